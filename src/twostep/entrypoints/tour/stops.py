"""The twelve stops of call k: who acts, what happened, and what the data look like then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from twostep.entrypoints.tour import facts
from twostep.entrypoints.tour.journey import A, B, Journey
from twostep.entrypoints.tour.source import Place, place
from twostep.executor.uniproc import UniprocExecutor
from twostep.ops.cpu.device_model import CpuModel
from twostep.runner.async_output import AsyncOutput
from twostep.runner.graphs import GraphDispatcher
from twostep.runner.input_batch import InputBatch, build_input_batch
from twostep.runner.model_runner import ModelRunner
from twostep.runner.request_states import RequestStates
from twostep.scheduler.plan_builder import PlanBuilder
from twostep.scheduler.stopping import check_stop


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """One stop."""

    number: int
    name: str
    place: Place
    also: list[Place]
    """Others that take part; on a real device, where the first is the simulated one's."""
    story: str
    data: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "number": self.number,
            "name": self.name,
            "file": self.place.file,
            "function": self.place.function,
            "line": self.place.line,
            "also": [msgspec.to_builtins(other) for other in self.also],
            "story": self.story,
            "data": self.data,
        }


def all_stops(journey: Journey) -> list[Stop]:
    """The stops in order."""
    return [make(journey) for make in _STOPS]


def _stop(
    number: int,
    name: str,
    functions: list[Callable[..., Any]],
    story: str,
    data: dict[str, Any],
) -> Stop:
    first, *others = dict.fromkeys(map(place, functions))
    return Stop(
        number=number, name=name, place=first, also=others, story=" ".join(story.split()), data=data
    )


def _in_flight(journey: Journey, queue: dict[int, dict[str, int]]) -> dict[str, dict[str, int]]:
    return {f"step {journey.name(step_id)}": tokens for step_id, tokens in queue.items()}


def stop_1(journey: Journey) -> Stop:
    """The loop calls the step function."""
    core, view = journey.core, journey.calls[0].started
    return _stop(
        1,
        "the loop calls the step function",
        [type(journey.client).get_output, core.step_fn],
        f"""{" and ".join(view.running)} are running, so the loop calls {core.step_fn.__name__}.
        Step k-1 is on the device; the queue of steps in flight holds {core.batch_queue_size}.""",
        {
            "batch_queue": _in_flight(journey, view.queue),
            "batch_queue_size": core.batch_queue_size,
            "running": view.running,
            "waiting": view.waiting,
        },
    )


def stop_2(journey: Journey) -> Stop:
    """The scheduler shares the token budget."""
    scheduler = journey.core.scheduler
    budget, left = scheduler.config.max_num_batched_tokens, facts.budget_left(journey, 0)
    rows, blocks = facts.shares(journey), facts.blocks(journey)
    needs = [
        f"{row['request']} needs {row['num_tokens']:,} + {row['placeholders']:,} - "
        f"{row['computed']:,} = {row['need']:,} and gets {row['scheduled']:,}"
        + (": no more is left." if row["scheduled"] == row["budget"] < row["need"] else ".")
        for row in rows
    ]
    kept = [
        f"{row['request']}'s {row['tokens']:,} tokens take {row['blocks']:,} KV blocks of "
        f"{scheduler.kv_cache_manager.block_size}, {row['new_blocks'] or 'none'} of them new."
        for row in blocks
    ]
    return _stop(
        2,
        f"the scheduler shares {budget:,} tokens",
        [
            type(scheduler).schedule,
            type(scheduler.kv_cache_manager).allocate_slots,
        ],
        f"""There is no prefill phase and no decode phase: from the front of the running requests,
        each gets the tokens that it knows (or has on the way) and has not computed.
        {" ".join(needs + kept)} {left or "Nothing"} is left for waiting requests.""",
        {"running_pass": rows, "blocks": blocks, "budget_left": left},
    )


def stop_3(journey: Journey) -> Stop:
    """The plan, and the placeholder for B."""
    scheduler, plan = journey.core.scheduler, journey.plan(0)
    after = journey.after_schedule(0)
    a, b = after[A], after[B]
    first = b.num_tokens - b.num_prompt_tokens + 1
    last = first + b.num_output_placeholders - 1
    return _stop(
        3,
        "the plan, and the placeholder for B",
        [type(scheduler)._update_after_schedule, PlanBuilder.build],
        f"""The plan holds changes only, with values from before the step. Then the counters advance
        as if it had run. A has {a.num_computed_tokens:,} of {a.num_tokens:,} tokens planned: still
        a chunk, which gives no token. B will sample, so it gets a placeholder: its output tokens
        {first} to {last} are on the way.""",
        {
            "SchedulerOutput": facts.plain(plan),
            B: facts.b_counters(b),
            A: facts.a_counters(a),
        },
    )


