"""Clients that people have, on a server as they start it: processes, a model, a key.

Each script runs once, in the environment of its client, and says what became of each of its
checks. `scripts/client-envs` makes the environments; where TWOSTEP_CLIENT_ENVS names a folder
(CI does), one that is not there is an error and no reason to skip.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.serve_process import ServeProcess
from helpers.tiny_models import tiny_hf_dir

pytestmark = [pytest.mark.native, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
KEY = "sk-right"
CLIENTS = {
    "openai": ("openai_checks.py", None),
    "openai-1": ("openai_checks.py", "openai-1"),
    "langchain": ("langchain_checks.py", "langchain"),
    "litellm": ("litellm_checks.py", "litellm"),
}
"""Script, and the environment that it runs in; None: this one."""

Results = dict[str, str | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_dir(tmp_path_factory.mktemp("model"), "qwen3")


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[ServeProcess]:
    argv = [str(model), "--served-model-name", "tiny", "--api-key", KEY, "--threads", "1"]
    argv += ["--max-model-len", "512", "--kv-cache-memory-bytes", "16MiB"]
    process = ServeProcess(*argv, *flags)
    yield process
    assert process.end() == 0
    assert "Traceback" not in "".join(process.lines)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServeProcess]:
    with serving(model) as process:
        yield process


@pytest.fixture(scope="module")
def embedder(model: Path) -> Iterator[ServeProcess]:
    with serving(model, "--convert", "embed") as process:
        yield process


def interpreter(environment: str | None) -> str:
    """The Python that has the client; skips where nobody made its environment."""
    if environment is None:
        return sys.executable
    told = os.environ.get("TWOSTEP_CLIENT_ENVS")
    folder = Path(told or Path.home() / ".cache" / "twostep-test-clients") / environment
    pins = HERE / "requirements" / f"{environment}.txt"
    found = folder / "requirements.txt"
    if not found.exists() or found.read_text() != pins.read_text():
        how = f"no environment for {environment}; run `scripts/client-envs {folder.parent}`"
        if told:
            pytest.fail(how)
        pytest.skip(how)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def results(server: ServeProcess, embedder: ServeProcess) -> Callable[[str], Results]:
    """What a client's checks found; each client runs once."""
    found: dict[str, Results] = {}

    def run(client: str) -> Results:
        if client not in found:
            script, environment = CLIENTS[client]
            child = subprocess.run(
                [interpreter(environment), str(HERE / script), f"{server.url}/v1", KEY]
                + [f"{embedder.url}/v1"],
                capture_output=True,
                text=True,
                timeout=500,
                env={
                    **{
                        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")
                    },
                    # Nothing is asked of the network.
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    "LANGSMITH_TRACING": "false",
                },
            )
            assert child.returncode == 0, child.stderr
            found[client] = json.loads(child.stdout.splitlines()[-1])
        return found[client]

    return run


def names_of(script: str) -> list[str]:
    return re.findall(r"^def check_(\w+)", (HERE / script).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("client", "check"),
    [(client, name) for client, (script, _) in CLIENTS.items() for name in names_of(script)],
)
def test_client(results: Callable[[str], Results], client: str, check: str) -> None:
    trace = results(client)[check]
    assert trace is None, trace


def test_every_environment_is_used() -> None:
    """Pins without a client, or a client without pins, would be tests that never run."""
    pinned = {path.stem for path in (HERE / "requirements").glob("*.txt")}
    assert pinned == {environment for _, environment in CLIENTS.values()} - {None}
