"""What the tour shows of a journey, as plain values: everything is read or computed here, once."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import SchedulerOutput
from twostep.entrypoints.tour.journey import NUM_CALLS, A, B, Journey
from twostep.entrypoints.tour.observer import Call, Counters, Launch, View
from twostep.executor.uniproc import UniprocExecutor
from twostep.runner.graphs import GraphDispatcher
from twostep.runner.input_batch import InputBatch
from twostep.sim.device import GIB
from twostep.sim.executor import SimExecutor


def plain(value: Any) -> Any:
    """A contract as what JSON has: dictionaries, lists, numbers, text; sets in order."""
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return str(value)
    return value


def b_counters(of: Counters) -> dict[str, Any]:
    """B's columns of the counter table."""
    return {
        "num_tokens": of.num_tokens,
        "num_computed_tokens": of.num_computed_tokens,
        "num_output_placeholders": of.num_output_placeholders,
    }


def a_counters(of: Counters) -> dict[str, Any]:
    """A's columns of the counter table."""
    return {
        "num_computed_tokens": of.num_computed_tokens,
        "is_prefill_chunk": of.is_prefill_chunk,
    }


def events(journey: Journey) -> list[tuple[str, View, SchedulerOutput | None]]:
    """The moment before call k and what follows in three calls: name, core, plan if any."""
    found: list[tuple[str, View, SchedulerOutput | None]] = [
        ("before S k", journey.calls[0].started, None)
    ]
    for call in journey.calls[:NUM_CALLS]:
        found.append((f"S {journey.name(call.plan.step_id)}", call.scheduled, call.plan))
        found.append((f"U {journey.name(call.waited_for.step_id)}", call.updated, None))
    return found


def counter_table(journey: Journey) -> list[dict[str, Any]]:
    """The counters of B and A at each of the events."""
    return [
        {
            "event": event,
            B: b_counters(view.requests[B]),
            A: a_counters(view.requests[A]),
            "scheduled": None if plan is None else scheduled_tokens(plan),
        }
        for event, view, plan in events(journey)
    ]


def scheduled_tokens(plan: SchedulerOutput) -> dict[str, int]:
    """Tokens of B and A in a plan."""
    return {request_id: plan.num_scheduled_tokens.get(request_id, 0) for request_id in (B, A)}


def shares(journey: Journey) -> list[dict[str, Any]]:
    """The running pass of step k: who needs how much, and what is left of the budget then."""
    left = journey.core.scheduler.config.max_num_batched_tokens
    rows = []
    for request_id, scheduled in journey.plan(0).num_scheduled_tokens.items():
        before = journey.calls[0].started.requests[request_id]
        rows.append(
            {
                "request": request_id,
                "num_tokens": before.num_tokens,
                "placeholders": before.num_output_placeholders,
                "computed": before.num_computed_tokens,
                "need": before.need,
                "budget": left,
                "scheduled": scheduled,
            }
        )
        left -= scheduled
    return rows


def blocks(journey: Journey) -> list[dict[str, Any]]:
    """The KV blocks of step k."""
    rows = []
    for request_id in journey.plan(0).num_scheduled_tokens:
        before = journey.calls[0].started.requests[request_id]
        after = journey.after_schedule(0)[request_id]
        rows.append(
            {
                "request": request_id,
                "tokens": after.num_computed_tokens,
                "blocks_before": before.num_blocks,
                "new_blocks": after.num_blocks - before.num_blocks,
                "blocks": after.num_blocks,
            }
        )
    return rows


def budget_left(journey: Journey, index: int) -> int:
    """Tokens that call k + index could still have planned."""
    budget = journey.core.scheduler.config.max_num_batched_tokens
    return budget - journey.plan(index).total_num_scheduled_tokens


def batch_document(launch: Launch, block_size: int) -> dict[str, Any]:
    """The flat batch, all tokens of it."""
    batch, step = launch.batch, launch.step
    block_index, offset = batch.slot_mapping(block_size)
    inputs = {}
    if step is not None:
        inputs = {
            "input_ids": step.input_ids.tolist(),
            "from_device": step.from_device.tolist(),
        }
    return {
        "req_ids": batch.req_ids,
        "num_scheduled_tokens": batch.num_scheduled_tokens,
        "query_start_loc": batch.query_start_loc,
        "positions": batch.positions.tolist(),
        "seq_lens": batch.seq_lens,
        **inputs,
        "logits_indices": launch.logits_indices,
        "slot_mapping": {
            "block_index": block_index.tolist(),
            "offset": offset.tolist(),
            "requests": slots_by_request(batch, block_size),
        },
    }


