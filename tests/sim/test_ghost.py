"""The ghost device notices what a plan may not ask for; each plan here is made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from twostep.contracts.sampling import SamplingParams, StructuredOutputsParams
from twostep.sim.ghost import GhostExecutor
from twostep.sim.ghost_grammar import GhostGrammar
from twostep.sim.ghost_model import end_of_chain, oracle
from twostep.sim.violation import Violation

PROMPT = [1, 2, 3, 4, 5, 6]


def new(
    request_id: str,
    blocks: Sequence[int],
    *,
    cached: int = 0,
    prompt: Sequence[int] = PROMPT,
    salt: int = 0,
    structured: bool = False,
) -> NewRequestData:
    """A request for a ghost with blocks of 4."""
    params = SamplingParams(
        seed=salt,
        structured_outputs=StructuredOutputsParams(grammar="3 0") if structured else None,
    )
    return NewRequestData(
        request_id=request_id,
        prompt_len=len(prompt),
        prefill_token_ids=list(prompt),
        sampling_params=params,
        stop_token_ids=[],
        block_ids=list(blocks),
        num_computed_tokens=min(cached, len(prompt) - 1),
        num_cached_tokens=cached,
    )


def plan(
    step_id: int,
    scheduled: Mapping[str, int],
    *starting: NewRequestData,
    going_on: Sequence[tuple[str, list[int] | None, int, int]] = (),
    drafts: Mapping[str, list[int]] | None = None,
    finished: Sequence[str] = (),
) -> SchedulerOutput:
    """``going_on``: (id, new blocks, computed before, outputs)."""
    return SchedulerOutput(
        step_id=step_id,
        scheduled_new_reqs=list(starting),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[row[0] for row in going_on],
            new_block_ids=[row[1] for row in going_on],
            num_computed_tokens=[row[2] for row in going_on],
            num_output_tokens=[row[3] for row in going_on],
        ),
        num_scheduled_tokens=dict(scheduled),
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=frozenset(finished),
        preempted_req_ids=frozenset(),
        scheduled_spec_decode_tokens=dict(drafts or {}),
    )


def step(ghost: GhostExecutor, step_plan: SchedulerOutput) -> ModelRunnerOutput:
    """Launch and wait."""
    assert ghost.execute_model(step_plan) is None
    return ghost.sample_tokens(None).result()


def expect(check: str, ghost: GhostExecutor, step_plan: SchedulerOutput) -> None:
    """The plan breaks a rule."""
    with pytest.raises(Violation) as caught:
        step(ghost, step_plan)
    assert caught.value.check == check


@pytest.fixture
def ghost() -> GhostExecutor:
    """Request a has blocks 1 and 2, 6 tokens of prompt and its first output."""
    device = GhostExecutor(4)
    output = step(device, plan(0, {"a": 6}, new("a", [1, 2])))
    assert output.sampled_token_ids == [oracle(PROMPT, 1, ())]
    return device


def test_text_is_the_oracles(ghost: GhostExecutor) -> None:
    """Prefill in one step, then decodes."""
    tokens = []
    for i in range(2):
        tokens += step(
            ghost, plan(1 + i, {"a": 1}, going_on=[("a", None, 6 + i, 1 + i)])
        ).sampled_token_ids[0]
    assert tokens == oracle(PROMPT, 3, ())[1:]


def test_foreign_blocks_are_not_written(ghost: GhostExecutor) -> None:
    """Block 2 is a's."""
    expect("I4", ghost, plan(1, {"b": 6}, new("b", [3, 2])))


def test_shared_blocks_are_not_written(ghost: GhostExecutor) -> None:
    """b is told that all of a's blocks are cached; a still fills the last one."""
    prompt = [*PROMPT, *oracle(PROMPT, 2, ())]
    going_on = [("a", None, 6, 1)]
    ghost.execute_model(plan(1, {"a": 1}, going_on=going_on))
    ghost.sample_tokens(None).result()
    ghost.block_values[2] = end_of_chain(0, prompt)
    ghost.slots[2 * 4 + 3] = end_of_chain(0, prompt)
    ghost.execute_model(plan(2, {"b": 1}, new("b", [1, 2], cached=8, prompt=prompt)))
    ghost.sample_tokens(None).result()
    expect("I4", ghost, plan(3, {"a": 1}, going_on=[("a", None, 7, 2)]))


def test_the_null_block_is_not_written(ghost: GhostExecutor) -> None:
    """It stands for nothing."""
    expect("I4", ghost, plan(1, {"b": 6}, new("b", [0, 3])))


def test_a_hit_must_hold_the_own_tokens(ghost: GhostExecutor) -> None:
    """Block 1 holds 1, 2, 3, 4."""
    expect("I5", ghost, plan(1, {"b": 2}, new("b", [1, 3], cached=4, prompt=[1, 2, 3, 9, 5, 6])))


