"""``twostep chat`` with a fake engine: what it asks, what it prints, how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.errors import ModelNotFoundError, TwostepError, UsageError
from twostep.entrypoints.cli import chat, console

Capture = pytest.CaptureFixture[str]
ANSWER = "The capital is Paris."


def typed(*lines: str | BaseException) -> Callable[[str], str]:
    """A person who types those lines, or presses Ctrl-C or Ctrl-D."""
    waiting: Iterator[str | BaseException] = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(waiting, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read_line


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "stdin_is_terminal", lambda: True)


class Piped(io.StringIO):
    """Standard input as a pipe of bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.buffer = io.BytesIO(data)


def talk(factory: Any, gguf: Path, *lines: str | BaseException) -> int:
    """An interactive session with a model file."""
    return chat.run([str(gguf)], factory, typed(*lines))


# -- one prompt -----------------------------------------------------------------------------------


def test_prompt_streams_to_stdout(factory: Any, gguf: Path, capsys: Capture) -> None:
    assert chat.run([str(gguf), "Capital of France?"], factory) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert err == ""  # no figures unless it is a terminal
    assert factory.engine.asked == [[{"role": "user", "content": "Capital of France?"}]]
    assert factory.engine.path == str(gguf)
    assert factory.engine.closed
    assert factory.engine.aborted == 0


def test_system_text_and_flags(factory: Any, gguf: Path) -> None:
    argv = [str(gguf), "Hi", "--system", "Be brief.", "--temperature", "0", "--max_model_len", "4K"]
    chat.run(argv, factory)
    assert factory.engine.asked[0][0] == {"role": "system", "content": "Be brief."}
    assert factory.engine.params[0].temperature == 0
    assert factory.engine.params[0].max_tokens is None
    assert factory.engine.options["max_model_len"] == 4096