def stop_4(journey: Journey) -> Stop:
    """The executor starts execute_model."""
    plan = journey.plan(0)
    return _stop(
        4,
        "the executor starts execute_model, without a wait",
        [type(journey.executor).execute_model, UniprocExecutor.execute_model],
        """The core hands the plan to the executor, which runs the worker at once, in this thread
        and process. Tokens are planned, so the step counts as executed, and sampling follows.""",
        {
            "step_id": plan.step_id,
            "total_num_scheduled_tokens": plan.total_num_scheduled_tokens,
            "executed": journey.calls[0].executed,
        },
    )


def stop_5(journey: Journey) -> Stop:
    """The runner's rows and the graph mode."""
    launch, plan = journey.calls[0].launch, journey.plan(0)
    new_blocks = {
        request_id: len(ids or ())
        for request_id, ids in zip(
            plan.scheduled_cached_reqs.req_ids,
            plan.scheduled_cached_reqs.new_block_ids,
            strict=True,
        )
    }
    return _stop(
        5,
        "the runner updates its rows, sorts the batch, picks a graph mode",
        [
            GraphDispatcher.dispatch,
            ModelRunner.execute_model,
            RequestStates.append_blocks,
        ],
        f"""The runner keeps a row for each request; the new block ids are appended to its block
        table. Decodes come first, then prefills: {", ".join(launch.batch.req_ids)}.
        {graph_story(journey)}""",
        {
            "new_blocks": new_blocks,
            "rows": launch.batch.req_ids,
            "num_tokens": launch.batch.num_tokens,
            "graph_mode": launch.graph.mode.value,
            "largest_capture_size": facts.dispatcher(journey).largest_size,
        },
    )


def graph_story(journey: Journey) -> str:
    """Why step k runs in its mode."""
    launch = journey.calls[0].launch
    tokens, mode = launch.batch.num_tokens, launch.graph.mode.value
    largest = facts.dispatcher(journey).largest_size
    if largest is None:
        return f"A recorded plan can be replayed with any number of tokens: mode {mode}."
    relation = "no graph fits" if tokens > largest else f"padded to {launch.graph.num_tokens:,}"
    return (
        f"Step k has {tokens:,} tokens and a prefill, the largest captured graph has {largest:,}: "
        f"{relation}, mode {mode}."
    )


def stop_6(journey: Journey) -> Stop:
    """The flat batch."""
    launch, before = journey.calls[0].launch, journey.calls[0].started.requests[B]
    block_size = journey.core.scheduler.kv_cache_manager.block_size
    document = facts.batch_document(launch, block_size)
    slots = document.pop("slot_mapping")["requests"]
    unknown = before.num_tokens - before.num_prompt_tokens + 1
    return _stop(
        6,
        "inputs and attention metadata: the flat batch",
        [build_input_batch, InputBatch.slot_mapping, CpuModel.make_step],
        f"""Both requests are packed into one flat batch of {launch.batch.num_tokens:,} tokens.
        B's input is its output token {unknown}, which the host does not know yet: the device reads
        it from where step k-1 will have written it. Block indexes count in each request's own
        block table.""",
        {
            **document,
            "slots": [
                {
                    "request": request_id,
                    "from_block": slot["first_block_index"],
                    "offset": slot["first_offset"],
                    "to_block": slot["last_block_index"],
                    "last_offset": slot["last_offset"],
                }
                for request_id, slot in slots.items()
            ],
        },
    )


def stop_7(journey: Journey) -> Stop:
    """The forward pass is queued."""
    call = journey.calls[0]
    lane = [
        {name: row[name] for name in ("step", "start", "end")}
        for row in facts.device_lane(journey)[:2]
    ]
    return _stop(
        7,
        "the forward pass is queued, execute_model returns None",
        [type(journey.executor).execute_model, ModelRunner.execute_model],
        """The device does it when step k-1 is done; nobody waits for that here. None tells the
        core that sampling must be queued too.""",
        {
            "on_the_device": _in_flight(
                journey,
                {**call.launched.queue, call.plan.step_id: call.plan.num_scheduled_tokens},
            ),
            **({"device_ms": lane} if lane else {}),
        },
    )


