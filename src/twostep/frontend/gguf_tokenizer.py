"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twostep.contracts.errors import ModelFileError, UnsupportedModelError
from twostep.frontend import pre_tokenizers
from twostep.frontend.sentencepiece import SentencePieceEncoder
from twostep.frontend.token_bytes import SPACE_MARK, TokenBytes
from twostep.frontend.tokenizer import Encoder, LibraryEncoder, SpecialTokens, Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

END_OF_TURN_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Control tokens that end a turn in the models known here, whatever the file calls eos."""

_INF = float("inf")


class _Vocabulary:
    """The lists of a GGUF file, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.model = self.get("ggml.model", None)
        if self.model is None:
            raise ModelFileError(
                "tokenizer.ggml.model is missing: this GGUF file has no tokenizer; "
                "convert the model again or use a directory with tokenizer.json"
            )
        self.tokens: list[str] = list(self.require("ggml.tokens"))
        types = self.get("ggml.token_type", None)
        self.types = bytes([_NORMAL]) * len(self.tokens) if types is None else _as_bytes(types)
        if len(self.types) != len(self.tokens):
            raise ModelFileError(
                f"tokenizer.ggml.token_type has {len(self.types)} entries for {len(self.tokens)} "
                "tokens; the file is corrupt, download it again"
            )

    def get(self, name: str, default: Any) -> Any:
        return self.metadata.get(f"tokenizer.{name}", default)

    def require(self, name: str) -> Sequence[Any]:
        value: Sequence[Any] | None = self.get(name, None)
        if value is None or len(value) == 0:
            raise ModelFileError(
                f"tokenizer.{name} is missing or empty in the GGUF metadata; "
                "the file is incomplete, download it again"
            )
        return value

    def id_of(self, name: str) -> int | None:
        """The id under ``tokenizer.ggml.<name>_token_id``; files write 2**32 - 1 for "none"."""
        value = self.get(f"ggml.{name}_token_id", None)
        if value is None or int(value) in (-1, 0xFFFFFFFF):
            return None
        if not 0 <= int(value) < len(self.tokens):
            raise ModelFileError(
                f"tokenizer.ggml.{name}_token_id = {value} is outside the vocabulary of "
                f"{len(self.tokens)} tokens; the file is corrupt, download it again"
            )
        return int(value)

    def ids_of_type(self, kind: int) -> list[int]:
        """Ids of one token type, ascending; scans at C speed."""
        found, at = [], self.types.find(kind)
        while at >= 0:
            found.append(at)
            at = self.types.find(kind, at + 1)
        return found


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """See ``Tokenizer.from_gguf_metadata``."""
    vocabulary = _Vocabulary(metadata)
    if vocabulary.model == "gpt2":
        return _build_byte_level(vocabulary)
    if vocabulary.model == "llama":
        return _build_sentencepiece(vocabulary)
    raise UnsupportedModelError(
        f"tokenizer.ggml.model = {vocabulary.model!r} is not supported (gpt2 and llama are); "
        "use a model directory with tokenizer.json instead"
    )


def _build_byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    import tokenizers

    kind = pre_tokenizers.kind_of(str(vocabulary.get("ggml.pre", "default")))
    tokens = vocabulary.tokens
    merges = [tuple(pair.split(" ", 1)) for pair in vocabulary.require("ggml.merges")]
    try:
        model = tokenizers.models.BPE(
            dict(zip(tokens, range(len(tokens)), strict=True)),
            merges,
            ignore_merges=pre_tokenizers.takes_whole_words(kind),
        )
    except Exception as error:
        raise ModelFileError(
            f"tokenizer.ggml.merges does not fit the vocabulary ({error}); "
            "the file is corrupt, download it again"
        ) from None
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.build_pre_tokenizer(kind)
    if (normalizer := pre_tokenizers.build_normalizer(kind)) is not None:
        library.normalizer = normalizer
    control = vocabulary.ids_of_type(_CONTROL)
    user_defined = vocabulary.ids_of_type(_USER_DEFINED)
    library.add_special_tokens(
        [tokenizers.AddedToken(tokens[i], normalized=False, special=True) for i in control]
    )
    library.add_tokens([tokenizers.AddedToken(tokens[i], normalized=False) for i in user_defined])
    table = TokenBytes(
        "byte_level", len(tokens), tokens.__getitem__, frozenset(control) | frozenset(user_defined)
    )
    return _finish(vocabulary, LibraryEncoder(library), table, pre_tokenizers.adds_bos(kind))