def test_json_is_one_document(factory: Any, gguf: Path, capsys: Capture) -> None:
    ticks = iter([10.0, 10.5, 11.0, 11.5])
    assert chat.run([str(gguf), "Hi", "--json"], factory, clock=lambda: next(ticks)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == ANSWER
    assert found["finish_reason"] == "stop"
    assert found["token_ids"] == [10, 11, 12]
    assert found["usage"] == {"prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": 3}
    assert found["ttft_s"] == 0.5
    assert found["tokens_per_s"] == 2.0


def test_piped_input_is_the_prompt(
    factory: Any, gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", Piped("zwei\nZeilen ü\n".encode()))
    assert chat.run([str(gguf)], factory) == 0
    assert factory.engine.asked[0][0]["content"] == "zwei\nZeilen ü"
    assert capsys.readouterr().out == ANSWER + "\n"


@pytest.mark.parametrize(("data", "text"), [(b"\n \n", "no prompt"), (b"\xff\xfe", "not UTF-8")])
def test_bad_piped_input(
    factory: Any, gguf: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, text: str
) -> None:
    monkeypatch.setattr("sys.stdin", Piped(data))
    with pytest.raises(UsageError, match=text):
        chat.run([str(gguf)], factory)
    assert factory.made == []


def test_stdin_is_not_read_when_there_is_a_prompt(
    factory: Any, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "read_piped_prompt", lambda: pytest.fail("read stdin"))
    assert chat.run([str(gguf), "Hi"], factory) == 0


def test_json_needs_a_prompt(factory: Any, gguf: Path, terminal: None) -> None:
    with pytest.raises(UsageError, match="--json needs a PROMPT"):
        chat.run([str(gguf), "--json"], factory)


def test_engine_error_is_an_error(factory: Any, gguf: Path) -> None:
    factory.finish_reason = "error"
    with pytest.raises(TwostepError, match="failed on this prompt"):
        chat.run([str(gguf), "Hi"], factory)
    assert factory.engine.closed


# -- which word is what ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "model", "expected"),
    [
        ([], None, ("smollm2-135m", None)),
        (
            ["What is the capital of France?"],
            None,
            ("smollm2-135m", "What is the capital of France?"),
        ),
        (["hello"], None, ("smollm2-135m", "hello")),
        (["gemma3-270m"], None, ("gemma3-270m", None)),
        (["org/name:Q8_0"], None, ("org/name:Q8_0", None)),
        (["x.gguf", "hello"], None, ("x.gguf", "hello")),
        (["org/name"], "x.gguf", ("x.gguf", "org/name")),
        ([], "x.gguf", ("x.gguf", None)),
    ],
)
def test_split_words(words: list[str], model: str | None, expected: tuple[str, str | None]) -> None:
    assert chat.split_words(words, model) == expected


def test_slip_in_a_model_name_is_no_prompt() -> None:
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m.*--model"):
        chat.split_words(["smolm2-135m"], None)


@pytest.mark.parametrize(("words", "model"), [(["a", "b", "c"], None), (["a", "b"], "m")])
def test_unquoted_prompt(words: list[str], model: str | None) -> None:
    with pytest.raises(UsageError, match="quotes"):
        chat.split_words(words, model)


# -- a conversation -------------------------------------------------------------------------------


def test_history(factory: Any, gguf: Path, terminal: None, capsys: Capture) -> None:
    assert talk(factory, gguf, "One?", "", "  ", "Two?") == 0
    roles = [[m["role"] for m in asked] for asked in factory.engine.asked]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert factory.engine.asked[1][1]["content"] == ANSWER
    assert capsys.readouterr().out.count(ANSWER) == 2


def test_reset_keeps_the_system_text(factory: Any, gguf: Path, terminal: None) -> None:
    talk(factory, gguf, "/system Be kind.", "One?", "/reset", "Two?")
    last = factory.engine.asked[-1]
    assert [(m["role"], m["content"]) for m in last] == [("system", "Be kind."), ("user", "Two?")]


def test_new_system_text_forgets(factory: Any, gguf: Path, terminal: None, capsys: Capture) -> None:
    talk(factory, gguf, "One?", "/system", "/system New.", "/system", "Two?")
    assert [m["role"] for m in factory.engine.asked[-1]] == ["system", "user"]
    err = capsys.readouterr().err
    assert "no system text" in err
    assert "New." in err


def test_help_and_unknown_commands(
    factory: Any, gguf: Path, terminal: None, capsys: Capture
) -> None:
    talk(factory, gguf, "/help", "/nonsense")
    err = capsys.readouterr().err
    assert "/reset" in err
    assert "unknown command /nonsense" in err
    assert factory.engine.asked == []


@pytest.mark.parametrize("line", ["/exit", "/quit"])
def test_exit(factory: Any, gguf: Path, terminal: None, line: str) -> None:
    assert talk(factory, gguf, line, "never asked") == 0
    assert factory.engine.asked == []
    assert factory.engine.closed


def test_ctrl_d_leaves(factory: Any, gguf: Path, terminal: None) -> None:
    assert talk(factory, gguf, EOFError()) == 0


def test_second_ctrl_c_at_the_prompt_leaves(factory: Any, gguf: Path, terminal: None) -> None:
    assert talk(factory, gguf, KeyboardInterrupt(), KeyboardInterrupt(), "never") == 130
    assert factory.engine.asked == []


def test_ctrl_c_only_counts_in_a_row(factory: Any, gguf: Path, terminal: None) -> None:
    once = KeyboardInterrupt
    assert talk(factory, gguf, once(), "Hi", once(), "/exit") == 0
    assert len(factory.engine.asked) == 1


def test_error_ends_the_turn_not_the_program(
    factory: Any, gguf: Path, terminal: None, capsys: Capture
) -> None:
    factory.finish_reason = "error"
    assert talk(factory, gguf, "One?", "Two?") == 0
    assert capsys.readouterr().err.count("twostep: error:") == 2
    assert len(factory.engine.asked) == 2


def test_invalid_text_ends_the_turn(
    factory: Any, gguf: Path, terminal: None, capsys: Capture
) -> None:
    assert talk(factory, gguf, "broken \udce4") == 0
    assert "not valid UTF-8" in capsys.readouterr().err
    assert factory.engine.asked == []


# -- Ctrl-C during an answer ----------------------------------------------------------------------


def interrupt(on: str) -> Callable[[str], None]:
    """Presses Ctrl-C when that piece of text arrives."""

    def on_text(text: str) -> None:
        if text == on:
            os.kill(os.getpid(), signal.SIGINT)

    return on_text


def test_ctrl_c_stops_the_answer_and_aborts_the_request(factory: Any) -> None:
    engine = factory("x", progress=lambda *a: None)
    conversation = chat.Conversation(engine, chat.SamplingParams(), None)
    before = signal.getsignal(signal.SIGINT)
    answer = conversation.ask("Hi", interrupt(" is"))
    assert (answer.text, answer.finish_reason) == ("The capital is", "abort")
    assert engine.aborted == 1
    assert conversation.messages[-1] == {"role": "assistant", "content": "The capital is"}
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_any_text_leaves_no_trace(factory: Any) -> None:
    factory.pieces = ["", "late"]
    engine = factory("x", progress=lambda *a: None)
    conversation = chat.Conversation(engine, chat.SamplingParams(), None)
    answer = conversation.ask("Hi", interrupt(""))
    assert answer.finish_reason == "abort"
    assert conversation.messages == []


def test_ctrl_c_on_the_last_piece_keeps_its_reason(factory: Any) -> None:
    engine = factory("x", progress=lambda *a: None)
    conversation = chat.Conversation(engine, chat.SamplingParams(), None)
    assert conversation.ask("Hi", interrupt(" Paris.")).finish_reason == "stop"


def test_second_ctrl_c_raises() -> None:
    """A model that hangs can still be left."""
    with console.interruptible() as flag:
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_single_prompt_exits_130(
    factory: Any, gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(chat, "show", interrupt("The capital"))
    assert chat.run([str(gguf), "Hi"], factory) == 130
    assert factory.engine.aborted == 1


def test_parameters_are_not_shared_between_turns(factory: Any, gguf: Path, terminal: None) -> None:
    talk(factory, gguf, "One?", "Two?")
    first, second = factory.engine.params
    assert first is not second
    assert first == second
