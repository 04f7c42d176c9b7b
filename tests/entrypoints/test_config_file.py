"""``twostep serve --config FILE``: the same flags, from a file; the command line wins."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import serve
from twostep.entrypoints.cli.config_file import parse_with_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "twostep.yaml"


def parse(config: Path, text: str, *argv: str) -> argparse.Namespace:
    config.write_text(text)
    return parse_with_config(serve.make_parser, [*argv, "--config", str(config)])


FULL = """\
# as for vLLM
model: gemma3-270m
port: 8123
host: "0.0.0.0"
max-model-len: 4k
max_num_seqs: 16
watermark: 0.25
served-model-name: [a, b/c]
api-key:
  - one
  - two
enable-prefix-caching: false
enforce-eager: true
enable-log-requests: false
override-generation-config:
  temperature: 0.5
allowed-origins: https://a.example
"""


def test_every_kind_of_flag(config: Path) -> None:
    args = parse(config, FULL)
    assert serve.model_name(args) == "gemma3-270m"
    assert (args.port, args.host, args.max_model_len, args.max_num_seqs) == (
        8123,
        "0.0.0.0",
        4000,
        16,
    )
    assert args.watermark == 0.25
    assert args.served_model_name == ["a", "b/c"]
    assert args.api_key == [["one"], ["two"]]
    assert args.enable_prefix_caching is False
    assert args.enforce_eager is True
    assert args.enable_log_requests is False
    assert args.override_generation_config == {"temperature": 0.5}
    assert args.allowed_origins == ["https://a.example"]
    assert args.enable_chunked_prefill is True, "what nobody sets has its default"
    assert serve.server_settings(args, "x").api_keys == ("one", "two")


def test_the_command_line_wins(config: Path) -> None:
    argv = ["--port=1", "--api-key", "three", "--enable-prefix-caching", "--max_model_len", "7"]
    args = parse(config, FULL, "smollm2-135m", *argv)
    assert serve.model_name(args) == "smollm2-135m"
    assert (args.port, args.max_model_len) == (1, 7)
    assert args.api_key == [["three"]], "keys of the file are not kept beside it"
    assert args.enable_prefix_caching is True
    assert args.max_num_seqs == 16
    # Even if it says what is the default anyway.
    assert parse(config, "port: 1", "--port", "8000").port == 8000


def test_an_empty_file(config: Path) -> None:
    assert vars(parse(config, "# nothing\n")) == {
        **vars(serve.make_parser().parse([])),
        "config": str(config),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "unknown flag --prot; did you mean --port?"),
        ("port: 99999", "is not a port"),
        ("port:", "port has no value"),
        ("port: [1, 2]", "port takes one value, not a list"),
        ("port: yes", "port takes a value, not true"),
        ("enforce-eager: 1", "enforce-eager must be true or false"),
        ("ui: 'no'", "ui must be true or false"),
        ("max-num-seqs: 2\nmax_num_seqs: 3", "sets max-num-seqs twice"),
        ("config: other.yaml", "may not set config"),
        ("help: true", "may not set help"),
        ("- port: 1", "`flag: value`"),
        ("port: {", "is not YAML"),
        ("port: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("\x00", "is not YAML"),
        ("log-format: xml", "invalid choice"),
        ("override-generation-config: [1]", "takes one value"),
        ("words: x", "unknown flag --words"),
        ("1: 2", "unknown flag --1"),
    ],
)
def test_mistakes_name_the_file(config: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(config, text)
    assert words in str(caught.value)
    assert str(config) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read --config"):
        serve.run(["--config", str(tmp_path / "no-such.yaml")])


def test_flags_without_a_file_load_no_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    loaded: Any = dict(sys.modules)
    loaded["yaml"] = None  # importing it would raise
    monkeypatch.setattr(sys, "modules", loaded)
    assert parse_with_config(serve.make_parser, ["--port", "5"]).port == 5
