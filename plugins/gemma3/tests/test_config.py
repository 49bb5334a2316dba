"""Every published spelling of a Gemma 3 configuration."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import ConfigError
from engine_gemma3.config import Gemma3Config

S, F = "sliding_attention", "full_attention"
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
}


def parse(**fields: Any) -> Gemma3Config:
    return Gemma3Config.parse(CheckpointConfig({**BASE, **fields}))


def test_sparse_multimodal_config_takes_published_defaults() -> None:
    config = Gemma3Config.parse(
        CheckpointConfig(
            {
                "model_type": "gemma3",
                "text_config": {
                    "hidden_size": 2560,
                    "intermediate_size": 10240,
                    "num_hidden_layers": 34,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024,
                },
            }
        )
    )
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == 262_208
    assert config.query_scalar == 256
    assert config.context_length == 131_072
    assert (config.full_rope.theta, config.full_rope.factor) == (1e6, 8.0)
    assert (config.sliding_rope.theta, config.sliding_rope.factor) == (1e4, 1.0)
    assert config.multimodal
    # Five sliding layers, then a full one; 34 is no multiple of 6, so the last layers slide.
    assert [index for index, slides in enumerate(config.sliding) if not slides] == [
        5,
        11,
        17,
        23,
        29,
    ]


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8}}, 8.0),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8}}, 8.0),
        ({"rope_theta": 5e5, "rope_scaling": None}, 1.0),
        (
            {
                "rope_parameters": {
                    F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500_000},
                    S: {"rope_type": "default", "rope_theta": 10_000},
                }
            },
            8.0,
        ),
        (
            {
                "rope_parameters": {
                    F: {"rope_type": "linear", "factor": 8.0},
                    S: {"rope_type": "default"},
                },
                "rope_theta": 5e5,
                "rope_local_base_freq": 1e4,
            },
            8.0,
        ),
        (
            {
                "rope_parameters": {F: {"rope_theta": 5e5}},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            4.0,
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, 2.0),
    ],
)
def test_rope_spellings_give_the_same_parameters(fields: dict[str, Any], factor: float) -> None:
    config = parse(**fields)
    assert config.full_rope.theta == 5e5
    assert config.full_rope.factor == factor
    assert config.sliding_rope.theta == 1e4
    assert config.sliding_rope.factor == 1.0


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, [5]),
        ({"sliding_window_pattern": 3}, [2, 5]),
        ({"_sliding_window_pattern": 3}, [2, 5]),
        ({"_sliding_window_pattern": 2, "sliding_window_pattern": 3}, [2, 5]),
        ({"sliding_window_pattern": None, "_sliding_window_pattern": 4}, [3]),
        ({"layer_types": [S, F, S, S, F, F, S], "sliding_window_pattern": 6}, [1, 4, 5]),
    ],
)
def test_layer_mix_spellings(fields: dict[str, Any], full: list[int]) -> None:
    assert [i for i, slides in enumerate(parse(**fields).sliding) if not slides] == full


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"layer_types": [S] * 6},
        {"layer_types": [S] * 6 + ["chunked_attention"]},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {F: {"rope_type": "dynamic"}}},
        {"num_attention_heads": 3},
        {"hidden_activation": "relu"},
        {"final_logit_softcapping": -1.0},
        {"hidden_size": "64"},
        {"num_hidden_layers": 0},
        {"head_dim": 15},
        {"rope_theta": 0},
        {"rope_theta": 1.0},
        {"rope_local_base_freq": 0.5},
        {"rope_parameters": {F: {"rope_theta": -5e5}}},
        {"rope_parameters": {S: {"rope_theta": 1}}},
    ],
)
def test_unsupported_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**fields)
    assert caught.value.code.startswith("config.")


def test_nulls_count_as_absent() -> None:
    config = parse(
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        rope_scaling=None,
        layer_types=None,
        rope_parameters=None,
    )
    assert config.final_softcap is None


def test_text_vocabulary_wins_over_the_top_level() -> None:
    config = Gemma3Config.parse(
        CheckpointConfig({"vocab_size": 999, "text_config": {**BASE, "vocab_size": 160}})
    )
    assert config.vocab_size == 160
