"""``run-batch``: every line is answered once, in order, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_core import ScriptedCore, make_async_llm, make_tokenizer

from twostep.contracts.errors import UsageError
from twostep.contracts.sampling import SamplingParams
from twostep.entrypoints.batch import BatchLine, answer_batch, encode_result, read_batch
from twostep.entrypoints.cli import run_batch, serve
from twostep.server.parsers.formats import choose_formats
from twostep.server.state import ServerState


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    return line(custom_id, messages=[{"role": "user", "content": content}], **body)


def write(file: Path, *lines: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return file


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedCore]:
    """Commands get a scripted core instead of a model."""
    made: list[ScriptedCore] = []

    async def load_engine(args: Any, name: str, state: ServerState) -> Any:
        tokenizer = make_tokenizer()
        core = ScriptedCore(tokenizer)
        core.reply = lambda request: f"answer {len(made[0].requests)}"
        made.append(core)
        engine = make_async_llm(core)
        state.ready(engine, SamplingParams(), choose_formats(tokenizer.chat_template))
        return engine

    monkeypatch.setattr(serve, "load_engine", load_engine)
    return made


def test_a_file_is_answered(
    tmp_path: Path, cores: list[ScriptedCore], capsys: pytest.CaptureFixture[str]
) -> None:
    requests = write(
        tmp_path / "in.jsonl",
        chat("a", "Hi"),
        line("b", "/v1/completions", prompt="Once", max_tokens=3),
        chat("c", "Hi", temperature=99),
        chat("d", "Hi", n=2),
    )
    answers = tmp_path / "out.jsonl"
    assert run_batch.run(["-i", str(requests), "-o", str(answers), "--model", "tiny"]) == 1
    results = [json.loads(each) for each in answers.read_text().splitlines()]
    assert [each["custom_id"] for each in results] == ["a", "b", "c", "d"]
    assert [each["response"]["status_code"] for each in results] == [200, 200, 400, 200]
    assert len({each["id"] for each in results}) == 4
    assert all(each["response"]["request_id"] for each in results)
    good, refused = results[0], results[2]
    assert good["error"] is None
    assert good["response"]["body"]["choices"][0]["message"]["content"].startswith("answer")
    assert refused["response"]["body"] is None
    assert (refused["error"]["code"], refused["error"]["param"]) == ("invalid_value", "temperature")
    assert len(results[3]["response"]["body"]["choices"]) == 2
    assert "3 answered, 1 failed" in capsys.readouterr().err
    assert not cores[0].running


def test_no_more_than_allowed_are_under_way(cores: list[ScriptedCore]) -> None:
    async def main() -> None:
        from twostep.server.app import build_app
        from twostep.server.settings import ServerSettings

        state = ServerState(ServerSettings(served_model_names=("tiny",)))
        engine = await serve.load_engine(None, "tiny", state)  # type: ignore[arg-type]
        most = 0
        reply = cores[0].reply

        def count(request: Any) -> Any:
            nonlocal most
            most = max(most, len(cores[0].running))
            return reply(request)

        cores[0].reply = count
        lines = [BatchLine(**chat(str(i), "Hi")) for i in range(20)]
        done: list[int] = []
        async with engine:
            results = [
                each
                async for each in answer_batch(
                    build_app(state), lines, concurrency=3, on_done=done.append
                )
            ]
        assert [each.custom_id for each in results] == [str(i) for i in range(20)]
        assert most == 3
        assert done == list(range(1, 21))
        assert all(json.loads(encode_result(each))["error"] is None for each in results)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["not json"], "line 1"),
        ([json.dumps({"custom_id": "a", "url": "/v1/completions"})], "line 1.*body"),
        ([json.dumps(line("a", "/metrics"))], "line 1: POST /metrics"),
        ([json.dumps(line("a", stream=True))], "does not stream"),
        ([json.dumps(chat("a", "x")), "", json.dumps(chat("a", "y"))], "line 3.*line 1"),
        ([""], "no requests"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_loaded(
    tmp_path: Path, lines: list[str], words: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=words):
        run_batch.run(["-i", str(file), "-o", str(tmp_path / "out"), "tiny"])
    with pytest.raises(UsageError, match="cannot read"):
        read_batch(tmp_path / "none")
