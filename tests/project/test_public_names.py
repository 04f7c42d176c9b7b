"""The public face: names, versions, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import twostep

ROOT = Path(__file__).parents[2]

PUBLIC = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "EngineOptions",
    "InvalidRequestError",
    "Logprob",
    "ModelError",
    "ModelFileError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TwostepError",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "start_async_llm",
]
HEAVY = ("torch", "transformers", "numpy", "tokenizers", "jinja2", "huggingface_hub", "tqdm")


def test_public_names_are_these() -> None:
    """A ratchet: a new public name is a promise, so it is added here on purpose."""
    assert twostep.__all__ == PUBLIC
    assert dir(twostep) == sorted(PUBLIC)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "LLM"])
def test_public_name_can_be_loaded(name: str) -> None:
    assert getattr(twostep, name) is not None


def test_errors_are_all_public() -> None:
    from twostep.contracts import errors

    defined = {n for n, v in vars(errors).items() if isinstance(v, type)}
    assert defined <= set(PUBLIC)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = twostep.nonsense


def test_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert twostep.__version__ == project["version"]
    assert f"## [{twostep.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that ran ``code``."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import twostep",
        "from twostep.entrypoints.cli.main import main; main(['--help'])",
        "from twostep.entrypoints.cli.main import main; main(['models'])",
    ],
    ids=["import", "help", "models"],
)
def test_light_things_import_nothing_heavy(code: str) -> None:
    """`import twostep` and `twostep --help` stay quick by not loading these."""
    assert modules_after(code).isdisjoint(HEAVY)


def test_sampling_params_need_only_msgspec() -> None:
    assert modules_after("from twostep import SamplingParams; SamplingParams()").isdisjoint(HEAVY)
