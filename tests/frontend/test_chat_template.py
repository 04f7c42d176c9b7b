"""Chat templates: Hugging Face's conventions, and a sandbox that holds."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError, UnsupportedModelError
from twostep.frontend.chat_template import ChatTemplate

USER = [{"role": "user", "content": " hi there "}]


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] | trim }}", "<s>hi there"),
        ("{% for m in messages %}\n  {% if true %}\nx{% endif %}\n{% endfor %}\n", "x"),
        ("{% for m in [1,2,3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% for m in [1,2,3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ {'k': '<é>', 'a': [1, none]} | tojson }}", '{"k": "<é>", "a": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% if add_generation_prompt %}assistant:{% endif %}", "assistant:"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ undefined_thing }}{{ undefined_thing is defined }}", "False"),
        ("{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}"
         "{{ ns.n }}", "6"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ f(1) }}", "[a][1]"),
        ("{% for m in range(5) if m is even %}{{ m }}{{ loop.last }}{% endfor %}",
         "0False2False4True"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.length }}{% endfor %}", "a11"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'a,b'.split(',')[-1] }}{{ 'abc'[::-1] }}{{ 'x' * 3 }}{{ 7 // 2 }}{{ -7 % 3 }}",
         "bcbaxxx32"),
        ("{{ 'aXb'.replace('X', '-') }}{{ 'ab'|replace('b', 'c') }}{{ ', '.join(['p', 'q']) }}",
         "a-bacp, q"),
        ("{% set x %}in{{ 1 }}{% endset %}{{ x | upper }}", "IN1"),
        ("{{ ((1, 2), {'a': [1]}) }}", "((1, 2), {'a': [1]})"),
        ("{{ 'a' if messages|length > 1 else 'b' }}", "b"),
        ("{{ 'q\nr' | indent(2) }}{{ '7' | int + 1 }}{{ x | default('d') }}", "q\n  r8d"),
    ],
)  # fmt: skip
def test_conventions(source: str, text: str) -> None:
    assert render(source) == text


def test_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", now=lambda: datetime.datetime(2024, 7, 26)
    )
    assert template.render(USER) == "26 Jul 2024"


def test_template_arguments() -> None:
    source = "{{ enable_thinking }}{{ add_generation_prompt }}"
    options = {"template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    assert render(source, **options) == "FalseFalse"
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "raise_exception"):
        with pytest.raises(InvalidRequestError, match=f"may not set '{name}'"):
            render("x", template_kwargs={name: 1})


def test_continue_final_message() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</end>\n{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": "Sure, "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(source, messages, **options) == "<user>hi there</end>\n<assistant>Sure,"
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        render(source, messages, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="keeps"):
        render("x", messages, **options)


def test_b47_the_templates_own_message_reaches_the_user() -> None:
    source = "{{ raise_exception('Roles must alternate user/assistant') }}"
    with pytest.raises(InvalidRequestError, match="Roles must alternate") as caught:
        render(source)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content.nothing.more }}", "{{ 1 + 'a' }}", "{{ nothing() }}"]
)
def test_whatever_goes_wrong_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="refuses this conversation"):
        render(source)


def test_broken_template_names_the_line() -> None:
    with pytest.raises(UnsupportedModelError, match="line 2"):
        render("a\n{% if %}")
    with pytest.raises(UnsupportedModelError, match="center"):
        render("{{ 'a' | center(9) }}")
    nested = "{% if x %}" * 400 + "{% endif %}" * 400
    with pytest.raises(UnsupportedModelError):
        render(nested)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__'].mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '%s' % messages }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ [1] | map(attribute='__class__') | list }}{{ x.y.z }}",
    ],
)
def test_no_way_out(source: str) -> None:
    """Refused, or the sandbox answers "undefined", which reads as nothing."""
    try:
        text = render(source)
    except (InvalidRequestError, UnsupportedModelError):
        text = ""
    assert text == ""


BOMBS = [
    "{{ 'a' * 10**13 }}",
    "{{ [1] * 10**13 }}",
    "{{ 10 ** 10 ** 9 }}{{ 9 ** 999999999 }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.zfill(width=10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ 1.5 | round(10**9, 'floor') }}",
    "{{ 'a' | indent(10**9) }}",
    "{{ strftime_now('%999999999Y') }}",
    "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{{ ['x' * 10**5] * 10**5 }}",
    "{{ ('b' * 10**6).join(('a,' * 10**5).split(',')) }}",
    "{{ ('a,' * 10**5).split(',') | join('b' * 10**6) }}",
    "{{ range(10**5) | map('string') | map('replace', '1', 'x' * 10**6) | join }}",
    "{{ range(10**5) | map('string') | map('replace', '1', 'x' * 10**6) | list | length }}",
    "{% set x = namespace(s='ab') %}{% for i in range(99) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
    "{% set x = namespace(s='ab') %}{% for i in range(99) %}{% set x.s = x.s + x.s %}{% endfor %}",
    "{% set x = namespace(s=[1]) %}{% for i in range(99) %}{% set x.s = [x.s, x.s] %}{% endfor %}",
    "{% set x = namespace(s=(1,)) %}{% for i in range(99) %}{% set x.s = (x.s, x.s) %}{% endfor %}",
    "{% set x = namespace(s={}) %}{% for i in range(99) %}"
    "{% set x.s = {'a': x.s, 'b': x.s} %}{% endfor %}",
    "{% set x = namespace(s=[1]) %}{% for i in range(99) %}{% set x.s = x.s + x.s %}{% endfor %}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
    "{% for i in range(10**5) %}{% for j in range(10**5) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(10**5) %}" + "static " * 1000 + "{% endfor %}",
    "{% set x %}{% for i in range(10**5) %}" + "static " * 1000 + "{% endfor %}{% endset %}",
    "{% set a = 'a' * 10**6 %}{% set x %}{% for i in range(1000) %}{{ a }}{% endfor %}{% endset %}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ [[1]] | sum(start=[]) }}",
    "{{ 'abc'.translate({97: 'x' * 10**6}) }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_every_bomb_is_defused_by_counting(source: str) -> None:
    """The clock stands still: operations and sizes alone must end these renderings."""
    limits = Limits(max_template_operations=200_000)
    template = ChatTemplate(source, limits=limits, clock=lambda: 0.0)
    # In the template's own words: no operation was tried until memory or patience ran out.
    with pytest.raises(InvalidRequestError, match="conversation: the template "):
        template.render(USER)


def test_time_is_bounded_too() -> None:
    ticks = iter(range(10**6))
    template = ChatTemplate(
        "{% for i in range(100) %}{% endfor %}", clock=lambda: next(ticks) / 10.0
    )
    with pytest.raises(InvalidRequestError, match="longer than 1.0 s"):
        template.render(USER)


@pytest.mark.parametrize(("size", "fits"), [(99, True), (100, True), (101, False)])
def test_output_cap(size: int, fits: bool) -> None:
    template = ChatTemplate(
        "{{ messages[0].content }}", limits=Limits(max_template_output_bytes=100)
    )
    messages = [{"role": "user", "content": "a" * size}]
    if fits:
        assert template.render(messages) == "a" * size
    else:
        with pytest.raises(InvalidRequestError, match="more than 100 bytes"):
            template.render(messages)


def test_output_cap_counts_bytes() -> None:
    template = ChatTemplate(
        "{{ messages[0].content }}", limits=Limits(max_template_output_bytes=100)
    )
    with pytest.raises(InvalidRequestError, match="more than 100 bytes"):
        template.render([{"role": "user", "content": "é" * 60}])


def test_a_failed_rendering_leaves_nothing_behind() -> None:
    template = ChatTemplate("{% for i in range(messages[0].n) %}{% endfor %}ok")
    with pytest.raises(InvalidRequestError):
        template.render([{"role": "user", "n": 10**7}])
    assert template.render([{"role": "user", "n": 3}]) == "ok"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "x"}]
    ChatTemplate("{% set m = messages[0] %}{{ m.content }}").render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_a_long_conversation_fits() -> None:
    source = (
        "{% set ns = namespace(all=[]) %}"
        "{% for m in messages %}{% set ns.all = ns.all + [m] %}{% endfor %}"
        "{% for m in ns.all %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 40} for _ in range(300)]
    text = ChatTemplate(source, clock=lambda: 0.0).render(messages)
    assert text == ("<user>" + "word " * 40) * 300
