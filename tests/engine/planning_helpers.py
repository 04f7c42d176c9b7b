"""Small builders that the tests of the planning half share."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.outputs import EngineCoreOutput, EngineCoreOutputs, ModelRunnerOutput
from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.contracts.sampling import SamplingParams, StructuredOutputsParams
from twostep.kv_cache.integrity import find_violations
from twostep.scheduler.async_scheduler import AsyncScheduler
from twostep.scheduler.request import Request, RequestStatus
from twostep.scheduler.scheduler import Scheduler


class FakeClock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Moves on a little with each look."""
        self.now += 0.001
        return self.now


class FakeGrammar:
    """Allows every token but one; remembers what it accepted. 64 tokens, two words."""

    def __init__(self, forbidden: int = -1, last: int | None = None) -> None:
        self.forbidden = forbidden
        self.last = last
        self.accepted: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Up to the forbidden one."""
        for token_id in token_ids:
            if token_id == self.forbidden:
                return False
            self.accepted.append(token_id)
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Up to the forbidden one."""
        ids = list(token_ids)
        return ids[: ids.index(self.forbidden)] if self.forbidden in ids else ids

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ones."""
        del self.accepted[len(self.accepted) - num_tokens :]

    def is_terminated(self) -> bool:
        """After its last token, if it has one."""
        return self.last is not None and self.accepted[-1:] == [self.last]

    def fill_bitmask(self) -> bytes:
        """Word 0 tells how many tokens were accepted."""
        return struct.pack("<2I", len(self.accepted), 2**32 - 1)


class FakeGrammarFuture:
    """Compiled when a test says so."""

    def __init__(self, grammar: FakeGrammar | None = None, *, is_done: bool = False) -> None:
        self.grammar = grammar or FakeGrammar()
        self.is_done = is_done
        self.error: Exception | None = None

    def done(self) -> bool:
        """See ``is_done``."""
        return self.is_done

    def result(self) -> FakeGrammar:
        """The grammar, or the error."""
        if self.error is not None:
            raise self.error
        return self.grammar


def make_engine_request(
    request_id: str,
    prompt: int | list[int] = 10,
    max_tokens: int | None = 16,
    *,
    eos: int | None = None,
    priority: int = 0,
    arrival: float = 0.0,
    salt: str | None = None,
    client: int = 0,
    structured: bool = False,
    **params: object,
) -> EngineCoreRequest:
    """A request; ``prompt`` as a number makes that many ids, different for each request."""
    if isinstance(prompt, int):
        base = sum(request_id.encode()) * 1000
        prompt = list(range(base, base + prompt))
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            seed=0,
            structured_outputs=StructuredOutputsParams(json_object=True) if structured else None,
            **params,  # type: ignore[arg-type]
        ),
        eos_token_id=eos,
        arrival_time=arrival,
        client_index=client,
        priority=priority,
        cache_salt=salt,
    )


def make_configs(
    *,
    budget: int = 8192,
    max_num_seqs: int = 1024,
    max_model_len: int = 32768,
    num_blocks: int = 10_000,
    block_size: int = 16,
    caching: bool = True,
    window: int | None = None,
    watermark: float = 0.0,
    events: bool = False,
    **scheduler: object,
) -> tuple[SchedulerConfig, CacheConfig]:
    """Both configs, roomy unless told otherwise."""
    return (
        SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            **scheduler,  # type: ignore[arg-type]
        ),
        CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=caching,
            sliding_window=window,
            watermark=watermark,
            enable_kv_cache_events=events,
        ),
    )


def make_scheduler(
    *, is_async: bool = False, num_spec_tokens: int = 0, **config: object
) -> Scheduler:
    """A scheduler with nothing in it."""
    scheduler_class = AsyncScheduler if is_async else Scheduler
    return scheduler_class(
        *make_configs(**config),  # type: ignore[arg-type]
        FakeClock(),
        num_spec_tokens=num_spec_tokens,
    )


def add(
    scheduler: Scheduler,
    request_id: str,
    *args: object,
    grammar: FakeGrammarFuture | None = None,
    **kwargs: object,
) -> Request:
    """Queue a request and return the scheduler's record of it."""
    request = scheduler.make_request(
        make_engine_request(
            request_id,
            *args,  # type: ignore[arg-type]
            structured=grammar is not None,
            **kwargs,  # type: ignore[arg-type]
        ),
        grammar,
    )
    scheduler.add_request(request)
    return request


