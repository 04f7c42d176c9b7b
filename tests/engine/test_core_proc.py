"""The core process's loop and threads, over a channel in memory and a ghost for a device."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_helpers import FakeClock, check_drained, make_configs, make_engine_request

from twostep.contracts.errors import EngineDeadError
from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.contracts.request import EngineCoreRequest, FinishReason
from twostep.engine.core import EngineCore
from twostep.engine.core_proc import EngineCoreProc
from twostep.engine.heartbeat import Heartbeat
from twostep.engine.wire import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    Codec,
    CoreMessage,
    Live,
    Outputs,
    Refused,
    Shutdown,
    UtilityCall,
    UtilityResult,
    Watch,
)
from twostep.sim.ghost import GhostExecutor, GhostFuture
from twostep.sim.ghost_model import VOCAB, oracle

PATIENCE = 30.0
"""Seconds until a test that waits for something has failed."""


class MemoryChannel:
    """A CoreChannel of queues; ``room`` is how many messages its reader lets pile up."""

    def __init__(self) -> None:
        self.to_core: SimpleQueue[bytes | None] = SimpleQueue()
        self.from_core: SimpleQueue[bytes] = SimpleQueue()
        self.room = 10**9
        self.kept: list[bytes] = []
        self._codec = Codec()

    def receive(self) -> bytes | None:
        return self.to_core.get()

    def send(self, message: CoreMessage) -> None:
        self.kept.append(self._codec.encode(message))
        self.flush()

    def flush(self) -> bool:
        while self.kept and self.from_core.qsize() < self.room:
            self.from_core.put(self.kept.pop(0))
        return not self.kept

    def stop_receiving(self) -> None:
        self.to_core.put(None)


class StoppableGhost(GhostExecutor):
    """A ghost whose results can be held back."""

    def __init__(self) -> None:
        super().__init__(16)
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.is_waited_for = threading.Event()

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StoppableFuture:  # type: ignore[override]
        return StoppableFuture(self, super().sample_tokens(grammar_output))


class StoppableFuture:
    def __init__(self, ghost: StoppableGhost, future: GhostFuture) -> None:
        self._ghost = ghost
        self._future = future

    def result(self) -> ModelRunnerOutput:
        self._ghost.is_waited_for.set()
        assert self._ghost.may_finish.wait(PATIENCE)
        return self._future.result()

    def done(self) -> bool:
        return self._ghost.may_finish.is_set()


class Running:
    """A core process's insides on a thread of this process."""

    def __init__(self) -> None:
        scheduler_config, cache_config = make_configs(num_blocks=60, max_model_len=200)
        self.ghost = StoppableGhost()
        self.core = EngineCore(
            scheduler_config=scheduler_config,
            cache_config=cache_config,
            executor=self.ghost,
            clock=FakeClock(),
        )
        self.channel = MemoryChannel()
        self.heartbeat, memory = Heartbeat.create(0.0)
        os.close(memory)
        self.proc = EngineCoreProc(
            self.core, self.channel, self.heartbeat, FakeClock(), vocab_size=VOCAB
        )
        self.first_beat = self.heartbeat.read()[0]
        self.error: BaseException | None = None
        self._codec = Codec()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.proc.run()
        except BaseException as error:
            self.error = error

    def send(self, *messages: ClientMessage) -> None:
        for message in messages:
            self.channel.to_core.put(self._codec.encode(message))

    def get(self) -> CoreMessage:
        return self._codec.decode_core_message(self.channel.from_core.get(timeout=PATIENCE))

    def answer(self) -> UtilityResult:
        """The next one; news are skipped."""
        while not isinstance(message := self.get(), UtilityResult):
            pass
        return message

    def collect(self, *request_ids: str) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
        """News until all these have ended: tokens and ends by request."""
        tokens: dict[str, list[int]] = {}
        ends: dict[str, FinishReason] = {}
        while not ends.keys() >= set(request_ids):
            message = self.get()
            if isinstance(message, Outputs):
                for news in message.outputs.outputs:
                    assert news.request_id not in ends
                    tokens.setdefault(news.request_id, []).extend(news.new_token_ids)
                    if news.finish_reason is not None:
                        ends[news.request_id] = news.finish_reason
        return tokens, ends

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.ghost.may_finish.set()
        self.channel.room = 10**9
        self.send(Shutdown())
        self.join()
        self.heartbeat.close()


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()
    assert running.error is None


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def request(request_id: str, prompt: list[int], max_tokens: int = 8) -> EngineCoreRequest:
    return make_engine_request(request_id, prompt, max_tokens)