def _build_sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    tokens = vocabulary.tokens
    scores = vocabulary.require("ggml.scores")
    if len(scores) != len(tokens):
        raise ModelFileError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens; "
            "the file is corrupt, download it again"
        )
    costs = [-score for score in scores]
    for kind in set(vocabulary.types) - {_NORMAL}:
        for i in vocabulary.ids_of_type(kind):
            costs[i] = _INF
    costs.append(_INF)  # index -1: no such token
    user_defined = vocabulary.ids_of_type(_USER_DEFINED)
    for i in user_defined:  # some converters write spaces, some space marks
        tokens[i] = tokens[i].replace(" ", SPACE_MARK)
    control = vocabulary.ids_of_type(_CONTROL)
    add_space_prefix = bool(vocabulary.get("ggml.add_space_prefix", True))
    encoder = SentencePieceEncoder(
        dict(zip(tokens, range(len(tokens)), strict=True)),
        costs,
        _byte_ids(vocabulary),
        vocabulary.id_of("unknown"),
        {tokens[i].replace(" ", SPACE_MARK): i for i in control},
        {tokens[i]: i for i in user_defined},
        add_space_prefix=add_space_prefix,
    )
    table = TokenBytes(
        "sentencepiece",
        len(tokens),
        tokens.__getitem__,
        frozenset(control),
        strip_leading_space=add_space_prefix,
    )
    return _finish(vocabulary, encoder, table, True)


def _byte_ids(vocabulary: _Vocabulary) -> list[int] | None:
    by_text = {vocabulary.tokens[i].upper(): i for i in vocabulary.ids_of_type(_BYTE)}
    if not by_text:
        return None
    try:
        return [by_text[f"<0X{byte:02X}>"] for byte in range(256)]
    except KeyError as error:
        raise ModelFileError(
            f"tokenizer.ggml.tokens lacks the byte token {error}; "
            "the file is corrupt, download it again"
        ) from None


def _finish(
    vocabulary: _Vocabulary, encoder: Encoder, table: TokenBytes, adds_bos: bool
) -> Tokenizer:
    bos, eos = vocabulary.id_of("bos"), vocabulary.id_of("eos")
    adds_bos = bool(vocabulary.get("ggml.add_bos_token", adds_bos))
    adds_eos = bool(vocabulary.get("ggml.add_eos_token", False))
    names = {"bos": bos, "eos": eos, "unk": vocabulary.id_of("unknown")}
    names["pad"] = vocabulary.id_of("padding")
    control = frozenset(vocabulary.ids_of_type(_CONTROL) + vocabulary.ids_of_type(_UNKNOWN))
    special = SpecialTokens(
        ids=control,
        bos_token_id=bos,
        eos_token_id=eos,
        extra_eos_token_ids=_end_of_turn_ids(vocabulary, eos),
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        suffix_ids=(eos,) if adds_eos and eos is not None else (),
        by_name={f"{k}_token": vocabulary.tokens[i] for k, i in names.items() if i is not None},
    )
    template = vocabulary.get("chat_template", None)
    return Tokenizer(encoder, table, special, chat_template=template)


def _end_of_turn_ids(vocabulary: _Vocabulary, eos: int | None) -> tuple[int, ...]:
    named = [vocabulary.id_of("eot"), vocabulary.id_of("eom")]
    texts = {vocabulary.tokens[i]: i for i in vocabulary.ids_of_type(_CONTROL)}
    named += [texts.get(text) for text in END_OF_TURN_TEXTS]
    return tuple(dict.fromkeys(i for i in named if i is not None and i != eos))


def _as_bytes(types: Sequence[Any]) -> bytes:
    try:
        return bytes(types) if isinstance(types, list | tuple) else bytes(map(int, types))
    except (TypeError, ValueError):
        raise ModelFileError(
            "tokenizer.ggml.token_type holds a value that is no token type; "
            "the file is corrupt, download it again"
        ) from None
