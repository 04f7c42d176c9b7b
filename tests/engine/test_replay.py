"""Record and replay: the same plans come out, and nothing that was changed goes unnoticed."""

from __future__ import annotations

import io
import logging
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from helpers.toy_engine import Toy, ToyCompiler, make_request, make_toy, run_load, step

from twostep.contracts.errors import EngineDeadError, TwostepError
from twostep.contracts.plan import CachedRequestData, SchedulerOutput
from twostep.engine import recording as rec
from twostep.engine.recording import Recording, RecordingError, encode_plan
from twostep.engine.replay import Difference, Replay, ReplayClock
from twostep.engine.timeline import StepSpan, Timeline
from twostep.entrypoints.tracing.watch import Watch


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


class Recorded:
    """A toy whose core is recorded to a file."""

    def __init__(self, path: Path, **options: object) -> None:
        self.path = path
        self.toy: Toy = make_toy(**options)  # type: ignore[arg-type]
        self.watch = Watch(None, path)
        toy = self.toy
        observer = self.watch.begin(
            toy.executor,
            toy.clock,
            toy.scheduler_config,
            toy.cache_config,
            num_spec_tokens=toy.num_spec_tokens,
        )
        self.core = toy.core(observer, self.watch.grammars(ToyCompiler()))

    def close(self) -> bytes:
        self.watch.close()
        return self.path.read_bytes()


def replay(
    data: bytes, until: int | None = None, watcher: Timeline | None = None
) -> tuple[Replay, Difference | None]:
    recording = Recording(io.BytesIO(data), "run.rec")
    run = Replay(recording, ReplayClock(), watcher)
    return run, run.run(until)


def events_of(data: bytes) -> list[rec.AnyEvent]:
    return list(Recording(io.BytesIO(data), "run.rec").events())


def with_events(data: bytes, events: list[rec.AnyEvent]) -> bytes:
    """The recording with other events, each in a frame of its own, properly checksummed."""
    header = Recording(io.BytesIO(data), "run.rec").header
    return rec.encode_header(header) + b"".join(rec.encode_events([e]) for e in events)


def recorded_load(path: Path, seed: int, *, is_async: bool = True, faults: bool = True) -> bytes:
    run = Recorded(path, is_async=is_async)
    run_load(run.toy, run.core, seed, faults=faults)
    return run.close()


