"""Messages between the two processes: what goes in comes out, and nothing else does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.contracts.engine_info import EngineInfo
from twostep.contracts.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    PrefillStats,
    SchedulerStats,
    TokenLogprobs,
)
from twostep.contracts.request import EngineCoreRequest, FinishReason
from twostep.contracts.sampling import SamplingParams, StructuredOutputsParams
from twostep.engine.wire import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    Codec,
    CoreMessage,
    LoadProgress,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    UtilityCall,
    UtilityResult,
    WireError,
)

REQUEST = EngineCoreRequest(
    request_id="chat-1é",
    prompt_token_ids=[0, 5, 2**31],
    sampling_params=SamplingParams(
        temperature=0.1, seed=-(2**63), max_tokens=7, stop=["x"], logit_bias={3: -1.5},
        bad_words_token_ids=[[1, 2]], structured_outputs=StructuredOutputsParams(json={"a": [1]}),
    ),
    eos_token_id=2,
    arrival_time=1e9,
    priority=-3,
    cache_salt="tenant",
)  # fmt: skip
OUTPUTS = EngineCoreOutputs(
    outputs=[
        EngineCoreOutput(request_id="a", new_token_ids=[1]),
        EngineCoreOutput(
            request_id="b",
            new_token_ids=[],
            new_logprobs=[TokenLogprobs([1, 2], [-0.5, -3.0], 1)],
            finish_reason=FinishReason.ERROR,
            stop_reason="ValueError: bad",
            prefill_stats=PrefillStats(num_prompt_tokens=3, num_cached_tokens=2, queued_ts=1.5),
            num_preemptions=2,
        ),
        EngineCoreOutput(request_id="c", new_token_ids=[0], pooled=b"\x00\x00\x80\xff"),
    ],
    scheduler_stats=SchedulerStats(num_running_reqs=1, num_waiting_reqs=2, kv_cache_usage=0.5),
    timestamp=12.25,
)
INFO = EngineInfo(
    model="m", model_path="/m", architecture="llama", vocab_size=10, max_model_len=20,
    block_size=16, num_gpu_blocks=5, kv_cache_dtype="fp16", max_num_seqs=4,
    max_num_batched_tokens=64, num_threads=2, version="1", boot=[("kv cache", "much")],
)  # fmt: skip
CLIENT_MESSAGES: list[ClientMessage] = [
    AddRequest(REQUEST),
    AbortRequests(["a", "b"]),
    UtilityCall(3, "pause", "keep"),
    Shutdown(),
]
CORE_MESSAGES: list[CoreMessage] = [
    LoadProgress("weights", 0.5),
    Ready(INFO),
    Outputs(OUTPUTS),
    Refused("a", "too long", "prompt", "context_length_exceeded"),
    UtilityResult(3, True),
    UtilityResult(4, None, "no"),
]


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda m: type(m).__name__)
def test_client_messages_come_out_as_they_went_in(message: ClientMessage) -> None:
    codec = Codec()
    assert codec.decode_client_message(codec.encode(message)) == message


@pytest.mark.parametrize("message", CORE_MESSAGES, ids=lambda m: type(m).__name__)
def test_core_messages_come_out_as_they_went_in(message: CoreMessage) -> None:
    codec = Codec()
    decoded = codec.decode_core_message(codec.encode(message))
    assert decoded == message
    if isinstance(decoded, Outputs):  # an int that happens to be equal is not enough
        assert isinstance(decoded.outputs.outputs[1].finish_reason, FinishReason)


def test_a_message_of_the_other_direction_is_none() -> None:
    codec = Codec()
    with pytest.raises(WireError, match="no message"):
        codec.decode_client_message(codec.encode(UtilityResult(1, True)))
    with pytest.raises(WireError, match="no message"):
        codec.decode_core_message(codec.encode(Shutdown()))


def test_a_plain_step_is_small() -> None:
    """The message of the hot path: what is default is left out."""
    news = EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id="cmpl-12345678", new_token_ids=[7])]
    )
    assert len(Codec().encode(Outputs(news))) < 120


frames = st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
).map(msgspec.msgpack.encode)


@settings(max_examples=100, deadline=None)
@given(frame=frames)
def test_any_frame_is_a_message_or_a_wire_error(frame: bytes) -> None:
    codec = Codec()
    for decode in (codec.decode_client_message, codec.decode_core_message):
        try:
            message = decode(frame)
        except WireError:
            continue
        assert isinstance(message, ClientMessage | CoreMessage)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_frames(data: st.DataObject) -> None:
    """Bytes changed, cut out or doubled in a real frame: a message again, or a wire error."""
    codec = Codec()
    frame = bytearray(codec.encode(data.draw(st.sampled_from(CLIENT_MESSAGES))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(["change", "cut", "double"])):
            case "change":
                frame[at] = data.draw(st.integers(0, 255))
            case "cut":
                del frame[at : at + data.draw(st.integers(1, 5))]
            case "double":
                frame[at:at] = frame[: data.draw(st.integers(1, 20))]
        frame = frame or bytearray(b"\0")
    try:
        message = codec.decode_client_message(bytes(frame))
    except WireError:
        return
    assert isinstance(message, ClientMessage)
