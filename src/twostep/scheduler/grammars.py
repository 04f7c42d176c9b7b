"""The masks of one plan: what the grammars of its structured requests allow."""

from __future__ import annotations

from collections.abc import Sequence

from twostep.contracts.grammar import Grammar
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.scheduler.step_in_flight import StepInFlight


def grammar_output(plan: SchedulerOutput, step: StepInFlight) -> GrammarOutput | None:
    """One mask for each logits row of the plan that a grammar constrains, in plan order.

    ``step``: the same plan. A request with d planned drafts has 1 + d rows; one that has ended
    meanwhile has none, whatever is sampled for it is thrown away. None if there are no rows.
    """
    request_ids: list[str] = []
    rows: list[bytes] = []
    for request_id, request in zip(plan.num_scheduled_tokens, step.requests, strict=True):
        if request is None or request.grammar is None or request.status.is_finished:
            continue
        if request_id in step.chunks:
            continue
        drafts = plan.scheduled_spec_decode_tokens.get(request_id, ())
        rows += mask_rows(request.grammar, drafts)
        request_ids += [request_id] * (1 + len(drafts))
    if not rows:
        return None
    return GrammarOutput(request_ids=request_ids, bitmask=b"".join(rows))


def mask_rows(grammar: Grammar, drafts: Sequence[int]) -> list[bytes]:
    """The masks before each draft and after the last one; the grammar ends where it began."""
    rows = [grammar.fill_bitmask()]
    for num_accepted, token_id in enumerate(drafts):
        if not grammar.accept_tokens([token_id]):
            # Drafts were validated when they were made. Behind a refused one nothing is sampled.
            rows += [rows[-1]] * (len(drafts) - num_accepted)
            grammar.rollback(num_accepted)
            return rows
        rows.append(grammar.fill_bitmask())
    grammar.rollback(len(drafts))
    return rows
