"""``/v1/completions``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.live_server import LiveServer

LONG = "Hello the world, 日本語 and 👩‍👩‍👧!"


def text_of(events: list[Any], index: int = 0) -> str:
    chunks = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
    return "".join(chunk["text"] for chunk in chunks)


def test_a_whole_answer(server: LiveServer) -> None:
    document = server.complete("Once upon").json
    assert document["object"] == "text_completion"
    assert document["id"].startswith("cmpl-")
    [choice] = document["choices"]
    assert choice == {
        "index": 0,
        "text": "Hello there.",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


def test_default_is_16_tokens(server: LiveServer) -> None:
    server.core.reply = lambda request: "x" * 50
    document = server.complete().json
    assert document["usage"]["completion_tokens"] == 16
    assert document["choices"][0]["finish_reason"] == "length"


def test_several_prompts_in_order(server: LiveServer) -> None:
    def reply(request: Any) -> str:
        return server.core.tokenizer.decode(request.prompt_token_ids) + "!"

    server.core.reply = reply
    document = server.complete(["a", "bb", "ccc"], n=2).json
    assert [c["index"] for c in document["choices"]] == list(range(6))
    assert [c["text"] for c in document["choices"]] == ["a!", "a!", "bb!", "bb!", "ccc!", "ccc!"]
    assert document["usage"]["prompt_tokens"] == 6
    events = server.complete(["a", "bb", "ccc"], n=2, stream=True).events
    assert [text_of(events, i) for i in range(6)] == ["a!", "a!", "bb!", "bb!", "ccc!", "ccc!"]
    assert events.count("[DONE]") == 1


def test_b29_token_prompts(server: LiveServer) -> None:
    assert server.complete([0]).status == 200
    document = server.complete([[70, 71], [72]], return_token_ids=True).json
    assert [c["prompt_token_ids"] for c in document["choices"]] == [[70, 71], [72]]


@pytest.mark.parametrize("tokens_per_tick", [1, 4, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": [" world", "lo"]},
        {"stop": ["👧"]},
        {"max_tokens": 25},
        {"echo": True},
        {"echo": True, "logprobs": 2},
        {"logprobs": 0},
        {"logprob_token_ids": [9, 4], "echo": True, "logprobs": 1},
        {"logprobs": 3, "n": 2, "seed": 3},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"echo": True, "logprobs": 1, "n": 2},
    ],
)
def test_stream_equals_whole(
    server: LiveServer, fields: dict[str, Any], tokens_per_tick: int
) -> None:
    server.core.reply = lambda request: LONG
    server.core.tokens_per_tick = tokens_per_tick
    fields = {"max_tokens": 60, **fields}
    whole = server.complete("Once the", **fields).json
    events = server.complete(
        "Once the", stream=True, stream_options={"include_usage": True}, **fields
    ).events
    for choice in whole["choices"]:
        chunks = [c for e in events[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        assert text_of(events, choice["index"]) == choice["text"]
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [
            choice["finish_reason"]
        ]
        assert chunks[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
            for chunk in chunks:
                for name, values in (chunk["logprobs"] or {}).items():
                    joined[name] += values
            assert joined == choice["logprobs"]
    assert events[-2]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-2]["usage"][name] == whole["usage"][name]


@pytest.mark.parametrize("asked", [{}, {"logprobs": 0}, {"logprobs": 1}], ids=str)
def test_logprobs_of_certain_tokens(server: LiveServer, asked: dict[str, Any]) -> None:
    fields = {"return_tokens_as_token_ids": True, "logprob_token_ids": [30, 3], **asked}
    [choice] = server.complete("Once", **fields).json["choices"]
    told = choice["logprobs"]
    for name, logprob, found in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert found.pop(name) == logprob == -0.5
        assert found == {"token_id:3": -4.0, "token_id:30": -31.0}


def test_b25_echo_scores_a_prompt(server: LiveServer) -> None:
    document = server.complete("The sky", echo=True, logprobs=1, max_tokens=0).json
    [choice] = document["choices"]
    assert choice["text"] == "The sky"
    assert "".join(choice["logprobs"]["tokens"]) == "The sky"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(isinstance(x, float) for x in choice["logprobs"]["token_logprobs"][1:])
    assert document["usage"]["completion_tokens"] == 0
    one = server.complete("The sky", echo=True, logprobs=1, max_tokens=1).json["choices"][0]
    assert one["logprobs"]["tokens"] == [*choice["logprobs"]["tokens"], "H"]


def test_b27_lists_are_parallel_and_offsets_are_right(server: LiveServer) -> None:
    choice = server.complete("Once", echo=True, logprobs=2, max_tokens=5).json["choices"][0]
    found = choice["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in found.values()}) == 1
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_b23_tokens_of_one_text(server: LiveServer) -> None:
    """Bytes of an unfinished character all read as nothing: they are told by their ids."""
    server.core.reply = lambda request: "日"
    top = server.complete(logprobs=3, max_tokens=1).json["choices"][0]["logprobs"]
    first = server.core.tokenizer.encode("日", False)[0]
    names = ["", f"token_id:{first + 1}", f"token_id:{first + 2}"]
    assert top["top_logprobs"] == [dict(zip(names, [-0.5, -1.5, -2.5], strict=True))]
    assert top["token_logprobs"] == [-0.5]


def test_prompt_logprobs(server: LiveServer) -> None:
    choice = server.complete("Once", prompt_logprobs=1).json["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == 3
    for entry in others:
        for found in entry.values():
            assert set(found) == {"logprob", "rank", "decoded_token"}


@pytest.mark.parametrize(
    ("keep", "side", "expected"),
    [(3, None, "efg"), (3, "right", "abc"), (100, None, "abcdefg"), (1, None, "g")],
)
def test_b36_truncation(server: LiveServer, keep: int, side: str | None, expected: str) -> None:
    server.complete("abcdefg", truncate_prompt_tokens=keep, truncation_side=side)
    ids = server.core.requests[0].prompt_token_ids
    assert server.core.tokenizer.decode(ids) == expected


def test_b36_truncation_to_what_fits(server: LiveServer) -> None:
    answer = server.complete("z" * 1000, truncate_prompt_tokens=-1, max_tokens=10)
    assert answer.status == 200
    assert answer.json["usage"]["prompt_tokens"] == 246


def test_b36_room_of_one_token(server: LiveServer) -> None:
    server.core.reply = lambda request: "xyz"
    for most in (None, 1, 10):
        document = server.complete([70] * 255, max_tokens=most).json
        assert document["usage"]["completion_tokens"] == 1
        assert document["choices"][0]["finish_reason"] == "length"


def test_add_special_tokens(server: LiveServer) -> None:
    server.complete("abc", add_special_tokens=False)
    assert len(server.core.requests[0].prompt_token_ids) == 3


def test_b22_tokenize_and_back(server: LiveServer) -> None:
    for prefix in ("", "/v1"):
        answer = server.post(f"{prefix}/tokenize", {"prompt": "hello<|im_end|> the"}).json
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 256
        assert answer["token_strs"] is None
        back = server.post(f"{prefix}/detokenize", {"tokens": answer["tokens"]}).json
        assert back["prompt"] == "hello<|im_end|> the"
    pieces = server.post("/tokenize", {"content": "hell", "with_pieces": True}).json
    assert "".join(pieces["token_strs"]) == "hell"
    messages = [{"role": "user", "content": "Hi"}]
    rendered = server.post("/v1/chat/completions/render", {"messages": messages}).json
    assert server.post("/tokenize", {"messages": messages}).json["tokens"] == rendered["token_ids"]


def test_tokenize_has_no_length_limit(server: LiveServer) -> None:
    assert server.post("/tokenize", {"prompt": "z" * 5000}).json["count"] == 5000


def test_render_completion(server: LiveServer) -> None:
    one = server.post("/v1/completions/render", {"prompt": "abc"}).json
    assert server.core.tokenizer.decode(one["token_ids"]) == "abc"
    many = server.post("/v1/completions/render", {"prompt": ["a", "b"]}).json
    assert [each["prompt"] for each in many] == ["a", "b"]
