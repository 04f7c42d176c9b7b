"""config.json and GGUF metadata → ModelConfig: spellings, defaults, refusals, nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import CASES, config_json, tiny_gguf, tiny_hf_dir

from twostep.config.model import ModelConfig, RopeConfig
from twostep.contracts.errors import (
    ModelFileError,
    ModelNotFoundError,
    TwostepError,
    UnsupportedModelError,
)
from twostep.models.loader import open_checkpoint
from twostep.models.loader.hf_config import model_config_from_hf
from twostep.models.registry import known_architectures, model_class

PATH = Path("somewhere/config.json")


SHARED_FIELDS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "activation",
    "tie_word_embeddings",
    "attention_bias",
    "final_softcap",
    "embedding_scale",
    "qk_norm",
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
    "norm_topk_prob",
    "max_position",
]


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return model_config_from_hf(PATH, {**config, **changes})


@pytest.mark.parametrize("case", list(CASES))
def test_both_spellings_say_the_same(case: str) -> None:
    assert read(config_json(case, spelling="v4")) == read(config_json(case, spelling="v5"))


@pytest.mark.parametrize("case", ["llama_tied", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_moe"])
def test_gguf_says_the_same_as_config_json(case: str, tmp_path: Path) -> None:
    hf = open_checkpoint(tiny_hf_dir(tmp_path, case)).config
    gguf = open_checkpoint(tiny_gguf(tmp_path, case, "F32")).config
    assert gguf.rms_norm_eps == pytest.approx(hf.rms_norm_eps)
    assert gguf.scale == pytest.approx(hf.scale)
    if case != "mistral":
        # GGUF files call Mistral a Llama, which it is but for the window.
        assert gguf.architecture == hf.architecture
    for field in SHARED_FIELDS:
        assert getattr(gguf, field) == getattr(hf, field), field
    for ours, theirs in zip(gguf.layers, hf.layers, strict=True):
        assert ours.sliding_window == theirs.sliding_window
        assert ours.is_moe == theirs.is_moe
        assert ours.rope.theta == theirs.rope.theta
        assert (ours.rope.scaling, ours.rope.factor) == (theirs.rope.scaling, theirs.rope.factor)


def test_llama3_scaling_travels_as_divisors(tmp_path: Path) -> None:
    rope = open_checkpoint(tiny_gguf(tmp_path, "llama", "F32")).config.layers[0].rope
    assert rope.scaling == "none"
    assert rope.interleaved
    assert len(rope.freq_factors) == 8
    assert rope.freq_factors[0] == 1.0
    assert rope.freq_factors[-1] == 8.0


def test_gemma3_layers() -> None:
    layers = read(config_json("gemma3")).layers
    assert [layer.sliding_window for layer in layers] == [9, 9, 9, 9, 9, None, 9]
    assert layers[0].rope == RopeConfig(theta=10000.0, rotary_dim=16)
    assert layers[5].rope.theta == 1000000.0
    assert (layers[5].rope.scaling, layers[5].rope.factor) == ("linear", 8.0)


def test_gemma3_multimodal_takes_defaults_of_its_code() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read({"model_type": "gemma3", "text_config": text})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == 262208
    assert config.tie_word_embeddings
    assert config.scale == 1 / 16
    assert config.layers[4].sliding_window == 1024
    assert config.layers[5].sliding_window is None


def test_qwen2_window_starts_at_its_layer() -> None:
    config = config_json("qwen2_window")
    assert [layer.sliding_window for layer in read(config).layers] == [None, 8]
    types = ["sliding_attention", "full_attention"]
    assert [layer.sliding_window for layer in read(config, layer_types=types).layers] == [8, None]
    assert read(config, use_sliding_window=False).layers[1].sliding_window is None


def test_moe_layers() -> None:
    config = config_json("qwen3_moe_mixed")
    assert [layer.is_moe for layer in read(config).layers] == [False, True]
    every_other = read(config, mlp_only_layers=[], decoder_sparse_step=2, num_hidden_layers=4)
    assert [layer.is_moe for layer in every_other.layers] == [False, True, False, True]


def test_partial_rotary_and_yarn_factors() -> None:
    config = config_json("qwen3")
    yarn = config["rope_scaling"]
    rope = read(config, partial_rotary_factor=0.5).layers[0].rope
    assert (rope.rotary_dim, rope.scaling, rope.factor) == (16, "yarn", 4.0)
    assert rope.attention_factor is None
    ratio = read(config, rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 0.5})
    assert ratio.layers[0].rope.attention_factor == pytest.approx(1.138629 / 1.069315, rel=1e-5)
    fixed = read(config, rope_scaling={**yarn, "attention_factor": 1.5})
    assert fixed.layers[0].rope.attention_factor == 1.5


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type: 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic'"),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=field) as caught:
        read(config_json("llama"), **changes)
    assert str(PATH) in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": None}, "model_type: is missing"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": 0}, "hidden_size: 0"),
        ({"hidden_size": "64"}, "hidden_size: '64'"),
        ({"hidden_size": True}, "hidden_size: True"),
        ({"hidden_size": 10**40}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"head_dim": 4096}, "head_dim 4096"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_theta": 0.5}, "theta 0.5"),
        ({"rope_scaling": []}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor: is missing"),
        ({"partial_rotary_factor": 1.5}, "24 rotary"),
    ],
)
def test_nonsense_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelFileError, match=field) as caught:
        read(config_json("llama"), **changes)
    assert str(PATH) in str(caught.value)


def test_too_many_experts_per_token() -> None:
    with pytest.raises(ModelFileError, match="9 experts per token out of 8"):
        read(config_json("qwen3_moe"), num_experts_per_tok=9)


NASTY: list[Any] = [
    None,
    True,
    0,
    -1,
    3,
    1.5,
    1e-300,
    1e308,
    10**30,
    float("nan"),
    "",
    "x",
    [],
    [3],
    [[], []],
    {},
    {"full_attention": 3},
]


@pytest.mark.parametrize("spelling", ["v4", "v5"])
@pytest.mark.parametrize("case", list(CASES))
def test_any_value_in_any_field_ends_well(case: str, spelling: str) -> None:
    """It is read, or a line names the file; nothing else comes out."""
    config = config_json(case, spelling=spelling)
    optional = ["layer_types", "partial_rotary_factor", "text_config", "attn_logit_softcapping"]
    tables = [name for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    for value in NASTY:
        for field in [*config, *optional]:
            reads_or_tells({**config, field: value})
        for table in tables:
            for part in [*config[table], "attention_factor", "mscale", "beta_fast"]:
                reads_or_tells({**config, table: {**config[table], part: value}})


def reads_or_tells(config: dict[str, Any]) -> None:
    try:
        read(config)
    except TwostepError as error:
        check_line(str(error))


def check_line(text: str) -> None:
    assert "\n" not in text
    assert str(PATH) in text


def test_every_architecture_has_its_file() -> None:
    decoders = ["gemma3", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
    assert known_architectures() == ["bert", *decoders]
    for name in known_architectures():
        assert model_class(name)
    with pytest.raises(UnsupportedModelError, match="gemma3, llama, mistral"):
        model_class("gpt2")


def test_gguf_of_unknown_architecture(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, "llama", "F32")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(UnsupportedModelError, match="general.architecture: 'mamba'"):
        open_checkpoint(path)


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ModelFileError, match="config.json: is missing"):
        open_checkpoint(tmp_path)
    gguf = tiny_gguf(tmp_path, "llama", "F32")
    with pytest.raises(ModelFileError, match=gguf.name):
        open_checkpoint(tmp_path)
    directory = tiny_hf_dir(tmp_path, "llama")
    with pytest.raises(ModelFileError, match="give its directory"):
        open_checkpoint(directory / "config.json")
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="config.json: JSON: not JSON"):
        open_checkpoint(directory)
    (directory / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelFileError, match="not a JSON object"):
        open_checkpoint(directory)
