"""--json-schema, --regex, --choice and --grammar of ``twostep complete`` and ``twostep chat``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.tiny_models import tiny_gguf

from twostep.contracts.errors import UsageError
from twostep.contracts.sampling import StructuredOutputsParams
from twostep.entrypoints.cli import chat, complete

Capture = pytest.CaptureFixture[str]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with a schema, a grammar, and what is neither."""
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "answer.lark").write_text('start: "yes" | "no" " sir"?')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [complete, chat])
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--json-schema", "schema.json"], StructuredOutputsParams(json=json.dumps(SCHEMA))),
        (["--json-schema", ' {"type": "null"}'], StructuredOutputsParams(json='{"type": "null"}')),
        (["--json_schema", "true"], StructuredOutputsParams(json="true")),
        (["--regex", "a+"], StructuredOutputsParams(regex="a+")),
        (["--choice", "a", "--choice", ""], StructuredOutputsParams(choice=("a", ""))),
        (
            ["--grammar", "answer.lark"],
            StructuredOutputsParams(grammar='start: "yes" | "no" " sir"?'),
        ),
        ([], None),
    ],
)
def test_what_the_flags_mean(
    command: Any, argv: list[str], expected: Any, factory: Any, gguf: Path, files: Path
) -> None:
    assert command.run([str(gguf), "Once", *argv], factory) == 0
    assert factory.engine.params[0].structured_outputs == expected


@pytest.mark.parametrize("command", [complete, chat])
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--regex", "a", "--choice", "b"], "--regex and --choice exclude each other"),
        (["--json-schema", "no-such.json"], "cannot read --json-schema no-such.json"),
        (["--json-schema", '{"type": '], "--json-schema is not JSON"),
        (["--json-schema", "answer.lark"], "--json-schema answer.lark is not JSON"),
        (["--json-schema", "list.json"], "a schema is an object"),
        (["--json-schema", "{" * 100_000], "is not JSON"),
        (["--json-schema", "x" * 5000], "cannot read"),
        (["--grammar", "bytes.bin"], "cannot read --grammar bytes.bin"),
        (["--grammar", "."], "cannot read --grammar ."),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(
    command: Any, argv: list[str], words: str, factory: Any, gguf: Path, files: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        command.run([str(gguf), "Once", *argv], factory)
    assert words in str(caught.value)
    assert not factory.made


@pytest.mark.parametrize("command", [complete, chat])
@pytest.mark.parametrize("output", [[], ["--json"]])
def test_an_answer_that_was_cut_is_no_success_in_silence(
    command: Any, output: list[str], factory: Any, gguf: Path, capsys: Capture
) -> None:
    factory.finish_reason = "length"
    assert command.run([str(gguf), "Once", "--regex", "a+", *output], factory) == 0
    assert "raise --max-tokens" in capsys.readouterr().err
    assert command.run([str(gguf), "Once", *output], factory) == 0
    assert "raise --max-tokens" not in capsys.readouterr().err


@pytest.mark.native
@pytest.mark.parametrize("command", [complete, chat])
def test_a_real_engine_keeps_the_form(
    command: Any, files: Path, capsys: Capture, tmp_path: Path
) -> None:
    model = str(tiny_gguf(tmp_path, "llama", "Q4_0"))
    common = [model, "Answer: ", "--temperature", "1.5", "--seed", "7", "--threads", "1"]

    def answer(*argv: str) -> str:
        assert command.run([*common, *argv]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    jsonschema.validate(json.loads(answer("--json-schema", "schema.json")), SCHEMA)
    assert re.fullmatch(r"\d{3}-[a-f]{2,4}", answer("--regex", r"\d{3}-[a-f]{2,4}"))
    assert answer("--choice", "red", "--choice", "dark blue") in ("red", "dark blue")
    assert answer("--grammar", "answer.lark") in ("yes", "no", "no sir")
    with pytest.raises(UsageError, match="uniqueItems"):
        command.run([*common, "--json-schema", '{"type": "array", "uniqueItems": true}'])
