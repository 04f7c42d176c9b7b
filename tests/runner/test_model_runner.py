"""Plans of a real scheduler to a runner without a device: what it launches, step after step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import CachedRequestData, NewRequestData, SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.contracts.sampling import SamplingParams
from twostep.ops.cpu.device_model import SAMPLE, DeviceLimits
from twostep.runner.model_runner import ModelRunner
from twostep.scheduler.async_scheduler import AsyncScheduler

VOCAB_SIZE = 50


class FakeStep:
    """What was launched."""

    def __init__(self, arrays: tuple[Any, ...], block_table: np.ndarray) -> None:
        self.arrays, self.block_table = arrays, block_table
        self.staged: list[int] = []

    def stage_tokens(self, table: Any, row: int, start: int, token_ids: np.ndarray) -> None:
        self.staged.append(row)


class FakeDevice:
    """Stands for a ``CpuModel``, its stream and its sampler state."""

    forward_plan = logits_plan = sample_plan = token_table = None

    def __init__(self, limits: DeviceLimits) -> None:
        self.limits = limits
        self.stream = self.sample_state = self
        self.steps: list[FakeStep] = []

    def view_block_table(self, block_table: np.ndarray) -> np.ndarray:
        return block_table

    def make_step(self, num_tokens: int, *arrays: Any) -> tuple[FakeStep, None]:
        query_start_loc, seq_lens, rows, block_table, logits, part = arrays
        assert num_tokens == query_start_loc[-1]
        assert part.start == 0
        step = FakeStep((query_start_loc, seq_lens, rows, logits), block_table.copy())
        self.steps.append(step)
        return step, None

    def stage(self, step: FakeStep, row: int, *args: Any, **kwargs: Any) -> None:
        assert row in step.staged

    def launch(self, plan: Any, step: Any) -> int:
        return len(self.steps)


def test_every_step_is_what_its_plan_says() -> None:
    """Requests come, go, are preempted and resume; most steps only decode, and are not packed anew.

    What was launched is compared with the plan and with the scheduler's own blocks, request by
    request.
    """
    draw = random.Random(5)
    scheduler = AsyncScheduler(
        SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6, max_model_len=96),
        CacheConfig(num_blocks=9, block_size=16, enable_prefix_caching=False),
        FakeClock(),
    )
    device, runner = make_runner()
    in_flight: list[SchedulerOutput] = []
    lens: dict[str, tuple[int, int]] = {}
    num_packed = num_preempted = 0
    pack = runner._pack

    def count_packed(plan: SchedulerOutput) -> Any:
        nonlocal num_packed
        num_packed += 1
        return pack(plan)

    runner._pack = count_packed  # type: ignore[method-assign]
    for number in range(400):
        if number % 12 == 0:
            request = make_request(f"r{number}", draw.randint(1, 40), draw.randint(2, 40))
            scheduler.add_request(scheduler.make_request(request, None))
        plan = scheduler.schedule()
        num_preempted += len(plan.preempted_req_ids)
        runner.execute_model(plan)
        if plan.total_num_scheduled_tokens:
            runner.sample_tokens(None)
            check_launch(device.steps[-1], plan, runner, scheduler, lens)
        in_flight.append(plan)
        if len(in_flight) == 2:
            finish(scheduler, in_flight.pop(0), lens)
    assert num_preempted > 0
    assert 20 < num_packed < len(device.steps) / 2


def test_others_of_the_same_number_are_packed_anew() -> None:
    """One sits a step out and comes back while another one sits out: as many, but not the same."""
    device, runner = make_runner()
    launch(runner, new={"A": (4, 4), "B": (4, 4), "C": (4, 4)})
    launch(runner, decoding={"A": 4, "B": 4})
    assert device.steps[-1].arrays[2] == [runner.states[name].row for name in "AB"]
    launch(runner, decoding={"A": 5, "C": 4})
    assert device.steps[-1].arrays[2] == [runner.states[name].row for name in "AC"]


def test_the_last_one_token_chunk_of_a_prompt_samples() -> None:
    """Chunks of one token look like decodes and sample nothing, but for the last one."""
    device, runner = make_runner()
    launch(runner, new={"A": (3, 1), "B": (1, 1)})
    assert device.steps[-1].arrays[3].requests == [1]
    for computed, sampling in ((1, [1]), (2, [0, 1]), (3, [0, 1])):
        launch(runner, decoding={"A": computed, "B": computed})
        assert device.steps[-1].arrays[3].requests == sampling


def make_runner() -> tuple[FakeDevice, ModelRunner]:
    """A runner of six rows, and the device under it."""
    device = FakeDevice(
        DeviceLimits(
            max_num_seqs=6,
            max_num_batched_tokens=24,
            max_model_len=96,
            num_blocks=9,
            block_size=16,
            max_logits_rows=8,
        )
    )
    return device, ModelRunner(device, VOCAB_SIZE)  # type: ignore[arg-type]


def launch(
    runner: ModelRunner,
    *,
    new: dict[str, tuple[int, int]] | None = None,
    decoding: dict[str, int] | None = None,
) -> None:
    """One step: ``new`` requests by (prompt, tokens of this step), others by computed tokens."""
    new, decoding = new or {}, decoding or {}
    num_scheduled = {
        **dict.fromkeys(decoding, 1),
        **{name: count for name, (_, count) in new.items()},
    }
    plan = SchedulerOutput(
        step_id=0,
        scheduled_new_reqs=[
            NewRequestData(
                request_id=name,
                prompt_len=prompt_len,
                prefill_token_ids=[3] * prompt_len,
                sampling_params=SamplingParams(seed=1),
                stop_token_ids=[],
                block_ids=[1],
                num_computed_tokens=0,
                num_cached_tokens=0,
            )
            for name, (prompt_len, _) in new.items()
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(decoding),
            new_block_ids=[None] * len(decoding),
            num_computed_tokens=list(decoding.values()),
            num_output_tokens=[1] * len(decoding),
        ),
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        finished_req_ids=frozenset(),
        preempted_req_ids=frozenset(),
    )
    runner.execute_model(plan)
    runner.sample_tokens(None)


def check_launch(
    step: FakeStep,
    plan: SchedulerOutput,
    runner: ModelRunner,
    scheduler: AsyncScheduler,
    lens: dict[str, tuple[int, int]],
) -> None:
    """Request by request."""
    query_start_loc, seq_lens, rows, logits = step.arrays
    computed = dict(
        zip(
            plan.scheduled_cached_reqs.req_ids,
            plan.scheduled_cached_reqs.num_computed_tokens,
            strict=True,
        )
    )
    for new in plan.scheduled_new_reqs:
        computed[new.request_id] = new.num_computed_tokens
        lens[new.request_id] = (new.prompt_len, len(new.prefill_token_ids))
    assert runner.last_batch is not None
    req_ids = runner.last_batch.req_ids
    assert sorted(req_ids) == sorted(plan.num_scheduled_tokens)
    assert len(set(rows)) == len(rows)
    sampling = []
    for index, request_id in enumerate(req_ids):
        num_tokens = query_start_loc[index + 1] - query_start_loc[index]
        assert num_tokens == plan.num_scheduled_tokens[request_id]
        assert seq_lens[index] == computed[request_id] + num_tokens
        assert rows[index] == runner.states[request_id].row
        blocks = scheduler.kv_cache_manager.get_block_ids(request_id)
        needed = -(-seq_lens[index] // 16)
        assert step.block_table[rows[index]][:needed].tolist() == blocks[:needed]
        if seq_lens[index] >= lens[request_id][1]:
            sampling.append(index)
    assert logits.requests == sampling
    assert logits.indices == [query_start_loc[index + 1] - 1 for index in sampling]
    assert logits.kinds == [SAMPLE] * len(sampling)


def finish(
    scheduler: AsyncScheduler, plan: SchedulerOutput, lens: dict[str, tuple[int, int]]
) -> None:
    """A token for everybody whose known tokens are all computed."""
    chunks = {
        request.request_id
        for step in list(scheduler._in_flight)[:1]
        for request in step.requests
        if request is not None and request.request_id in step.chunks
    }
    req_ids = list(plan.num_scheduled_tokens)
    tokens = [[] if request_id in chunks else [7] for request_id in req_ids]
    scheduler.update_from_output(plan, ModelRunnerOutput(req_ids=req_ids, sampled_token_ids=tokens))


class FakeClock:
    """Stands still."""

    def monotonic(self) -> float:
        return 0.0


def make_request(request_id: str, prompt_len: int, max_tokens: int) -> EngineCoreRequest:
    """A request whose end tokens never come."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[3] * prompt_len,
        sampling_params=SamplingParams(seed=1, max_tokens=max_tokens),
        eos_token_id=None,
        arrival_time=0.0,
    )