@pytest.mark.parametrize("faults", [False, True], ids=["calm", "failing"])
@pytest.mark.parametrize(
    ("is_async", "drafts"), [(False, 0), (True, 0), (True, 2)], ids=["sync", "async", "drafts"]
)
def test_a_random_load_replays(is_async: bool, drafts: int, faults: bool, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        run = Recorded(tmp_path / "run.rec", is_async=is_async, num_spec_tokens=drafts)
        run_load(run.toy, run.core, seed, faults=faults)
        data = run.close()
        replayed, difference = replay(data)
        assert difference is None, f"seed {seed}: {difference}"
        assert not replayed._core.has_unfinished_requests()
        seen.update(run.toy.counts)
        for event in events_of(data):
            seen[type(event).__name__] += 1
            if isinstance(event, rec.Planned):
                plan = rec.decode_plan(event.plan)
                seen["preemptions"] += len(plan.preempted_req_ids)
                seen["drafts"] += len(plan.scheduled_spec_decode_tokens)
                seen["plans"] += 1
        assert replayed.step_id + 1 == sum(
            isinstance(event, rec.Planned) for event in events_of(data)
        )
    assert seen["plans"] > 500
    assert seen["preemptions"] > 10
    assert seen["aborts"] > 10
    assert seen["resets"] > 3
    assert seen["pauses"] > 10
    assert (seen["drafts"] > 50) == (drafts > 0)
    if faults:
        assert seen["failures"] > 3
        assert seen["Failed"] > 3
        assert seen["interrupts"] > 3


@pytest.mark.parametrize("faults", [False, True], ids=["calm", "failing"])
@pytest.mark.parametrize(
    ("is_async", "drafts"), [(False, 0), (True, 0), (False, 2)], ids=["sync", "async", "drafts"]
)
def test_structured_requests_replay(
    is_async: bool, drafts: int, faults: bool, tmp_path: Path
) -> None:
    """Without their grammars: that they were ready, refused, cut and ended is in the file."""
    seen: Counter[str] = Counter()
    for seed in range(12):
        run = Recorded(tmp_path / "run.rec", is_async=is_async, num_spec_tokens=drafts)
        run.toy.executor.proposes = drafts
        run_load(run.toy, run.core, seed, faults=faults, structured=True)
        data = run.close()
        replayed, difference = replay(data)
        assert difference is None, f"seed {seed}: {difference}"
        assert not replayed._core.has_unfinished_requests()
        for event in events_of(data):
            if isinstance(event, rec.GrammarSaid):
                seen[event.news] += 1
            elif isinstance(event, rec.SamplingLaunched):
                seen["masks"] += len(event.structured or ())
            elif isinstance(event, rec.Planned):
                seen["plans"] += 1
    assert seen["plans"] > 300
    assert seen["masks"] > 100
    for news, least in (("ready", 50), ("failed", 8), ("refused", 5), ("ended", 15)):
        assert seen[news] > least, news
    assert (seen["cut"] > 20) == (drafts > 0)


def test_what_a_grammar_said_is_part_of_the_run(tmp_path: Path) -> None:
    """Each of its words: one left out, said by another, or said again is noticed."""
    run = Recorded(tmp_path / "run.rec")
    run_load(run.toy, run.core, 4, faults=False, structured=True)
    data = run.close()
    events = events_of(data)
    noticed: Counter[str] = Counter()
    for index, event in enumerate(events):
        if not isinstance(event, rec.GrammarSaid):
            continue
        other = msgspec.structs.replace(event, number=event.number + 50)
        for changed in ([other], [event, event]):
            changed_events = [*events[:index], *changed, *events[index + 1 :]]
            assert replay(with_events(data, changed_events))[1] is not None, event
        without = [*events[:index], *events[index + 1 :]]
        is_noticed = replay(with_events(data, without))[1] is not None
        # A text that ends by its length as well ends without its grammar's word.
        assert is_noticed or event.news == "ended", event
        noticed[event.news] += is_noticed
    assert noticed["ready"]
    assert noticed["failed"]
    assert noticed["ended"] >= 3


def test_the_recorded_times_come_back(tmp_path: Path) -> None:
    """A replay shows the same timeline as a trace of the run would have."""
    run = Recorded(tmp_path / "run.rec")
    run_load(run.toy, run.core, 3, faults=True)
    clock = ReplayClock()
    recording = Recording(io.BytesIO(run.close()), "run.rec")
    spans: list[StepSpan] = []
    assert Replay(recording, clock, Timeline(clock, spans.append)).run() is None
    assert any(span.failure == "RuntimeError: poison" for span in spans)
    assert {span.name for span in spans if span.lane == "device"} == {"forward", "sample"}
    for lane in ("planning", "wait", "device"):
        edges = [e for s in spans if s.lane == lane for e in (s.start, s.end)]
        assert edges == sorted(edges)
        assert 100 < edges[0] < edges[-1] < 110


def test_until(tmp_path: Path) -> None:
    data = recorded_load(tmp_path / "run.rec", 1)
    run, difference = replay(data, until=5)
    assert difference is None
    assert run.step_id == 5


# -- what was changed is noticed --------------------------------------------------------------


def altered(data: bytes, step: int, **changes: object) -> bytes:
    """The recording with other values in one plan."""
    events = events_of(data)
    for index, event in enumerate(events):
        if isinstance(event, rec.Planned):
            plan = rec.decode_plan(event.plan)
            if plan.step_id == step:
                plan = msgspec.structs.replace(plan, **changes)
                events[index] = rec.Planned(event.time, msgspec.Raw(encode_plan(plan)))
    return with_events(data, events)


def test_an_altered_plan_is_caught(tmp_path: Path) -> None:
    data = recorded_load(tmp_path / "run.rec", 1)
    _, difference = replay(altered(data, 6, total_num_scheduled_tokens=99))
    assert difference is not None
    assert (difference.step, difference.field) == (6, "total_num_scheduled_tokens")
    assert difference.recorded == "99"
    assert difference.recorded_plan is not None
    assert difference.recorded_plan.total_num_scheduled_tokens == 99
    assert difference.replayed_plan is not None
    assert str(difference).startswith("step 6, total_num_scheduled_tokens: recorded 99, now ")
    assert replay(with_events(data, events_of(data)))[1] is None, "unaltered it is equal"


def test_one_block_id_is_named(tmp_path: Path) -> None:
    data = recorded_load(tmp_path / "run.rec", 1)
    first = next(e for e in events_of(data) if isinstance(e, rec.Planned))
    [new] = rec.decode_plan(first.plan).scheduled_new_reqs
    ids = [*new.block_ids[:-1], 77]
    changed = [msgspec.structs.replace(new, block_ids=ids)]
    _, difference = replay(altered(data, 0, scheduled_new_reqs=changed))
    assert difference is not None
    assert difference.field == f"scheduled_new_reqs[0].block_ids[{len(ids) - 1}]"
    assert (difference.recorded, difference.replayed) == ("77", str(new.block_ids[-1]))


def test_the_plan_order_is_part_of_the_plan(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run.rec")
    for name in ("a", "b"):
        run.core.add_request(make_request(name, [10, 11, 12]))
    for _ in range(4):
        run.core.step_fn()
    data = run.close()
    assert replay(data)[1] is None
    _, difference = replay(altered(data, 1, num_scheduled_tokens={"b": 1, "a": 1}))
    assert difference is not None
    assert difference.field == "num_scheduled_tokens"
    assert (difference.recorded, difference.replayed) == ("['b', 'a']", "['a', 'b']")


def test_another_result_leads_to_other_plans(tmp_path: Path) -> None:
    """The end of text where there was none: the request is gone from the next plan."""
    data = recorded_load(tmp_path / "run.rec", 2, faults=False)
    events = events_of(data)
    for index, event in enumerate(events):
        if isinstance(event, rec.Arrived) and any(event.output.sampled_token_ids):
            event.output.sampled_token_ids = [[3] for _ in event.output.req_ids]
            events[index] = event
            break
    assert replay(with_events(data, events))[1] is not None


def test_a_missing_call_is_caught(tmp_path: Path) -> None:
    data = recorded_load(tmp_path / "run.rec", 2, faults=False)
    events = events_of(data)
    added = [
        index
        for index, event in enumerate(events)
        if isinstance(event, rec.Called) and event.method == "add_request"
    ]
    index = added[2]
    _, difference = replay(with_events(data, events[:index] + events[index + 1 :]))
    assert difference is not None


def test_a_missing_stop_is_caught(tmp_path: Path) -> None:
    data = recorded_load(tmp_path / "run.rec", 2, faults=False)
    for kind in (rec.Planned, rec.Launched, rec.SamplingLaunched, rec.Waiting, rec.Updated):
        events = events_of(data)
        index = [i for i, e in enumerate(events) if isinstance(e, kind)][3]
        _, difference = replay(with_events(data, events[:index] + events[index + 1 :]))
        assert difference is not None, kind


def test_every_flipped_byte_is_caught(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run.rec")
    run.core.add_request(make_request("a", [10, 11, 12], 2))
    while run.core.has_work():
        run.core.step_fn()
    data = run.close()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x10
        with pytest.raises(RecordingError, match=r"run\.rec is (damaged|not a recording)"):
            replay(bytes(flipped))


def test_a_recording_that_ends_anywhere(tmp_path: Path) -> None:
    """Whatever a killed program left is replayed as far as it goes."""
    run = Recorded(tmp_path / "run.rec")
    for name in ("a", "b"):
        run.core.add_request(make_request(name, [10, 11, 12], 4))
    while run.core.has_work():
        run.core.step_fn()
    data = run.close()
    start = len(rec.encode_header(Recording(io.BytesIO(data), "").header))
    for end in range(start, len(data), 13):
        recording = Recording(io.BytesIO(data[:end]), "run.rec")
        assert Replay(recording, ReplayClock()).run() is None, end
        assert not recording.is_complete
    for end in range(len(rec.MAGIC), start):
        with pytest.raises(RecordingError, match="ends in its header"):
            Recording(io.BytesIO(data[:end]), "run.rec")


@pytest.mark.parametrize("data", [b"", b"GGUF\x03\0\0\0", b"twostep", b"[\n{}"])
def test_foreign_files(data: bytes) -> None:
    with pytest.raises(RecordingError, match=r"run\.rec is not a recording"):
        Recording(io.BytesIO(data), "run.rec")


def test_a_format_of_the_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = Recording(io.BytesIO(recorded_load(tmp_path / "r", 1)), "").header
    monkeypatch.setattr(rec, "FORMAT", 7)
    data = rec.encode_header(header)
    monkeypatch.undo()
    with pytest.raises(RecordingError, match="has format 7, this twostep reads format 1"):
        Recording(io.BytesIO(data), "run.rec")


# -- what happened to the recorded program ----------------------------------------------------


def test_a_crash_leaves_the_plan_that_was_running(tmp_path: Path) -> None:
    """The program dies while it waits: nobody closes the file."""
    run = Recorded(tmp_path / "run.rec")
    run.core.add_request(make_request("a", [10, 11, 12], 9))
    run.core.step_fn()
    run.core.step_fn()

    class Crash(BaseException):
        pass

    def crash(plan: SchedulerOutput) -> BaseException | None:
        return Crash()

    run.toy.executor.fail_result = crash
    run.core.step_fn()
    with pytest.raises(Crash):
        run.core.step_fn()
    events = events_of(run.path.read_bytes())
    assert isinstance(events[-1], rec.Waiting)
    plans = [rec.decode_plan(e.plan).step_id for e in events if isinstance(e, rec.Planned)]
    assert plans == [0, 1, 2, 3]
    assert replay(run.path.read_bytes())[1] is None
    run.watch.close()


def test_interrupts_replay(tmp_path: Path) -> None:
    """Ctrl-C while the core waits, queues the forward pass, queues sampling."""
    run = Recorded(tmp_path / "run.rec")
    executor = run.toy.executor
    for name in ("fail_result", "fail_execute", "fail_sample"):
        run.core.add_request(make_request(name, [10, 11, 12], 6))
        step(run.core)
        setattr(executor, name, lambda plan: KeyboardInterrupt())
        interrupts = [step(run.core) for _ in range(3)]
        assert any(interrupts)
        setattr(executor, name, lambda plan: None)
    for _ in range(200):
        step(run.core)
    assert not run.core.has_work()
    assert replay(run.close())[1] is None


def test_a_core_that_died_dies_again(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run.rec", is_async=False)
    run.core.add_request(make_request("a", [10, 11, 12], 2))
    run.toy.executor.fail_execute = lambda plan: (
        None if plan.num_scheduled_tokens else RuntimeError("the device is gone")
    )
    run.core.step_fn()
    run.core.step_fn()
    with pytest.raises(EngineDeadError):
        run.core.step_fn()
    run.core.shutdown()
    data = run.close()
    assert replay(data)[1] is None
    # Had the recorded core gone on, the replay that dies would be the one that differs.
    events = events_of(data)
    index = next(i for i, e in enumerate(events) if isinstance(e, rec.Failed))
    events[index + 1 : index + 1] = [rec.Updated(999.0, events[index].step_id)]
    _, difference = replay(with_events(data, events))
    assert difference is not None
    assert (difference.recorded, difference.replayed) == ("updated", "nothing more")


def test_a_bug_of_the_core_shows_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = recorded_load(tmp_path / "run.rec", 2, faults=False)

    def update(*args: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("twostep.scheduler.scheduler.Scheduler.update_from_output", update)
    with pytest.raises(TwostepError, match="the core fails after step 1 with AssertionError"):
        replay(data)


def test_a_request_that_is_refused_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = recorded_load(tmp_path / "run.rec", 2)
    events = events_of(data)
    first = next(i for i, e in enumerate(events) if isinstance(e, rec.Called))
    too_long = rec.encode_args((make_request("x", list(range(500))),))
    events[first] = rec.Called(events[first].time, "add_request", too_long)
    _, difference = replay(with_events(data, events))
    assert difference is not None
    assert difference.field == "add_request"
    assert "refused" in difference.replayed


# -- bytes ------------------------------------------------------------------------------------


def test_equal_plans_have_equal_bytes() -> None:
    """Sets have no order; dictionaries have one, and it is the plan order."""
    names = [f"request-{number}" for number in range(100)]

    def plan(finished: list[str], scheduled: list[str]) -> SchedulerOutput:
        return SchedulerOutput(
            step_id=1,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], num_output_tokens=[]
            ),
            num_scheduled_tokens=dict.fromkeys(scheduled, 1),
            total_num_scheduled_tokens=len(scheduled),
            finished_req_ids=frozenset(finished),
            preempted_req_ids=frozenset(finished),
        )

    data = encode_plan(plan(names, names))
    assert data == encode_plan(plan(names[::-1], names))
    assert msgspec.msgpack.decode(data)["finished_req_ids"] == sorted(names)
    assert msgspec.msgpack.decode(data)["preempted_req_ids"] == sorted(names)
    assert data != encode_plan(plan(names, names[::-1]))
    assert rec.decode_plan(data) == plan(names, names)