def test_requests_are_answered(running: Running) -> None:
    prompts = {"a": [1, 2, 3], "b": list(range(40)), "c": [5]}
    running.send(*[AddRequest(request(name, prompt)) for name, prompt in prompts.items()])
    tokens, ends = running.collect(*prompts)
    assert tokens == {name: oracle(prompt, 8, set()) for name, prompt in prompts.items()}
    assert set(ends.values()) == {FinishReason.LENGTH}


def test_one_message_for_each_step(running: Running) -> None:
    """However many requests take part in it."""
    running.ghost.may_finish.clear()
    running.send(*[AddRequest(request(f"r{i}", [i, 2], 4)) for i in range(20)])
    until(lambda: len(running.core.scheduler.requests) == 20)
    running.ghost.may_finish.set()
    messages = 0
    seen: set[str] = set()
    ends = 0
    while ends < 20:
        message = running.get()
        assert isinstance(message, Outputs)
        messages += 1
        seen |= {news.request_id for news in message.outputs.outputs}
        ends += sum(news.finish_reason is not None for news in message.outputs.outputs)
    assert len(seen) == 20
    assert messages <= 4 + 20  # at worst each came alone into the first steps


@pytest.mark.parametrize("at_once", [False, True])
def test_an_abort_is_seen_while_a_step_is_waited_for(running: Running, at_once: bool) -> None:
    """The step's own token is not told any more, and the blocks are free when it is over."""
    running.ghost.may_finish.clear()
    running.send(AddRequest(request("gone", [1, 2, 3], 100)), AddRequest(request("stays", [4], 6)))
    assert running.ghost.is_waited_for.wait(PATIENCE)
    if not at_once:
        until(lambda: len(running.core.scheduler.requests) == 2)
    running.send(AbortRequests(["gone", "nobody"]))
    until(lambda: not running.core.aborts_queue.empty())
    running.ghost.may_finish.set()
    tokens, _ = running.collect("stays")
    assert tokens["stays"] == oracle([4], 6, set())
    assert "gone" not in tokens or at_once
    until(lambda: not running.core.has_work())
    check_drained(running.core.scheduler)


def test_an_abort_that_overtakes_nothing(running: Running) -> None:
    """Added and aborted in one breath: it is gone, and its id can be used again."""
    for _ in range(20):
        running.send(AddRequest(request("x", [1], 100)), AbortRequests(["x"]))
    running.send(AddRequest(request("y", [2], 3)))
    tokens, _ = running.collect("y")
    assert tokens["y"] == oracle([2], 3, set())
    until(lambda: not running.core.has_work())
    check_drained(running.core.scheduler)


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("bad", []), "prompt"),
        (request("bad", [1] * 200), "prompt"),
        (request("bad", [VOCAB]), "prompt"),
        (request("bad", [-1]), "prompt"),
        (request("good", [1]), "request_id"),
        (make_engine_request("bad", [1], stop_token_ids=[VOCAB]), "stop_token_ids"),
        (make_engine_request("bad", [1], allowed_token_ids=[3, 2**40]), "allowed_token_ids"),
        (make_engine_request("bad", [1], logit_bias={-5: 1.0}), "logit_bias"),
        (make_engine_request("bad", [1], bad_words_token_ids=[[1, 99]]), "bad_words"),
        (make_engine_request("bad", [1], eos=VOCAB), "eos_token_id"),
        (make_engine_request("bad", [1], max_tokens=0), "max_tokens"),
        (make_engine_request("bad", [1], structured=True), "structured_outputs"),
    ],
)
def test_a_refused_request_is_answered_and_leaves_others_alone(
    running: Running, bad: EngineCoreRequest, param: str
) -> None:
    running.ghost.may_finish.clear()
    running.send(AddRequest(request("good", [1, 2], 12)))
    assert running.ghost.is_waited_for.wait(PATIENCE)
    running.send(AddRequest(bad))
    until(lambda: running.proc._input_queue.qsize() == 1)
    running.ghost.may_finish.set()
    tokens: list[int] = []
    refused: list[Refused] = []
    while len(tokens) < 12 or not refused:
        match running.get():
            case Refused() as answer:
                refused.append(answer)
            case Outputs(outputs):
                tokens += [i for news in outputs.outputs for i in news.new_token_ids]
    assert tokens == oracle([1, 2], 12, set())
    assert [(answer.request_id, answer.param) for answer in refused] == [(bad.request_id, param)]


