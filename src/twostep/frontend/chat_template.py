"""A model's chat template: messages to the text the model was trained on."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError, UnsupportedModelError

if TYPE_CHECKING:
    from jinja2.environment import Template

    from twostep.frontend.template_sandbox import TemplateSandbox

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"}
)
"""Variables a request's own template arguments may not replace."""


class ChatTemplate:
    """A Jinja template, compiled on first use and run in a sandbox with a budget."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """``special_tokens`` ({"bos_token": "<s>", ...}) are variables of the template.

        ``now`` gives the date that some templates write into the prompt.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or Limits()
        self._clock = clock
        self._now = now
        self._compiled: tuple[TemplateSandbox, Template] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text.

        ``continue_final_message`` leaves the last message open, so that the model goes on with it.
        Raises InvalidRequestError with the template's own message when it refuses the
        conversation, UnsupportedModelError when the template itself does not compile.
        """
        extra = dict(template_kwargs or {})
        if taken := sorted(_RESERVED.intersection(extra) | set(self._special_tokens) & set(extra)):
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {taken[0]!r}; it is filled in by the engine",
                "chat_template_kwargs",
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one",
                "continue_final_message",
            )
        variables = {
            **self._special_tokens,
            **extra,
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": self._strftime_now,
        }
        text = self._run(variables)
        if continue_final_message:
            return _cut_behind(text, messages[-1].get("content"))
        return text

    def _run(self, variables: Mapping[str, Any]) -> str:
        sandbox, template = self._compile()
        try:
            return sandbox.run(template, variables)
        except RecursionError:
            message = "the template nests too deeply"
        except Exception as error:  # whatever a template provokes is this conversation's fault
            message = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise InvalidRequestError(
            f"the model's chat template refuses this conversation: {message[:500]}", "messages"
        )

    def _strftime_now(self, pattern: str) -> str:
        from twostep.frontend.template_sandbox import check_date_pattern

        return self._now().strftime(check_date_pattern(pattern))

    def _compile(self) -> tuple[TemplateSandbox, Template]:
        if self._compiled is None:
            from jinja2 import TemplateSyntaxError

            from twostep.frontend.template_sandbox import TemplateSandbox

            sandbox = TemplateSandbox(self._limits, self._clock)
            try:
                self._compiled = sandbox, sandbox.compile_template(self.source)
            except TemplateSyntaxError as error:
                raise UnsupportedModelError(
                    f"the chat template cannot be compiled (line {error.lineno}: {error.message}); "
                    "give another one with chat_template"
                ) from None
            except (RecursionError, MemoryError, SyntaxError):
                raise UnsupportedModelError(
                    "the chat template nests too deeply to be compiled; "
                    "give another one with chat_template"
                ) from None
        return self._compiled


def _cut_behind(text: str, content: Any) -> str:
    """``text`` up to the end of the last message's content."""
    last = content.strip() if isinstance(content, str) else ""
    at = text.rfind(last) if last else -1
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message needs a last message whose text the chat template keeps",
            "continue_final_message",
        )
    return text[: at + len(last)]
