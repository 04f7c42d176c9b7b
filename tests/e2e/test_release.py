"""A closed engine gives everything back at once, without waiting for the garbage collector."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest
from helpers.tiny_models import tiny_gguf

from twostep import LLM, SamplingParams
from twostep.contracts.errors import ModelFileError
from twostep.entrypoints import inproc_engine

HEAVY = {"CpuModel", "CpuOps", "Record", "Value", "CpuWeight", "EngineCore", "ModelRunner", "LLM"}


def heavy_objects() -> Counter[str]:
    """How many objects of the kinds that hold a model are alive."""
    gc.unfreeze()
    kinds = (type(o) for o in gc.get_objects())
    ours = (k for k in kinds if str(k.__module__).startswith("twostep"))
    return Counter(kind.__name__ for kind in ours if kind.__name__ in HEAVY)


def test_no_circle_keeps_a_closed_model(tmp_path: Path) -> None:
    """Found as a leak of a whole model for each ``LLM`` made: loading freezes the collector's
    generations, so what a circle holds at that time is never collected."""
    path = tiny_gguf(tmp_path, "llama", "Q4_0")
    gc.collect()
    before = heavy_objects()
    gc.disable()
    try:
        llm = LLM(path, max_model_len=64, max_num_seqs=2)
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4), use_tqdm=False)
        assert heavy_objects()["CpuModel"] == before["CpuModel"] + 1
        llm.close()
        del llm
        assert heavy_objects() == before
    finally:
        gc.enable()


def test_a_broken_tokenizer_gives_the_loaded_model_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made beside the weights, and may fail when they are there already."""

    def fail(_: object) -> None:
        raise ModelFileError("tokenizer.ggml.tokens is missing")

    path = tiny_gguf(tmp_path, "llama", "Q4_0")
    gc.collect()
    before = heavy_objects()
    threads = len(list(Path("/proc/self/task").iterdir()))
    monkeypatch.setattr(inproc_engine, "load_text_side", fail)
    with pytest.raises(ModelFileError, match="is missing"):
        LLM(path, max_model_len=64, max_num_seqs=2)
    gc.collect()
    assert heavy_objects() == before
    assert len(list(Path("/proc/self/task").iterdir())) == threads