def test_a_request_that_breaks_the_core_s_own_code_is_refused(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise TypeError("surprise")

    monkeypatch.setattr(running.core.scheduler, "make_request", broken)
    with caplog.at_level(logging.CRITICAL):
        running.send(AddRequest(request("x", [1])))
        answer = running.get()
    assert isinstance(answer, Refused)
    assert "TypeError: surprise" in answer.message


def test_frames_that_are_no_messages_change_nothing(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for frame in (b"", b"\xc1", b"\x93\xa3add", b"\x91\xa4quit", b"\x92\xa3add\x80"):
            running.channel.to_core.put(frame)
        running.send(AddRequest(request("a", [1, 2])))
        tokens, _ = running.collect("a")
    assert tokens["a"] == oracle([1, 2], 8, set())
    assert len(caplog.records) == 5


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()
    assert running.error is None


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_traffic_leaves_the_core_alive(shared: Running, data: st.DataObject) -> None:
    """Messages with all sorts of numbers, and rubbish between them; then an honest request."""
    logging.disable(logging.CRITICAL)
    try:
        number = st.integers(-(2**63), 2**63 - 1)
        for i in range(data.draw(st.integers(1, 5))):
            params = data.draw(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "stop_token_ids": st.lists(number, max_size=3),
                        "logit_bias": st.dictionaries(number, st.floats(), max_size=2),
                        "n": number,
                        "temperature": st.floats(),
                        "top_k": number,
                        "seed": number,
                        "min_tokens": number,
                        "prompt_logprobs": st.none() | number,
                    },
                )  # fmt: skip
            )
            strange = make_engine_request(
                f"strange{i}",
                data.draw(st.lists(number | st.integers(0, VOCAB - 1), max_size=4)),
                data.draw(number | st.none()),
                eos=data.draw(st.none() | number),
                priority=data.draw(number),
                arrival=data.draw(st.floats()),
                client=data.draw(number),
                salt=data.draw(st.none() | st.text(max_size=3)),
            )
            for key, value in params.items():
                setattr(strange.sampling_params, key, value)
            shared.send(AddRequest(strange))
            shared.channel.to_core.put(data.draw(st.binary(max_size=30)))
        shared.send(AbortRequests([f"strange{i}" for i in range(5)]))
        shared.send(AddRequest(request("honest", [1, 2, 3], 4)))
        tokens, ends = shared.collect("honest")
        assert (tokens["honest"], ends["honest"]) == (
            oracle([1, 2, 3], 4, set()),
            FinishReason.LENGTH,
        )
        until(lambda: not shared.core.has_work())
        check_drained(shared.core.scheduler)
    finally:
        logging.disable(logging.NOTSET)


def test_loading_does_not_count_as_silence() -> None:
    """The first sign of life comes before anybody is told that the core is ready."""
    running = Running()
    assert running.first_beat > 0.0
    running.stop()


