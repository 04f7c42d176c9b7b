"""Outputs on their way to the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from twostep.contracts.outputs import EngineCoreOutput, PrefillStats, TokenLogprobs
from twostep.contracts.request import FinishReason
from twostep.contracts.results import RequestOutput
from twostep.contracts.sampling import RequestOutputKind, SamplingParams
from twostep.frontend.input_processor import InputProcessor
from twostep.frontend.output_processor import OutputProcessor, merge_request_outputs
from twostep.frontend.tokenizer import Tokenizer

Make = Callable[..., InputProcessor]
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Session:
    """One request, fed with text by hand."""

    def __init__(
        self, make_inputs: Make, tokenizer: Tokenizer, prompt: Any = "hello", **fields: Any
    ) -> None:
        interval = fields.pop("server_interval", 1)
        fields.setdefault("max_tokens", 50)
        fields.setdefault("output_kind", DELTA)
        self.now = 100.0
        self.tokenizer = tokenizer
        inputs = make_inputs(tokenizer)
        self.request = inputs.process("r", prompt, SamplingParams(**fields))
        self.core_ids = [core.request_id for core in self.request.core_requests]
        self.outputs = OutputProcessor(tokenizer, stream_interval=interval, clock=lambda: self.now)
        self.outputs.add_request(self.request)
        self.aborted: list[str] = []

    def feed(
        self, ids: list[int], finish: FinishReason | None = None, child: int = 0, **fields: Any
    ) -> list[RequestOutput]:
        output = EngineCoreOutput(
            request_id=self.core_ids[child], new_token_ids=ids, finish_reason=finish, **fields
        )
        done = self.outputs.process_outputs([output])
        self.aborted += done.reqs_to_abort
        return done.request_outputs

    def text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def texts(self, pieces: list[str], finish: FinishReason | None = None) -> list[str]:
        """What is shown after each piece (all its tokens in one step)."""
        shown = []
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            made = self.feed(self.text(piece), finish if last else None)
            shown.append("".join(output.outputs[0].text for output in made))
        return shown


@pytest.fixture
def session(make_inputs: Make, byte_level: Tokenizer) -> Callable[..., Session]:
    def make(prompt: Any = "hello", **fields: Any) -> Session:
        return Session(make_inputs, byte_level, prompt, **fields)

    return make


Start = Callable[..., Session]


def test_output_kinds(session: Start) -> None:
    words = ["hello", " world", " and"]
    assert session().texts(words, FinishReason.LENGTH) == words
    cumulative = session(output_kind=CUMULATIVE).texts(words, FinishReason.LENGTH)
    assert cumulative == ["hello", "hello world", "hello world and"]
    assert session(output_kind=FINAL_ONLY).texts(words, FinishReason.LENGTH) == [
        "",
        "",
        "hello world and",
    ]


def test_token_ids_of_each_kind(session: Start) -> None:
    for kind, expected in ((DELTA, [[7], [8], [9]]), (CUMULATIVE, [[7], [7, 8], [7, 8, 9]])):
        run = session(output_kind=kind)
        outputs = [run.feed([i], FinishReason.LENGTH if i == 9 else None)[0] for i in (7, 8, 9)]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.finished for output in outputs] == [False, False, True]


def test_fields_of_an_output(session: Start) -> None:
    run = session()
    (output,) = run.feed([7], prefill_stats=PrefillStats(num_prompt_tokens=1, num_cached_tokens=0))
    assert output.request_id == "r"
    assert output.prompt == "hello"
    assert output.prompt_token_ids == run.request.prompt_token_ids
    assert output.num_cached_tokens == 0
    completion = output.outputs[0]
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, None, None)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None
    assert not completion.finished()


@pytest.mark.parametrize(
    ("finish", "stop_reason", "word"),
    [
        (FinishReason.LENGTH, None, "length"),
        (FinishReason.ABORT, None, "abort"),
        (FinishReason.ERROR, "NaN logits", "error"),
        (FinishReason.REPETITION, "repetition_detected", "repetition"),
        (FinishReason.STOP, 9, "stop"),
    ],
)
def test_finish_reasons(
    session: Start, finish: FinishReason, stop_reason: int | str | None, word: str
) -> None:
    run = session()
    (output,) = run.feed([7], finish, stop_reason=stop_reason)
    assert output.finished
    assert output.outputs[0].finish_reason == word
    assert output.outputs[0].stop_reason == stop_reason
    assert run.aborted == []
    assert run.outputs.num_unfinished_requests == 0


def test_the_end_token_is_counted_but_not_shown(session: Start) -> None:
    run = session(skip_special_tokens=False)
    run.feed(run.text("hello"))
    (output,) = run.feed([2], FinishReason.STOP)
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == [2]
    assert output.outputs[0].stop_reason is None
    run = session(skip_special_tokens=False, include_stop_str_in_output=True)
    assert run.feed([2], FinishReason.STOP)[0].outputs[0].text == "<|im_end|>"


def test_a_visible_stop_token_is_cut_too(session: Start) -> None:
    run = session(stop_token_ids=[9])
    (world,) = run.text("world")
    (output,) = run.feed([world], FinishReason.STOP, stop_reason=world)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", world)


def test_case_57_stop_string_over_tokens(session: Start) -> None:
    run = session(stop=["STOP"])
    assert run.texts(["hello", " ST", "OP"]) == ["hello", " ", ""]
    assert run.aborted == run.core_ids
    final = session(stop=["STOP"], output_kind=FINAL_ONLY).texts(["hello", " ST", "OP"])
    assert final[-1] == "hello "
    included = session(stop=["STOP"], include_stop_str_in_output=True)
    assert included.texts(["hello", " ST", "OP"]) == ["hello", " ST", "OP"]


def test_case_57_stop_reason_and_surplus_tokens(session: Start) -> None:
    run = session(stop=["STOP"], logprobs=0)
    ids = [*run.text("ST"), *run.text("OP"), 7, 8]
    logprobs = [TokenLogprobs([i], [-1.0], 1) for i in ids]
    (output,) = run.feed(ids, new_logprobs=logprobs)
    completion = output.outputs[0]
    assert completion.token_ids == ids[:-2]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(ids) - 2
    assert completion.cumulative_logprob == -(len(ids) - 2)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "STOP")
    assert run.feed([9]) == []  # late news of a finished request


def test_text_behind_an_included_stop_string_is_cut(session: Start) -> None:
    (wor, *_) = ["wor"]
    run = session(stop=[wor], include_stop_str_in_output=True)
    assert run.texts(["hello", " world"]) == ["hello", " wor"]
    run = session(stop=[wor])
    assert run.texts(["hello", " world"]) == ["hello", " "]


def test_b14_deltas_never_show_a_stop_string(session: Start) -> None:
    pieces = ["ABC", "D", "EF", "GH", "IJ"]
    streamed = session(stop=["DEFGHIJ"]).texts(pieces)
    whole = session(stop=["DEFGHIJ"], output_kind=FINAL_ONLY).texts(pieces)
    assert streamed == ["ABC", "", "", "", ""]
    assert "".join(streamed) == whole[-1]


def test_held_text_comes_out_at_the_end(session: Start) -> None:
    run = session(stop=["STOP"])
    assert run.texts(["hello", " ST"], FinishReason.LENGTH) == ["hello", " ST"]
    run = session(stop=["STOP"])
    run.feed(run.text(" ST"))
    assert run.feed([2], FinishReason.STOP)[0].outputs[0].text == "ST"


def test_a_stop_string_completed_at_the_limit_counts_as_stop(session: Start) -> None:
    run = session(stop=["world"])
    (output,) = run.feed(run.text(" world"), FinishReason.LENGTH)
    assert output.outputs[0].finish_reason == "stop"
    assert run.aborted == []  # the core ended it by itself


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_b16_stop_string_that_is_a_special_token(session: Start, skip: bool, include: bool) -> None:
    run = session(
        stop=["<|im_end|>"],
        ignore_eos=True,
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
    )
    run.feed(run.text("hello"))
    (output,) = run.feed([2], FinishReason.STOP, stop_reason=2)
    completion = output.outputs[0]
    assert completion.text == ("<|im_end|>" if include else "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "<|im_end|>")
    assert run.aborted == []


def test_b18_stop_strings_wait_for_min_tokens(session: Start) -> None:
    run = session(stop=["a"], min_tokens=3)
    (a,) = run.text("a")
    outputs = [run.feed([a])[0] for _ in range(4)]
    assert [output.outputs[0].text for output in outputs] == ["a", "a", "a", ""]
    assert [output.finished for output in outputs] == [False, False, False, True]


def test_b18_a_match_must_lie_behind_min_tokens(session: Start) -> None:
    run = session(stop=["ab"], min_tokens=1)
    a, b = run.text("ab")
    assert [run.feed([i])[0].outputs[0].text for i in (a, b)] == ["a", "b"]
    assert run.feed([a])[0].outputs[0].text == ""
    assert run.feed([b])[0].finished


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_b21_cut_character_reads_the_same_in_all_modes(
    session: Start, kind: RequestOutputKind
) -> None:
    run = session(output_kind=kind)
    ids = run.text("a🌶")[:-1]
    made = [
        out
        for i, token_id in enumerate(ids)
        for out in run.feed([token_id], FinishReason.LENGTH if i == len(ids) - 1 else None)
    ]
    assert "".join(output.outputs[0].text for output in made) == "a\ufffd"


def test_case_58_byte_split_character(session: Start) -> None:
    run = session()
    assert [run.feed([i])[0].outputs[0].text for i in run.text("家")] == ["", "", "家"]


def test_b20_text_follows_the_prompt(make_inputs: Make, space_prefixed: Tokenizer) -> None:
    run = Session(make_inputs, space_prefixed, "hello")
    ids = space_prefixed.encode("world", add_special_tokens=False)
    assert run.feed(ids, FinishReason.LENGTH)[0].outputs[0].text == " world"


def test_case_59_stream_interval(session: Start) -> None:
    for fields in ({"server_interval": 4}, {"stream_interval": 4}):
        for kind, counts in ((DELTA, [1, 4, 4, 1]), (CUMULATIVE, [1, 5, 9, 10])):
            run = session(output_kind=kind, **fields)
            made = [
                output
                for i in range(10)
                for output in run.feed([7 + i], FinishReason.LENGTH if i == 9 else None)
            ]
            assert [len(output.outputs[0].token_ids) for output in made] == counts
            if kind == DELTA:
                text = "".join(output.outputs[0].text for output in made)
                assert text == run.tokenizer.decode(range(7, 17))


def test_a_request_cannot_ask_for_a_shorter_interval(session: Start) -> None:
    run = session(server_interval=3, stream_interval=1)
    assert [len(run.feed([7])) for _ in range(5)] == [1, 0, 0, 1, 0]


def test_case_59_slow_reader(session: Start) -> None:
    run = session(logprobs=0)
    first, second = (
        run.feed(run.text(text), new_logprobs=[TokenLogprobs([1], [-0.5], 1)])[0]
        for text in ("hello", " world")
    )
    merged = merge_request_outputs(first, second, DELTA)
    assert merged.outputs[0].text == "hello world"
    assert merged.outputs[0].token_ids == [*run.text("hello"), *run.text(" world")]
    assert merged.outputs[0].logprobs is not None
    assert len(merged.outputs[0].logprobs) == 2
    (last,) = run.feed([2], FinishReason.STOP, new_logprobs=[TokenLogprobs([2], [-0.5], 1)])
    merged = merge_request_outputs(merged, last, DELTA)
    assert merged.finished
    assert merged.outputs[0].finish_reason == "stop"
    assert merged.outputs[0].text == "hello world"


def test_slow_reader_of_several_sequences(session: Start) -> None:
    for kind, text in ((DELTA, "hello world"), (CUMULATIVE, "hello world")):
        run = session(n=2, output_kind=kind)
        made = [
            *run.feed(run.text("hello"), child=1),
            *run.feed(run.text("and"), child=0),
            *run.feed(run.text(" world"), FinishReason.LENGTH, child=1),
        ]
        merged = merge_request_outputs(merge_request_outputs(made[0], made[1], kind), made[2], kind)
        assert [(out.index, out.text) for out in merged.outputs] == [(0, "and"), (1, text)]
        assert not merged.finished


def test_case_60_final_only_waits_for_all_sequences(session: Start) -> None:
    run = session(n=3, seed=7, output_kind=FINAL_ONLY)
    assert run.feed([7], FinishReason.LENGTH, child=2) == []
    assert run.feed([8, 9], FinishReason.LENGTH, child=0) == []
    (output,) = run.feed([2], FinishReason.STOP, child=1)
    assert output.finished
    assert [out.index for out in output.outputs] == [0, 1, 2]
    assert [out.finish_reason for out in output.outputs] == ["length", "stop", "length"]
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == 4


def test_b08_streamed_sequences_keep_their_index(session: Start) -> None:
    run = session(n=2)
    (first,) = run.feed([7], FinishReason.LENGTH, child=1)
    assert [out.index for out in first.outputs] == [1]
    assert first.outputs[0].finished()
    assert not first.finished
    (second,) = run.feed([8], FinishReason.LENGTH, child=0)
    assert second.finished


def test_logprobs(session: Start) -> None:
    run = session(logprobs=2, output_kind=CUMULATIVE)
    hello, world = run.text("hello") + run.text(" world")
    run.feed([hello], new_logprobs=[TokenLogprobs([hello, 9, hello], [-0.5, -0.1, -0.5], 2)])
    (output,) = run.feed(
        [world], new_logprobs=[TokenLogprobs([world, world, 9], [-1.5, -1.5, -2], 1)]
    )
    completion = output.outputs[0]
    assert completion.cumulative_logprob == -2.0
    assert completion.logprobs is not None
    first, second = completion.logprobs
    assert list(first) == [hello, 9]
    assert (first[hello].logprob, first[hello].rank, first[hello].decoded_token) == (
        -0.5,
        2,
        "hello",
    )
    assert first[9].rank == 1
    assert (second[world].rank, second[9].rank) == (1, 2)
    assert "".join(entry.decoded_token or "" for entry in (first[hello], second[world])) == (
        completion.text
    )


def test_b23_logprobs_of_ids_that_read_alike_are_kept_apart(session: Start) -> None:
    run = session(logprobs=3)
    ids = run.text("家")
    made = []
    for i, token_id in enumerate(ids):
        others = [x for x in ids if x != token_id]
        position = TokenLogprobs([token_id, *others], [-1.0 - i, -5.0, -6.0], 1)
        made += run.feed([token_id], new_logprobs=[position])
    entries = [output.outputs[0].logprobs for output in made]
    assert all(entry is not None and len(entry[0]) == 3 for entry in entries)
    chosen = [entry[0][i].decoded_token for entry, i in zip(entries, ids, strict=True) if entry]
    assert chosen == ["", "", "家"]


def test_b24_zero_logprobs_is_the_chosen_token(session: Start) -> None:
    run = session(logprobs=0)
    (output,) = run.feed([7], new_logprobs=[TokenLogprobs([7], [-0.25], 4)])
    assert output.outputs[0].logprobs is not None
    assert list(output.outputs[0].logprobs[0]) == [7]


def test_end_token_has_its_name_in_logprobs(session: Start) -> None:
    run = session(logprobs=0)
    (output,) = run.feed([2], FinishReason.STOP, new_logprobs=[TokenLogprobs([2], [-0.25], 1)])
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][2].decoded_token == "<|im_end|>"


def test_case_54_prompt_logprobs(session: Start) -> None:
    prompt = [10, 11, 12, 13, 14]
    positions = [TokenLogprobs([i, 99], [-1.0, -0.5], 2) for i in prompt[1:]]
    run = session(prompt, prompt_logprobs=1)
    (first,) = run.feed([7], new_prompt_logprobs=positions)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [list(entry or {}) for entry in first.prompt_logprobs[1:]] == [
        [i, 99] for i in prompt[1:]
    ]
    (second,) = run.feed([8])
    assert second.prompt_logprobs is None  # DELTA: told once
    run = session(prompt, prompt_logprobs=1, output_kind=CUMULATIVE)
    run.feed([7], new_prompt_logprobs=positions)
    assert run.feed([8])[0].prompt_logprobs is not None


def test_prompt_logprobs_read_like_the_prompt(session: Start) -> None:
    run = session("hello 家", prompt_logprobs=0)
    ids = run.request.prompt_token_ids
    (output,) = run.feed([7], new_prompt_logprobs=[TokenLogprobs([i], [-1.0], 1) for i in ids[1:]])
    assert output.prompt_logprobs is not None
    read = [
        (entry or {})[token_id].decoded_token or ""
        for entry, token_id in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    assert "".join(read) == " 家"


def test_metrics(session: Start) -> None:
    run = session()
    run.now = 101.0
    run.feed([7])
    run.now = 103.0
    (output,) = run.feed([8, 9], num_preemptions=2)
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.first_token_ts, metrics.last_token_ts) == (100, 101, 103)
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (3, 2)


def test_abort_by_either_name(session: Start) -> None:
    run = session(n=2, stop=["STOP"])
    run.feed(run.text("ST"), child=0)
    done = run.outputs.abort_requests(["r", "unknown"])
    assert done.reqs_to_abort == run.core_ids
    assert [out.outputs[0].finish_reason for out in done.request_outputs] == ["abort", "abort"]
    assert done.request_outputs[0].outputs[0].text == "ST"
    assert [out.finished for out in done.request_outputs] == [False, True]
    assert run.feed([7]) == []
    assert run.outputs.num_unfinished_requests == 0
    run = session()
    assert run.outputs.abort_requests(run.core_ids).reqs_to_abort == run.core_ids


def test_two_requests_may_have_the_same_name(make_inputs: Make, byte_level: Tokenizer) -> None:
    first = make_inputs().process("r", "hello", SamplingParams())
    inputs = make_inputs()
    inputs._id_source = lambda: "xyz"
    second = inputs.process("r", "hello", SamplingParams())
    outputs = OutputProcessor(byte_level)
    outputs.add_request(first)
    outputs.add_request(second)
    assert outputs.abort_requests(["r"]).reqs_to_abort == ["r-abc", "r-xyz"]


def test_news_without_tokens_make_no_output(session: Start) -> None:
    run = session()
    assert run.feed([]) == []
    run.feed([7])
    assert run.feed([]) == []
    assert run.feed([], FinishReason.ABORT)[0].finished


def test_without_text(session: Start, make_inputs: Make) -> None:
    run = session(detokenize=False)
    (output,) = run.feed([7, 8], FinishReason.LENGTH)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [7, 8])
    inputs = make_inputs(None)
    outputs = OutputProcessor(None)
    request = inputs.process("r", [1, 2], SamplingParams(logprobs=0))
    outputs.add_request(request)
    news = EngineCoreOutput(
        request_id="r-abc", new_token_ids=[5], new_logprobs=[TokenLogprobs([5], [-1.0], 1)]
    )
    (made,) = outputs.process_outputs([news]).request_outputs
    assert made.outputs[0].logprobs is not None
    assert made.outputs[0].logprobs[0][5].decoded_token is None


def test_outputs_given_out_do_not_change_later(session: Start) -> None:
    run = session(output_kind=CUMULATIVE, logprobs=0)
    (first,) = run.feed([7], new_logprobs=[TokenLogprobs([7], [-1.0], 1)])
    run.feed([8], new_logprobs=[TokenLogprobs([8], [-1.0], 1)])
    assert first.outputs[0].token_ids == [7]
    assert first.outputs[0].logprobs is not None
    assert len(first.outputs[0].logprobs) == 1
    assert first.metrics is not None
    assert first.metrics.num_generation_tokens == 1
