"""What the two processes import: a start is quick because of what it leaves out."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"asyncio", "tokenizers", "jinja2", "huggingface_hub", "tqdm", "torch", "transformers"}


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            "twostep.entrypoints.core_main, twostep.entrypoints.build, twostep.models.llama",
            HEAVY | {"twostep.frontend", "twostep.server"},
        ),
        (
            "twostep.entrypoints.async_engine",
            HEAVY - {"asyncio"} | {"numpy", "twostep._native"},
        ),
        (
            "twostep.frontend.async_llm, twostep.frontend.core_client",
            HEAVY - {"asyncio"} | {"numpy", "twostep._native", "twostep.runner", "twostep.ops"},
        ),
    ],
    ids=["the core process", "before it is started", "the API process"],
)
def test_nothing_is_imported_that_is_not_needed(modules: str, unwanted: set[str]) -> None:
    code = f"import {modules}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & unwanted == set()
