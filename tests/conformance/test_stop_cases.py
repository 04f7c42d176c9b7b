"""Cases 46-49: where an answer ends."""

from __future__ import annotations

import pytest
from planning_helpers import add, by_id, make_engine_request, make_scheduler, result, run_step

from twostep.contracts.outputs import TokenLogprobs
from twostep.contracts.request import FinishReason
from twostep.contracts.sampling import RepetitionDetectionParams
from twostep.scheduler.stopping import repeats

EOS = 2


def test_case_46_tokens_behind_the_end_are_cut() -> None:
    """[5, 7, eos, 9] from a step with drafts: three tokens, three logprobs, reason stop."""
    scheduler = make_scheduler(is_async=True, num_spec_tokens=3)
    add(scheduler, "a", 10, 50, eos=EOS, logprobs=0)
    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.update_from_output(first, result(first, a=1))
    output = result(second, a=[5, 7, EOS, 9])
    output.logprobs["a"] = [
        TokenLogprobs(token_ids=[t], logprobs=[-0.5], rank=1) for t in (5, 7, EOS, 9)
    ]
    news = by_id(scheduler.update_from_output(second, output))["a"]
    assert news.new_token_ids == [5, 7, EOS]
    assert news.new_logprobs is not None
    assert [row.token_ids[0] for row in news.new_logprobs] == [5, 7, EOS]
    assert news.finish_reason is FinishReason.STOP
    assert news.stop_reason is None


def test_case_47_the_plan_tells_what_min_tokens_masks() -> None:
    """The sampler masks eos and stop ids; the plan carries them, and the prompt's length."""
    scheduler = make_scheduler()
    add(scheduler, "a", 10, 50, eos=EOS, stop_token_ids=[9, 4, EOS], min_tokens=3)
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.stop_token_ids == [EOS, 4, 9]
    assert new.prompt_len == 10
    assert new.sampling_params.min_tokens == 3


def test_case_48_an_end_token_wins_over_the_limit() -> None:
    """Both at the same token: stop."""
    scheduler = make_scheduler()
    add(scheduler, "a", 10, 2, eos=EOS)
    run_step(scheduler, 7)
    _, outputs = run_step(scheduler, EOS)
    assert outputs["a"].finish_reason is FinishReason.STOP


def test_case_48_stop_token_id_is_the_stop_reason() -> None:
    """A stop id, unlike eos, is named."""
    scheduler = make_scheduler()
    add(scheduler, "a", 10, 2, eos=EOS, stop_token_ids=[9])
    _, outputs = run_step(scheduler, 9)
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert outputs["a"].stop_reason == 9


@pytest.mark.parametrize("is_async", [False, True])
def test_case_48_model_length(is_async: bool) -> None:
    """Prompt 4000 of 4096: 96 outputs, then length."""
    scheduler = make_scheduler(is_async=is_async, max_model_len=4096, num_blocks=260)
    add(scheduler, "a", make_engine_request("a", 4000).prompt_token_ids, 200)
    outputs = {}
    for _ in range(96):
        assert scheduler.has_unfinished_requests()
        plan, outputs = run_step(scheduler)
        assert "a" in plan.num_scheduled_tokens
    assert outputs["a"].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    ("outputs", "params", "expected"),
    [
        ([5, 6, 5, 6, 5, 6], (3, 1, 3), True),
        ([5, 6, 5, 6], (3, 1, 3), False),
        ([7, 7, 7], (3, 1, 3), True),
        ([7, 7, 7], (3, 2, 3), False),
        ([1, 2, 3, 1, 2, 3, 1, 2, 4], (3, 1, 3), False),
        ([9, 1, 2, 3, 1, 2, 3, 1, 2, 3], (3, 1, 3), True),
        ([7, 7, 7], (0, 1, 3), False),
        ([7, 7, 7], (3, 1, 1), False),
    ],
)
def test_case_49_patterns(outputs: list[int], params: tuple[int, int, int], expected: bool) -> None:
    """(longest, shortest pattern, times in a row); the prompt [5, 6] does not count."""
    longest, shortest, count = params
    detection = RepetitionDetectionParams(
        max_pattern_size=longest, min_pattern_size=shortest, min_count=count
    )
    assert repeats([5, 6, *outputs], len(outputs), detection) is expected


def test_case_49_a_repetition_ends_the_request() -> None:
    """Three times (5, 6); not before min_tokens."""
    detection = RepetitionDetectionParams(max_pattern_size=3, min_count=3)
    scheduler = make_scheduler()
    add(scheduler, "a", 10, 50, repetition_detection=detection)
    add(scheduler, "late", 10, 50, repetition_detection=detection, min_tokens=8)
    for token in (5, 6, 5, 6, 5):
        _, outputs = run_step(scheduler, token)
        assert outputs["a"].finish_reason is None
    _, outputs = run_step(scheduler, 6)
    assert outputs["a"].finish_reason is FinishReason.REPETITION
    assert outputs["a"].stop_reason == "repetition_detected"
    assert outputs["late"].finish_reason is None
    run_step(scheduler, 5)
    _, outputs = run_step(scheduler, 6)
    assert outputs["late"].finish_reason is FinishReason.REPETITION
