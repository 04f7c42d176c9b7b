"""Embeddings through the whole engine: transformers' vectors, and the same bytes in every batch."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.golden import embedding_texts, load_embeddings, write_embedding_model
from helpers.tiny_bert import CLS, SEP, bert_ids, tiny_bert_dir
from helpers.tiny_models import tiny_gguf, tiny_hf_dir
from helpers.tiny_text import VOCAB_SIZE

from twostep import (
    LLM,
    EmbeddingRequestOutput,
    EngineOptions,
    InvalidRequestError,
    OutOfMemoryError,
    PoolingParams,
    SamplingParams,
    UsageError,
    start_async_llm,
)
from twostep import _native as native

pytestmark = pytest.mark.timeout(600)

ISAS = native.cpu_info()["isas"]
# float32 in another order, and an erf that is exact to 1.5e-7; of vectors of length 1.
ATOL = 2e-5
# bf16 weights on AVX-512 meet activations rounded to bf16.
BF16_ATOL = {"scalar": 2e-5, "avx2": 2e-5, "avx512": 2e-2, "amx": 2e-2}


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector.astype(np.float64))


def vectors_of(llm: LLM, texts: list[list[int]], **params: Any) -> list[np.ndarray]:
    prompts = [{"prompt_token_ids": ids} for ids in texts]
    outputs = llm.embed(prompts, PoolingParams(**params), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == texts
    assert [output.error for output in outputs] == [None] * len(texts)
    return [np.array(output.outputs.embedding, np.float32) for output in outputs]


@pytest.fixture
def force_isa(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda isa: monkeypatch.setitem(os.environ, "TWOSTEP_CPU_ISA", isa)


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["cls", "mean"])
def test_bert_equals_transformers(kind: Any, isa: str, tmp_path: Path, force_isa: Any) -> None:
    force_isa(isa)
    with LLM(tiny_bert_dir(tmp_path, pooling=kind), threads=2) as llm:
        got = vectors_of(llm, embedding_texts("bert"))
        raw = vectors_of(llm, embedding_texts("bert"), normalize=False)
    for vector, whole, expected in zip(got, raw, load_embeddings("bert", kind), strict=True):
        np.testing.assert_allclose(vector, unit(expected), rtol=0, atol=ATOL)
        np.testing.assert_allclose(whole, expected, rtol=0, atol=10 * ATOL)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_a_decoder_equals_transformers(
    case: str, kind: Any, isa: str, tmp_path: Path, force_isa: Any
) -> None:
    force_isa(isa)
    path = write_embedding_model(tmp_path, case)
    with LLM(
        path, convert="embed", pooling_type=kind, kv_cache_dtype="fp32", threads=2,
        max_num_batched_tokens=16,
    ) as llm:  # fmt: skip
        got = vectors_of(llm, embedding_texts(case))
    for vector, expected in zip(got, load_embeddings(case, kind), strict=True):
        np.testing.assert_allclose(vector, unit(expected), rtol=0, atol=BF16_ATOL[isa])


def test_last_is_the_default_of_a_decoder_and_vectors_have_length_1(tmp_path: Path) -> None:
    path = write_embedding_model(tmp_path, "llama")
    with LLM(path, convert="embed", threads=1) as llm:
        assert ("embeddings", "64 numbers out of the last token, scaled to length 1") in (
            llm.boot.rows()
        )
        [output] = llm.embed("hello there", use_tqdm=False)
    assert isinstance(output, EmbeddingRequestOutput)
    assert output.finished
    assert output.outputs.hidden_size == 64
    assert math.isclose(math.fsum(x * x for x in output.outputs.embedding), 1.0, abs_tol=1e-6)


def test_text_gets_its_frame(tmp_path: Path) -> None:
    with LLM(tiny_bert_dir(tmp_path), threads=1) as llm:
        [by_text] = llm.embed("The CAT sat", use_tqdm=False)
        ids = by_text.prompt_token_ids
        [by_ids] = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    assert (ids[0], ids[-1]) == (CLS, SEP)
    assert tokenizer.decode(ids) == "the cat sat"
    assert tokenizer.special_token_id("[MASK]") == 4
    assert by_ids.outputs == by_text.outputs


# -- the same bytes -------------------------------------------------------------------------------

ENGINES: dict[str, dict[str, Any]] = {
    "one step at a time": {"async_scheduling": False},
    "op by op": {"enforce_eager": True},
    "one thread": {"threads": 1},
    "few at a time": {"max_num_seqs": 3},
    "little memory": {"kv_cache_memory_bytes": 330 * 6 * 64 * 4 * 2},
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert_dir(tmp_path_factory.mktemp("model"))


def bert_batch() -> list[list[int]]:
    return [bert_ids(length, seed) for seed, length in enumerate([2, 300, 31, 64, 5, 17, 130, 33])]


@pytest.fixture(scope="module")
def bert_alone(bert: Path) -> list[bytes]:
    with LLM(bert, threads=2) as llm:
        return [vectors_of(llm, [ids])[0].tobytes() for ids in bert_batch()]


@pytest.mark.parametrize("engine", ["together", *ENGINES])
def test_bert_is_the_same_alone_and_in_any_batch(
    engine: str, bert: Path, bert_alone: list[bytes]
) -> None:
    with LLM(bert, **{"threads": 2, **ENGINES.get(engine, {})}) as llm:
        together = vectors_of(llm, bert_batch())
        backwards = vectors_of(llm, bert_batch()[::-1])[::-1]
    assert [vector.tobytes() for vector in together] == bert_alone
    assert [vector.tobytes() for vector in backwards] == bert_alone


DECODER_ENGINES: dict[str, dict[str, Any]] = {
    **{name: options for name, options in ENGINES.items() if name != "little memory"},
    "in chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "in chunks beside others": {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 5},
    "no prefix cache": {"enable_prefix_caching": False},
}


def decoder_batch() -> list[list[int]]:
    """Some begin alike, so that the prefix cache has something to find."""
    base = [5 + (7 * i * i + 3 * i) % (VOCAB_SIZE - 5) for i in range(61)]
    return [base, base[:48], base[:33] + [9, 8, 7], base[::-1], base[:1], base[10:40]]


@pytest.fixture(scope="module", params=["llama Q4_0", "gemma3 Q8_0", "qwen3 bf16"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    case, fmt = request.param.split()
    if fmt == "bf16":
        return tiny_hf_dir(folder, case)
    return tiny_gguf(folder, case, fmt)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_decoder_is_the_same_alone_and_in_any_batch(kind: Any, decoder: Path) -> None:
    options: dict[str, Any] = {"convert": "embed", "pooling_type": kind, "max_model_len": 64}
    options["kv_cache_dtype"] = "fp32"
    with LLM(decoder, threads=2, **options) as llm:
        alone = []
        for ids in decoder_batch():
            alone.append(vectors_of(llm, [ids])[0].tobytes())
            llm.reset_prefix_cache()
        little = {"kv_cache_memory_bytes": 9 * llm.boot.kv_sizing.block_bytes}
    for name, engine in {**DECODER_ENGINES, "little memory": little}.items():
        with LLM(decoder, **{"threads": 2, **options, **engine}) as llm:
            for _ in range(2):  # the second time out of the cache, if there is one
                together = [vector.tobytes() for vector in vectors_of(llm, decoder_batch())]
                assert together == alone, name


def test_the_prefix_cache_is_used_for_the_last_token_and_never_for_a_mean(tmp_path: Path) -> None:
    path = write_embedding_model(tmp_path, "llama")
    for kind, cached in (("last", 48), ("mean", 0)):
        with LLM(path, convert="embed", pooling_type=kind, threads=1) as llm:
            for expected in (0, cached):
                [output] = llm.embed({"prompt_token_ids": [*range(5, 60)]}, use_tqdm=False)
                assert output.num_cached_tokens == expected


# -- what is refused ------------------------------------------------------------------------------


def test_the_longest_text_fits_and_one_more_token_does_not(bert: Path) -> None:
    with LLM(bert, threads=1) as llm:  # sentence_bert_config.json says 300
        assert len(vectors_of(llm, [bert_ids(300)])) == 1
        with pytest.raises(InvalidRequestError, match="maximum context length is 300.*has 301"):
            llm.embed({"prompt_token_ids": bert_ids(301)}, use_tqdm=False)
    with LLM(bert, threads=1, max_model_len=320) as llm:
        assert len(vectors_of(llm, [bert_ids(320)])) == 1


def test_memory_for_no_text_of_that_length(bert: Path) -> None:
    """The cure must be one: the length that is named fits."""
    block = 16 * 64 * 3 * 2 * 4
    with pytest.raises(OutOfMemoryError, match="set --max-model-len 63 or less"):
        LLM(bert, max_model_len=64, kv_cache_memory_bytes=5 * block)
    with LLM(bert, threads=1, max_model_len=63, kv_cache_memory_bytes=5 * block) as llm:
        assert len(vectors_of(llm, [bert_ids(63)])) == 1


def test_requests_that_cannot_be_served(bert: Path, tmp_path: Path) -> None:
    with LLM(bert, threads=1) as llm:
        for prompt in ("", {"prompt_token_ids": []}):
            with pytest.raises(InvalidRequestError, match="empty"):
                llm.embed(prompt, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="generates no text") as refused:
            llm.generate("a", SamplingParams(), use_tqdm=False)
        assert refused.value.code == "unsupported_feature"
        with pytest.raises(InvalidRequestError, match="matryoshka") as short:
            llm.embed("a", PoolingParams(dimensions=8), use_tqdm=False)
        assert short.value.param == "dimensions"
        assert not llm.has_unfinished_requests()
    with (
        LLM(tiny_hf_dir(tmp_path, "llama"), threads=1) as llm,
        pytest.raises(InvalidRequestError, match="--convert embed") as generates,
    ):
        llm.embed("a", use_tqdm=False)
    assert generates.value.code == "unsupported_feature"


def test_dimensions_of_a_matryoshka_model(tmp_path: Path) -> None:
    path = tiny_bert_dir(tmp_path, matryoshka_dimensions=[16, 32])
    with LLM(path, threads=1) as llm:
        [whole] = vectors_of(llm, [bert_ids(9)], normalize=False)
        [short] = vectors_of(llm, [bert_ids(9)], dimensions=16)
        for wrong in (8, 64, 0):
            with pytest.raises(InvalidRequestError, match="dimensions"):
                llm.embed("a", PoolingParams(dimensions=wrong), use_tqdm=False)
    np.testing.assert_allclose(short, unit(whole[:16]), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runner": "generate"}, "generates no text"),
        ({"convert": "none"}, "generates no text"),
        ({"runner": "generate", "convert": "embed"}, "contradict"),
    ],
)
def test_options_that_contradict_an_encoder(options: Any, words: str, bert: Path) -> None:
    with pytest.raises(UsageError, match=words):
        LLM(bert, **options)


def test_options_that_contradict_a_decoder(tmp_path: Path) -> None:
    path = tiny_hf_dir(tmp_path, "llama")
    with pytest.raises(UsageError, match="cls needs an encoder"):
        LLM(path, convert="embed", pooling_type="cls")
    with pytest.raises(UsageError, match="add --convert embed"):
        LLM(path, normalize=False)


# -- isolation and the other clients --------------------------------------------------------------


def test_a_broken_vector_ends_its_own_request_only(tmp_path: Path) -> None:
    """NaN in the embedding of one token: its text fails by name, the others have their bytes."""
    path = tiny_bert_dir(tmp_path)
    with LLM(path, threads=1) as llm:
        expected = vectors_of(llm, [bert_ids(30)])[0]
        # Positions are what no kernel rounds: an infinite one makes NaN of every norm behind it.
        poisoned = [CLS, 60, SEP]
        model = llm._engine.model
        hidden_of = model.make_step

        def poison(*args: Any) -> Any:
            step, pooled = hidden_of(*args)
            numpy = pooled.numpy

            class Poisoned:
                def numpy(self) -> np.ndarray:
                    vectors = numpy().copy()
                    lengths = args[2]
                    vectors[[length == 3 for length in lengths]] = np.nan
                    return vectors

            return step, Poisoned()

        model.make_step = poison
        prompts = [{"prompt_token_ids": ids} for ids in (bert_ids(30), poisoned, bert_ids(30))]
        outputs = llm.embed(prompts, use_tqdm=False)
    assert [output.error for output in outputs] == [
        None,
        "its embedding has NaN or infinite numbers",
        None,
    ]
    assert outputs[1].outputs.embedding == []
    for output in (outputs[0], outputs[2]):
        assert np.array(output.outputs.embedding, np.float32).tobytes() == expected.tobytes()


def test_async_engine(bert: Path, bert_alone: list[bytes]) -> None:
    """A core in a process of its own: the vector comes over the wire, bit for bit."""

    async def ask() -> tuple[list[bytes], list[Any], Any]:
        async with await start_async_llm(bert, EngineOptions(threads=1)) as engine:
            prompts = [{"prompt_token_ids": ids} for ids in bert_batch()]
            outputs = await asyncio.gather(*(engine.embed(prompt) for prompt in prompts))
            one = [output async for output in engine.encode(prompts[0], PoolingParams(), "mine")]
            with pytest.raises(InvalidRequestError, match="generates no text"):
                await engine.add_request("x", "a", SamplingParams())
            return (
                [np.array(each.outputs.embedding, np.float32).tobytes() for each in outputs],
                one,
                engine.info,
            )

    vectors, one, info = asyncio.run(ask())
    assert vectors == bert_alone
    assert [(output.request_id, output.finished) for output in one] == [("mine", True)]
    assert (info.pooler.kind, info.pooler.size, info.max_model_len) == ("mean", 64, 300)
    assert not info.enable_prefix_caching
