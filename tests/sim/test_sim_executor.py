"""The simulated device: the seed's step, time as a FIFO, tokens that the host never sends."""

from __future__ import annotations

import pytest

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.plan import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from twostep.contracts.request import EngineCoreRequest
from twostep.contracts.sampling import SamplingParams
from twostep.engine.core import EngineCore
from twostep.runner.graphs import BatchDescriptor, GraphMode
from twostep.sim.build import build_sim_core
from twostep.sim.clock import VirtualClock
from twostep.sim.device import H100
from twostep.sim.executor import SimExecutor
from twostep.sim.model_facts import load_model_facts
from twostep.sim.step_cost import StepCostModel

LLAMA = load_model_facts("llama-3.1-8b")


def request(request_id: str, prompt_len: int, max_tokens: int = 1000) -> EngineCoreRequest:
    """A prompt of ids that no other request has."""
    base = sum(request_id.encode()) * 100_000
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(range(base, base + prompt_len)),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=0),
        eos_token_id=None,
        arrival_time=0.0,
    )


def before_step_k() -> tuple[EngineCore, SimExecutor, VirtualClock]:
    """The seed's machine, with step k-1 (B's 41st token, A's first chunk) in flight."""
    core, executor, clock = build_sim_core(LLAMA, "h100")
    core.add_request(request("B", 500))
    for _ in range(40):
        core.step_fn()
    # Step k-1 must hold A's first chunk: take B's last result before A arrives.
    future, plan = core.batch_queue.pop()
    core.scheduler.update_from_output(plan, future.result())  # type: ignore[union-attr]
    core.add_request(request("A", 20_000))
    assert core.step_fn() == (None, True)
    return core, executor, clock


def test_the_seeds_step_k() -> None:
    core, executor, _ = before_step_k()
    outputs, _ = core.step_fn()
    assert outputs is not None
    assert [(o.request_id, o.new_token_ids) for o in outputs[0].outputs] == [("B", [41])]
    step = executor.steps[41]
    batch = step.batch
    assert batch.req_ids == ["B", "A"]
    assert batch.query_start_loc == [0, 1, 8192]
    assert batch.positions.tolist() == [540, *range(8191, 16382)]
    assert batch.seq_lens == [541, 16382]
    assert step.logits_indices == [0, 8191]
    assert step.num_sampled.tolist() == [1, 0]
    assert step.sampled_token_ids == {"B": [42], "A": []}
    assert (step.block_index[0], step.block_offset[0]) == (33, 12)
    assert (step.block_index[1], step.block_index[-1]) == (511, 1023)
    table = core.scheduler.kv_cache_manager.get_block_ids
    assert step.block_id[0] == table("B")[33]
    assert step.slot_mapping[0] == table("B")[33] * 16 + 12
    assert step.slot_mapping[-1] == table("A")[1023] * 16 + 13
    assert step.graph == BatchDescriptor(GraphMode.NONE, 8192, 2)


def test_the_seeds_following_steps() -> None:
    """A's last chunk samples; then two decodes replay a graph of two."""
    core, executor, _ = before_step_k()
    for _ in range(3):
        core.step_fn()
    assert executor.steps[42].num_sampled.tolist() == [1, 1]
    assert executor.steps[42].batch.num_scheduled_tokens == [1, 3618]
    assert executor.steps[43].graph == BatchDescriptor(GraphMode.FULL, 2, 2)
    assert executor.steps[43].input_ids.tolist() == [43, 1]


def test_input_tokens_come_from_the_device() -> None:
    """B reads what step k-1 left in its row, not what the host has heard of."""
    core, executor, _ = before_step_k()
    row = executor.states["B"].row
    assert executor.last_sampled[row] == 41
    assert core.scheduler.requests["B"].num_tokens == 540  # the host has not heard of it
    executor.last_sampled[row] = 777
    core.step_fn()
    step = executor.steps[41]
    assert step.from_device.tolist() == [0]
    assert step.input_ids[0] == 777
    prompt = core.scheduler.requests["A"].all_token_ids
    assert step.input_ids[1:].tolist() == list(prompt[8191:16382])


def test_time_is_a_fifo() -> None:
    """A step starts when it is launched and the device is free; only waiting moves the clock."""
    core, executor, clock = build_sim_core(LLAMA, "h100")
    core.add_request(request("B", 500))
    core.step_fn()
    first = executor.steps[0]
    assert (first.launched, first.device_start) == (0.0, 0.0)
    assert first.device_end == first.cost.total
    assert clock.monotonic() == 0.0  # launched, not waited for
    core.step_fn()
    second = executor.steps[1]
    assert second.launched == 0.0  # while the first one ran
    assert second.device_start == first.device_end
    assert clock.monotonic() == first.device_end  # it was the first one that was waited for
    clock.advance_to(100.0)
    core.step_fn()
    third = executor.steps[2]
    assert third.device_start == 100.0  # the device stood idle
    assert clock.monotonic() == 100.0  # the second step has long been done


