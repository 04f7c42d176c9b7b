"""What README shows of the server, word for word but for the port."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.live_server import LiveServer, live_server

from twostep.entrypoints.cli import serve

README = (Path(__file__).parents[2] / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def block(language: str, word: str) -> str:
    """The code block of README that has ``word`` in it."""
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if word in b]
    assert len(found) == 1
    return found[0]


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(served_model_names=("smollm2-135m",)) as server:
        yield server


def test_the_client_in_python(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python", "OpenAI(")
    assert ADDRESS in code
    exec(compile(code.replace(ADDRESS, server.url), "README.md", "exec"), {})
    assert capsys.readouterr().out == "Hello there."


def test_the_shell(server: LiveServer) -> None:
    lines = block("bash", "curl").replace("\\\n", " ").strip().splitlines()
    assert len(lines) == 2
    command, *argv = shlex.split(lines[0])
    assert (command, argv[0]) == ("twostep", "serve")
    assert serve.make_parser().parse(argv[1:]).port == 8000
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    assert ADDRESS in lines[1]
    words = shlex.split(lines[1].replace(ADDRESS, server.url))
    done = subprocess.run([*words, "-s", "-S"], capture_output=True, text=True, timeout=50)
    assert '"content":"Hello there."' in done.stdout, done.stderr


def test_it_takes_twenty_lines() -> None:
    shown = block("bash", "curl") + block("python", "OpenAI(")
    assert len(shown.strip().splitlines()) <= 20
