"""Cases 63 and 64: what a grammar allows, and a grammar that does not compile."""

from __future__ import annotations

import struct
from collections.abc import Collection

import pytest
from planning_helpers import (
    FakeClock,
    FakeGrammar,
    FakeGrammarFuture,
    add,
    by_id,
    check,
    make_configs,
    make_engine_request,
    make_scheduler,
    result,
    run_step,
)

from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.request import FinishReason
from twostep.contracts.sampling import StructuredOutputsParams
from twostep.engine.core import EngineCore
from twostep.scheduler.grammars import mask_rows
from twostep.sim.recording_ghost import RecordingGhost


def counts(bitmask: bytes) -> list[int]:
    """Word 0 of each row: the fake grammar writes there how many tokens it had accepted."""
    return [struct.unpack_from("<I", bitmask, at)[0] for at in range(0, len(bitmask), 8)]


def test_case_63_rows_of_a_plan() -> None:
    """U none, V two drafts, W a chunk, X no drafts: four rows, V three times and X once."""
    scheduler = make_scheduler(num_spec_tokens=2, budget=40)
    grammars = {name: FakeGrammar() for name in "VWX"}

    def structured(name: str, length: int) -> None:
        future = FakeGrammarFuture(grammars[name], is_done=True)
        add(scheduler, name, length, 80, grammar=future)

    add(scheduler, "U", 5, 80)
    structured("V", 5)
    structured("X", 5)
    plan = scheduler.schedule()
    masks = scheduler.get_grammar_bitmask(plan)
    assert masks is not None
    assert masks.request_ids == ["V", "X"]
    output = result(plan, U=1, V=1, X=1)
    output.draft_token_ids = {"V": [7, 9]}
    scheduler.update_from_output(plan, output)
    structured("W", 100)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"U": 1, "V": 3, "X": 1, "W": 35}
    masks = scheduler.get_grammar_bitmask(plan)
    assert masks is not None
    assert masks.request_ids == ["V", "V", "V", "X"]
    assert counts(masks.bitmask) == [1, 2, 3, 1]
    assert grammars["V"].accepted == [1]  # rolled back
    scheduler.update_from_output(plan, result(plan, U=1, V=[7, 8], X=1))
    assert grammars["V"].accepted == [1, 7, 8]
    assert grammars["W"].accepted == []


def test_case_63_rows_behind_a_refused_draft_repeat() -> None:
    """Nothing is sampled from them; the grammar is where it was."""
    grammar = FakeGrammar(forbidden=9)
    rows = mask_rows(grammar, [7, 9, 8])
    assert counts(b"".join(rows)) == [0, 1, 1, 1]
    assert grammar.accepted == []


def test_case_63_drafts_are_validated_when_they_are_made() -> None:
    """A grammar cuts its request's drafts before they are planned."""
    scheduler = make_scheduler(num_spec_tokens=3)
    future = FakeGrammarFuture(FakeGrammar(forbidden=9), is_done=True)
    request = add(scheduler, "a", 5, 80, grammar=future)
    plan = scheduler.schedule()
    output = result(plan, a=1)
    output.draft_token_ids = {"a": [7, 9, 8]}
    scheduler.update_from_output(plan, output)
    assert request.spec_token_ids == [7]


@pytest.mark.parametrize("is_async", [False, True])
def test_case_64_a_grammar_that_does_not_compile(is_async: bool) -> None:
    """That request ends with an error, even if there is nothing to run; others never notice."""
    future = FakeGrammarFuture()

    class Compiler:
        def compile(
            self, params: StructuredOutputsParams, end_token_ids: Collection[int]
        ) -> FakeGrammarFuture:
            assert params.json_object
            return future

    scheduler_config, cache_config = make_configs(async_scheduling=is_async)
    core = EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=RecordingGhost(cache_config.block_size),
        clock=FakeClock(),
        grammar_compiler=Compiler(),
    )
    core.add_request(make_engine_request("bad", 5, 4, structured=True))
    core.add_request(make_engine_request("good", 5, 4))
    ends = {}
    for number in range(20):
        if number == 10:  # "good" has ended long ago
            assert list(ends) == ["good"]
            future.error = ValueError("unbalanced bracket")
            future.is_done = True
        outputs, _ = core.step_fn()
        check(core.scheduler)
        ends.update({n: o for n, o in by_id(outputs).items() if o.finish_reason is not None})
    assert ends["good"].finish_reason is FinishReason.LENGTH
    assert ends["bad"].finish_reason is FinishReason.ERROR
    assert ends["bad"].stop_reason == "the grammar could not be compiled: unbalanced bracket"
    assert not core.has_work()


def test_case_64_without_a_compiler_structured_requests_are_refused() -> None:
    """At admission, with the field's name."""
    scheduler_config, cache_config = make_configs()
    core = EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=RecordingGhost(cache_config.block_size),
        clock=FakeClock(),
    )
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        core.add_request(make_engine_request("a", 5, 4, structured=True))
    assert caught.value.param == "structured_outputs"


