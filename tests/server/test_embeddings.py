"""``/v1/embeddings`` on a real server with a real model, asked by the openai client and by hand."""

from __future__ import annotations

import base64
import json
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.live_server import LiveServer
from helpers.tiny_bert import CLS, SEP, bert_ids, tiny_bert_dir

from twostep import EngineOptions, start_async_llm
from twostep.contracts.sampling import SamplingParams
from twostep.frontend.async_llm import AsyncLLM
from twostep.server.parsers.formats import choose_formats

pytestmark = pytest.mark.timeout(600)

PATH = "/v1/embeddings"


class EmbeddingServer(LiveServer):
    """A live server with an engine of its own behind it."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.model = model
        super().__init__(**settings)

    async def _load(self) -> AsyncLLM:
        engine = await start_async_llm(self.model, EngineOptions(threads=1))
        self.state.ready(engine, SamplingParams(), choose_formats(None))
        self._is_up.set()
        return engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingServer]:
    model = tiny_bert_dir(tmp_path_factory.mktemp("model"), matryoshka_dimensions=[16, 64])
    server = EmbeddingServer(model)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: EmbeddingServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        yield client


def embed(server: LiveServer, **body: Any) -> list[list[float]]:
    answer = server.post(PATH, body)
    assert answer.status == 200, answer.body
    return [entry["embedding"] for entry in answer.json["data"]]


def test_the_openai_client_in_both_encodings(client: openai.OpenAI) -> None:
    """The client asks for base64 unless told otherwise, and decodes it itself."""
    texts = ["The cat sat.", "A dog ran", "the cat sat ."]
    answer = client.embeddings.create(model="tiny", input=texts)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert answer.object == "list"
    assert answer.model == "tiny"
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert {entry.object for entry in answer.data} == {"embedding"}
    vectors = [entry.embedding for entry in answer.data]
    assert [len(vector) for vector in vectors] == [64] * 3
    assert vectors == [entry.embedding for entry in plain.data]
    assert vectors[0] == vectors[2] != vectors[1]
    assert (
        answer.usage.prompt_tokens
        == answer.usage.total_tokens
        == sum(len(text) for text in ([0] * 6, [0] * 5, [0] * 6))
    )


def test_the_document_is_openais(server: EmbeddingServer) -> None:
    document = server.post(PATH, {"input": "sun", "user": "me"}).json
    assert set(document) == {"id", "object", "created", "model", "data", "usage"}
    assert document["id"].startswith("embd-")
    assert document["usage"] == {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    [entry] = document["data"]
    assert set(entry) == {"index", "object", "embedding"}


def test_base64_is_little_endian_float32(server: EmbeddingServer) -> None:
    [numbers] = embed(server, input="sun", encoding_format="float")
    [little] = embed(server, input="sun", encoding_format="base64")
    [big] = embed(server, input="sun", encoding_format="base64", endianness="big")
    assert list(struct.unpack("<64f", base64.b64decode(little))) == numbers
    assert list(struct.unpack(">64f", base64.b64decode(big))) == numbers


def test_every_form_of_input(server: EmbeddingServer) -> None:
    [text] = embed(server, input="red sun")
    ids = server.post("/tokenize", {"prompt": "red sun"}).json["tokens"]
    assert (ids[0], ids[-1]) == (CLS, SEP)
    assert embed(server, input=["red sun"]) == [text]
    assert embed(server, input=ids) == [text]
    assert embed(server, input=[ids, ids]) == [text, text]
    assert embed(server, input="red sun", add_special_tokens=False) == embed(
        server, input=ids[1:-1]
    )
    assert embed(server, input="red sun", add_special_tokens=False) != [text]


def test_the_same_bytes_in_any_company(server: EmbeddingServer) -> None:
    texts = [bert_ids(length, seed=length) for length in (3, 300, 17, 64, 130)]
    alone = [embed(server, input=ids, encoding_format="base64")[0] for ids in texts]
    assert embed(server, input=texts, encoding_format="base64") == alone
    assert embed(server, input=texts[::-1], encoding_format="base64") == alone[::-1]


def test_truncation_keeps_the_frame(server: EmbeddingServer) -> None:
    text = "the cat sat on the mat and ran"
    ids = server.post("/tokenize", {"prompt": text}).json["tokens"]
    for keep, side, expected in (
        (5, None, [*ids[:4], SEP]),
        (5, "left", [CLS, *ids[-4:]]),
        (99, None, ids),
        (-1, None, ids),
        (2, None, ids[:2]),
    ):
        body = {"input": text, "truncate_prompt_tokens": keep, "truncation_side": side}
        answer = server.post(PATH, body)
        assert answer.json["usage"]["prompt_tokens"] == len(expected)
        assert [answer.json["data"][0]["embedding"]] == embed(server, input=expected)
    long = bert_ids(340)
    assert embed(server, input=long, truncate_prompt_tokens=-1) == embed(server, input=long[:300])


def test_dimensions_and_length(server: EmbeddingServer) -> None:
    [whole] = embed(server, input="sun", normalize=False)
    [short] = embed(server, input="sun", dimensions=16)
    length = sum(x * x for x in whole[:16]) ** 0.5
    assert short == array("f", [x / length for x in whole[:16]]).tolist()


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"input": [[5], []]}, "invalid_value", "input[1]"),
        ({"input": ["a", [5]]}, "invalid_type", "input[1]"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": [5, 99999]}, "invalid_value", "input"),
        ({"input": [5, -1]}, "invalid_value", "input"),
        ({"input": bert_ids(301)}, "context_length_exceeded", "input"),
        ({"input": [bert_ids(5), bert_ids(301)]}, "context_length_exceeded", "input"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "embed_dtype": "int8"}, "invalid_value", "embed_dtype"),
        ({"input": "a", "endianness": "middle"}, "invalid_value", "endianness"),
        ({"input": "a", "dimensions": 17}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": "16"}, "invalid_type", "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 301}, "invalid_value", "truncate_prompt_tokens"),
        (
            {"input": "a b c", "truncate_prompt_tokens": 3, "truncation_side": "up"},
            "invalid_value",
            "truncation_side",
        ),
        ({"input": "a", "priority": 3}, "invalid_value", "priority"),
        ({"input": "a", "model": "other"}, "model_not_found", "model"),
    ],
)
def test_what_is_refused(server: EmbeddingServer, body: Any, code: str, param: str) -> None:
    answer = server.post(PATH, body)
    assert answer.status == (404 if code == "model_not_found" else 400)
    assert (answer.error["code"], answer.error["param"]) == (code, param)


def test_a_text_that_is_too_long_is_refused_with_the_numbers(server: EmbeddingServer) -> None:
    message = server.post(PATH, {"input": bert_ids(301)}).error["message"]
    assert "300 tokens" in message
    assert "301 tokens" in message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Once"}),
    ],
)
def test_an_embedding_model_generates_nothing(
    server: EmbeddingServer, path: str, body: Any
) -> None:
    answer = server.post(path, body)
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("unsupported_feature", "model")
    assert "/v1/embeddings" in answer.error["message"]


def test_figures(server: EmbeddingServer) -> None:
    def figures() -> dict[str, float]:
        found = {}
        for line in server.get("/metrics").body.decode().splitlines():
            if line.startswith("vllm:"):
                name, _, value = line.partition(" ")
                found[name.partition("{")[0] + name.partition("finished_reason=")[2][:6]] = float(
                    value
                )
        return found

    before = figures()
    embed(server, input=[bert_ids(10), bert_ids(20)])
    after = figures()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vllm:prompt_tokens_total") == 30
    assert grown("vllm:generation_tokens_total") == 0
    assert grown('vllm:request_success_total"stop"') == 2
    assert grown("vllm:request_prefill_time_seconds_count") == 2
    assert grown("vllm:time_to_first_token_seconds_count") == 0
    assert grown("vllm:request_params_max_tokens_count") == 0


def test_the_description_of_the_api_has_it(server: EmbeddingServer) -> None:
    document = server.get("/openapi.json").json
    operation = document["paths"][PATH]["post"]
    kinds = {"request": operation["requestBody"], "response": operation["responses"]["200"]}
    names = {
        name: kind["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for name, kind in kinds.items()
    }
    assert names == {"request": "EmbeddingRequest", "response": "EmbeddingResponse"}
    assert "input" in document["components"]["schemas"]["EmbeddingRequest"]["properties"]
    assert json.dumps(document["components"]["schemas"]["EmbeddingData"])
