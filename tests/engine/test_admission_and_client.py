"""What cannot be served is refused with numbers; the in-process client drives the core."""

from __future__ import annotations

import pytest
from planning_helpers import (
    FakeClock,
    FakeGrammarFuture,
    add,
    ids,
    make_configs,
    make_engine_request,
)

from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.request import EngineCoreRequest, FinishReason
from twostep.engine.client import InprocClient
from twostep.engine.core import EngineCore
from twostep.sim.ghost_model import oracle
from twostep.sim.recording_ghost import RecordingGhost


def make_client(*, concurrent: int = 2, **config: object) -> tuple[InprocClient, RecordingGhost]:
    """A client of a core on a ghost."""
    scheduler_config, cache_config = make_configs(**config)  # type: ignore[arg-type]
    ghost = RecordingGhost(cache_config.block_size, max_concurrent_batches=concurrent)
    core = EngineCore(
        scheduler_config=scheduler_config,
        cache_config=cache_config,
        executor=ghost,
        clock=FakeClock(),
    )
    return InprocClient(core), ghost


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (make_engine_request("x", []), "prompt", "the prompt is empty"),
        (make_engine_request("x", 1024), "prompt", "1024 tokens and max_model_len is 1024"),
        (
            make_engine_request("x", 400),
            "prompt",
            r"400 tokens and needs 26 KV blocks of 16 tokens to answer, but the KV cache has 15 "
            r"\(240 tokens\)",
        ),
        (make_engine_request("x", 240), "prompt", "needs 16 KV blocks"),
        (make_engine_request("used"), "request_id", "request id used is in use"),
        (make_engine_request("x", 5, None), "max_tokens", "max_tokens is None"),
        (make_engine_request("x", 5, 0), "max_tokens", "max_tokens is 0"),
        (make_engine_request("x", structured=True), "structured_outputs", "not supported"),
    ],
)
def test_refused_at_admission(request_: EngineCoreRequest, param: str, words: str) -> None:
    """B01: at once, with the numbers; the requests behind it are served."""
    client, _ = make_client(num_blocks=16, max_model_len=1024)
    client.add_request(make_engine_request("used"))
    with pytest.raises(InvalidRequestError, match=words) as caught:
        client.add_request(request_)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)
    while client.has_unfinished_requests():
        client.get_output()


def test_longest_prompt_that_fits() -> None:
    """239 of 240 tokens: one token of answer, then length."""
    client, _ = make_client(num_blocks=16, max_model_len=1024)
    client.add_request(make_engine_request("a", 239, 50))
    outputs = []
    while client.has_work():
        outputs += client.get_output().outputs
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", FinishReason.LENGTH)]


@pytest.mark.parametrize(
    ("is_async", "concurrent", "lag"), [(True, 2, 1), (True, 1, 0), (False, 2, 0)]
)
def test_generate_until_done(is_async: bool, concurrent: int, lag: int) -> None:
    """One token a call, one call late with the batch queue; nothing is left behind."""
    client, ghost = make_client(concurrent=concurrent, async_scheduling=is_async)
    prompt = [3, 1, 4, 1, 5]
    client.add_request(make_engine_request("a", prompt, 6))
    tokens: list[int] = []
    calls = 0
    while client.has_unfinished_requests():
        news = client.get_output()
        calls += 1
        assert ids(news.outputs) in ([], ["a"])
        for output in news.outputs:
            tokens += output.new_token_ids
    assert calls == 6 + lag
    assert tokens == oracle(prompt, 6, set())
    while client.has_work():
        assert client.get_output().outputs == []
    assert not ghost.rows
    assert client.get_output().outputs == []


def test_calls_reach_the_executor_in_order() -> None:
    """sample_tokens follows each execute_model that has tokens, and nothing else."""
    client, ghost = make_client()
    client.add_request(make_engine_request("a", 5, 2))
    while client.has_work():
        client.get_output()
    assert ghost.calls == ["execute_model", "sample_tokens"] * 2 + ["execute_model"]


def test_abort_reset_and_close() -> None:
    """Aborted requests give no more news; closing twice is harmless."""
    client, ghost = make_client()
    client.add_request(make_engine_request("a", 40, 50))
    client.add_request(make_engine_request("b", 40, 50))
    client.get_output()
    client.abort_requests(["a"])
    assert ids(client.get_output().outputs) == ["b"]
    assert not client.reset_prefix_cache()
    assert client.reset_prefix_cache(reset_running_requests=True)
    client.close()
    client.close()
    assert ghost.is_shut_down
    assert not client.has_unfinished_requests()


def test_news_of_other_clients_is_not_ours() -> None:
    """In one process there is only client 0."""
    client, _ = make_client(async_scheduling=False)
    client.add_request(make_engine_request("a", 5, 5, client=1))
    assert client.get_output().outputs == []


def test_nothing_can_be_planned_yet() -> None:
    """A grammar is compiling: no plan is sent, and the core says that nothing ran."""
    client, ghost = make_client()
    core = client.engine_core
    add(core.scheduler, "g", grammar=FakeGrammarFuture())
    assert core.step_fn() == (None, False)
    assert core.step() == (None, False)
    assert ghost.plans == []
    assert core.has_work()
