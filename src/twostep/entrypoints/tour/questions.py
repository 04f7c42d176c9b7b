"""Five questions about call k, answered from what happened."""

from __future__ import annotations

from typing import Any

import msgspec

from twostep.entrypoints.tour import facts
from twostep.entrypoints.tour.journey import A, B, Journey
from twostep.entrypoints.tour.stops import graph_story
from twostep.sim.executor import SimStep


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question, its answer, and the values that prove it."""

    question: str
    answer: str
    evidence: dict[str, Any]


def all_questions(journey: Journey) -> list[Question]:
    """The five questions, in order."""
    return [
        _which_token(journey),
        _why_so_few(journey),
        _where_from(journey),
        _why_nothing(journey),
        _which_graph(journey),
    ]


def _make(question: str, answer: str, evidence: dict[str, Any]) -> Question:
    return Question(
        question=" ".join(question.split()), answer=" ".join(answer.split()), evidence=evidence
    )


def _step(journey: Journey) -> SimStep:
    step = journey.calls[0].launch.step
    assert step is not None, "the questions are about a simulated device"
    return step


def _row_of(journey: Journey, request_id: str) -> int:
    return journey.calls[0].launch.batch.req_ids.index(request_id)


def _which_token(journey: Journey) -> Question:
    call = journey.calls[0]
    sent = {
        output.request_id: output.new_token_ids
        for news in call.outputs.values()
        for output in news.outputs
    }
    number = call.updated.requests[B].num_tokens - call.updated.requests[B].num_prompt_tokens
    name = journey.name(call.waited_for.step_id)
    return _make(
        "Which step's token does the call send to the front end?",
        f"""That of step {name}: B's output token {number}. The call plans and queues step
        {journey.name(call.plan.step_id)} first; then it takes step {name} from the queue and
        updates the scheduler with it.""",
        {
            "planned_step_id": call.plan.step_id,
            "sent_step_id": call.waited_for.step_id,
            "new_token_ids": sent,
        },
    )


def _why_so_few(journey: Journey) -> Question:
    rows = {row["request"]: row for row in facts.shares(journey)}
    threshold = journey.core.scheduler.config.long_prefill_token_threshold
    cap = "no cap of its own" if threshold == 0 else f"at most {threshold:,} of one prompt"
    return _make(
        f"Why does A get {rows[A]['scheduled']:,} tokens and not {rows[A]['need']:,}?",
        f"""Nobody gets more than is left of the budget. B came first and took
        {rows[B]["scheduled"]} of {rows[B]["budget"]:,} tokens, {rows[A]["budget"]:,} were left.
        long_prefill_token_threshold is {threshold}: {cap}.""",
        {"running_pass": list(rows.values()), "long_prefill_token_threshold": threshold},
    )


def _where_from(journey: Journey) -> Question:
    step, view = _step(journey), journey.calls[0].sampling_launched
    row = _row_of(journey, B)
    index = step.batch.query_start_loc[row]
    position, known = int(step.batch.positions[index]), view.requests[B].num_tokens
    lane = {row["step"]: row for row in facts.device_lane(journey)}
    return _make(
        "Where does B's input token for step k come from, when the host has not got it yet?",
        f"""From the device. B's input is position {position}; when step k was queued, the host knew
        {known} tokens of B, positions 0 to {known - 1}. Step k-1 leaves the token that it draws in
        B's row on the device, and step k, which runs after it, reads it there. It is token
        {int(step.input_ids[index])}, the one that comes to the host with the result of step
        k-1.""",
        {
            "input_position": position,
            "tokens_the_host_knew": known,
            "inputs_read_on_the_device": step.from_device.tolist(),
            "input_id": int(step.input_ids[index]),
            "drawn_by_step_k_minus_1": dict(
                zip(
                    journey.calls[0].result.req_ids,
                    journey.calls[0].result.sampled_token_ids,
                    strict=True,
                )
            ),
            "step_k_minus_1_ends_ms": lane["k-1"]["end"],
            "step_k_starts_ms": lane["k"]["start"],
        },
    )


def _why_nothing(journey: Journey) -> Question:
    step, following = _step(journey), journey.calls[1]
    row = _row_of(journey, A)
    result = dict(zip(following.result.req_ids, following.result.sampled_token_ids, strict=True))
    news = [output.request_id for each in following.outputs.values() for output in each.outputs]
    after = journey.after_schedule(0)[A]
    return _make(
        """A has a logits row in step k. Why has it no token in the result, and why is there no
        news of it?""",
        f"""Every request gets a logits row, that of its last token in the step. A's chunk ends at
        {step.batch.seq_lens[row]:,} of {after.num_prompt_tokens:,} prompt tokens, so
        num_sampled is {int(step.num_sampled[row])} and its row of the result is {result[A]}.
        Without a token, an end or an error there is no news: the update with step k speaks of
        {", ".join(news)} only.""",
        {
            "logits_indices": step.logits_indices,
            "num_sampled": step.num_sampled.tolist(),
            "result_of_step_k": result,
            "news_of_step_k": news,
        },
    )


def _which_graph(journey: Journey) -> Question:
    step, decodes = _step(journey), journey.two_decodes.step
    assert decodes is not None
    return _make(
        "Which graph mode does step k use, and what does a step use in which B and A only decode?",
        f"""{graph_story(journey)} Step {journey.name(decodes.step_id)} is such a step:
        {decodes.batch.num_tokens} requests with one token each are a uniform decode, which runs in
        mode {decodes.graph.mode.value}.""",
        {
            "step_k": _graph(step),
            "two_decodes": {"step": journey.name(decodes.step_id), **_graph(decodes)},
            "device_mode": facts.dispatcher(journey).mode.value,
            "largest_capture_size": facts.dispatcher(journey).largest_size,
        },
    )


def _graph(step: SimStep) -> dict[str, Any]:
    return {
        "num_tokens": step.batch.num_tokens,
        "num_tokens_padded": step.graph.num_tokens,
        "mode": step.graph.mode.value,
    }
