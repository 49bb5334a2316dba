"""Every published spelling of a Gemma 4 configuration, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from published_gemma4 import CONFIGS, listed_per_layer
from tiny_gemma4 import DENSE, MOE, PLAIN, UNIFIED, F, S, multimodal

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import ConfigError
from engine_core.plugins import Plugins
from engine_gemma4.config import Gemma4Config

SPARSE = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
}


def parse(config: dict[str, Any], **changes: Any) -> Gemma4Config:
    return Gemma4Config.parse(CheckpointConfig({**config, **changes}))


def test_fields_left_out_take_transformers_values() -> None:
    config = parse(SPARSE)
    assert (config.heads, config.vocab_size, config.sliding_window) == (8, 262_144, 512)
    assert (config.per_layer_width, config.per_layer_vocab) == (256, 262_144)
    assert (config.final_softcap, config.moe, config.context_length) == (None, None, 131_072)
    assert [layer.sliding for layer in config.layers] == [*[True] * 5, False] * 2
    assert [layer.head_dim for layer in config.layers] == [*[256] * 5, 512] * 2
    assert {layer.kv_heads for layer in config.layers} == {4}
    assert {(layer.donor, layer.key_is_value, layer.mlp_width) for layer in config.layers} == {
        (None, False, 48)
    }
    assert config.spans == "none"
    assert config.placeholders == ()


def test_fields_left_out_are_off_in_the_unified_model() -> None:
    config = parse(SPARSE, model_type="gemma4_unified_text")
    assert (config.per_layer_width, config.moe) == (0, None)
    assert (config.sliding_window, config.context_length) == (1024, 262_144)
    assert config.unified


def test_real_sizes_resolve_every_layer() -> None:
    found = {}
    for size, whole in CONFIGS.items():
        config = parse(whole)
        full = next(layer for layer in config.layers if not layer.sliding)
        first = config.layers[0]
        found[size] = (
            (first.head_dim, first.kv_heads, full.head_dim, full.kv_heads),
            (first.mlp_width, config.layers[-1].mlp_width),
            (config.layers[-2].donor, config.layers[-1].donor),
            full.key_is_value,
            config.spans,
            config.per_layer_width,
        )
        assert (config.full_rope.theta, config.full_rope.rotary_share) == (1e6, 0.25)
        assert config.full_rope.proportional
        assert (config.sliding_rope.theta, config.sliding_rope.proportional) == (1e4, False)
        newer = whole | {"text_config": listed_per_layer(whole["text_config"])}
        assert parse(newer) == config
        # Some saves pad the layer numbers.
        text = newer["text_config"]
        padded = {key.zfill(3): value for key, value in text["per_layer_config"].items()}
        assert parse(newer, text_config=text | {"per_layer_config": padded}) == config
    assert found == {
        "E2B": ((256, 1, 512, 1), (6144, 12_288), (13, 14), False, "none", 256),
        "E4B": ((256, 2, 512, 2), (10_240, 10_240), (22, 23), False, "none", 256),
        "26B-A4B": ((256, 8, 512, 2), (2112, 2112), (None, None), True, "sliding", 0),
        "31B": ((256, 16, 512, 4), (21_504, 21_504), (None, None), True, "sliding", 0),
        "12B-unified": ((256, 8, 512, 1), (15_360, 15_360), (None, None), True, "all", 0),
    }


def test_global_key_heads_count_only_where_keys_are_values() -> None:
    older = {key: value for key, value in DENSE.items() if key != "per_layer_config"}
    older |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert {layer.kv_heads for layer in parse(older).layers} == {2}
    older["attention_k_eq_v"] = True
    assert [layer.kv_heads for layer in parse(older).layers] == [2, 2, 2, 2, 1] * 2


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, [5, 11]),
        ({"sliding_window_pattern": 3}, [2, 5, 8, 11]),
        ({"_sliding_window_pattern": 4}, [3, 7, 11]),
        ({"sliding_window_pattern": 5}, [4, 9, 11]),
        ({"layer_types": [F, *[S] * 10, F], "sliding_window_pattern": 2}, [0, 11]),
        # The last layer is a full one whatever the list says.
        ({"layer_types": [F, *[S] * 11]}, [0, 11]),
        ({"layer_types": None, "sliding_window_pattern": None}, [5, 11]),
    ],
)
def test_layer_mix_spellings(fields: dict[str, Any], full: list[int]) -> None:
    layers = parse(SPARSE, **fields).layers
    assert [index for index, layer in enumerate(layers) if not layer.sliding] == full


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {F: {}, S: {}},
        {F: {"rope_type": "proportional"}},
        {F: {"rope_theta": 1_000_000, "partial_rotary_factor": 0.25}, S: {"rope_theta": 10_000}},
        {S: {"rope_type": "default"}},
    ],
)
def test_rope_members_left_out_are_filled_by_layer_type(parameters: Any) -> None:
    config = parse(SPARSE, rope_parameters=parameters)
    assert config == parse(SPARSE)
    assert (config.full_rope.theta, config.sliding_rope.theta) == (1e6, 1e4)
    assert (config.full_rope.rotary_share, config.full_rope.proportional) == (0.25, True)
    assert (config.sliding_rope.rotary_share, config.sliding_rope.proportional) == (1.0, False)


def test_rope_factor_and_types_are_read() -> None:
    config = parse(
        SPARSE,
        rope_parameters={
            F: {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
            S: {"rope_type": "linear", "factor": 4.0},
        },
    )
    assert (config.full_rope.factor, config.full_rope.rotary_share) == (2.0, 0.5)
    assert (config.sliding_rope.factor, config.sliding_rope.rotary_share) == (4.0, 1.0)


def test_text_values_win_over_the_top_level() -> None:
    whole = multimodal(PLAIN, vocab_size=999, tie_word_embeddings=False)
    config = parse(whole)
    assert (config.vocab_size, config.tied) == (160, True)
    assert config.placeholders == (152, 155, 156)
    assert config.multimodal
    text = {key: value for key, value in whole["text_config"].items() if key != "vocab_size"}
    assert parse(whole, text_config=text).vocab_size == 999


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (DENSE, {"attn_logit_softcapping": 50.0}),
        (DENSE, {"attention_bias": True}),
        (DENSE, {"hidden_activation": "relu"}),
        (DENSE, {"final_logit_softcapping": 0}),
        (DENSE, {"use_bidirectional_attention": "all"}),
        (DENSE, {"use_bidirectional_attention": True}),
        (DENSE, {"layer_types": [S] * 9}),
        (DENSE, {"layer_types": [*[S] * 9, "chunked_attention"]}),
        (DENSE, {"num_kv_shared_layers": 10}),
        # No full layer is left that has keys and values to share.
        (DENSE, {"num_kv_shared_layers": 6}),
        (DENSE, {"num_attention_heads": 3}),
        (DENSE, {"head_dim": 15}),
        (DENSE, {"hidden_size": "72"}),
        (DENSE, {"hidden_size_per_layer_input": -1}),
        (DENSE, {"per_layer_config": {"10": {"head_dim": 32}}}),
        (DENSE, {"per_layer_config": {"x": {"head_dim": 32}}}),
        (DENSE, {"per_layer_config": {"-1": {"head_dim": 32}}}),
        (DENSE, {"per_layer_config": {"4": {"head_dim": 32}, "04": {"head_dim": 16}}}),
        (DENSE, {"per_layer_config": {"4": {"sliding_window": 32}}}),
        # A layer cannot read keys of another head size.
        (DENSE, {"per_layer_config": {"9": {"head_dim": 32}}}),
        (DENSE, {"rope_parameters": {F: {"rope_type": "yarn", "factor": 4.0}}}),
        (DENSE, {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6}}),
        (DENSE, {"rope_parameters": {F: {"partial_rotary_factor": 1.5}}}),
        (DENSE, {"rope_parameters": {F: {"rope_theta": 1.0}}}),
        (DENSE, {"rope_parameters": {F: {"factor": 0.0}}}),
        (MOE, {"num_experts": None}),
        (MOE, {"top_k_experts": 7}),
        (MOE, {"moe_intermediate_size": 0}),
        (multimodal(DENSE), {"text_config": {**DENSE, "model_type": "embedding_gemma2"}}),
    ],
)
def test_unsupported_values_are_refused(config: dict[str, Any], fields: dict[str, Any]) -> None:
    assert parse(config).layers
    with pytest.raises(ConfigError) as caught:
        parse(config, **fields)
    assert caught.value.code.startswith("config.")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vocab_size_per_layer_input": 159}, "vocab_size_per_layer_input"),
        ({"pad_token_id": 160}, "pad_token_id"),
    ],
)
def test_ids_beyond_a_table_are_refused(changes: dict[str, Any], field: str) -> None:
    assert DENSE["vocab_size"] == 160
    with pytest.raises(ConfigError, match=field):
        parse(DENSE, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma4_assistant"},
        {"model_type": "gemma4_unified_assistant"},
        {"model_type": None, "architectures": ["Gemma4AssistantForCausalLM"]},
    ],
)
def test_drafters_are_refused_by_name(changes: dict[str, Any]) -> None:
    config = {**UNIFIED, **changes}
    names = tuple(config["architectures"])
    owner = Plugins.load().resolve_owner(config["model_type"], names, None)
    assert owner.family.name == "gemma4"
    with pytest.raises(ConfigError, match="drafter") as caught:
        parse(config)
    assert caught.value.code == "config.drafter"
    assert "drafts for" in caught.value.hint


@pytest.mark.parametrize("nested", [False, True])
def test_googles_packed_format_is_refused(nested: bool) -> None:
    packing = {"quantization_config": {"quant_method": "gemma", "bits": 4}}
    whole = multimodal(PLAIN)
    changes = {"text_config": whole["text_config"] | packing} if nested else packing
    with pytest.raises(ConfigError, match="quant_method") as caught:
        parse(whole, **changes)
    assert caught.value.code == "config.quant_method"