def result(plan: SchedulerOutput, **tokens: int | list[int]) -> ModelRunnerOutput:
    """A result of ``plan``; requests not named sampled nothing."""
    rows = [tokens.get(request_id, []) for request_id in plan.num_scheduled_tokens]
    return ModelRunnerOutput(
        req_ids=list(plan.num_scheduled_tokens),
        sampled_token_ids=[[row] if isinstance(row, int) else list(row) for row in rows],
    )


def sample_all(scheduler: Scheduler, plan: SchedulerOutput, token: int = 1) -> ModelRunnerOutput:
    """A result where every request that is past its prompt chunks sampled ``token``."""
    rows: dict[str, int | list[int]] = {}
    for request_id in plan.num_scheduled_tokens:
        request = scheduler.requests.get(request_id)
        is_chunk = request is not None and request.is_prefill_chunk
        rows[request_id] = [] if is_chunk else token
    return result(plan, **rows)


def run_step(scheduler: Scheduler, token: int = 1) -> tuple[SchedulerOutput, dict]:
    """One synchronous step; returns the plan and {request id: output}."""
    plan = scheduler.schedule()
    outputs = scheduler.update_from_output(plan, sample_all(scheduler, plan, token))
    check(scheduler)
    return plan, by_id(outputs)


def by_id(outputs: dict[int, EngineCoreOutputs] | None) -> dict[str, EngineCoreOutput]:
    """{request id: output} of all clients."""
    news = [] if outputs is None else outputs.values()
    return {output.request_id: output for message in news for output in message.outputs}


def check(scheduler: Scheduler) -> None:
    """The invariants of scheduler and KV cache, recomputed from scratch."""
    kv = scheduler.kv_cache_manager
    assert find_violations(kv, scheduler.requests) == []
    running, waiting = scheduler.running, list(scheduler.waiting)
    assert len(running) <= scheduler.max_num_running_reqs
    assert {id(r) for r in running} | {id(r) for r in waiting} == {
        id(r) for r in scheduler.requests.values()
    }
    assert len(running) + len(waiting) == len(scheduler.requests)
    assert all(r.status is RequestStatus.RUNNING for r in running)
    for request in running:
        _check_running(request, kv.block_size, kv.get_block_ids(request.request_id))
    for request in waiting:
        assert request.status < RequestStatus.RUNNING or request.status is RequestStatus.PREEMPTED
        assert request.num_computed_tokens == request.num_output_placeholders == 0
        assert request.request_id not in kv._tables
    for request in scheduler.requests.values():
        assert request.num_tokens == len(request.all_token_ids) < request.max_total_tokens
        if kv.enable_prefix_caching:
            assert len(request.block_hashes) <= request.num_tokens // kv.block_size
    assert scheduler.suspects.keys() <= scheduler.requests.keys()
    assert not kv._parked or min(kv._parked) > kv.last_processed_step


def _check_running(request: Request, block_size: int, block_ids: list[int]) -> None:
    known = request.num_tokens + request.num_output_placeholders
    assert request.num_output_placeholders >= 0
    assert request.num_computed_tokens <= known
    if not request.is_prefill_chunk:
        assert request.num_computed_tokens == known - 1
    # A block may have been allocated ahead for drafts that were refused.
    assert len(block_ids) >= -(-request.num_computed_tokens // block_size)


def check_drained(scheduler: Scheduler) -> None:
    """Nothing is left behind."""
    check(scheduler)
    kv = scheduler.kv_cache_manager
    assert not scheduler.has_requests()
    assert not scheduler.requests
    assert not scheduler.suspects
    assert not kv._tables
    assert not kv._parked
    assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks


def ids(outputs: Iterable[EngineCoreOutput]) -> list[str]:
    """Request ids, in order."""
    return [output.request_id for output in outputs]
