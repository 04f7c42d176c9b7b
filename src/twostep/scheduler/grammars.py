"""Grammars of structured requests: when they are ready, and the masks of one plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostep.contracts.grammar import Grammar
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.scheduler.request import Request


def grammar_output(plan: SchedulerOutput, requests: Mapping[str, Request]) -> GrammarOutput | None:
    """One mask for each logits row of the plan that a grammar constrains, in plan order.

    A request with d planned drafts has 1 + d rows. None if there are no such rows.
    """
    request_ids: list[str] = []
    rows: list[bytes] = []
    for request_id in plan.num_scheduled_tokens:
        request = requests[request_id]
        if request.grammar is None or request.is_prefill_chunk:
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