def test_idle_means_no_steps_and_signs_of_life(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.send(AddRequest(request("a", [1], 2)))
    running.collect("a")
    until(lambda: not running.core.has_work() and running.proc._input_queue.empty())
    _, before, steps = running.heartbeat.read()
    until(lambda: running.heartbeat.read()[1] > before)
    assert running.heartbeat.read()[2] == steps


def test_a_reader_that_is_behind_stops_the_planning_and_loses_nothing(running: Running) -> None:
    running.channel.room = 3
    running.send(AddRequest(request("a", [1, 2], 50)))
    until(lambda: running.channel.from_core.qsize() == 3)
    steps = running.heartbeat.read()[2]
    for _ in range(15):
        beat = running.heartbeat.read()[0]
        until(lambda beat=beat: running.heartbeat.read()[0] > beat)  # alive
    assert running.heartbeat.read()[2] <= steps + 3
    assert running.channel.from_core.qsize() == 3
    tokens, _ = running.collect("a")
    assert tokens["a"] == oracle([1, 2], 50, set())


def test_a_reader_that_is_behind_can_still_abort(running: Running) -> None:
    running.channel.room = 1
    running.send(AddRequest(request("a", [1, 2], 100)))
    until(lambda: running.channel.from_core.qsize() == 1)
    running.send(AbortRequests(["a"]))
    until(lambda: not running.core.has_unfinished_requests())


def test_pause_is_answered_when_nothing_runs_any_more(running: Running) -> None:
    running.ghost.may_finish.clear()
    running.send(AddRequest(request("a", [1], 20)), UtilityCall(1, "pause", "wait"))
    until(lambda: running.ghost.is_waited_for.is_set() or running.core.scheduler.requests == {})
    running.send(AddRequest(request("b", [2], 4)))
    running.ghost.may_finish.set()
    messages = []
    while not isinstance(message := running.get(), UtilityResult):
        messages.append(message)
    assert message.call_id == 1
    tokens = [i for m in messages if isinstance(m, Outputs) for n in m.outputs.outputs
              for i in n.new_token_ids]  # fmt: skip
    assert tokens in ([], oracle([1], 20, set()))  # a was started before the pause, or not at all
    running.send(UtilityCall(2, "resume"))
    _, ends = running.collect("b")
    assert ends["b"] == FinishReason.LENGTH


def test_pause_with_abort_tells_everybody(running: Running) -> None:
    running.ghost.may_finish.clear()
    running.send(AddRequest(request("a", [1], 100)))
    assert running.ghost.is_waited_for.wait(PATIENCE)
    running.send(UtilityCall(1, "pause", "abort"))
    until(lambda: not running.proc._input_queue.empty())
    running.ghost.may_finish.set()
    _, ends = running.collect("a")
    assert ends == {"a": FinishReason.ABORT}
    assert running.answer() == UtilityResult(1, None)


def test_the_prefix_cache_can_be_reset_right_after_the_last_answer(running: Running) -> None:
    """The step in flight behind a last token still holds blocks for a moment."""
    for i in range(10):
        running.send(AddRequest(request(f"r{i}", list(range(40)), 5)))
        running.collect(f"r{i}")
        running.send(UtilityCall(i, "reset_prefix_cache"))
        assert running.answer() == UtilityResult(i, True)


def test_the_prefix_cache_can_be_reset_right_after_an_abort(running: Running) -> None:
    """The same, with the step in flight for certain."""
    running.ghost.may_finish.clear()
    running.send(AddRequest(request("a", list(range(40)), 100)))
    assert running.ghost.is_waited_for.wait(PATIENCE)
    running.send(AbortRequests(["a"]), UtilityCall(1, "reset_prefix_cache"))
    until(lambda: running.proc._input_queue.qsize() == 2)
    running.ghost.may_finish.set()
    assert running.answer() == UtilityResult(1, True)


def test_the_prefix_cache_is_kept_while_requests_run(running: Running) -> None:
    running.ghost.may_finish.clear()
    running.send(AddRequest(request("a", [1], 30)))
    assert running.ghost.is_waited_for.wait(PATIENCE)
    running.send(UtilityCall(1, "reset_prefix_cache"))
    until(lambda: not running.proc._input_queue.empty())
    running.ghost.may_finish.set()
    assert running.answer() == UtilityResult(1, False)


def test_an_unknown_mode_is_answered(running: Running) -> None:
    running.send(UtilityCall(1, "pause", "forever"))
    answer = running.get()
    assert isinstance(answer, UtilityResult)
    assert answer.error is not None


def test_the_end_of_the_client_ends_the_core(running: Running) -> None:
    running.send(AddRequest(request("a", [1], 100)))
    running.channel.to_core.put(None)
    running.join()
    check_drained(running.core.scheduler)


def test_a_core_that_fails_frees_everything_and_raises(caplog: pytest.LogCaptureFixture) -> None:
    running = Running()

    def failure(plan: SchedulerOutput) -> Exception | None:
        return None if plan.num_scheduled_tokens else RuntimeError("no device")

    with caplog.at_level(logging.CRITICAL):
        running.ghost.fail_execute = failure  # the plan that tells who has finished
        running.send(AddRequest(request("a", [1], 2)))
        running.join()
    assert isinstance(running.error, EngineDeadError)
    assert "no device" in str(running.error)
    assert not running.proc._input_thread.is_alive()
    running.heartbeat.close()


def test_watching_leaves_nothing_behind(running: Running) -> None:
    """Who has gone costs nothing: no observer, and no clock on the device."""
    wanted: list[bool] = []
    running.ghost.time_device = wanted.append  # type: ignore[method-assign, assignment]
    running.send(Watch(True))
    while not isinstance(running.get(), Live):
        pass
    assert running.core.observer is not None
    running.send(Watch(False), UtilityCall(1, "resume"))
    assert running.answer() == UtilityResult(1, None)
    assert running.core.observer is None
    assert wanted == [True, False]
