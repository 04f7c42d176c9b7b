"""Runs chat templates as data: no way out of the sandbox, no endless loop, no endless text.

A template comes with a model file, so it is as trustworthy as a download. Jinja's sandbox keeps
it from Python's internals; ``template_budget`` bounds what it spends. Jinja has hooks for calls,
filters and arithmetic; loops, macros, ``~`` and literals have none, so they get a call of an
internal filter when the template is compiled.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostep.config.limits import Limits
from twostep.frontend.template_budget import Budget, BudgetError

_FILTERS = """
    abs batch capitalize count d default dictsort e escape first float groupby indent int items
    join last length list lower map max min reject rejectattr replace reverse round safe select
    selectattr slice sort string sum title trim unique upper wordcount
"""
"""Those of Jinja's filters whose work can be bounded, which leaves out ``format`` and its like."""

_DATE_PATTERN = re.compile(r"(?:[^%]|%[-#]?[A-Za-z%]){0,256}\Z")
_TURN, _JOINED, _MADE = "_turn", "_joined", "_made"


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text; shown as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment with Hugging Face's conventions and a budget for each rendering.

    Safe to use from several threads.
    """

    intercepted_binops = frozenset(["+", "-", "*", "**", "%", "/", "//"])

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._written,
            optimized=False,  # folding constants would run filters outside a rendering
            cache_size=0,
        )
        self._limits = limits
        self._clock = clock
        self._local = threading.local()
        self.filters = {name: self._guarded(name) for name in _FILTERS.split()}
        self.filters |= {"tojson": self._tojson}
        self.filters |= {_TURN: self._turn, _JOINED: self._joined, _MADE: self._made}
        self.globals = {
            "range": self._range,
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": _raise_exception,
        }

    def compile_template(self, source: str) -> Template:
        """Parse and compile; raises jinja2.TemplateSyntaxError."""
        tree = self._parse(source, None, None)
        code = self._compile(self._generate(_instrument(tree), None, None), "<chat template>")
        return Template.from_code(self, code, dict(self.globals))

    def run(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render within the limits. Raises TemplateError or whatever the template provokes."""
        budget = self._local.budget = Budget(self._limits, self._clock)
        parts: list[str] = []
        size = 0
        for part in template.root_render_func(template.new_context(dict(variables))):
            size += len(part.encode("utf-8", "surrogatepass"))
            budget.check_size(size)
            parts.append(part)
        return "".join(parts)

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._local.budget
        return budget

    # Jinja's hooks --------------------------------------------------------------------------

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call written in the template."""
        self._budget.spend()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            args = self._budget.check_method(obj.__name__, owner, args, kwargs)
        return self._budget.checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operation written in the template."""
        self._budget.spend()
        self._budget.check_binop(operator, left, right)
        return self._budget.checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` in the template: refused, its widths are unbounded."""
        if super().wrap_str_format(value) is None:
            return None

        def refuse(*args: Any, **kwargs: Any) -> str:
            raise BudgetError(f"the template calls str.{value.__name__}, which is not allowed")

        return refuse

    def _guarded(self, name: str) -> Callable[..., Any]:
        """One of Jinja's filters, paid for and measured; keeps its pass-argument mark."""
        function = self.filters[name]
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget
            budget.spend()
            value = budget.check_filter(name, args[skip], args[skip + 1 :], kwargs)
            return budget.checked(function(*args[:skip], value, *args[skip + 1 :], **kwargs))

        if skip:
            # Jinja marks functions with an attribute, which function types do not declare.
            guarded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return guarded

    @pass_context
    def _written(self, context: Context, value: Any) -> Any:
        """Every ``{{ value }}``, on its way into the text."""
        text = value if isinstance(value, str | Undefined) else str(self._budget.checked(value))
        if isinstance(text, str):
            self._budget.write(len(text))
        return text

    # What compilation puts in -----------------------------------------------------------------

    def _turn(self, static_size: int) -> None:
        """At every turn of a loop or macro whose own fixed text has this many characters."""
        self._budget.spend()
        self._budget.write(static_size)

    def _joined(self, values: Iterable[Any]) -> str:
        """The operator ``~``."""
        budget = self._budget
        budget.spend()
        text: str = budget.checked("".join([str(budget.checked(value)) for value in values]))
        return text

    def _made(self, value: Any) -> Any:
        """A list, tuple or dict written in the template."""
        return self._budget.checked(value)

    # Hugging Face's names ---------------------------------------------------------------------

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        if len(numbers) > self._limits.max_template_operations:
            raise BudgetError("the template counts further than allowed")
        return numbers

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without HTML escapes, characters as they are."""
        budget = self._budget
        budget.spend()
        value = budget.check_filter("indent", value, (indent,), {})
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        budget.check_size(len(text))
        return text


def check_date_pattern(pattern: str) -> str:
    """``pattern`` for strftime, without widths (they are unbounded)."""
    if not _DATE_PATTERN.match(pattern):
        raise BudgetError("the template writes a date in a pattern that is not allowed")
    return pattern


def _raise_exception(message: Any = "") -> None:
    raise TemplateError(str(message))


def _instrument(node: Any) -> Any:
    """The same tree with a price on loops, macros, ``~`` and literals, from the leaves up."""
    for field, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(node, field, _instrument(value))
        elif isinstance(value, list):
            items = [_instrument(v) if isinstance(v, nodes.Node) else v for v in value]
            setattr(node, field, items)
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        tick = _filter(nodes.Const(_static_size(node)), _TURN)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(nodes.Not(_filter(nodes.Const(0), _TURN)), node.test)
    elif isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes), _JOINED).set_lineno(node.lineno)
    elif isinstance(node, nodes.List | nodes.Dict) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    ):
        return _filter(node, _MADE).set_lineno(node.lineno)
    return node


def _static_size(node: nodes.Node) -> int:
    """Characters of fixed text in one turn of ``node``, inner loops left to themselves."""
    size = 0
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.TemplateData):
            size += len(child.data)
        elif not isinstance(child, nodes.For | nodes.Macro | nodes.CallBlock):
            size += _static_size(child)
    return size


def _filter(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)
