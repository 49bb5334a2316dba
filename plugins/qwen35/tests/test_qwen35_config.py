"""Every spelling of config.json, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from published_qwen35 import MODELS, published_config
from tiny_qwen35 import FULL, IRREGULAR, LINEAR, flat_config, text_config, whole_config

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import ConfigError
from engine_core.rope_spec import LinearScaling, YarnScaling
from engine_qwen35.config import Qwen35Config


def parse(config: dict[str, Any]) -> Qwen35Config:
    return Qwen35Config.parse(CheckpointConfig(config))


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


def rope(**changes: Any) -> dict[str, Any]:
    text = text_config("dense_tied")
    return {**text, "rope_parameters": {**text["rope_parameters"], **changes}}


@pytest.mark.parametrize("name", MODELS)
def test_published_sizes_parse(name: str) -> None:
    sizes, tied, _ = MODELS[name]
    parsed = parse(published_config(name))
    assert parsed.layers == sizes["num_hidden_layers"]
    assert [i for i, full in enumerate(parsed.full) if full] == list(range(3, parsed.layers, 4))
    assert parsed.tied is tied
    assert (parsed.rope.dims, parsed.mrope_section) == (64, (11, 11, 10))
    assert parsed.linear.channels == 2 * 16 * 128 + sizes["linear_num_value_heads"] * 128
    assert (parsed.experts is None) == ("num_experts" not in sizes)


def test_text_fields_are_read_from_both_places() -> None:
    text = text_config("moe_untied")
    assert parse(whole_config(text)) == parse(flat_config(text))


def test_layer_types_win_over_the_interval() -> None:
    text = {**text_config("irregular"), "full_attention_interval": 2}
    assert parse(text).full == tuple(kind == FULL for kind in IRREGULAR)


@pytest.mark.parametrize(("interval", "full"), [(None, [3]), (2, [1, 3]), (3, [2])])
def test_interval_serves_without_layer_types(interval: int | None, full: list[int]) -> None:
    text = without(text_config("dense_tied"), "layer_types")
    parsed = parse({**text, "full_attention_interval": interval})
    assert [index for index, one in enumerate(parsed.full) if one] == full


def test_rotary_factor_is_read_from_rope_parameters_then_text_then_default() -> None:
    assert parse({**rope(), "partial_rotary_factor": 0.5}).rope.dims == 8
    text = {**rope(partial_rotary_factor=None), "partial_rotary_factor": 0.5}
    text["rope_parameters"]["mrope_section"] = [4, 2, 2]
    assert parse(text).rope.dims == 16
    assert parse(rope(partial_rotary_factor=None)).rope.dims == 8


@pytest.mark.parametrize(
    ("text", "top", "tied"),
    [(True, False, True), (False, True, False), (None, True, True), (None, None, False)],
)
def test_tie_flag_of_the_text_level_wins(text: bool | None, top: bool | None, tied: bool) -> None:
    fields = {**text_config("dense_tied"), "tie_word_embeddings": text}
    config = {"model_type": "qwen3_5", "text_config": fields, "tie_word_embeddings": top}
    assert parse(config).tied is tied


@pytest.mark.parametrize("count", [None, 0])
def test_no_experts_means_dense(count: int | None) -> None:
    parsed = parse({**text_config("dense_tied"), "num_experts": count})
    assert (parsed.experts, parsed.intermediate_size) == (None, 96)


def test_older_name_of_the_rope_type_and_flat_theta_are_read() -> None:
    text = rope(rope_type=None, type="default", rope_theta=None)
    assert parse({**text, "rope_theta": 5e6}).rope.theta == 5e6


def test_scaled_rotations_are_read() -> None:
    linear = parse(rope(rope_type="linear", factor=4.0)).rope.scaling
    assert linear == LinearScaling(factor=4.0)
    yarn = parse(rope(rope_type="yarn", factor=4.0)).rope.scaling
    assert isinstance(yarn, YarnScaling)
    assert (yarn.factor, yarn.original_context) == (4.0, 2048)


def test_absent_sections_leave_text_usable() -> None:
    parsed = parse(rope(mrope_section=None, mrope_interleaved=None))
    assert parsed.mrope_section is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"layer_types": [LINEAR, FULL]}, "layer_types"),
        ({"layer_types": [LINEAR, FULL, "sliding_attention", LINEAR]}, "layer_types"),
        ({"layer_types": [FULL] * 4}, "layer_types"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
    ids=str,
)
def test_unsupported_fields_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"text_config\.{field} "):
        parse(whole_config({**text_config("dense_tied"), **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"mrope_section": [2, 2, 1]},
        {"mrope_section": [2, 2]},
        {"mrope_section": [0, 4, 0]},
        {"mrope_section": [4, -1, 1]},
        {"mrope_interleaved": False},
        {"rope_type": "dynamic"},
        {"rope_theta": None},
        {"rope_theta": 0.5},
        {"partial_rotary_factor": 0.1},
        {"rope_type": "linear", "factor": -1.0},
    ],
    ids=str,
)
def test_unusable_rotations_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: "):
        parse(rope(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"moe_intermediate_size": None},
        {"shared_expert_intermediate_size": None},
        {"num_experts_per_tok": None},
        {"num_experts_per_tok": 7},
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"norm_topk_prob": False},
    ],
    ids=str,
)
def test_sparse_models_need_their_widths(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        parse({**text_config("moe_tied"), **change})
