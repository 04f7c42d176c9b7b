"""Tokenizers from a directory in Hugging Face layout."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from twostep.contracts.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from twostep.frontend.tokenizer import Tokenizer

Make = Callable[..., dict[str, Any]]


def byte_level_library(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    library = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, normalized=False) for text in tokens[:3]])
    return library


def sentencepiece_library() -> tokenizers.Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "h", "i", "hi", "▁hi"]
    vocab = {text: i for i, text in enumerate(tokens)}
    model = models.BPE(
        vocab, [("h", "i"), ("▁", "hi")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([AddedToken(text, normalized=False) for text in tokens[:3]])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return library


def write(path: Path, library: tokenizers.Tokenizer, **files: Any) -> Path:
    library.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_byte_level_directory(tmp_path: Path, make_byte_level: Make) -> None:
    library = byte_level_library(make_byte_level())
    library.enable_truncation(2)
    library.enable_padding(length=50)
    write(
        tmp_path,
        library,
        tokenizer_config={"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}},
    )
    tokenizer = Tokenizer.from_dir(tmp_path)
    text = "hello world and the 日本 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text), False) == text
    assert len(tokenizer.encode(text)) > 2  # neither cut nor padded
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2
    assert tokenizer.extra_eos_token_ids == (0,)
    assert tokenizer.special.by_name == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.vocab_size == library.get_vocab_size()


def test_sentencepiece_directory(tmp_path: Path) -> None:
    write(tmp_path, sentencepiece_library(), special_tokens_map={"bos_token": "<s>"})
    tokenizer = Tokenizer.from_dir(str(tmp_path))
    assert tokenizer.encode("hi") == [1, tokenizer.encode("hi", False)[0]]
    assert tokenizer.encode("<s>hi").count(1) == 1
    assert tokenizer.decode(tokenizer.encode("hi hi 🌶")) == "hi hi 🌶"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_decoding_is_the_librarys(tmp_path: Path, make_byte_level: Make, kind: str) -> None:
    is_byte_level = kind == "byte_level"
    library = byte_level_library(make_byte_level()) if is_byte_level else sentencepiece_library()
    tokenizer = Tokenizer.from_dir(write(tmp_path, library))
    rng = random.Random(3)
    compared = 0
    for _ in range(400):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 7))]
        for skip in (True, False):
            expected = library.decode(ids, skip_special_tokens=skip)
            # Broken characters of byte tokens: the library also spoils whole ones beside them.
            if is_byte_level or "\ufffd" not in expected:
                compared += 1
                assert tokenizer.decode(ids, skip) == expected
    assert compared > 80


def test_end_ids_come_from_the_generation_config_first(
    tmp_path: Path, make_byte_level: Make
) -> None:
    library = byte_level_library(make_byte_level())
    config = {"eos_token": "<|im_end|>"}
    write(tmp_path, library, tokenizer_config=config, generation_config={"eos_token_id": [0, 1, 0]})
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.eos_token_id == 0
    assert tokenizer.extra_eos_token_ids == (1, 2)


def test_config_decides_about_bos(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    write(tmp_path, sentencepiece_library(), tokenizer_config=config)
    assert Tokenizer.from_dir(tmp_path).encode("hi")[0] != 1
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True}
    write(tmp_path, sentencepiece_library(), tokenizer_config=config)
    ids = Tokenizer.from_dir(tmp_path).encode("hi")
    assert (ids[0], ids[-1]) == (1, 2)


def test_chat_template_sources(tmp_path: Path, make_byte_level: Make) -> None:
    library = byte_level_library(make_byte_level())
    write(tmp_path, library)
    assert Tokenizer.from_dir(tmp_path).chat_template is None
    write(tmp_path, library, tokenizer_config={"chat_template": "one"})
    assert Tokenizer.from_dir(tmp_path).chat_template == "one"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    write(tmp_path, library, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_dir(tmp_path).chat_template == "two"
    (tmp_path / "chat_template.jinja").write_text("three", encoding="utf-8")
    assert Tokenizer.from_dir(tmp_path).chat_template == "three"


def test_what_is_missing_or_broken_is_named(tmp_path: Path, make_byte_level: Make) -> None:
    with pytest.raises(ModelNotFoundError, match="not a directory"):
        Tokenizer.from_dir(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match="tokenizer.json is missing"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match="save the tokenizer again"):
        Tokenizer.from_dir(tmp_path)
    for text in ("{", "[]", '{"model": {"type": "Nonsense"}}'):
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        with pytest.raises(ModelFileError, match="cannot be read"):
            Tokenizer.from_dir(tmp_path)
    library = byte_level_library(make_byte_level())
    write(tmp_path, library)
    (tmp_path / "tokenizer_config.json").write_text("{,", encoding="utf-8")
    with pytest.raises(ModelFileError, match="tokenizer_config.json is not JSON"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ModelFileError, match="does not hold a JSON object"):
        Tokenizer.from_dir(tmp_path)


def test_unknown_decoder_is_refused(tmp_path: Path, make_byte_level: Make) -> None:
    library = byte_level_library(make_byte_level())
    library.decoder = decoders.CTC()
    with pytest.raises(UnsupportedModelError, match="CTC"):
        Tokenizer.from_dir(write(tmp_path, library))


def test_metaspace_decoder(tmp_path: Path) -> None:
    library = sentencepiece_library()
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = Tokenizer.from_dir(write(tmp_path, library))
    ids = tokenizer.encode("hi hi", False)
    assert tokenizer.decode(ids) == library.decode(ids) == "hi hi"
    library.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = Tokenizer.from_dir(write(tmp_path, library))
    assert tokenizer.decode(ids) == " hi hi"


def test_white_space_swallowed_by_a_special_token(tmp_path: Path, make_byte_level: Make) -> None:
    library = byte_level_library(make_byte_level())
    library.add_special_tokens([AddedToken("<|sep|>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer = Tokenizer.from_dir(write(tmp_path, library))
    sep = tokenizer.special_token_id("<|sep|>")
    assert sep is not None
    expected = library.encode("hello <|sep|>  world", add_special_tokens=False).ids
    assert tokenizer.encode_segments(["hello ", sep, "  world"]) == expected
