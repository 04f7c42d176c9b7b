"""AsyncLLM with a real (tiny) model in a process of its own: the bytes are those of LLM."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.ghost_llm import last_of
from helpers.time_slices import time_slice, time_slices
from helpers.tiny_models import tiny_gguf, tiny_hf_dir
from helpers.tiny_text import VOCAB_SIZE

from twostep import LLM, RequestOutput, RequestOutputKind, SamplingParams
from twostep.contracts.errors import ModelFileError, ModelNotFoundError, UsageError
from twostep.entrypoints import async_engine
from twostep.entrypoints.async_engine import start_async_llm, start_core_process
from twostep.entrypoints.engine_options import EngineOptions
from twostep.frontend.async_llm import AsyncLLM
from twostep.frontend.core_process import CoreProcess

OPTIONS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "threads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model"), "llama", "Q4_0")


def requests() -> list[tuple[Any, SamplingParams]]:
    """Sixteen of all kinds: twice as many as run at once."""
    draw = random.Random(5)
    chosen: list[tuple[Any, SamplingParams]] = []
    for i in range(16):
        prompt: Any = {"prompt_token_ids": draw.choices(range(5, VOCAB_SIZE), k=1 + 5 * i)}
        params = SamplingParams(
            temperature=0 if i % 2 else 1.2,
            seed=i,
            top_p=0.9,
            max_tokens=draw.randint(5, 30),
            logprobs=2,
            prompt_logprobs=1 if i % 5 == 0 else None,
            presence_penalty=0.4 if i % 3 == 0 else 0,
            stop=["e", "he"] if i % 4 == 0 else None,
            n=2 if i == 6 else 1,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        chosen.append((prompt if i % 7 else "hello there " * i or "he", params))
    return chosen


def test_sixteen_at_once_give_the_bytes_of_llm(model: Path) -> None:
    prompts, params = zip(*requests(), strict=True)
    with LLM(model, **OPTIONS) as llm:
        expected = llm.generate(list(prompts), list(params), use_tqdm=False)

    async def main() -> list[RequestOutput]:
        async with await start_async_llm(model, EngineOptions(**OPTIONS)) as llm:
            return await asyncio.gather(
                *[
                    last_of(llm.generate(prompt, each, f"r{i}"))
                    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
                ]
            )

    for ours, theirs in zip(asyncio.run(main()), expected, strict=True):
        assert completions(ours) == completions(theirs)
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        assert (ours.prompt, ours.prompt_token_ids) == (theirs.prompt, theirs.prompt_token_ids)


def completions(output: RequestOutput) -> list[Any]:
    """Of each sequence, everything."""
    return [
        (each.index, each.text, each.token_ids, each.logprobs, each.finish_reason, each.stop_reason)
        for each in output.outputs
    ]


def test_what_is_known_about_the_engine(model: Path) -> None:
    told: list[tuple[str, float]] = []

    async def main() -> None:
        async with await start_async_llm(
            model, EngineOptions(**OPTIONS), on_progress=lambda *now: told.append(now)
        ) as llm:
            info = llm.info
            assert (info.architecture, info.vocab_size) == ("llama", VOCAB_SIZE)
            assert (info.max_model_len, info.max_num_seqs, info.block_size) == (128, 8, 16)
            assert info.num_gpu_blocks == 8 * 8
            assert info.num_parameters is not None
            assert 50_000 < info.num_parameters < 500_000
            assert info.heartbeat_timeout > 10
            assert dict(info.boot)["model"].endswith("(llama)")
            await llm.check_health()
            text, ids = llm.chat_prompter.encode([{"role": "user", "content": "hello"}])
            output = await last_of(
                llm.generate({"prompt": text, "prompt_token_ids": ids}, SamplingParams(), "r")
            )
            assert output.prompt == text

    asyncio.run(main())
    phases = list(dict.fromkeys(phase for phase, _ in told))
    assert phases == ["open", "weights", "kv cache and plan"]
    assert all(0 <= fraction <= 1 for _, fraction in told)
    assert told[-1] == ("kv cache and plan", 1.0)


def test_cache_salt_keeps_tenants_apart(model: Path) -> None:
    async def main() -> list[int | None]:
        found: list[int | None] = []
        async with await start_async_llm(model, EngineOptions(**OPTIONS)) as llm:
            for salt in ("a", "b", "a"):
                stream = llm.generate("hello " * 12, SamplingParams(), "r", cache_salt=salt)
                found.append((await last_of(stream)).num_cached_tokens)
        return found

    first, other, again = asyncio.run(main())
    assert (first, other) == (0, 0)
    assert again is not None
    assert again >= 16


def test_priority_needs_its_policy(model: Path) -> None:
    async def main() -> None:
        options = EngineOptions(scheduling_policy="priority", **OPTIONS)
        async with await start_async_llm(model, options) as llm:
            await last_of(llm.generate("hello", SamplingParams(), "r", priority=3))

    asyncio.run(main())


def start(path: Any, **options: Any) -> AsyncLLM:
    return asyncio.run(start_async_llm(path, EngineOptions(**{**OPTIONS, **options})))


def test_a_file_that_is_cut(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "cut.gguf"
    broken.write_bytes(model.read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match="cut.gguf"):
        start(broken)


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    """Only the core looks at weights: its error is raised here."""
    folder = tiny_hf_dir(tmp_path, "llama", dtype="F32")
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-8:] = b"\xff" * 8
    file.write_bytes(data)
    with pytest.raises(ModelFileError, match="NaN"):
        start(folder)


def test_a_name_that_means_nothing() -> None:
    with pytest.raises(ModelNotFoundError, match="no model"):
        start("smollm2-135n")


def test_options_that_are_out_of_range(model: Path) -> None:
    with pytest.raises(UsageError, match="max-model-len"):
        start(model, max_model_len=10**6)


def test_a_trace_is_complete_after_shutdown(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        options = EngineOptions(trace=str(tmp_path / "t.json"), **OPTIONS)
        async with await start_async_llm(model, options) as llm:
            await last_of(llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True), "r"))

    asyncio.run(main())
    events = json.loads((tmp_path / "t.json").read_text())
    assert sum(event.get("cat") == "output" for event in events) >= 4


def test_a_start_that_is_cancelled_leaves_no_process(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[CoreProcess] = []

    def start_process(*args: Any) -> CoreProcess:
        started.append(start_core_process(*args))
        return started[0]

    monkeypatch.setattr(async_engine, "start_core_process", start_process)

    async def main() -> None:
        loading = asyncio.Event()
        starting = asyncio.create_task(
            start_async_llm(
                model, EngineOptions(**OPTIONS), on_progress=lambda phase, part: loading.set()
            )
        )
        await loading.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    [process] = started
    assert process.exit_words() == "killed by SIGKILL"
    assert process.wire.fileno() == -1


def test_what_computes_lets_others_run_first(model: Path) -> None:
    """The thread of the loop and its helper; not the one that takes requests in."""
    usual = time_slice()
    if usual == 0:
        pytest.skip("threads choose their time slices from Linux 6.12 on")

    async def main() -> list[int]:
        async with await start_async_llm(model, EngineOptions(**OPTIONS)) as llm:
            await last_of(llm.generate("hello", SamplingParams(max_tokens=4), "r"))
            return sorted(time_slices(llm._client.pid).values())

    slices = asyncio.run(main())
    assert len(slices) > 2
    assert [each > 2 * usual for each in slices] == [False] * (len(slices) - 2) + [True] * 2
    assert time_slice() == usual


def test_the_example_of_the_docs(model: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "processes.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert "smollm2-135m" in code
    code = code.replace("smollm2-135m", str(model))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_nothing_is_left_behind(model: Path) -> None:
    """File descriptors, children, folders."""

    async def main() -> None:
        async with await start_async_llm(model, EngineOptions(**OPTIONS)) as llm:
            await last_of(llm.generate("hello", SamplingParams(max_tokens=4), "r"))

    asyncio.run(main())  # once for what stays (thread pool, libraries)
    before = sorted(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert sorted(os.listdir("/proc/self/fd")) == before