def test_a_hit_must_hold_the_own_salt(ghost: GhostExecutor) -> None:
    """The same tokens of another tenant."""
    expect("I5", ghost, plan(1, {"b": 2}, new("b", [1, 3], cached=4, salt=7)))


def test_blocks_in_the_wrong_order_are_noticed(ghost: GhostExecutor) -> None:
    """Everything is there, elsewhere."""
    ghost.rows["a"].table.reverse()
    expect("I5", ghost, plan(1, {"a": 1}, going_on=[("a", None, 6, 1)]))


def test_a_whole_prompt_that_is_cached_is_not_written_again(ghost: GhostExecutor) -> None:
    """Its last token is computed for its logits; the block is a's."""
    output = step(ghost, plan(1, {"b": 1}, new("b", [1], cached=4, prompt=PROMPT[:4])))
    assert output.sampled_token_ids == [oracle(PROMPT[:4], 1, ())]


def test_blocks_of_a_step_in_flight_are_fenced(ghost: GhostExecutor) -> None:
    """a ended, its step 1 has not returned."""
    ghost.execute_model(plan(1, {"a": 1}, going_on=[("a", None, 6, 1)]))
    future = ghost.sample_tokens(None)
    expect("I6", ghost, plan(2, {"b": 6}, new("b", [1, 3]), finished=["a"]))
    future.result()
    ghost.reset_after_failure()
    ghost.rows.clear()
    step(ghost, plan(3, {"c": 6}, new("c", [2, 4])))


@pytest.mark.parametrize(("computed", "outputs"), [(7, 1), (5, 1), (6, 2), (6, 0)])
def test_counters_must_agree(ghost: GhostExecutor, computed: int, outputs: int) -> None:
    """The device has 6 computed tokens and 1 output."""
    expect("I9", ghost, plan(1, {"a": 1}, going_on=[("a", None, computed, outputs)]))


def test_tokens_need_slots(ghost: GhostExecutor) -> None:
    """7 tokens and 3 drafts do not fit into 8 slots."""
    drafts = {"a": [-1, -1, -1]}
    expect("I9", ghost, plan(1, {"a": 4}, going_on=[("a", None, 6, 1)], drafts=drafts))


def test_unknown_rows_and_known_ones_as_new(ghost: GhostExecutor) -> None:
    """The runner would crash, or mix two requests up."""
    expect("contract", ghost, plan(1, {"b": 1}, going_on=[("b", None, 6, 1)]))
    ghost.reset_after_failure()
    expect("contract", ghost, plan(2, {"a": 6}, new("a", [3, 4])))


def test_refused_drafts_are_known_when_the_result_was_taken(ghost: GhostExecutor) -> None:
    """Until then plans count them as computed, afterwards they must not."""
    wrong = (oracle(PROMPT, 2, ())[1] + 1) % 61
    ghost.execute_model(plan(1, {"a": 2}, going_on=[("a", None, 6, 1)], drafts={"a": [wrong]}))
    future = ghost.sample_tokens(None)
    ghost.execute_model(plan(2, {"a": 1}, going_on=[("a", [3], 8, 3)]))
    assert ghost.sample_tokens(None).result().sampled_token_ids == [oracle(PROMPT, 3, ())[2:]]
    assert future.result().sampled_token_ids == [oracle(PROMPT, 2, ())[1:]]
    expect("I9", ghost, plan(3, {"a": 1}, going_on=[("a", None, 9, 4)]))


def test_masks_are_for_the_rows_that_wait_for_them(ghost: GhostExecutor) -> None:
    """A structured row without its mask is as wrong as a mask for nobody."""
    mask = GhostGrammar(3).fill_bitmask()
    ghost.execute_model(plan(1, {"s": 6}, new("s", [3, 4], structured=True)))
    with pytest.raises(Violation, match="I13"):
        ghost.sample_tokens(None)
    output = ghost.sample_tokens(GrammarOutput(request_ids=["s"], bitmask=mask)).result()
    (token,) = output.sampled_token_ids[0]
    assert GhostGrammar(3).accept_tokens([token])


def test_what_a_failed_step_wrote_is_garbage(ghost: GhostExecutor) -> None:
    """Nobody may find it; a step behind it fails as well."""
    ghost.fail_result = lambda p: OSError("glitch") if p.step_id == 1 else None
    ghost.execute_model(plan(1, {"b": 6}, new("b", [3, 4])))
    failed = ghost.sample_tokens(None)
    ghost.execute_model(plan(2, {"a": 1}, going_on=[("a", None, 6, 1)]))
    behind = ghost.sample_tokens(None)
    for future in (failed, behind):
        with pytest.raises((OSError, RuntimeError)):
            future.result()
    ghost.rows.clear()
    ghost.holders.clear()
    expect("I5", ghost, plan(3, {"c": 2}, new("c", [3, 5], cached=4)))
