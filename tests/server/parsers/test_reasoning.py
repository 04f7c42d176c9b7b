"""Reasoning told apart from the answer (B57)."""

from __future__ import annotations

import pytest
from server.parsers.parse import parse, summary

from twostep.server.parsers.events import Reasoning, Text
from twostep.server.parsers.formats import choose_formats


@pytest.mark.parametrize("starts_in_reasoning", [False, True])
@pytest.mark.parametrize("tag", ["", "<think>", "<think>\n", "\n<think>"])
def test_the_start_tag_may_be_in_the_prompt_or_in_both(tag: str, starts_in_reasoning: bool) -> None:
    if not tag and not starts_in_reasoning:
        return  # no tag anywhere: see test_a_tag_nobody_opened
    events = parse(
        [tag + "I think.\n</think>\n\nYes."],
        reasoning="think",
        starts_in_reasoning=starts_in_reasoning,
    )
    assert events == [Reasoning("I think."), Text("Yes.")]


def test_a_tag_nobody_opened_is_dropped() -> None:
    assert summary(parse(["I think.</think> Yes."], reasoning="think")) == (
        "",
        "I think. Yes.",
        [],
    )


@pytest.mark.parametrize("empty", ["<think></think>", "<think>\n\n</think>\n\n"])
def test_an_empty_block_is_nothing(empty: str) -> None:
    assert parse([empty + "Hi"], reasoning="think") == [Text("Hi")]


def test_cut_before_the_end_tag_all_is_reasoning() -> None:
    assert parse(["hm hm </thi"], reasoning="think", starts_in_reasoning=True) == [
        Reasoning("hm hm </thi")
    ]


def test_a_second_end_tag_is_no_text() -> None:
    events = parse(["a</think>b</think>c"], reasoning="think", starts_in_reasoning=True)
    assert summary(events) == ("a", "bc", [])


def test_a_call_ends_a_block_that_was_not_closed() -> None:
    text = '<think>so I call\n<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    assert summary(parse([text], "hermes", reasoning="think")) == (
        "so I call",
        "",
        [("ping", "{}")],
    )
    assert summary(parse([text + "\nDone"], "hermes", reasoning="think"))[1] == "Done"


def test_reasoning_streams() -> None:
    formats = choose_formats(None, reasoning_parser="think")
    parser = formats.make([], "auto", starts_in_reasoning=True, call_ids=lambda: "")
    assert parser.feed("Well, ") == [Reasoning("Well,")]
    assert parser.feed("a <b> </th") == [Reasoning(" a <b>")]
    assert parser.feed("ink>") == []
    assert parser.feed("Yes") == [Text("Yes")]


def test_without_a_format_tags_are_text() -> None:
    assert parse(["<think>x</think>"]) == [Text("<think>x</think>")]


def test_whether_the_prompt_opens_a_block() -> None:
    think = choose_formats("{{ '<think>' }}</think>")
    assert think.opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not think.opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not think.opens_reasoning("<|im_start|>assistant\n")
    assert not choose_formats(None).opens_reasoning("<think>")
    assert choose_formats(None, reasoning_parser="deepseek_r1").opens_reasoning("Assistant:")