def stop_8(journey: Journey) -> Stop:
    """The grammar bitmask."""
    call, plan = journey.calls[0], journey.plan(0)
    return _stop(
        8,
        "the grammar bitmask (none here)",
        [type(journey.core.scheduler).get_grammar_bitmask],
        """Which tokens a grammar allows is worked out while the device computes. No request of this
        plan has a grammar, so there is no mask.""",
        {
            "has_structured_output_requests": plan.has_structured_output_requests,
            "grammar_output": facts.plain(call.grammar_output),
        },
    )


def stop_9(journey: Journey) -> Stop:
    """Logits and sampling are queued."""
    launch = journey.calls[0].launch
    batch = launch.batch
    sampled = batch.num_sampled
    who = [request for request, count in zip(batch.req_ids, sampled, strict=True) if count]
    not_yet = [request for request in batch.req_ids if request not in who]
    return _stop(
        9,
        "sample_tokens: logits and sampling are queued",
        [type(journey.executor).sample_tokens, ModelRunner.sample_tokens],
        f"""Logits for {len(launch.logits_indices)} of {batch.num_tokens:,} tokens (the last one of
        a request), then the sampler: {", ".join(who)} gets a token,
        {", ".join(not_yet)} gets none, because its prompt goes on after this chunk. The drawn token
        stays on the device as B's input of step k+1; a copy of it comes to the host later.""",
        {
            "logits_indices": launch.logits_indices,
            "num_sampled": sampled,
            **({} if launch.step is None else {"last_sampled": launch.step.last_sampled}),
        },
    )


def stop_10(journey: Journey) -> Stop:
    """The queue is full: wait for step k-1."""
    core, call = journey.core, journey.calls[0]
    result = call.result
    empty = [
        request
        for request, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True)
        if not tokens
    ]
    return _stop(
        10,
        "the batch queue is full: pop step k-1 and wait",
        [core.step_fn, type(call.future).result, AsyncOutput.result],
        f"""{len(call.waiting.queue)} steps are in flight and the queue holds
        {core.batch_queue_size}, so the oldest is waited for: the only place where the host waits
        for the device, and step k is queued behind already. {", ".join(empty)} ran a chunk in step
        {journey.name(call.waited_for.step_id)}: an empty row.""",
        {
            "in_flight": _in_flight(journey, call.waiting.queue),
            "waited_for": f"step {journey.name(call.waited_for.step_id)}",
            "waited_ms": 1000 * (call.arrived.time - call.waiting.time),
            "ModelRunnerOutput": facts.result_document(result),
        },
    )


def stop_11(journey: Journey) -> Stop:
    """The scheduler takes the result."""
    call = journey.calls[0]
    before, after = call.arrived.requests[B], call.updated.requests[B]
    return _stop(
        11,
        "update_from_output for step k-1",
        [type(journey.core.scheduler).update_from_output, check_stop],
        f"""B gets its token and does not stop; of its {before.num_output_placeholders} placeholders
        {after.num_output_placeholders} remains. A has no token, so there is no news of it. News is
        grouped by front end, with the scheduler's figures.""",
        {
            "outputs": facts.outputs_document(call),
            "scheduler_stats": facts.stats_document(call),
            B: facts.b_counters(after),
            A: facts.a_counters(call.updated.requests[A]),
        },
    )


def stop_12(journey: Journey) -> Stop:
    """The news goes to the front end."""
    call = journey.calls[0]
    return _stop(
        12,
        "the outputs go to the front end",
        [type(journey.client).get_output],
        f"""The call planned step k and returns the news of step
        {journey.name(call.waited_for.step_id)}. The front end turns the token into text; the loop
        goes back to stop 1.""",
        {
            "news_for_clients": sorted(call.outputs),
            "executed": call.executed,
            "still_in_flight": _in_flight(journey, call.finished.queue),
        },
    )


_STOPS = (
    stop_1,
    stop_2,
    stop_3,
    stop_4,
    stop_5,
    stop_6,
    stop_7,
    stop_8,
    stop_9,
    stop_10,
    stop_11,
    stop_12,
)
