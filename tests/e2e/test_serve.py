"""``twostep serve`` as its users start it: a process, a real model, the openai client."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from helpers.live_server import OpenStream
from helpers.serve_process import ServeProcess

from twostep import LLM, SamplingParams
from twostep.entrypoints import catalogue, store

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PROMPT = "The three primary colours are"
HI: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model() -> str:
    entry = catalogue.find("smollm2-135m")
    assert entry is not None
    if not store.is_present(entry):
        pytest.skip("smollm2-135m is not on disk; `twostep pull smollm2-135m` fetches it")
    return entry.name


@pytest.fixture(scope="module")
def process(model: str) -> Iterator[ServeProcess]:
    argv = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "64MiB"]
    argv += ["--shutdown-timeout", "300"]
    process = ServeProcess(model, "--served-model-name", "m", *argv)
    yield process
    if process.child.poll() is None:
        process.end()


@pytest.fixture
def client(process: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="x", timeout=200) as client:
        yield client


def test_the_text_is_the_engines(client: openai.OpenAI, model: str) -> None:
    """Over HTTP, streamed or not, alone or among others: the text that ``LLM`` gives, by the same
    arithmetic (a server that was named a model of the catalogue had another one once)."""
    with LLM(model, max_model_len=1024, kv_cache_memory_bytes=64 << 20) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    expected = output.outputs[0]
    whole = client.completions.create(model="m", prompt=PROMPT, temperature=0, max_tokens=12)
    assert whole.choices[0].text == expected.text
    chunks = client.completions.create(
        model="m", prompt=[PROMPT, "Once", PROMPT], temperature=0, max_tokens=12, stream=True
    )
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts[0] == texts[2] == expected.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(expected.token_ids)
    assert whole.usage.prompt_tokens == len(output.prompt_token_ids)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=HI, temperature=0, max_tokens=24, logprobs=True, top_logprobs=3
    )
    text = answer.choices[0].message.content
    assert text
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    chunks = client.chat.completions.create(
        model="m", messages=HI, temperature=0, max_tokens=24, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == text


def test_the_head_and_the_first_bytes_come_together(process: ServeProcess) -> None:
    """Found as 2 ms of time to first token: the head, alone, woke the client, which took the core
    from the server before the first event was written."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "stream": True}
    heads = 0
    for _ in range(10):
        with connect(process.url) as sock:
            OpenStream(sock, "/v1/completions", body)
            heads += b"data: " not in sock.recv(1 << 16)
    assert heads == 0


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=100)


def test_an_idle_server_sleeps(process: ServeProcess) -> None:
    """Found as 14 wake-ups a second, each of which took a core from a step that computed."""
    status = Path("/proc", str(process.child.pid), "status")

    def wakes() -> int:
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.MULTILINE)
        assert found
        return int(found[1])

    assert process.url
    time.sleep(0.5)
    before = wakes()
    time.sleep(3)
    assert wakes() - before <= 12


def test_seeds(client: openai.OpenAI) -> None:
    def draw(**fields: Any) -> list[str]:
        answer = client.completions.create(
            model="m", prompt=PROMPT, temperature=1.5, max_tokens=8, seed=7, **fields
        )
        return [choice.text for choice in answer.choices]

    assert draw(n=3) == draw(n=3)
    assert draw() == draw(n=3)[:1]
    assert len(set(draw(n=3))) > 1


def test_a_client_that_goes_frees_the_engine(client: openai.OpenAI, process: ServeProcess) -> None:
    stream = client.completions.create(
        model="m", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 60
    while client.get("/../load", cast_to=object) != {"server_load": 0}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = client.completions.create(model="m", prompt=PROMPT, temperature=0, max_tokens=2)
    assert again.choices[0].text


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="word " * 3000)
    assert caught.value.code == "context_length_exceeded"


def test_sigterm_drains(client: openai.OpenAI, process: ServeProcess) -> None:
    """Last of those that share the process: it ends here."""
    stream = client.completions.create(
        model="m", prompt=PROMPT, max_tokens=40, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = [next(iter(stream))]
    cores = process.core_pids()
    assert cores
    process.child.send_signal(signal.SIGTERM)
    pieces += list(stream)
    assert pieces[-1].choices[0].finish_reason == "length"
    assert process.wait() == 0
    for pid in cores:
        assert not Path(f"/proc/{pid}").exists()
    assert "Traceback" not in "".join(process.lines)


def test_a_killed_core_ends_the_server(model: str) -> None:
    argv = ["--max-model-len", "512", "--kv-cache-memory-bytes", "32MiB", "--restart-core", "0"]
    process = ServeProcess(model, "--served-model-name", "m", *argv)
    url = process.url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=200, max_retries=0) as client:
        stream = client.completions.create(
            model="m", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        for pid in process.core_pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        stream.close()
    assert caught.value.code == "engine_dead"
    assert process.wait() == 1
    assert "twostep: error: " in process.lines[-1]


def test_a_model_that_is_not_there() -> None:
    process = ServeProcess("/nowhere/at-all.gguf")
    assert process.wait() == 1
    assert "no such file" in process.lines[-1]
    assert "Traceback" not in "".join(process.lines)
