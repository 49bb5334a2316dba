"""Every published spelling of a Laguna configuration, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_laguna import BASE, FULL, PLAIN, SLIDING, YARN

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import ConfigError
from engine_core.rope_spec import LinearScaling, RopeSpec, YarnScaling
from engine_laguna.config import LagunaConfig

SILENT = {key: value for key, value in BASE.items() if key != "rope_parameters"}


def parse(**fields: Any) -> LagunaConfig:
    return LagunaConfig.parse(CheckpointConfig({**BASE, **fields}))


def ropes(**fields: Any) -> tuple[RopeSpec, RopeSpec]:
    config = LagunaConfig.parse(CheckpointConfig({**SILENT, **fields}))
    return config.full_rope, config.sliding_rope


YARN_SPEC = RopeSpec(
    head_dim=16,
    theta=5e5,
    partial_rotary_factor=0.5,
    scaling=YarnScaling(
        factor=32.0,
        original_context=64,
        beta_fast=64.0,
        beta_slow=1.0,
        attention_factor=1.3465735902799727,
    ),
)
PLAIN_SPEC = RopeSpec(head_dim=16, theta=1e4)
BARE = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in YARN.items() if key not in names}


ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {FULL: YARN, SLIDING: PLAIN}},
        {"rope_parameters": {"global_attention": YARN, SLIDING: PLAIN}},
        {"rope_parameters": {FULL: YARN, SLIDING: None}},
        {"rope_parameters": {FULL: YARN, SLIDING: {}}},
        {"rope_parameters": {FULL: YARN}},
        {"rope_parameters": {FULL: YARN}, "swa_rope_parameters": PLAIN},
        {"rope_parameters": {FULL: without(ORIGINAL), SLIDING: PLAIN, ORIGINAL: 64}},
        {"rope_parameters": {FULL: without(ORIGINAL), SLIDING: PLAIN}, ORIGINAL: 64},
        {"rope_parameters": {FULL: YARN, SLIDING: PLAIN, ORIGINAL: 4096}, ORIGINAL: 8192},
        {
            "rope_parameters": {FULL: without("partial_rotary_factor"), SLIDING: PLAIN},
            "partial_rotary_factor": 0.5,
        },
        # A runtime's rewrite: the value beside the entries is another one.
        {"rope_parameters": {FULL: YARN, SLIDING: PLAIN}, "partial_rotary_factor": 1.0},
        {"rope_parameters": {FULL: without("rope_theta"), SLIDING: PLAIN}, "rope_theta": 5e5},
        {"rope_parameters": {FULL: without("rope_theta"), SLIDING: PLAIN}},
        {"rope_parameters": YARN, "swa_rope_parameters": PLAIN},
        {"rope_parameters": YARN, "swa_rope_parameters": None},
        {"rope_parameters": {"type": "yarn", **BARE}, "rope_theta": 5e5},
        {"rope_parameters": {**YARN, "type": "default"}},
        {"rope_scaling": {"type": "yarn", **BARE}, "rope_theta": 5e5, "rope_parameters": None},
        {
            "rope_scaling": {"rope_type": "yarn", **BARE, "partial_rotary_factor": None},
            "rope_theta": 500_000,
            "partial_rotary_factor": 0.5,
            "swa_rope_parameters": PLAIN,
        },
        {"rope_parameters": {FULL: {**YARN, "truncate": True}, SLIDING: {"rope_theta": 1e4}}},
    ],
)
def test_rotary_spellings_give_the_same_parameters(fields: dict[str, Any]) -> None:
    assert ropes(**fields) == (YARN_SPEC, PLAIN_SPEC)


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, RopeSpec(head_dim=16, theta=5e5, partial_rotary_factor=0.5)),
        ({"rope_parameters": None, "rope_scaling": None}, None),
        ({"rope_parameters": {}}, None),
        ({"rope_parameters": {SLIDING: PLAIN}}, None),
        ({"rope_theta": 1e6}, RopeSpec(head_dim=16, theta=1e6, partial_rotary_factor=0.5)),
        ({"partial_rotary_factor": 0.25}, RopeSpec(head_dim=16, theta=5e5,
                                                   partial_rotary_factor=0.25)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
         RopeSpec(head_dim=16, theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4}},
         RopeSpec(head_dim=16, theta=5e5, scaling=LinearScaling(factor=4.0))),
    ],
)  # fmt: skip
def test_silent_fields_take_the_published_defaults(
    fields: dict[str, Any], full: RopeSpec | None
) -> None:
    default = RopeSpec(head_dim=16, theta=5e5, partial_rotary_factor=0.5)
    assert ropes(**fields) == (full or default, PLAIN_SPEC)


def test_yarn_without_its_optional_values_follows_the_reference() -> None:
    full, _ = ropes(rope_parameters={FULL: {"rope_type": "yarn", "factor": 8.0}})
    assert full.scaling == YarnScaling(factor=8.0, original_context=2048)
    full, _ = ropes(rope_parameters={FULL: {"rope_type": "yarn", ORIGINAL: 64, "factor": None}})
    assert full.scaling == YarnScaling(factor=32.0, original_context=64)
    entry = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 0, "beta_slow": None}
    full, _ = ropes(rope_parameters={FULL: {**entry, "truncate": False, "mscale": 1.0}})
    expected = YarnScaling(factor=8.0, original_context=2048, truncate=False, mscale=1.0)
    assert full.scaling == expected


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, [0]),
        ({"mlp_layer_types": None}, [0]),
        ({"mlp_layer_types": None, "mlp_only_layers": [0, 1, 2]}, [0, 1, 2]),
        ({"mlp_layer_types": None, "mlp_only_layers": []}, []),
        ({"mlp_layer_types": None, "mlp_only_layers": [0], "decoder_sparse_step": 2}, [0, 2, 4]),
        ({"mlp_layer_types": ["sparse", "dense"] * 2 + ["dense"], "mlp_only_layers": [0]},
         [1, 3, 4]),
        ({"mlp_layer_types": None, "num_experts": 0}, [0, 1, 2, 3, 4]),
    ],
)  # fmt: skip
def test_dense_layers_of_every_spelling(fields: dict[str, Any], dense: list[int]) -> None:
    layers = parse(**fields).layers
    assert [index for index, layer in enumerate(layers) if not layer.sparse] == dense


@pytest.mark.parametrize(
    ("fields", "elements"),
    [
        ({"gating": None}, [False] * 5),
        ({"gating": True}, [False] * 5),
        ({"gating": "per-head"}, [False] * 5),
        ({"gating": "per_element"}, [True] * 5),
        ({"gating": "per-element"}, [True] * 5),
        ({"gating": "per-head", "gating_types": ["per_head"] * 5}, [False] * 5),
        (
            {"gating": True, "gating_types": ["per_element"] * 4 + ["per-head"]},
            [True] * 4 + [False],
        ),
    ],
)
def test_gates_of_every_spelling(fields: dict[str, Any], elements: list[bool]) -> None:
    assert [layer.gates_elements for layer in parse(**fields).layers] == elements


def test_layers_without_lists_are_uniform_and_full() -> None:
    config = parse(num_attention_heads_per_layer=None, layer_types=None, sliding_window=None)
    assert {(layer.heads, layer.slides) for layer in config.layers} == {(4, False)}
    assert config.window is None


def test_dense_configuration_needs_no_expert_fields() -> None:
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    config = parse(mlp_layer_types=["dense"] * 5, **dict.fromkeys(names))
    assert config.experts is None


def test_inert_fields_are_ignored() -> None:
    assert (
        parse(
            norm_topk_prob=False,
            moe_router_use_sigmoid=True,
            moe_router_score_func="sigmoid",
            moe_apply_router_weight_on_input=False,
            swa_attention_sink_enabled=False,
            rope_style="rotate-half",
            router_aux_loss_coef=0.001,
            output_router_logits=False,
        )
        == parse()
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"gating": False},
        {"gating": "per-token"},
        {"gating": 1},
        {"gating_types": ["per_head"] * 4},
        {"gating_types": ["per_head"] * 4 + [True]},
        {"sliding_window": None},
        {"sliding_window": 0},
        {"layer_types": [FULL] * 4},
        {"layer_types": [FULL] * 4 + ["linear_attention"]},
        {"num_attention_heads_per_layer": [4] * 4},
        {"num_attention_heads_per_layer": [4, 6, 6, 5, 6]},
        {"num_attention_heads_per_layer": [4, 6, 6, True, 6]},
        {"num_attention_heads_per_layer": [4, 6, 6, 4.0, 6]},
        {"num_attention_heads_per_layer": None, "num_attention_heads": 3},
        {"mlp_layer_types": ["dense"] * 4},
        {"mlp_layer_types": ["dense"] * 4 + ["moe"]},
        {"mlp_layer_types": None, "mlp_only_layers": [5]},
        {"mlp_layer_types": None, "mlp_only_layers": [True]},
        {"mlp_layer_types": None, "decoder_sparse_step": 0},
        {"num_experts_per_tok": 9},
        {"num_experts": None},
        {"moe_intermediate_size": None},
        {"moe_router_logit_softcapping": -1.0},
        {"moe_apply_router_weight_on_input": True},
        {"moe_router_use_sigmoid": False},
        {"moe_router_score_func": "softmax"},
        {"swa_attention_sink_enabled": True},
        {"rope_style": "interleaved"},
        {"hidden_act": "gelu"},
        {"hidden_size": None},
        {"rms_norm_eps": 0},
        {"num_hidden_layers": 0},
        {"rope_parameters": {FULL: {"rope_type": "llama3", "factor": 8.0}}},
        {"rope_parameters": {FULL: {"rope_type": "dynamic", "factor": 8.0}}},
        {"rope_parameters": {FULL: {"factor": 8.0}}},
        {"rope_parameters": {FULL: YARN, "global_attention": YARN}},
        {"rope_parameters": {FULL: {**YARN, "attention_factor": 0}}},
        {"rope_parameters": {FULL: {**YARN, "factor": -1}}},
        {"rope_parameters": {FULL: {**YARN, "partial_rotary_factor": 1.5}}},
        {"rope_parameters": {FULL: {**YARN, "rope_theta": 0}}},
        {"rope_parameters": {FULL: [YARN]}},
        {"rope_parameters": {FULL: {**YARN, "inner": {}}}},
        {"rope_parameters": {"chunked_attention": YARN}},
    ],
)
def test_unusable_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**fields)
    assert caught.value.code.startswith("config.")
