"""Bodies to structs, and the words for what is wrong with them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from twostep.contracts.errors import EngineDeadError, InvalidRequestError
from twostep.server.decode import decode_body
from twostep.server.errors import ApiError, from_exception, is_ours, one_line, scrub, shown


class Inner(msgspec.Struct, kw_only=True):
    count: int
    name: str | None = None


class Outer(msgspec.Struct, kw_only=True):
    inners: list[Inner]
    share: float | None = None
    map: dict[str, float] | None = None
    any: Any = None


def decoded(body: str) -> Outer:
    return decode_body(body.encode(), Outer)


def test_integers_of_all_spellings() -> None:
    assert decoded('{"inners": [{"count": 5.0}], "share": 2}').inners[0].count == 5
    assert decoded('{"inners": [{"count": -0.0}]}').inners[0].count == 0
    document = decoded('{"inners": [{"count": 5.0}], "share": 0.5, "any": {"a": [1.0, 1.5]}}')
    assert (document.share, document.any) == (0.5, {"a": [1, 1.5]})


@pytest.mark.parametrize(
    ("body", "code", "param", "words"),
    [
        ("{}", "missing_required_parameter", "inners", "inners is required"),
        ('{"inners": [{}]}', "missing_required_parameter", "inners[0].count", "required"),
        ('{"inners": null}', "missing_required_parameter", "inners", "required"),
        ('{"inners": 1}', "invalid_type", "inners", "inners is an integer; it must be a list"),
        ('{"inners": [{"count": "1"}]}', "invalid_type", "inners[0].count", "is a string"),
        ('{"inners": [{"count": 1.5}]}', "invalid_type", "inners[0].count", "is a number"),
        ('{"inners": [{"count": true}]}', "invalid_type", "inners[0].count", "true or false"),
        ('{"inners": [], "share": "x"}', "invalid_type", "share", "must be a number"),
        ('{"inners": [], "map": {"a": "x"}}', "invalid_type", "map[...]", "must be a number"),
        ('{"inners": [], "share": 1e999}', "invalid_value", "share", "out of range"),
        ("5", "invalid_type", None, "the request body is an integer; it must be an object"),
        ('{"inners": [}', "invalid_json", None, "not valid JSON"),
        ("", "invalid_json", None, "not valid JSON"),
        ('{"any": ' + "[" * 5000, "invalid_json", None, "nests too deeply"),
    ],
)
def test_what_is_wrong(body: str, code: str, param: str | None, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        decoded(body)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert words in caught.value.message


def test_messages_tell_nothing_of_the_machine() -> None:
    text = "cannot open /srv/models/a.gguf near 0x7f0012345678, in org/model at 3/4"
    assert scrub(text) == "cannot open <path> near 0x…, in org/model at 3/4"
    error = from_exception(InvalidRequestError("no /etc/passwd/x here", "prompt"))
    assert "<path>" in error.message


def test_messages_are_one_short_valid_line() -> None:
    assert one_line("a\n b\ud800") == "a b?"
    assert len(one_line("x" * 10_000)) < 2000
    assert len(shown("x" * 1000)) == 200
    assert shown(10**5000) == "a huge number"


def test_what_is_whose_fault() -> None:
    assert not is_ours(InvalidRequestError("no"))
    assert not is_ours(EngineDeadError("dead"))
    assert is_ours(KeyError("x"))
    assert from_exception(KeyError("/srv/x/y")).message.find("srv") < 0
    assert from_exception(InvalidRequestError("x", "structured_outputs")).code == "invalid_schema"
    assert from_exception(EngineDeadError("x")).status == 500
