"""A conversation as prompt token ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.frontend.chat_template import ChatTemplate
from twostep.frontend.tokenizer import Tokenizer, check_unicode

_PRIVATE_USE = range(0xE000, 0xF900)


class ChatPrompter:
    """Turns messages into prompt ids with one model's chat template.

    Special tokens spelled in a message or a document are plain words, not control tokens: nobody
    can end a turn or open a system message by writing the model's markers.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        limits: Limits | None = None,
    ) -> None:
        """``template`` replaces the model's own."""
        self._tokenizer = tokenizer
        self._limits = limits or Limits()
        source = tokenizer.chat_template
        if template is None and source is not None:
            template = ChatTemplate(source, tokenizer.special.by_name, limits=self._limits)
        self._template = template

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = False,
    ) -> tuple[str, list[int]]:
        """The prompt's text and its ids, BOS exactly once.

        ``documents`` are the texts that the answer is to rest on, in whatever form the template
        knows ({"title": ..., "text": ...}, mostly).
        ``parse_special`` lets special tokens in messages be what they are in templates.
        Raises InvalidRequestError for a conversation that cannot be rendered.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template (it is a base model): pass chat_template, "
                "or complete text instead of chatting",
                "messages",
            )
        handles_developer = "developer" in self._template.source
        clean = normalize_messages(messages, self._limits, keep_developer=handles_developer)
        texts = self._checked_documents(documents)
        marker = None if parse_special else self._protect([*clean, *texts])
        render = functools.partial(
            self._template.render,
            tools=tools or None,
            documents=texts or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        try:
            text = render(clean)
        except InvalidRequestError:
            if all(message["content"] is not None for message in clean):
                raise
            # Null is what clients send beside tool calls. Some templates ask for it, others join
            # it to text, which only an empty text can be.
            text = render([{**message, "content": message["content"] or ""} for message in clean])
        if marker is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            return text, self._tokenizer.with_bos(ids)
        # What is still a special token was written by the template; the marked ones are words.
        segments: list[str | int] = [
            part.replace(marker, "") if isinstance(part, str) else part
            for part in self._tokenizer.split_special(text)
        ]
        ids = self._tokenizer.encode_segments(segments)
        return text.replace(marker, ""), self._tokenizer.with_bos(ids)

    def _checked_documents(
        self, documents: Sequence[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Copies. Refuses them where they would be left out: that answer would rest on nothing."""
        if not documents:
            return []
        assert self._template is not None
        if "documents" not in self._template.source:
            raise InvalidRequestError(
                "this model's chat template has no place for documents; write them into a message",
                "documents",
                "unsupported_feature",
            )
        if len(documents) > self._limits.max_messages:
            raise InvalidRequestError(
                f"{len(documents)} documents; at most {self._limits.max_messages} (max_messages) "
                "are allowed",
                "documents",
            )
        check_unicode(_all_text(documents), "documents")
        return [dict(document) for document in documents]

    def _protect(self, entries: list[dict[str, Any]]) -> str | None:
        """Break special tokens inside entries with a marker; the marker, or None if none occur."""
        texts = _all_text(entries)
        split = self._tokenizer.split_special
        if not any(isinstance(part, int) for part in split(texts)):
            return None
        marker = next(chr(code) for code in _PRIVATE_USE if chr(code) not in texts)
        table = self._tokenizer.token_bytes

        def broken(text: str) -> str:
            return "".join(
                part if isinstance(part, str) else marker.join(table[part].decode("utf-8"))
                for part in split(text)
            )

        for entry in entries:
            for key, value in entry.items():
                entry[key] = _map_text(value, broken)
        return marker


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], limits: Limits, *, keep_developer: bool = False
) -> list[dict[str, Any]]:
    """Messages as templates expect them, copied.

    Text parts are joined, empty ``tool_calls`` dropped, tool-call arguments parsed, a missing
    content of anything but a tool call is empty text, ``developer`` is ``system`` unless kept.
    """
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message", "messages")
    if len(messages) > limits.max_messages:
        raise InvalidRequestError(
            f"{len(messages)} messages; at most {limits.max_messages} (max_messages) are allowed",
            "messages",
        )
    return [_normalize(message, i, keep_developer) for i, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], index: int, keep_developer: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f'{where} needs a role: {{"role": "user", "content": "..."}}', "messages"
        )
    clean = dict(message)
    if clean["role"] == "developer" and not keep_developer:
        clean["role"] = "system"
    if not clean.get("tool_calls"):
        clean.pop("tool_calls", None)
    else:
        clean["tool_calls"] = [_parse_arguments(call, where) for call in clean["tool_calls"]]
    content = _content_text(clean.get("content"), where)
    if content is None and "tool_calls" not in clean:
        content = ""
    clean["content"] = content
    check_unicode(_all_text(clean), "messages")
    return clean


def _content_text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            if not (isinstance(part, Mapping) and part.get("type") in ("text", "refusal")):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise InvalidRequestError(
                    f"{where} has a part of type {kind!r}; this model reads text only", "messages"
                )
            texts.append(str(part.get("text", part.get("refusal", ""))))
        return "\n".join(texts)
    raise InvalidRequestError(
        f"{where}.content is {type(content).__name__}; give text or a list of text parts",
        "messages",
    )


def _parse_arguments(call: Any, where: str) -> Any:
    """A tool call whose ``function.arguments`` is an object, not JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}.tool_calls has an entry without function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise InvalidRequestError(
                f"{where}.tool_calls: arguments are not JSON ({error})", "messages"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _map_text(value: Any, function: Any) -> Any:
    """``value`` with ``function`` applied to every text in it (keys of objects stay)."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list | tuple):
        return [_map_text(item, function) for item in value]
    if isinstance(value, Mapping):
        return {key: _map_text(item, function) for key, item in value.items()}
    return value


def _all_text(value: Any) -> str:
    """All texts in ``value`` (keys of objects left out), one behind the other."""
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    _map_text(value, collect)
    return "\0".join(texts)
