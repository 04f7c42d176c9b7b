"""The flags and the help of ``twostep serve``; nothing is loaded here."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twostep.contracts.errors import UsageError
from twostep.entrypoints.catalogue import DefaultSampling
from twostep.entrypoints.cli import help_pages, serve
from twostep.entrypoints.engine_options import EngineOptions
from twostep.server.settings import ServerSettings
from twostep.server.state import ServerState

MAX_HELP_MODULES = 150
"""Some 120 of Python, msgspec and ourselves; every heavy library brings hundreds more."""


def settings(*argv: str) -> ServerSettings:
    args = serve.make_parser().parse(list(argv))
    return serve.server_settings(args, serve.model_name(args))


def test_defaults() -> None:
    found = settings()
    assert found.served_model_names == ("smollm2-135m",)
    assert found.api_keys == ()
    assert found.allowed_hosts is not None
    assert "localhost" in found.allowed_hosts
    assert found.max_request_bytes == 32 << 20
    assert found.shutdown_timeout == 30
    assert found.request_timeout is None


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_API_KEY", "from-env")
    assert settings().api_keys == ("from-env",)
    found = settings(
        "model-a",
        "--host=0.0.0.0",
        "--api_key",
        "one",
        "two",
        "--api-key=three",
        "--served-model-name",
        "x",
        "y/z",
        "--allowed-origins",
        "https://a.example/",
        "--max-num-queued-reqs",
        "1k",
        "--request-timeout",
        "2.5",
        "--root-path",
        "/llm/",
        "--max-request-bytes",
        "1MiB",
    )
    assert found.api_keys == ("one", "two", "three")
    assert found.served_model_names == ("x", "y/z")
    assert found.allowed_hosts is None, "whoever lets others in names no hosts"
    assert found.allowed_origins == ("https://a.example",)
    assert found.max_num_queued_reqs == 1000
    assert found.request_timeout == 2.5
    assert found.root_path == "/llm"
    assert found.max_request_bytes == 1 << 20


def test_a_path_is_not_told_to_clients() -> None:
    assert settings("/home/me/models/a.gguf").served_model_names == ("a.gguf",)
    assert settings("org/name").served_model_names == ("org/name",)
    assert settings("--model", "gemma3-270m").served_model_names == ("gemma3-270m",)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["a", "b"], "one MODEL"),
        (["a", "--model", "b"], "one MODEL"),
        (["--port", "70000"], "is not a port"),
        (["--port", "x"], "is not a port"),
        (["--api-key", ""], "--api-key is empty"),
        (["--allowed-origins", "example.com"], "is no origin"),
        (["--request-timeout", "-1"], "0 or more"),
        (["--override-generation-config", "{"], "not JSON"),
        (["--override-generation-config", "[]"], "not a JSON object"),
        (["--override-generation-config", '{"temprature": 1}'], "temprature"),
        (["--override-generation-config", '{"temperature": "hot"}'], "temperature"),
        (["--tool-call-parser", "nonsense"], "nonsense"),
        (["--servd-model-name", "x"], "did you mean --served-model-name"),
        (["--help=nonsense"], "no help on"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        serve.run(argv)
    assert words in str(caught.value)


def test_sampling_defaults() -> None:
    recommended = DefaultSampling(temperature=0.2, top_p=0.9)
    params = serve.default_params(recommended, {"top_p": 0.5, "min_p": 0.1})
    assert (params.temperature, params.top_p, params.min_p) == (0.2, 0.5, 0.1)
    assert serve.default_params(None, None).temperature == 1.0


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_help_on_parts(capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[str, Any] = {}
    for topic in ("all", "env", "limits", "engine", "port", "--max_model_len"):
        assert serve.run([f"--help={topic}"]) == 0
        shown[topic] = capsys.readouterr().out
    assert serve.run(["--help-all"]) == 0
    assert capsys.readouterr().out == shown["all"]
    assert "--port" in shown["port"]
    assert len(shown["port"].splitlines()) == 1
    assert "--max-model-len" in shown["--max_model_len"]
    assert "TWOSTEP_API_KEY" in shown["env"]
    assert "--request-timeout" in shown["limits"]
    parser = serve.make_parser()
    flags = [flag for flag in help_pages._by_flag(parser) if flag.startswith("--")]
    for flag in flags:
        assert flag in shown["all"], "no flag without help"
    for action in parser._actions:
        assert action.help, action.option_strings


def test_help_loads_nothing_heavy() -> None:
    """Counted, not timed: a machine may be busy."""
    code = (
        "import sys; before = set(sys.modules);"
        "from twostep.entrypoints.cli.main import main; main(['serve', '--help']);"
        "print(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stderr.split()
    heavy = {"starlette", "uvicorn", "numpy", "tokenizers", "jinja2", "asyncio", "ssl"}
    assert not heavy & set(loaded)
    assert len(loaded) <= MAX_HELP_MODULES, loaded


@pytest.mark.parametrize(("status", "recorded"), [("loading", True), ("restarting", False)])
def test_a_restarted_core_does_not_write_over_what_the_first_one_left(
    status: str, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    made: list[EngineOptions] = []

    async def start(name: str, options: EngineOptions, **others: Any) -> Any:
        made.append(options)
        return SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))

    monkeypatch.setattr("twostep.entrypoints.async_engine.start_async_llm", start)
    files = {"trace": str(tmp_path / "t.json"), "record": str(tmp_path / "r.rec")}
    argv = [str(tmp_path / "tiny.gguf"), *(f"--{name}={path}" for name, path in files.items())]
    args = serve.make_parser().parse(argv)

    async def load() -> None:
        state = ServerState(serve.server_settings(args, "tiny"))
        state.status = status
        monkeypatch.setattr(state, "ready", lambda *_: None)
        await serve.load_engine(args, argv[0], state)

    asyncio.run(load())
    assert (made[0].trace, made[0].record) == (
        (files["trace"], files["record"]) if recorded else (None, None)
    )


def test_the_flag_of_restarts() -> None:
    assert settings().max_core_restarts == 5
    assert settings("--restart-core", "0").max_core_restarts == 0
