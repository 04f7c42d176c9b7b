"""Text to token ids and back."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from twostep.contracts.errors import InvalidRequestError
from twostep.frontend.added_tokens import AddedTokenMatcher
from twostep.frontend.token_bytes import TokenBytes

if TYPE_CHECKING:
    import tokenizers


class Encoder(Protocol):
    """Turns text into ids and adds nothing."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of ``text``. Special tokens spelled in it become their ids if ``parse_special``."""
        ...

    def serve_threads(self) -> None:
        """Threads will encode at the same time: from now on none may wait for another."""
        ...


LONG_TEXT_CHARS = 4096
"""A longer text is encoded without the interpreter lock: other threads go on meanwhile."""


class LibraryEncoder:
    """An encoder of the ``tokenizers`` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._plain: tokenizers.Tokenizer | None = None
        """Set by ``serve_threads``: the one for which special tokens are text."""

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of ``text``, nothing added. Safe to call from several threads."""
        if self._plain is not None:
            return _ids(self._tokenizer if parse_special else self._plain, text)
        with self._lock:  # the library keeps "special tokens are text" as a state of the tokenizer
            self._tokenizer.encode_special_tokens = not parse_special
            return _ids(self._tokenizer, text)

    def serve_threads(self) -> None:
        """From now on nobody waits for the lock: each way of reading has its own tokenizer."""
        with self._lock:
            if self._plain is None:
                plain = _twin_of(self._tokenizer)
                plain.encode_special_tokens = True
                self._tokenizer.encode_special_tokens = False
                self._plain = plain


