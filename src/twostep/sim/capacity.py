"""Runs traffic through a simulated engine and keeps the figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from twostep.contracts.outputs import EngineCoreOutputs
from twostep.contracts.request import EngineCoreRequest
from twostep.engine.core import EngineCore
from twostep.runner.graphs import BatchDescriptor
from twostep.sim.clock import VirtualClock
from twostep.sim.executor import SimExecutor
from twostep.sim.step_cost import StepCost
from twostep.sim.traffic import Traffic

COST_TERMS = ("weights", "compute", "attention", "logits", "sampling", "launch", "communication")


class RequestTimes(msgspec.Struct):
    """One request, in virtual seconds."""

    arrival: float
    input_len: int
    first_token: float = 0.0
    last_token: float = 0.0
    output_len: int = 0
    num_cached_tokens: int = 0
    is_finished: bool = False

    @property
    def ttft(self) -> float:
        """Arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time of the tokens after the first; None if there is only one."""
        if self.output_len < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_len - 1)

    @property
    def e2e(self) -> float:
        """Arrival to the last token."""
        return self.last_token - self.arrival


class CapacityFigures(msgspec.Struct):
    """Sums over all steps and all requests."""

    requests: dict[str, RequestTimes] = msgspec.field(default_factory=dict)
    duration: float = 0.0
    """Virtual seconds, from 0 to the last token."""
    device_seconds: dict[str, float] = msgspec.field(
        default_factory=lambda: dict.fromkeys(COST_TERMS, 0.0)
    )
    num_steps: int = 0
    num_batched_requests: int = 0
    num_batched_tokens: int = 0
    """Padding included."""
    graph_modes: dict[str, int] = msgspec.field(default_factory=dict)
    num_preemptions: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    peak_kv_usage: float = 0.0

    @property
    def device_busy(self) -> float:
        """Virtual seconds that the device computed."""
        return sum(self.device_seconds.values())

    def add_step(self, graph: BatchDescriptor, cost: StepCost, num_requests: int) -> None:
        """One step was queued on the device."""
        self.num_steps += 1
        self.num_batched_requests += num_requests
        self.num_batched_tokens += graph.num_tokens
        self.graph_modes[graph.mode.value] = self.graph_modes.get(graph.mode.value, 0) + 1
        for term in COST_TERMS:
            self.device_seconds[term] += getattr(cost, term)

    def add_news(self, message: EngineCoreOutputs, now: float) -> list[str]:
        """Outputs arrived; returns the ids of the requests that ended."""
        ended = []
        for output in message.outputs:
            times = self.requests[output.request_id]
            if output.new_token_ids:
                times.first_token = times.first_token if times.output_len else now
                times.last_token = now
                times.output_len += len(output.new_token_ids)
            if output.prefill_stats is not None:
                times.num_cached_tokens = output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                times.is_finished = True
                ended.append(output.request_id)
        stats = message.scheduler_stats
        if stats is not None:
            self.num_preemptions += stats.num_preemptions
            self.peak_running = max(self.peak_running, stats.num_running_reqs)
            self.peak_waiting = max(self.peak_waiting, stats.num_waiting_reqs)
            self.peak_kv_usage = max(self.peak_kv_usage, stats.kv_cache_usage)
        return ended


def simulate(
    core: EngineCore, executor: SimExecutor, clock: VirtualClock, traffic: Traffic
) -> CapacityFigures:
    """Run the traffic to its end, in virtual time.

    Raises InvalidRequestError for a request that the engine can never serve.
    """
    figures = CapacityFigures()
    executor.on_step = figures.add_step
    coming = deque(traffic.requests(executor.cost_model.facts.config.vocab_size))
    if traffic.concurrency is not None:
        _start(core, figures, _take(coming, traffic.concurrency), 0.0)
    while True:
        now = clock.monotonic()
        if traffic.request_rate is not None:
            arrived = _take_arrived(coming, now)
            _start(core, figures, arrived, None)
        if not core.has_work():
            if not coming:
                break
            clock.advance_to(coming[0].arrival_time)
            continue
        outputs, _ = core.step_fn()
        now = clock.monotonic()
        for message in (outputs or {}).values():
            ended = figures.add_news(message, now)
            if traffic.concurrency is not None:
                _start(core, figures, _take(coming, len(ended)), now)
    figures.duration = max((times.last_token for times in figures.requests.values()), default=0.0)
    return figures


def _take(coming: deque[EngineCoreRequest], count: int) -> list[EngineCoreRequest]:
    return [coming.popleft() for _ in range(min(count, len(coming)))]


def _take_arrived(coming: deque[EngineCoreRequest], now: float) -> list[EngineCoreRequest]:
    arrived = []
    while coming and coming[0].arrival_time <= now:
        arrived.append(coming.popleft())
    return arrived


def _start(
    core: EngineCore,
    figures: CapacityFigures,
    requests: Iterable[EngineCoreRequest],
    now: float | None,
) -> None:
    """Hand requests to the core; ``now`` is their arrival, unless they bring their own."""
    for request in requests:
        core.add_request(request)
        figures.requests[request.request_id] = RequestTimes(
            arrival=request.arrival_time if now is None else now,
            input_len=len(request.prompt_token_ids),
        )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least ``percent`` of the values do not exceed; None if empty."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
