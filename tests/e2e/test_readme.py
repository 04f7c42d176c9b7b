"""Everything that README shows is run: word for word, but for the port.

A tiny model lies where the one that README names would be. What takes minutes (the figures, the
installation) is not run: its programs and flags are looked up instead.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny_models import tiny_gguf

from twostep.entrypoints import catalogue

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
SERVED = 8000
"""The port that README's examples use."""


def lines_of(text: str) -> list[str]:
    """Command lines without their comments, continued lines joined."""
    lines = (re.sub(r"\s+# .*", "", line) for line in text.replace("\\\n", " ").splitlines())
    return [line.strip() for line in lines if line.strip()]


COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in lines_of(text)]
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
START = next(line for line in COMMANDS if line.startswith("twostep serve"))
SLOW = [
    line
    for line in COMMANDS
    if re.match(r"pip|python |pytest|dir=", line) or line == "twostep simulate check"
]
QUICK = [line for line in COMMANDS if line not in SLOW and line != START]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user's environment: commands on the path, and a small model in place of the real one."""
    home = tmp_path_factory.mktemp("home")
    entry = catalogue.find("smollm2-135m")
    assert entry is not None
    models = home / "models"
    models.mkdir()
    sizes = {"vocab_size": 8192, "max_position_embeddings": 4096}
    path = tiny_gguf(models, "llama_tied", "Q8_0", **sizes).rename(models / entry.filename)
    assert path.stat().st_size < entry.size_bytes
    os.truncate(path, entry.size_bytes)  # by its size the store knows that a file is complete
    commands = Path(sys.executable).parent
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TWOSTEP_")}
    return kept | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "TWOSTEP_HOME": str(home),
        "TWOSTEP_OFFLINE": "1",
    }


@pytest.fixture(scope="module")
def url(environment: dict[str, str]) -> Iterator[str]:
    """Of a server that was started as README says."""
    command = START.replace(str(SERVED), "0")
    assert command != START
    server = subprocess.Popen(
        shlex.split(command), stderr=subprocess.PIPE, text=True, env=environment
    )
    assert server.stderr is not None
    found = None
    for line in server.stderr:
        if found := re.search(r"ready on (http://127\.0\.0\.1:\d+) in", line):
            break
    drain = threading.Thread(target=server.stderr.read, daemon=True)
    drain.start()
    try:
        assert found is not None
        yield found[1]
    finally:
        server.terminate()
        assert server.wait(100) == 0
        drain.join(10)
        server.stderr.close()


def run(command: str, environment: dict[str, str], folder: Path) -> str:
    """Run a line of shell as a person would, who types /exit if asked; standard output."""
    master, slave = pty.openpty()
    try:
        os.write(master, b"/exit\n")
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            stdin=slave,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            cwd=folder,
            timeout=250,
        )
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_is_of_a_known_kind() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "python"}
    for line in QUICK:
        assert re.search(r"\b(twostep|curl) ", line), f"nobody tests: {line}"
    assert len(PROGRAMS) == 2
    assert len(QUICK) >= 8


@pytest.mark.native
@pytest.mark.parametrize("line", [line for line in QUICK if not line.startswith("curl")])
def test_command(line: str, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Milk, bread, two pens.\n")
    run(line, environment, tmp_path)
    if "--trace t.json" in line:
        assert (tmp_path / "t.json").stat().st_size > 1000


@pytest.mark.native
@pytest.mark.parametrize("line", [line for line in QUICK if line.startswith("curl")])
def test_curl(line: str, environment: dict[str, str], url: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    assert f"http://127.0.0.1:{SERVED}/" in line
    out = run(line.replace(f"http://127.0.0.1:{SERVED}", url), environment, tmp_path)
    assert '"object":"chat.completion"' in out


@pytest.mark.native
@pytest.mark.parametrize("program", PROGRAMS, ids=["LLM", "openai"])
def test_program(program: str, environment: dict[str, str], url: str, tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(program.replace(f"http://127.0.0.1:{SERVED}", url))
    run(f"python {script}", environment, tmp_path)


@pytest.mark.parametrize("line", [line for line in SLOW if not line.startswith("pip")])
def test_slow_command_is_there(line: str, environment: dict[str, str]) -> None:
    """Its files exist, and the program knows its flags."""
    words = shlex.split(line.removeprefix("dir=").strip("$()"))
    for word in words:
        is_file = word.startswith(("benchmarks/", "tests/"))
        assert not is_file or (ROOT / word).exists(), word
    if words[0].endswith(".sh"):
        assert os.access(ROOT / words[0], os.X_OK)
        return
    flags = [word for word in words[1:] if word.startswith("--")]
    if words[0] == "python" and flags:
        program = words[: 3 if words[1] == "-m" else 2]
        done = subprocess.run(
            [*program, "--help"], capture_output=True, text=True, env=environment, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        for flag in flags:
            assert flag in done.stdout


@pytest.mark.parametrize("line", [line for line in SLOW if line.startswith("pip")])
def test_installation(line: str, environment: dict[str, str], tmp_path: Path) -> None:
    """pip is not run here; what follows is. The project, and the extra, are there to install."""
    install, _, then = line.partition(" && ")
    target = shlex.split(install)[-1]
    assert install.startswith("pip install ")
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", target)
    assert extra
    if extra[1] is not None:
        assert f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text()
    if then.startswith("twostep"):
        run(then, environment, tmp_path)


def test_serving_takes_twenty_lines() -> None:
    shown = [text for _, text in BLOCKS if "twostep serve" in text or "OpenAI(" in text]
    assert len(shown) == 2
    assert "curl " in shown[0]
    assert len("".join(shown).strip().splitlines()) <= 20