def test_without_async_scheduling_the_device_waits_for_the_host() -> None:
    core, executor, clock = build_sim_core(
        LLAMA, "h100", async_scheduling=False, executor_options={"host_cost": lambda plan: 0.25}
    )
    core.add_request(request("B", 500))
    for _ in range(3):
        core.step_fn()
    steps = [executor.steps[i] for i in range(3)]
    for before, after in zip(steps, steps[1:], strict=False):
        assert after.device_start == pytest.approx(before.device_end + 0.25)
    assert clock.monotonic() == steps[2].device_end


def test_host_time_hides_behind_the_device() -> None:
    core, executor, _ = build_sim_core(
        LLAMA, "h100", executor_options={"host_cost": lambda plan: 0.001}
    )
    core.add_request(request("B", 500))
    for _ in range(4):
        core.step_fn()
    assert executor.steps[3].device_start == executor.steps[2].device_end


def test_futures_say_when_they_are_done() -> None:
    core, executor, clock = build_sim_core(LLAMA, "h100")
    core.add_request(request("B", 500))
    core.step_fn()
    future, _ = core.batch_queue[-1]
    assert not future.done()  # type: ignore[union-attr]
    clock.advance_to(executor.steps[0].device_end)
    assert future.done()  # type: ignore[union-attr]


def test_a_resumed_request_goes_on_where_it_was() -> None:
    """Preempted: its row is dropped; replayed tokens come from the host, the next one is new."""
    core, executor, _ = build_sim_core(
        LLAMA, "h100", max_num_seqs=2, max_model_len=64, kv_cache_memory_bytes=6 * (2 << 20)
    )
    core.add_request(request("X", 30, 30))
    core.add_request(request("Y", 30, 30))
    tokens: dict[str, list[int]] = {"X": [], "Y": []}
    preempted = 0
    while core.has_work():
        outputs, _ = core.step_fn()
        for message in (outputs or {}).values():
            for output in message.outputs:
                tokens[output.request_id] += output.new_token_ids
            assert message.scheduler_stats is not None
            preempted += message.scheduler_stats.num_preemptions
    assert preempted > 0
    assert tokens == {"X": list(range(1, 31)), "Y": list(range(1, 31))}
    assert len(executor.states) == 0


def test_tokens_can_be_chosen() -> None:
    core, _, _ = build_sim_core(
        LLAMA, "h100", executor_options={"next_token": lambda request_id, n: 1000 + n}
    )
    core.add_request(request("B", 5, 2))
    found = []
    while core.has_work():
        outputs, _ = core.step_fn()
        for message in (outputs or {}).values():
            found += [token for output in message.outputs for token in output.new_token_ids]
    assert found == [1001, 1002]


def test_history_is_bounded() -> None:
    core, executor, _ = build_sim_core(LLAMA, "h100", executor_options={"history": 3})
    core.add_request(request("B", 5))
    for _ in range(10):
        core.step_fn()
    assert list(executor.steps) == [7, 8, 9]


def test_eager_and_device_spans() -> None:
    core, executor, _ = build_sim_core(LLAMA, "h100", executor_options={"enforce_eager": True})
    executor.time_device()
    core.add_request(request("B", 5))
    core.step_fn()
    core.step_fn()
    future, _ = core.batch_queue[-1]
    assert executor.steps[1].graph.mode is GraphMode.NONE
    spans = future.result().device_spans  # type: ignore[union-attr]
    assert spans is not None
    step = executor.steps[1]
    assert [name for name, _, _ in spans] == ["forward", "logits", "sample"]
    assert (spans[0][1], spans[-1][2]) == (step.device_start, step.device_end)
    assert all(a[2] == b[1] for a, b in zip(spans, spans[1:], strict=False))


# ---------------------------------------------------------------- plans by hand


def make_executor(**options: object) -> SimExecutor:
    """An executor that is fed by hand."""
    return SimExecutor(
        StepCostModel(LLAMA, H100),
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=128),
        CacheConfig(num_blocks=20),
        VirtualClock(),
        **options,  # type: ignore[arg-type]
    )


