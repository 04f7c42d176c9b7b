"""A tokenizer from a directory in Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from twostep.contracts.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from twostep.frontend.gguf_tokenizer import END_OF_TURN_TEXTS
from twostep.frontend.token_bytes import SPACE_MARK, TokenAlphabet, TokenBytes
from twostep.frontend.tokenizer import LibraryEncoder, SpecialTokens, Tokenizer

if TYPE_CHECKING:
    import tokenizers

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class _TokenizerJson(msgspec.Struct):
    """The part of ``tokenizer.json`` that the library does not tell."""

    decoder: dict[str, Any] | None = None


def load_tokenizer_dir(path: Path) -> Tokenizer:
    """See ``Tokenizer.from_dir``."""
    library, decoder = _load_library_tokenizer(path)
    config = _read_json(path / "tokenizer_config.json")
    names = _special_names({**_read_json(path / "special_tokens_map.json"), **config})
    alphabet, strips = _alphabet_of(decoder, path)
    added = library.get_added_tokens_decoder()
    vocab_size = max([library.get_vocab_size(with_added_tokens=True), *[i + 1 for i in added]])
    # The library decodes added tokens like any other: spelled in the alphabet if they can be.
    # A WordPiece alphabet would put a space before them.
    literal = frozenset(added) if alphabet == "wordpiece" else frozenset()
    table = TokenBytes(
        alphabet, vocab_size, library.id_to_token, literal, strip_leading_space=strips
    )
    hidden = {i for i, token in added.items() if token.special}
    eos_ids = _eos_ids(path, library, names, hidden)
    bos = library.token_to_id(names["bos_token"]) if "bos_token" in names else None
    prefix, suffix = _frame(library, config, bos, eos_ids)
    special = SpecialTokens(
        ids=frozenset(hidden),
        bos_token_id=bos,
        eos_token_id=eos_ids[0] if eos_ids else None,
        extra_eos_token_ids=tuple(eos_ids[1:]),
        prefix_ids=prefix,
        suffix_ids=suffix,
        by_name=names,
        strips_left=frozenset(i for i in hidden if added[i].lstrip),
        strips_right=frozenset(i for i in hidden if added[i].rstrip),
    )
    template = _chat_template(path, config)
    return Tokenizer(LibraryEncoder(library), table, special, chat_template=template)


def _load_library_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any] | None]:
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        if not path.is_dir():
            raise ModelNotFoundError(f"{path} is not a directory; give a model directory")
        if (path / "tokenizer.model").is_file():
            raise UnsupportedModelError(
                f"{path} has only tokenizer.model, not tokenizer.json; save the tokenizer again "
                "with transformers (use_fast=True), or use a GGUF file of the model"
            )
        raise ModelFileError(f"tokenizer.json is missing in {path}; download the model again")
    data = file.read_bytes()
    try:
        decoder = msgspec.json.decode(data, type=_TokenizerJson).decoder
        library = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:
        detail = str(error).splitlines()[0][:200]
        raise ModelFileError(
            f"{file} cannot be read ({detail}); download it again or upgrade tokenizers"
        ) from None
    library.no_truncation()
    library.no_padding()
    return library, decoder


def _alphabet_of(decoder: dict[str, Any] | None, path: Path) -> tuple[TokenAlphabet, bool]:
    """What the decoder section means: the spelling of bytes, whether one leading space goes."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["WordPiece"]:
        return "wordpiece", True
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds == ["Metaspace"]:
        scheme = steps[0].get("prepend_scheme", "always")
        return "sentencepiece", scheme != "never"
    replaces = any(
        step.get("type") == "Replace" and step.get("pattern") == {"String": SPACE_MARK}
        for step in steps
    )
    if replaces and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return "sentencepiece", "Strip" in kinds
    raise UnsupportedModelError(
        f"tokenizer.json in {path} decodes with {kinds or 'nothing'}, which this version does not "
        "know (byte-level, SentencePiece and WordPiece decoders are supported); use a GGUF file of "
        "the model"
    )


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """{"bos_token": text, ...} from entries that are text or {"content": text}."""
    names: dict[str, str] = {}
    for name in _NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            names[name] = value
    return names


def _eos_ids(
    path: Path, library: tokenizers.Tokenizer, names: Mapping[str, str], special: set[int]
) -> list[int]:
    """All ids that end a generation: the generation config's first, then the tokenizer's.

    Without a generation config, tokens known to end a turn are added.
    """
    config = _read_json(path / "generation_config.json")
    listed = config.get("eos_token_id")
    ids = [listed] if isinstance(listed, int) else list(listed or [])
    if "eos_token" in names:
        ids.append(library.token_to_id(names["eos_token"]))
    if not config:
        known = (library.token_to_id(text) for text in END_OF_TURN_TEXTS)
        ids += [i for i in known if i in special]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _frame(
    library: tokenizers.Tokenizer, config: Mapping[str, Any], bos: int | None, eos_ids: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids put before and behind a text: by the post-processor, unless the config decides."""
    bare = library.encode("a", add_special_tokens=False).ids
    framed = library.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0)
    prefix, suffix = tuple(framed[:at]), tuple(framed[at + len(bare) :])
    if isinstance(adds_bos := config.get("add_bos_token"), bool):
        prefix = (bos,) if adds_bos and bos is not None else ()
    if isinstance(adds_eos := config.get("add_eos_token"), bool):
        suffix = (eos_ids[0],) if adds_eos and eos_ids else ()
    return prefix, suffix


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """``chat_template.jinja`` if there, else the config's (its "default" one if it has several)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = msgspec.json.decode(file.read_bytes())
    except msgspec.DecodeError as error:
        raise ModelFileError(f"{file} is not JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{file} does not hold a JSON object; download it again")
    return value
