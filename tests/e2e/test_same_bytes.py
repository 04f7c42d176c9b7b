"""Same request, same bytes: whatever the load, chunking, cache, preemption, mode and threads.

Every test compares with the request run alone: token ids and log-probabilities, bit for bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import tiny_gguf, tiny_hf_dir
from helpers.tiny_text import VOCAB_SIZE

from twostep import LLM, RequestOutput, SamplingParams

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama Q4_0": lambda folder: tiny_gguf(folder, "llama", "Q4_0"),
    "llama Q4_1": lambda folder: tiny_gguf(folder, "llama_tied", "Q4_1"),
    "gemma3 Q8_0, windows of 9": lambda folder: tiny_gguf(folder, "gemma3", "Q8_0"),
    "mistral Q6_K, every layer a window": lambda folder: tiny_gguf(folder, "mistral", "Q6_K"),
    "qwen3 bf16": lambda folder: tiny_hf_dir(folder, "qwen3", dtype="BF16"),
    "qwen3_moe fp32": lambda folder: tiny_hf_dir(folder, "qwen3_moe", dtype="F32"),
}
PROMPT = [5 + (7 * i * i + 3 * i) % (VOCAB_SIZE - 5) for i in range(61)]
NEEDLES = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, logprobs=3, ignore_eos=True),
    "sampled": SamplingParams(
        temperature=1.3, top_p=0.9, top_k=40, seed=11, max_tokens=24, logprobs=3, ignore_eos=True,
        repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2, min_tokens=5,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Transcript:
    """What must not change by a bit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float, int | None], ...], ...]


def transcript(output: RequestOutput) -> Transcript:
    [completion] = output.outputs
    assert completion.logprobs is not None
    return Transcript(
        tuple(completion.token_ids),
        tuple(
            tuple((token, entry.logprob, entry.rank) for token, entry in position.items())
            for position in completion.logprobs
        ),
    )


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Transcript]:
    """The oracle: each needle alone, in one engine of one thread, synchronous, no cache."""
    with make(model, async_scheduling=False, enable_prefix_caching=False, threads=1) as llm:
        return {name: run(llm, params)[0] for name, params in NEEDLES.items()}


def make(model: Path, **options: Any) -> LLM:
    options = {"max_model_len": 128, "max_num_seqs": 40, "threads": 2, **options}
    return LLM(model, **options)


def run(llm: LLM, params: SamplingParams) -> tuple[Transcript, RequestOutput]:
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return transcript(output), output


def strangers(count: int, seed: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Requests of all kinds and lengths."""
    draw = random.Random(seed)
    prompts = [
        {"prompt_token_ids": draw.choices(range(5, VOCAB_SIZE), k=draw.randint(1, 90))}
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            temperature=draw.choice([0, 0.7, 1.5]),
            top_k=draw.choice([0, 5]),
            max_tokens=draw.randint(1, 30),
            logprobs=draw.choice([None, 2]),
            seed=draw.randint(0, 1000),
            frequency_penalty=draw.choice([0, 0.5]),
        )
        for _ in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("needle", list(NEEDLES))
@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 2}, {"async_scheduling": False}])
def test_threads_and_scheduling_mode(
    model: Path, alone: dict[str, Transcript], needle: str, options: dict[str, Any]
) -> None:
    with make(model, **options) as llm:
        assert run(llm, NEEDLES[needle])[0] == alone[needle]


@pytest.mark.parametrize("needle", list(NEEDLES))
def test_case_51_inside_a_batch_of_strangers(
    model: Path, alone: dict[str, Transcript], needle: str
) -> None:
    prompts, params = strangers(32, seed=3)
    prompts.insert(13, {"prompt_token_ids": PROMPT})
    params.insert(13, NEEDLES[needle])
    with make(model) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert transcript(outputs[13]) == alone[needle]


@pytest.mark.parametrize("needle", list(NEEDLES))
@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_prompt_in_chunks(
    model: Path, alone: dict[str, Transcript], needle: str, chunk: int
) -> None:
    with make(model, max_num_batched_tokens=chunk, max_num_seqs=1) as llm:
        assert run(llm, NEEDLES[needle])[0] == alone[needle]


@pytest.mark.parametrize("needle", list(NEEDLES))
def test_after_a_prefix_cache_hit(model: Path, alone: dict[str, Transcript], needle: str) -> None:
    params = NEEDLES[needle]
    with make(model) as llm:
        for length in (17, 33, 48):  # hits of every number of blocks, then of all but the last
            llm.generate(
                {"prompt_token_ids": PROMPT[:length]}, SamplingParams(max_tokens=1), use_tqdm=False
            )
            found, output = run(llm, params)
            assert found == alone[needle]
            assert output.num_cached_tokens is not None
            assert output.num_cached_tokens >= length // 16 * 16
        assert llm.reset_prefix_cache()
        found, output = run(llm, params)
        assert (found, output.num_cached_tokens) == (alone[needle], 0)


@pytest.mark.parametrize("needle", list(NEEDLES))
def test_after_a_full_hit(model: Path, needle: str) -> None:
    """All 48 tokens are cached: one is computed, in a block that three requests read at once."""
    prompt = {"prompt_token_ids": PROMPT[:48]}
    with make(model, enable_prefix_caching=False, threads=1) as llm:
        [alone] = llm.generate(prompt, NEEDLES[needle], use_tqdm=False)
    with make(model) as llm:
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        outputs = llm.generate([prompt] * 3, NEEDLES[needle], use_tqdm=False)
        wants_prompt = NEEDLES[needle].prompt_logprobs is not None
        for output in outputs:
            assert output.num_cached_tokens == (0 if wants_prompt else 47)
            assert transcript(output) == transcript(alone)


@pytest.mark.parametrize("needle", list(NEEDLES))
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_preempted_and_resumed(
    model: Path, alone: dict[str, Transcript], needle: str, is_async: bool
) -> None:
    """A pool for little more than one request, shared by four: all but the first are preempted."""
    with make(model, max_num_seqs=1, max_model_len=128) as llm:
        block_bytes = llm.boot.kv_sizing.block_bytes
    count = 4
    options = {"kv_cache_memory_bytes": 13 * block_bytes, "max_model_len": 96, "max_num_seqs": 8}
    with make(model, async_scheduling=is_async, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPT}] * count, NEEDLES[needle], use_tqdm=False
        )
    assert all(transcript(output) == alone[needle] for output in outputs)
    if "mistral" not in str(model):  # its windows let go of what preemption would take
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0


def test_seeds_make_n_sequences_that_repeat(model: Path) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    with make(model) as llm:
        [first] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        [second] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 4
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
