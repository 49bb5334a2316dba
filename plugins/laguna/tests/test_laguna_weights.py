"""Configs of the published sizes, and their key lists, with no weights present."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tiny_laguna import FULL, SLIDING, published_shapes

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.checkpoint.quantization import plan_quantization
from engine_core.errors import ConfigError
from engine_core.family import Full, Sliding
from engine_core.plugins import Plugins
from engine_core.quantization import QuantizationSpec
from engine_core.weight_plan import TensorInfo, sources
from engine_laguna import plugin
from engine_laguna.config import LagunaConfig
from engine_laguna.weights import plan_weights

COMMON: dict[str, Any] = {
    "model_type": "laguna",
    "architectures": ["LagunaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 2,
    "decoder_sparse_step": 1,
    "eos_token_id": [2, 24],
    "head_dim": 128,
    "hidden_act": "silu",
    "mlp_only_layers": [0],
    "moe_apply_router_weight_on_input": False,
    "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 0.0,
    "norm_topk_prob": True,
    "num_experts": 256,
    "num_key_value_heads": 8,
    "pad_token_id": 9,
    "rms_norm_eps": 1e-6,
    "swa_attention_sink_enabled": False,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


def yarn(**values: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "rope_theta": 500000.0, "beta_slow": 1.0, **values}


def mixed(layers: int, full: int, sliding: int) -> dict[str, Any]:
    """One full layer, then three sliding ones."""
    kinds = [FULL if index % 4 == 0 else SLIDING for index in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_attention_heads": full,
        "num_attention_heads_per_layer": [full if kind == FULL else sliding for kind in kinds],
        "sliding_window": 512,
    }


XS = mixed(40, 48, 64) | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}
SIZES: dict[str, dict[str, Any]] = {
    # Shared scalars beside the entries, as this revision was published.
    "xs.2": COMMON
    | XS
    | {
        "gating": True,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            FULL: yarn(factor=32.0, beta_fast=64.0, attention_factor=1.0),
            SLIDING: PLAIN,
            "original_max_position_embeddings": 4096,
        },
    },
    "xs-2.1": COMMON
    | XS
    | {
        "gating": "per-head",
        "gating_types": ["per_head"] * 40,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            FULL: yarn(
                factor=32.0,
                beta_fast=64.0,
                original_max_position_embeddings=8192,
                attention_factor=1.3465735902799727,
                partial_rotary_factor=0.5,
            ),
            SLIDING: PLAIN,
        },
    },
    "s-2.1": COMMON
    | mixed(48, 48, 72)
    | {
        "gating": "per-head",
        "gating_types": ["per_head"] * 48,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 10,
        "rope_parameters": {
            FULL: yarn(
                factor=128.0,
                beta_fast=32.0,
                original_max_position_embeddings=8192,
                attention_factor=1.4852030263919618,
                partial_rotary_factor=0.5,
            ),
            SLIDING: PLAIN,
        },
        "shared_expert_intermediate_size": 1024,
    },
    # The widths of this size are not public; the rest is as published.
    "m.1": COMMON
    | {
        "gating": "per-element",
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [0, 1, 2],
        "moe_intermediate_size": 1024,
        "num_attention_heads": 64,
        "num_experts_per_tok": 16,
        "num_hidden_layers": 70,
        "rope_parameters": {
            FULL: yarn(factor=32.0, beta_fast=64.0, original_max_position_embeddings=8192)
        },
        "shared_expert_intermediate_size": 1024,
    },
}
LAYOUTS = ("disk", "packed", "mlx", "mlx fused")


def shapes_of(name: str, layout: str) -> dict[str, tuple[int, ...]]:
    config = SIZES[name]
    layers = config["num_hidden_layers"]
    kinds = ["dense" if i in config["mlp_only_layers"] else "sparse" for i in range(layers)]
    return published_shapes({**config, "mlp_layer_types": kinds}, layout)


@pytest.mark.parametrize("name", SIZES)
def test_config_of_every_published_size_parses(name: str) -> None:
    parsed = LagunaConfig.parse(CheckpointConfig(SIZES[name]))
    assert len(parsed.layers) == {"xs.2": 40, "xs-2.1": 40, "s-2.1": 48, "m.1": 70}[name]
    assert parsed.vocab_size == 100352
    assert parsed.full_rope.dims == (128 if name == "m.1" else 64)
    assert parsed.full_rope.attention_factor == pytest.approx(
        {"xs.2": 1.0, "s-2.1": 1.4852030263919618}.get(name, 1.3465735902799727)
    )
    if name == "m.1":
        assert parsed.window is None
        assert all(layer.gates_elements and layer.heads == 64 for layer in parsed.layers)
        return
    assert parsed.sliding_rope.dims == 128
    assert [layer.heads for layer in parsed.layers[:5]] == [
        48,
        *[64 if "xs" in name else 72] * 3,
        48,
    ]
    assert [layer.sparse for layer in parsed.layers[:2]] == [False, True]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SIZES)
def test_plan_consumes_exactly_the_published_keys(name: str, layout: str) -> None:
    """Every tensor is used once and the result is the same tree for every layout."""
    shapes = shapes_of(name, layout)
    infos = {key: TensorInfo(shape, "BF16") for key, shape in shapes.items()}
    config = CheckpointConfig(SIZES[name])
    resolved = plan_weights(LagunaConfig.parse(config), infos).resolve(infos)
    assert not resolved.dropped
    used = {leaf.key for node in resolved.targets.values() for leaf in sources(node)}
    assert used == set(infos)
    # No value is lost or taken twice.
    held = sum(math.prod(info.shape) for info in resolved.infos.values())
    assert held == sum(map(math.prod, shapes.values()))
    assert {key: info.shape for key, info in resolved.infos.items()} == expected_tree(name)
    architecture = plugin.engine_architecture(config=config, tensors=resolved.infos)
    kinds = {type(layer) for layer in architecture.layers}
    assert kinds == ({Full} if name == "m.1" else {Full, Sliding})
    assert architecture.keep_float32 == {key for key in resolved.infos if ".mlp.gate." in key}


def expected_tree(name: str) -> dict[str, tuple[int, ...]]:
    """Mapped keys with shapes: the stacked layout, rows joined wherever experts do not own them."""
    tree = shapes_of(name, "mlx")
    joined: dict[str, tuple[int, ...]] = {}
    for key, shape in tree.items():
        path, _, projection = key.removesuffix(".weight").rpartition(".")
        group = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
                 "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip
        fuses = projection in group and not path.endswith("switch_mlp")
        target = f"{path}.{group[projection]}.weight" if fuses else key
        rows = joined[target][0] if target in joined else 0
        joined[target] = (rows + shape[0], *shape[1:])
    return joined


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overrides_map_in_every_layout(layout: str) -> None:
    shapes = shapes_of("s-2.1", layout)
    infos = {key: TensorInfo(shape, "BF16") for key, shape in shapes.items()}
    plan = plan_weights(LagunaConfig.parse(CheckpointConfig(SIZES["s-2.1"])), infos)
    block = "model.layers.3.mlp"
    spellings = {
        f"{block}.gate": f"{block}.gate.proj",
        f"{block}.gate.proj": f"{block}.gate.proj",
        f"language_model.{block}.gate.proj": f"{block}.gate.proj",
        f"{block}.experts.down_proj": f"{block}.switch_mlp.down_proj",
        f"{block}.experts.17.down_proj": f"{block}.switch_mlp.down_proj",
        f"{block}.switch_mlp.down_proj": f"{block}.switch_mlp.down_proj",
        f"{block}.shared_expert.down_proj": f"{block}.shared_expert.down_proj",
        f"{block}.shared_experts.down_proj": f"{block}.shared_expert.down_proj",
        "model.layers.3.self_attn.v_proj": "model.layers.3.self_attn.qkv_proj",
        "model.layers.3.self_attn.g_proj": "model.layers.3.self_attn.g_proj",
        "lm_head": "lm_head",
    }
    assert {path: plan.map_path(path) for path in spellings} == {
        path: (mapped,) for path, mapped in spellings.items()
    }
    both = (f"{block}.switch_mlp.gate_proj", f"{block}.switch_mlp.up_proj")
    for path in (f"{block}.experts.gate_up_proj", f"{block}.switch_mlp.gate_up_proj"):
        assert plan.map_path(path) == both


def test_mixed_quantization_of_a_published_conversion_is_planned() -> None:
    """4-bit experts, finer attention and shared expert, router at 8 bits: all by override."""
    shapes = shapes_of("s-2.1", "mlx")
    fine = ("mlp.gate.proj", "self_attn.v_proj")
    infos: dict[str, TensorInfo] = {}
    overrides: dict[str, Any] = {}
    for key, shape in shapes.items():
        path = key.removesuffix(".weight")
        if path == key or len(shape) < 2:
            infos[key] = TensorInfo(shape, "BF16")
            continue
        bits, group_size = (8, 64) if path.endswith(fine) else (4, 128)
        if bits == 8:
            overrides[path] = {"bits": bits, "group_size": group_size}
        *rows, width = shape
        infos[key] = TensorInfo((*rows, width * bits // 32), "U32")
        for part in ("scales", "biases"):
            infos[f"{path}.{part}"] = TensorInfo((*rows, width // group_size), "BF16")
    config = CheckpointConfig(
        SIZES["s-2.1"] | {"quantization": {"bits": 4, "group_size": 128, **overrides}}
    )
    plan = plan_weights(LagunaConfig.parse(config), infos)
    resolved = plan.resolve(infos)
    found = plan_quantization(config, plan, resolved.infos)
    assert not found.notes
    fine_spec, coarse = QuantizationSpec("affine", 8, 64), QuantizationSpec("affine", 4, 128)
    assert found.layers["model.layers.1.mlp.gate.proj"] == fine_spec
    assert found.layers["model.layers.1.self_attn.v_proj"] == fine_spec
    assert found.layers["model.layers.1.self_attn.q_proj"] == coarse
    assert found.layers["model.layers.1.mlp.switch_mlp.gate_proj"] == coarse
    assert found.layers["model.layers.1.mlp.switch_mlp.down_proj"] == coarse
    assert "model.layers.1.self_attn.qkv_proj" not in found.layers
    kept = plugin.engine_architecture(config=config, tensors=resolved.infos).keep_float32
    assert "model.layers.1.mlp.gate.proj.scales" in kept
    assert "model.layers.1.mlp.gate.proj.weight" not in kept


def test_owner_is_found_by_type_and_by_architecture() -> None:
    plugins = Plugins.load()
    assert plugins.resolve_owner("laguna", (), None).family.name == "laguna"
    assert plugins.resolve_owner(None, ("LagunaForCausalLM",), None).family.name == "laguna"


def test_plan_of_an_unusable_config_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        plugin.engine_weight_plan(config=CheckpointConfig({"model_type": "laguna"}), tensors={})
