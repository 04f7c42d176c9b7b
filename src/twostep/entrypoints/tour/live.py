"""The tour on a real model on this machine's CPU: the same two requests, with measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from twostep.contracts.errors import TwostepError
from twostep.contracts.plan import SchedulerOutput
from twostep.engine.client import InprocClient
from twostep.engine.device_idle import device_idle_share, host_overlap
from twostep.engine.fan_out import together
from twostep.engine.timeline import Lane, StepSpan, Timeline
from twostep.entrypoints.inproc_engine import BuiltEngine
from twostep.entrypoints.system_clock import MonotonicClock
from twostep.entrypoints.tour.journey import Journey, Situation, make_request, travel
from twostep.entrypoints.tour.observer import Call, Launch, TourObserver
from twostep.executor.uniproc import UniprocExecutor

SEED_BUDGET = 8192
STREAMS = (1, 8, 32)
STREAM_PROMPT_TOKENS = 16
WARM_UP_STEPS = 8
STEADY_STEPS = 60
HOST_LANES: tuple[Lane, ...] = ("planning", "launch", "sampling", "wait", "update", "output")


class LiveTour(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen."""

    journey: Journey
    config: dict[str, Any]
    steady: list[dict[str, Any]]
    """Steady decoding, by number of streams."""


def scaled_situation(budget: int, prompt_tokens_a: int | None = None) -> Situation:
    """The seed's example with prompts that relate to this budget as the seed's to its own."""
    seed = Situation()
    return Situation(
        prompt_tokens_b=max(1, seed.prompt_tokens_b * budget // SEED_BUDGET),
        known_outputs_b=seed.known_outputs_b,
        prompt_tokens_a=prompt_tokens_a or seed.prompt_tokens_a * budget // SEED_BUDGET,
    )


def run_live(engine: BuiltEngine, prompt_tokens_a: int | None = None) -> LiveTour:
    """The tour, then steady decoding of more and more streams.

    The engine's requests are all the tour's own; it is left without any.
    """
    client = engine.client
    core = client.engine_core
    executor = core.executor
    assert isinstance(executor, UniprocExecutor)
    executor.time_device()
    clock = MonotonicClock()

    def look_at_launch(plan: SchedulerOutput) -> Launch:
        runner = executor.runner
        assert runner.last_batch is not None
        assert runner.last_logits_rows is not None
        assert runner.last_graph is not None
        return Launch(
            batch=runner.last_batch,
            logits_indices=runner.last_logits_rows.indices,
            graph=runner.last_graph,
        )

    observer = TourObserver(clock.monotonic, look_at_launch)
    observer.watch(core)
    situation = scaled_situation(engine.boot.max_num_batched_tokens, prompt_tokens_a)
    vocab_size = engine.config.vocab_size
    journey = travel(client, observer, situation, vocab_size)
    observer.leave()
    end_all(client)
    spans: list[StepSpan] = []
    others = core.observer
    core.observer = together(others, Timeline(clock, spans.append))
    steady = [
        decode_steadily(engine, count, vocab_size, spans, STEADY_STEPS)
        for count in STREAMS
        if count <= engine.boot.max_num_seqs
    ]
    core.observer = others
    return LiveTour(journey=journey, config=live_config(engine), steady=steady)


def decode_steadily(
    engine: BuiltEngine, count: int, vocab_size: int, spans: list[StepSpan], num_steps: int
) -> dict[str, Any]:
    """So many requests that decode, one token each in every step; what the spans say of it.

    Raises TwostepError if one of them ends before the last step.
    """
    client = engine.client
    client.reset_prefix_cache()  # no stream finds the prompt of an earlier one
    ids = [f"stream {number}" for number in range(count)]
    for number, request_id in enumerate(ids):
        prompt = [(7919 * number + i) % vocab_size for i in range(STREAM_PROMPT_TOKENS)]
        client.add_request(make_request(request_id, prompt))
    waiting = set(ids)
    while waiting:
        waiting -= {output.request_id for output in client.get_output().outputs}
    for _ in range(WARM_UP_STEPS):
        client.get_output()
    spans.clear()
    for _ in range(num_steps):
        client.get_output()
    seen = list(spans)
    still_running = len(client.engine_core.scheduler.running)
    end_all(client)
    if still_running != count:
        raise TwostepError(
            f"only {still_running} of {count} streams were still running after "
            f"{WARM_UP_STEPS + num_steps} steps: is the model's context long enough?"
        )
    return steady_figures(count, num_steps, seen)


def end_all(client: InprocClient) -> None:
    """End every request and take what is in flight."""
    client.abort_requests(list(client.engine_core.scheduler.requests))
    while client.has_work():
        client.get_output()


def steady_figures(count: int, num_steps: int, spans: Sequence[StepSpan]) -> dict[str, Any]:
    """Of ``num_steps`` steps: time of one, its parts, and how well host and device overlap."""
    length = max(span.end for span in spans) - min(span.start for span in spans)
    per_step: dict[str, float] = dict.fromkeys((*HOST_LANES, "device"), 0.0)
    for span in spans:
        per_step[span.lane] += span.end - span.start
    us = {lane: round(1e6 * seconds / num_steps, 1) for lane, seconds in per_step.items()}
    return {
        "streams": count,
        "steps": num_steps,
        "ms_per_step": round(1000 * length / num_steps, 3),
        "device_ms": round(us["device"] / 1000, 3),
        "planning_us": us["planning"],
        "launch_us": round(us["launch"] + us["sampling"], 1),
        "wait_ms": round(us["wait"] / 1000, 3),
        "update_us": us["update"],
        "overlap": round(host_overlap(spans) or 0.0, 4),
        "device_idle": round(device_idle_share(spans), 4),
    }


def live_config(engine: BuiltEngine) -> dict[str, Any]:
    """The device, the model and the sizes."""
    boot, core = engine.boot, engine.client.engine_core
    kv = core.scheduler.kv_cache_manager
    return {
        "device": f"CPU, {boot.isa}, {boot.num_threads} threads",
        "simulated": False,
        "model": boot.model,
        "architecture": boot.architecture,
        "max_num_batched_tokens": boot.max_num_batched_tokens,
        "max_num_seqs": boot.max_num_seqs,
        "max_model_len": boot.max_model_len,
        "async_scheduling": boot.async_scheduling,
        "batch_queue_size": core.batch_queue_size,
        "block_size": kv.block_size,
        "num_blocks": kv.pool.num_usable_blocks,
    }


class LaneSpan(msgspec.Struct, frozen=True):
    """What was busy with what, in ms since call k began."""

    lane: str
    what: str
    start: float
    end: float


def lanes_of_call(journey: Journey) -> list[LaneSpan]:
    """Host and device while call k ran: the device worked on step k-1, then on step k."""
    call, following = journey.calls[0], journey.calls[1]
    begin = call.started.time
    parts = (
        ("2-3 schedule", call.started, call.scheduled),
        ("4-7 execute_model", call.scheduled, call.launched),
        ("8-9 sample_tokens", call.launched, call.sampling_launched),
        ("10  wait for step k-1", call.waiting, call.arrived),
        ("11  update_from_output", call.arrived, call.updated),
    )
    lanes = [
        LaneSpan("host", what, 1000 * (start.left - begin), 1000 * (end.entered - begin))
        for what, start, end in parts
    ]
    for step, result in (("k-1", call.result), ("k", following.result)):
        lanes += [
            LaneSpan("device", f"step {step}: {name}", 1000 * (start - begin), 1000 * (end - begin))
            for name, start, end in result.device_spans or ()
        ]
    return lanes


def overlap_of_call(call: Call) -> float:
    """Share of planning and launching step k, 0..1, that the device spent on step k-1."""
    spans = [(start, end) for _, start, end in call.result.device_spans or ()]
    first, last = call.started.left, call.sampling_launched.entered
    hidden = sum(max(0.0, min(end, last) - max(start, first)) for start, end in spans)
    return hidden / (last - first)
