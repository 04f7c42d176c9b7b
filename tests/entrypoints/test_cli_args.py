"""Flags: sizes, spellings, and what becomes of them."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.errors import UsageError
from twostep.contracts.sampling import SamplingParams
from twostep.entrypoints.catalogue import CATALOGUE, DefaultSampling
from twostep.entrypoints.cli.args import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    options_for_one,
    sampling_params,
    size,
    utf8,
)
from twostep.entrypoints.resolve import ResolvedModel


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4k", 4000),
        ("8K", 8192),
        ("25.6k", 25600),
        ("1.5M", 1572864),
        ("2g", 2 * 10**9),
        ("1G", 2**30),
        ("2GiB", 2**31),
        ("1T", 2**40),
    ],
)
def test_size(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "4x", "-1", "1.5", "k", "1e3", "4 k", "٤", "1.0001k", "2GB"])
def test_size_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


def parser() -> Parser:
    made = Parser("twostep test", "[WORDS]", "")
    made.add_argument("words", nargs="*")
    add_sampling_flags(made, max_tokens="16")
    add_engine_flags(made)
    return made


def test_dashes_and_underscores() -> None:
    args = parser().parse(
        ["--max_model_len=4K", "--no_enable_prefix_caching", "--max-num-seqs", "8"]
    )
    assert args.max_model_len == 4096
    assert args.enable_prefix_caching is False
    assert args.max_num_seqs == 8


def test_values_keep_their_underscores() -> None:
    args = parser().parse(["--quantization", "q8_0", "--stop=a_b", "some_word"])
    assert (args.quantization, args.stop, args.words) == ("q8_0", ["a_b"], ["some_word"])


def test_words_after_two_dashes_are_no_flags() -> None:
    assert parser().parse(["--", "--not_a_flag"]).words == ["--not_a_flag"]
    assert parser().parse(["--looks like a flag"]).words == ["--looks like a flag"]


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(UsageError, match="unknown flag --max-tok; did you mean --max-tokens"):
        parser().parse(["--max-tok", "3"])


FILE = ResolvedModel(name="m.gguf", path=Path("m.gguf"), format="gguf")


def test_defaults_of_the_engine() -> None:
    options = engine_options(parser().parse([]))
    assert options["enable_prefix_caching"] is True
    assert options["async_scheduling"] is True
    assert options["max_model_len"] is None
    assert options["enforce_eager"] is False
    assert engine_options(parser().parse(["--enforce-eager"]))["enforce_eager"] is True
    assert "chat_template" not in options


def test_every_engine_option_is_one_of_llm() -> None:
    llm = pytest.importorskip("twostep.entrypoints.llm", exc_type=ImportError)
    taken = inspect.signature(llm.LLM.__init__).parameters
    assert set(engine_options(parser().parse([]))) | {"chat_template", "progress"} <= set(taken)


def test_chat_template_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages }}")
    options = engine_options(parser().parse(["--chat-template", str(path)]))
    assert options["chat_template"] == "{{ messages }}"
    with pytest.raises(UsageError, match="cannot read --chat-template"):
        engine_options(parser().parse(["--chat-template", str(tmp_path / "none")]))


def test_small_models_answer_a_person_exactly_unless_told_otherwise() -> None:
    """Their answers change with int8 activations: the capital of France is then a monument.

    A server, which was slow by that once, does what ``LLM`` does.
    """
    small = ResolvedModel(name="m", path=Path("m.gguf"), format="gguf", entry=CATALOGUE[0])
    assert options_for_one(parser().parse([]), FILE)["linear_precision"] == "auto"
    assert options_for_one(parser().parse([]), small)["linear_precision"] == "bf16"
    assert engine_options(parser().parse([]))["linear_precision"] == "auto"
    told = parser().parse(["--linear-precision", "int8"])
    assert options_for_one(told, small)["linear_precision"] == "int8"


def params(*argv: str, **default: Any) -> SamplingParams:
    recommended = DefaultSampling(**{"temperature": 0.3, "top_p": 0.9, "top_k": 40, **default})
    return sampling_params(parser().parse(argv), recommended, 16)


def test_sampling_defaults_are_the_models() -> None:
    found = params()
    assert (found.temperature, found.top_p, found.top_k) == (0.3, 0.9, 40)
    assert found.max_tokens == 16
    assert found.seed is None
    assert found.stop is None


def test_sampling_flags_win() -> None:
    found = params(
        *("--temperature", "0", "--top-k=-1", "--max-tokens", "1k", "--seed", "7"),
        *("--stop", "a", "--stop", "b", "--ignore-eos", "--min-p", "0.1"),
        *("--repetition-penalty", "1.1"),
    )
    assert (found.temperature, found.top_p, found.top_k) == (0.0, 0.9, -1)
    assert (found.max_tokens, found.seed, found.stop) == (1000, 7, ["a", "b"])
    assert (found.ignore_eos, found.min_p, found.repetition_penalty) == (True, 0.1, 1.1)


def test_text_must_be_utf8() -> None:
    assert utf8("grün 🦊") == "grün 🦊"
    with pytest.raises(argparse.ArgumentTypeError, match="not valid UTF-8"):
        utf8("broken \udce4")