def slots_by_request(batch: InputBatch, block_size: int) -> dict[str, dict[str, int]]:
    """First and last slot that each request writes, in terms of its own block table."""
    block_index, offset = batch.slot_mapping(block_size)
    found = {}
    for row, request_id in enumerate(batch.req_ids):
        first, last = batch.query_start_loc[row], batch.query_start_loc[row + 1] - 1
        found[request_id] = {
            "first_block_index": int(block_index[first]),
            "first_offset": int(offset[first]),
            "last_block_index": int(block_index[last]),
            "last_offset": int(offset[last]),
        }
    return found


def dispatcher(journey: Journey) -> GraphDispatcher:
    """What chooses graph modes."""
    executor = journey.executor
    if isinstance(executor, SimExecutor):
        return executor.graphs
    assert isinstance(executor, UniprocExecutor)
    return executor.runner.graphs


def graph_modes(journey: Journey) -> dict[str, str]:
    """Of step k, and of the first step in which both requests decode."""
    return {
        "step_k": journey.calls[0].launch.graph.mode.value,
        "two_decodes": journey.two_decodes.graph.mode.value,
    }


def device_lane(journey: Journey) -> list[dict[str, Any]]:
    """When a simulated device works on steps k-1 and on, in ms since call k began, and on what."""
    begin = journey.calls[0].started.time
    rows = []
    for call in (journey.begin, *journey.calls):
        step = call.launch.step
        if step is not None:
            cost = step.cost
            rows.append(
                {
                    "step": journey.name(step.step_id),
                    "start": _ms(step.device_start - begin),
                    "end": _ms(step.device_end - begin),
                    "weights": _ms(cost.weights),
                    "compute": _ms(cost.compute),
                    "attention": _ms(cost.attention),
                    "logits": _ms(cost.logits),
                    "sampling": _ms(cost.sampling),
                    "launch": _ms(cost.launch),
                }
            )
    return rows


def host_lane(call: Call) -> list[dict[str, Any]]:
    """How long the host was busy with each part of a call, in microseconds, measured here.

    The time that the looking itself takes is left out.
    """
    parts = (
        ("2-3", "schedule", call.started, call.scheduled),
        ("4-7", "execute_model", call.scheduled, call.launched),
        ("8-9", "bitmask, sample_tokens", call.launched, call.sampling_launched),
        ("10", "wait for the oldest step", call.waiting, call.arrived),
        ("11", "update_from_output", call.arrived, call.updated),
    )
    return [
        {"stops": stops, "what": what, "us": round(1e6 * (end.entered - start.left), 1)}
        for stops, what, start, end in parts
    ]


def result_document(result: ModelRunnerOutput) -> dict[str, Any]:
    """What came back from the device."""
    return {"req_ids": result.req_ids, "sampled_token_ids": result.sampled_token_ids}


def outputs_document(call: Call) -> dict[str, list[dict[str, Any]]]:
    """The call's news by client; JSON wants text as keys."""
    return {str(client): plain(news.outputs) for client, news in call.outputs.items()}


def stats_document(call: Call) -> dict[str, Any]:
    """The scheduler's figures that travel with the news."""
    return next(plain(n.scheduler_stats) for n in call.outputs.values() if n.scheduler_stats)


def _ms(seconds: float) -> float:
    """To a microsecond: what lies below is rounding of the cost model."""
    return round(1000 * seconds, 3)


def simulator(journey: Journey) -> SimExecutor:
    """The executor of a simulated tour."""
    executor = journey.executor
    assert isinstance(executor, SimExecutor)
    return executor


def config_document(journey: Journey) -> dict[str, Any]:
    """The device, the model and the sizes that the engine chose for them."""
    executor, scheduler = simulator(journey), journey.core.scheduler
    device, model = executor.cost_model.device, executor.cost_model.facts
    config, kv = scheduler.config, scheduler.kv_cache_manager
    return {
        "device": device.name,
        "simulated": True,
        "model": model.name,
        "dtype": model.dtype,
        "weights_gib": round(model.weight_bytes / GIB, 2),
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "async_scheduling": config.async_scheduling,
        "batch_queue_size": journey.core.batch_queue_size,
        "block_size": kv.block_size,
        "num_blocks": kv.pool.num_usable_blocks,
        "kv_cache_gib": round(
            kv.pool.num_usable_blocks * kv.block_size * model.kv_bytes_per_token / GIB, 2
        ),
    }