def _twin_of(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokens, a state of its own, one vocabulary for both: no time, no memory.

    Only a file whose added tokens have ids that adding them again would not give is copied whole.
    """
    twin = type(library)(library.model)
    twin.normalizer, twin.pre_tokenizer = library.normalizer, library.pre_tokenizer
    added = sorted(library.get_added_tokens_decoder().items())
    for _, token in added:
        if token.special:
            twin.add_special_tokens([token])
        else:
            twin.add_tokens([token])
    if repr(sorted(twin.get_added_tokens_decoder().items())) != repr(added):
        return type(library).from_str(library.to_str())
    return twin


def _ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    if len(text) <= LONG_TEXT_CHARS:
        return library.encode(text, add_special_tokens=False).ids
    return library.encode_batch_fast([text], add_special_tokens=False)[0].ids


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The ids with a meaning of their own, and what goes around a text."""

    ids: frozenset[int] = frozenset()
    """What ``skip_special_tokens`` leaves out."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    extra_eos_token_ids: tuple[int, ...] = ()
    """Further ids that end a turn; they stop a generation like eos."""
    prefix_ids: tuple[int, ...] = ()
    """Put before every text (BOS, mostly)."""
    suffix_ids: tuple[int, ...] = ()
    """Put behind every text; empty for generating models."""
    by_name: Mapping[str, str] = msgspec.field(default_factory=dict)
    """{"bos_token": "<s>", ...}: what chat templates see."""
    strips_left: frozenset[int] = frozenset()
    """Special tokens that swallow white space before them."""
    strips_right: frozenset[int] = frozenset()


class Tokenizer:
    """A model's vocabulary: encode, decode, and the ids with a meaning.

    Decoding goes through the bytes of each token, so that a text decoded piece by piece
    (``detokenizer``) and one decoded at once are the same by construction.
    """

    def __init__(
        self,
        encoder: Encoder,
        token_bytes: TokenBytes,
        special: SpecialTokens,
        *,
        chat_template: str | None = None,
    ) -> None:
        self.special = special
        self.token_bytes = token_bytes
        self.chat_template = chat_template
        self._encoder = encoder
        self._special_by_text: dict[str, int] | None = None
        self._special_matcher: AddedTokenMatcher | None = None

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """From a directory in Hugging Face layout (``tokenizer.json`` and its companions).

        Raises ModelFileError (missing, corrupt) or UnsupportedModelError.
        """
        from twostep.frontend.tokenizer_files import load_tokenizer_dir

        return load_tokenizer_dir(Path(path))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the ``tokenizer.*`` keys of a GGUF file (other keys are ignored).

        Raises ModelFileError (missing or contradictory keys) or UnsupportedModelError.
        """
        from twostep.frontend.gguf_tokenizer import build_gguf_tokenizer

        return build_gguf_tokenizer(metadata)

    def serve_threads(self) -> None:
        """For servers: takes some time and memory, and then no thread waits for another's text."""
        self._encoder.serve_threads()

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model's embedding table may be longer."""
        return self.token_bytes.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Begin of text, if the vocabulary has one."""
        return self.special.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The first of the ids that end a generation."""
        return self.special.eos_token_id

    @property
    def extra_eos_token_ids(self) -> tuple[int, ...]:
        """Further ids that end a turn."""
        return self.special.extra_eos_token_ids

    def encode(
        self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True
    ) -> list[int]:
        """Ids of ``text``.

        ``add_special_tokens`` puts BOS first (if the model wants one) unless the text already
        begins with it. ``parse_special=False`` reads special tokens in the text as plain words.
        Raises InvalidRequestError for text that is not valid Unicode (a lone surrogate).
        """
        if not text.isascii():
            check_unicode(text)
        ids = self._encoder.encode(text, parse_special)
        if not add_special_tokens:
            return ids
        ids, suffix = self.with_bos(ids), list(self.special.suffix_ids)
        if suffix and ids[-len(suffix) :] != suffix:
            ids = ids + suffix
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; bytes that form no character are U+FFFD, unknown ids nothing."""
        table = self.token_bytes
        if skip_special_tokens:
            hidden = self.special.ids
            data = b"".join([table[i] for i in token_ids if i not in hidden])
        else:
            data = b"".join([table[i] for i in token_ids])
        if table.strip_leading_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_text(self, token_id: int, pending: bytes = b"") -> str:
        """What one token reads as behind the bytes of a not yet complete character.

        Empty while no character is complete; special tokens show their name.
        """
        data = pending + self.token_bytes[token_id]
        return codecs.utf_8_decode(data, "replace", False)[0]

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` hides this id."""
        return token_id in self.special.ids

    def special_token_id(self, text: str) -> int | None:
        """Id of the special token spelled exactly ``text``, or None."""
        return self._special_texts().get(text)

    def split_special(self, text: str) -> list[str | int]:
        """``text`` cut at the special tokens spelled in it: plain stretches (str) and ids."""
        if self._special_matcher is None:
            self._special_matcher = AddedTokenMatcher(self._special_texts())
        return self._special_matcher.split(text)

    def with_bos(self, token_ids: list[int]) -> list[int]:
        """``token_ids`` with what goes before every text (BOS), unless it is there already."""
        prefix = list(self.special.prefix_ids)
        return token_ids if token_ids[: len(prefix)] == prefix else prefix + token_ids

    def encode_segments(self, segments: Sequence[str | int]) -> list[int]:
        """Ids of plain text (str, special tokens in it are words) and special tokens (int)."""
        out: list[int] = []
        for i, segment in enumerate(segments):
            if isinstance(segment, int):
                out.append(segment)
                continue
            before = segments[i - 1] if i else None
            behind = segments[i + 1] if i + 1 < len(segments) else None
            if before in self.special.strips_right:
                segment = segment.lstrip()
            if behind in self.special.strips_left:
                segment = segment.rstrip()
            if segment:
                out.extend(self.encode(segment, False, parse_special=False))
        return out

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """{spelling: id} of all special tokens."""
        return self._special_texts()

    def _special_texts(self) -> dict[str, int]:
        if self._special_by_text is None:
            table = self.token_bytes
            self._special_by_text = {
                table[i].decode("utf-8", "replace"): i for i in sorted(self.special.ids) if table[i]
            }
        return self._special_by_text


def check_unicode(text: str, param: str | None = "prompt") -> None:
    """InvalidRequestError if ``text`` holds half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is not valid Unicode: lone surrogate at character {error.start}; "
            "remove it or send the whole character",
            param,
        ) from None
