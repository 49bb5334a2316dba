"""Spellings of config.json, and the published shapes."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_llama import BASE, CASES, config_of, hub_spelling, published_shapes

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import ConfigError
from engine_core.rope_spec import BandScaling, DynamicScaling, LinearScaling, YarnScaling
from engine_core.weight_plan import TensorInfo
from engine_llama.config import LlamaConfig
from engine_llama.weights import plan_weights

THREE_ONE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def model(hidden, inner, layers, heads, kv, vocab, theta, tied, context, **rest) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "pretraining_tp": 1,
        "torch_dtype": "bfloat16",
    } | rest


TOO_WIDE = THREE_ONE | {"factor": 32.0}
PUBLISHED = {
    "2-7b": (model(4096, 11008, 32, 32, None, 32000, 1e4, False, 4096), 128, 291),
    "3-8b": (model(4096, 14336, 32, 32, 8, 128256, 5e5, False, 8192), 128, 291),
    "3.1-8b": (
        model(4096, 14336, 32, 32, 8, 128256, 5e5, False, 131072, rope_scaling=THREE_ONE),
        128,
        291,
    ),
    "3.2-1b": (
        model(2048, 8192, 16, 32, 8, 128256, 5e5, True, 131072, rope_scaling=TOO_WIDE, head_dim=64),
        64,
        146,
    ),
    "3.2-3b": (
        model(
            3072, 8192, 28, 24, 8, 128256, 5e5, True, 131072, rope_scaling=TOO_WIDE, head_dim=128
        ),
        128,
        254,
    ),
    "3.3-70b": (
        model(8192, 28672, 80, 64, 8, 128256, 5e5, False, 131072, rope_scaling=THREE_ONE),
        128,
        723,
    ),
    "135m": (model(576, 1536, 30, 9, 3, 49152, 1e5, True, 8192), 64, 272),
    "360m": (model(960, 2560, 32, 15, 5, 49152, 1e5, True, 8192), 64, 290),
    "1.7b": (model(2048, 8192, 24, 32, 32, 49152, 1.3e5, True, 8192), 64, 218),
}


def parse(changes: dict[str, Any] | None = None) -> LlamaConfig:
    return LlamaConfig.parse(CheckpointConfig(BASE | (changes or {})))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shape_parses_and_plan_consumes_every_key(name: str) -> None:
    config, head_dim, count = PUBLISHED[name]
    parsed = LlamaConfig.parse(CheckpointConfig(config))
    assert parsed.head_dim == head_dim
    assert parsed.kv_heads == (config["num_key_value_heads"] or config["num_attention_heads"])
    assert parsed.context_length == config["max_position_embeddings"]
    shapes = published_shapes(config)
    assert len(shapes) == count
    infos = {key: TensorInfo(shape, "BF16") for key, shape in shapes.items()}
    resolved = plan_weights(parsed, infos).resolve(infos)
    assert not resolved.dropped
    joined = parsed.layers * 2
    assert len(resolved.infos) == count - 3 * parsed.layers
    assert sum("qkv_proj" in key or "gate_up_proj" in key for key in resolved.infos) == joined
    rows = (parsed.heads + 2 * parsed.kv_heads) * head_dim
    first = resolved.infos["model.layers.0.self_attn.qkv_proj.weight"]
    assert first.shape == (rows, config["hidden_size"])


@pytest.mark.parametrize("name", CASES)
def test_both_spellings_give_one_record(name: str) -> None:
    config = config_of(name)
    first = LlamaConfig.parse(CheckpointConfig(config))
    assert LlamaConfig.parse(CheckpointConfig(hub_spelling(config))) == first


def test_nulls_and_absent_fields_are_equal() -> None:
    nulls = dict.fromkeys(
        (
            "head_dim",
            "num_key_value_heads",
            "rope_scaling",
            "rope_parameters",
            "rope_theta",
            "attention_bias",
            "mlp_bias",
            "layer_types",
            "sliding_window",
            "tie_word_embeddings",
            "hidden_act",
            "max_position_embeddings",
        )
    )
    parsed = parse(nulls)
    absent = {key: value for key, value in BASE.items() if key not in nulls}
    assert parsed == LlamaConfig.parse(CheckpointConfig(absent))
    assert (parsed.kv_heads, parsed.head_dim, parsed.context_length) == (4, 16, 2048)
    assert parsed.rope.theta == 1e4
    assert parsed.tie_word_embeddings is None


@pytest.mark.parametrize(
    ("configured", "keys", "tied"),
    [
        (None, ("model.norm.weight",), True),
        (None, ("model.norm.weight", "lm_head.weight"), False),
        (None, ("lm_head.scales",), False),
        (True, ("lm_head.weight",), True),
        (False, ("model.norm.weight",), False),
    ],
)
def test_tie_silent_config_is_decided_by_the_head(configured, keys, tied) -> None:
    assert parse({"tie_word_embeddings": configured}).is_tied(keys) is tied


def test_rope_precedence_follows_transformers() -> None:
    inner = {"rope_type": "linear", "type": "yarn", "factor": 2.0, "rope_theta": 7e4}
    outer = {"rope_type": "yarn", "factor": 9.0, "rope_theta": 8e4}
    parsed = parse({"rope_scaling": inner, "rope_parameters": outer, "rope_theta": 9e4}).rope
    assert (parsed.theta, parsed.scaling) == (7e4, LinearScaling(factor=2.0))
    parsed = parse({"rope_scaling": {}, "rope_parameters": {"rope_theta": 6e4}}).rope
    assert (parsed.theta, parsed.scaling) == (6e4, None)
    assert parse({"rope_theta": 3e4, "rope_parameters": {"rope_type": "default"}}).rope.theta == 3e4


def test_rope_missing_original_context_is_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "finetuned": True}
    parsed = parse({"rope_scaling": scaling, "max_position_embeddings": 4096})
    assert parsed.rope.scaling == YarnScaling(factor=4.0, original_context=4096)
    band = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    parsed = parse({"rope_scaling": band, "max_position_embeddings": 512})
    assert isinstance(parsed.rope.scaling, BandScaling)
    assert parsed.rope.scaling.original_context == 512
    beside = {"rope_scaling": band, "original_max_position_embeddings": 64}
    scaling = parse(beside).rope.scaling
    assert isinstance(scaling, BandScaling)
    assert scaling.original_context == 64


def test_yarn_every_field_is_honoured() -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 64,
        "beta_fast": 0,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1,
        "mscale": 0.5,
        "mscale_all_dim": 0.25,
    }
    assert parse({"rope_scaling": scaling}).rope.scaling == YarnScaling(
        factor=4.0,
        original_context=64,
        beta_fast=32.0,
        beta_slow=2.0,
        truncate=False,
        attention_factor=1.0,
        mscale=0.5,
        mscale_all_dim=0.25,
    )


def test_dynamic_is_limited_to_the_context() -> None:
    parsed = parse({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert parsed.rope.scaling == DynamicScaling(limit=256)


def test_layer_types_with_a_window_are_accepted() -> None:
    types = ["full_attention", "sliding_attention"]
    assert parse({"layer_types": types, "sliding_window": 9}).windows == (None, 9)
    assert parse({"layer_types": types[:1] * 2, "sliding_window": None}).windows == (None, None)
    assert parse({"sliding_window": 9}).windows == (None, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"vocab_size": 0},
        {"rms_norm_eps": None},
        {"rms_norm_eps": 0},
        {"num_hidden_layers": "2"},
        {"num_attention_heads": True},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 0},
        {"hidden_size": 66},
        {"head_dim": 0},
        {"head_dim": 7},
        {"hidden_act": "gelu"},
        {"rope_traditional": True},
        {"rope_interleaved": True},
        {"partial_rotary_factor": 0.5},
        {"rope_theta": 0},
        {"rope_theta": "1e4"},
        {"max_position_embeddings": 0},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": 1},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0},
        {"rope_scaling": {"factor": 2.0}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        {"rope_scaling": {"type": "dynamic"}},
        {"rope_scaling": {"type": "yarn"}},
        {"rope_scaling": {"type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}},
        {"rope_scaling": {"type": "linear", "factor": float("inf")}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_scaling": [1]},
        *(
            {"rope_scaling": {"type": kind, "factor": 2.0}}
            for kind in ("longrope", "su", "proportional", "mrope", "")
        ),
        *({"rope_scaling": {"rope_type": kind}} for kind in ("longrope", 3)),
    ],
    ids=str,
)
def test_unusable_value_is_a_typed_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: "):
        parse(changes)