def test_a_token_that_the_grammar_does_not_allow_ends_the_request() -> None:
    """Mask and grammar disagree: a fault, but of one request only."""
    scheduler = make_scheduler()
    future = FakeGrammarFuture(FakeGrammar(forbidden=9), is_done=True)
    add(scheduler, "a", 5, 80, grammar=future)
    add(scheduler, "b", 5, 80)
    _, outputs = run_step(scheduler, 9)
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert "does not allow" in str(outputs["a"].stop_reason)
    assert outputs["b"].finish_reason is None


def test_structured_requests_run_in_every_step() -> None:
    """Asynchronous: the mask of a step is filled when the one before was processed."""
    scheduler = make_scheduler(is_async=True, num_spec_tokens=2)
    grammar = FakeGrammar()
    add(scheduler, "S", 10, 4, grammar=FakeGrammarFuture(grammar, is_done=True))
    in_flight = [scheduler.schedule()]
    seen = []
    while scheduler.has_unfinished_requests():
        in_flight.append(plan := scheduler.schedule())
        oldest = in_flight.pop(0)
        scheduler.update_from_output(oldest, result(oldest, S=5))
        masks = scheduler.get_grammar_bitmask(plan)
        seen.append(None if masks is None else counts(masks.bitmask))
        check(scheduler)
    assert seen == [[1], [2], [3], None]
    assert grammar.accepted == [5, 5, 5, 5]


def test_who_ended_with_the_step_before_has_no_mask() -> None:
    """Its row is still in the plan; what is sampled there is thrown away."""
    scheduler = make_scheduler(is_async=True)
    futures = {name: FakeGrammarFuture(FakeGrammar(last=7), is_done=True) for name in "ST"}
    for name, future in futures.items():
        add(scheduler, name, 10, 40, grammar=future)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, result(first, S=7, T=5))
    masks = scheduler.get_grammar_bitmask(second)
    assert masks is not None
    assert masks.request_ids == ["T"]
    news = scheduler.update_from_output(second, result(second, S=3, T=7))
    assert [output.request_id for output in news[0].outputs] == ["T"]


def test_case_63_a_chunk_alone_has_no_rows() -> None:
    """Nothing is sampled, so nothing is masked."""
    scheduler = make_scheduler(budget=8)
    add(scheduler, "W", 20, 5, grammar=FakeGrammarFuture(is_done=True))
    plan = scheduler.schedule()
    assert plan.has_structured_output_requests
    assert scheduler.get_grammar_bitmask(plan) is None


@pytest.mark.parametrize("ignores_end", [False, True])
def test_a_complete_grammar_ends_its_request_at_once(ignores_end: bool) -> None:
    """No step is spent on an end token, ``ignore_eos`` and ``min_tokens`` or not; the last token
    is text."""
    scheduler = make_scheduler()
    grammar = FakeGrammar(last=7)
    add(
        scheduler,
        "a",
        5,
        80,
        grammar=FakeGrammarFuture(grammar, is_done=True),
        eos=None if ignores_end else 2,
        min_tokens=30,
    )
    _, outputs = run_step(scheduler, 4)
    assert outputs["a"].finish_reason is None
    _, outputs = run_step(scheduler, 7)
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert outputs["a"].new_token_ids == [7]
    assert outputs["a"].ends_with_text
    assert outputs["a"].stop_reason is None


def test_an_end_token_of_a_structured_request_is_no_text() -> None:
    scheduler = make_scheduler()
    grammar = FakeGrammar(last=2)
    add(scheduler, "a", 5, 80, grammar=FakeGrammarFuture(grammar, is_done=True), eos=2)
    _, outputs = run_step(scheduler, 2)
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert not outputs["a"].ends_with_text


def test_tokens_behind_the_end_of_a_grammar_are_dropped() -> None:
    """With accepted drafts several tokens arrive at once: as without, the text ends where it is
    complete."""
    scheduler = make_scheduler(num_spec_tokens=2)
    grammar = FakeGrammar(last=7)
    request = add(scheduler, "a", 5, 80, grammar=FakeGrammarFuture(grammar, is_done=True))
    plan = scheduler.schedule()
    output = result(plan, a=1)
    output.draft_token_ids = {"a": [7, 9]}
    scheduler.update_from_output(plan, output)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 3}
    news = scheduler.update_from_output(plan, result(plan, a=[7, 9, 8]))
    [end] = news[0].outputs
    assert end.new_token_ids == [7]
    assert end.finish_reason is FinishReason.STOP
    assert list(request.all_token_ids)[5:] == [1, 7]


def test_the_compiler_is_told_what_ends_a_request() -> None:
    told = []

    class Compiler:
        def compile(
            self, params: StructuredOutputsParams, end_token_ids: Collection[int]
        ) -> FakeGrammarFuture:
            told.append(set(end_token_ids))
            return FakeGrammarFuture(is_done=True)

    scheduler_config, cache_config = make_configs()
    core = EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=RecordingGhost(cache_config.block_size),
        clock=FakeClock(),
        grammar_compiler=Compiler(),
    )
    core.add_request(make_engine_request("a", 5, 4, structured=True, eos=2, stop_token_ids=[3, 4]))
    core.add_request(make_engine_request("b", 5, 4, structured=True))
    assert told == [{2, 3, 4}, set()]