def plan(step_id: int, tokens: dict[str, int], **fields: object) -> SchedulerOutput:
    """A plan; requests that are not new are known ones without new blocks."""
    new = {data.request_id: data for data in fields.pop("new", [])}  # type: ignore[attr-defined]
    known = [request_id for request_id in tokens if request_id not in new]
    return SchedulerOutput(
        step_id=step_id,
        scheduled_new_reqs=list(new.values()),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=known,
            new_block_ids=[None] * len(known),
            num_computed_tokens=[0] * len(known),
            num_output_tokens=[0] * len(known),
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        finished_req_ids=fields.pop("finished", frozenset()),  # type: ignore[arg-type]
        preempted_req_ids=fields.pop("preempted", frozenset()),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def new_request(
    request_id: str, prompt: list[int], num_computed: int = 0, num_cached: int = 0
) -> NewRequestData:
    """A request that may use blocks 1..4."""
    return NewRequestData(
        request_id=request_id,
        prompt_len=len(prompt),
        prefill_token_ids=prompt,
        sampling_params=SamplingParams(),
        stop_token_ids=[],
        block_ids=[1, 2, 3, 4],
        num_computed_tokens=num_computed,
        num_cached_tokens=num_cached,
    )


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_drafts(accepted: int) -> None:
    """Refused drafts are not computed: the device steps back, whatever the plan hoped for."""
    executor = make_executor(num_spec_tokens=2, accept_drafts=lambda r, number, drafts: accepted)
    executor.execute_model(plan(0, {"X": 5}, new=[new_request("X", [9, 8, 7, 6, 5])]))
    assert executor.sample_tokens(None).result().sampled_token_ids == [[1]]
    executor.execute_model(plan(1, {"X": 3}, scheduled_spec_decode_tokens={"X": [-1, -1]}))
    result = executor.sample_tokens(None).result()
    assert result.sampled_token_ids == [list(range(2, 3 + accepted))]
    step = executor.steps[1]
    assert step.input_ids.tolist() == [1, -1, -1]
    assert step.batch.positions.tolist() == [5, 6, 7]
    assert step.logits_indices == [0, 1, 2]
    assert step.graph == BatchDescriptor(GraphMode.FULL, 3, 1)
    executor.execute_model(plan(2, {"X": 1}))
    executor.sample_tokens(None)
    step = executor.steps[2]
    assert step.batch.positions.tolist() == [6 + accepted]
    assert step.input_ids.tolist() == [2 + accepted]


def test_a_plan_without_tokens_only_frees_rows() -> None:
    executor = make_executor()
    new = [new_request("X", [1, 2]), new_request("Y", [3, 4])]
    executor.execute_model(plan(0, {"X": 2, "Y": 2}, new=new))
    executor.sample_tokens(None)
    gone = {"finished": frozenset({"X", "unknown"}), "preempted": frozenset({"Y"})}
    empty = executor.execute_model(plan(1, {}, **gone))
    assert empty is not None
    assert empty.result().req_ids == []
    assert len(executor.states) == 0


def test_kv_that_is_there_is_not_written_again() -> None:
    """A full hit: the last token is computed for its logits, its block belongs to others too."""
    executor = make_executor()
    new = [new_request("hit", [7] * 32, 31, 32), new_request("miss", [7] * 20)]
    executor.execute_model(plan(0, {"hit": 1, "miss": 20}, new=new))
    executor.sample_tokens(None)
    slots = executor.steps[0].slot_mapping
    assert slots.tolist() == [-1, *range(16, 36)]
    assert executor.steps[0].batch.positions[0] == 31


def test_results_are_in_plan_order() -> None:
    executor = make_executor()
    new = [new_request("long", [1] * 9), new_request("short", [1])]
    executor.execute_model(plan(0, {"long": 9, "short": 1}, new=new))
    assert executor.sample_tokens(None).result().req_ids == ["long", "short"]
    assert executor.steps[0].batch.req_ids == ["short", "long"]


def test_misuse_is_refused() -> None:
    executor = make_executor()
    with pytest.raises(RuntimeError, match="without execute_model"):
        executor.sample_tokens(None)
    executor.execute_model(plan(0, {"X": 2}, new=[new_request("X", [1, 2])]))
    with pytest.raises(RuntimeError, match="twice"):
        executor.execute_model(plan(1, {"X": 1}))
    with pytest.raises(RuntimeError, match="no grammars"):
        executor.sample_tokens(GrammarOutput(request_ids=["X"], bitmask=b""))
    executor.reset_after_failure()
    with pytest.raises(RuntimeError, match="does not know the next tokens of X"):
        executor.execute_model(plan(1, {"X": 5}))  # it knows two


def test_shutdown_waits_for_the_device() -> None:
    executor = make_executor()
    executor.execute_model(plan(0, {"X": 2}, new=[new_request("X", [1, 2])]))
    executor.sample_tokens(None)
    executor.shutdown()
    executor.shutdown()
    assert executor.clock.monotonic() == executor.busy_until > 0
