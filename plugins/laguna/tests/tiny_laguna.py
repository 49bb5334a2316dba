"""Tiny Laguna checkpoints made of nothing but a seed: configs, key lists, layouts, weights."""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    Shapes = dict[str, tuple[int, ...]]

# Of the first dozen the one whose routers decide most clearly: every choice of an expert in the
# tests is 7e-5 or more from the next, so no rounding turns one over.
SEED = "engine-laguna tiny 7"
LENGTH = 36
FULL, SLIDING = "full_attention", "sliding_attention"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "beta_slow": 1.0,
    "beta_fast": 64.0,
    "attention_factor": 1.3465735902799727,
    "partial_rotary_factor": 0.5,
}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
BASE: dict[str, Any] = {
    "model_type": "laguna",
    "architectures": ["LagunaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": [2, 24],
    "gating": "per-head",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING],
    "max_position_embeddings": 2048,
    "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    "moe_intermediate_size": 32,
    "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 0.0,
    "num_attention_heads": 4,
    "num_attention_heads_per_layer": [4, 6, 6, 4, 6],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "pad_token_id": 9,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {FULL: YARN, SLIDING: PLAIN},
    "shared_expert_intermediate_size": 64,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "vocab_size": 96,
}


def yarn(**changes: Any) -> dict[str, Any]:
    """Nested rotary parameters with another yarn entry; ``None`` leaves a value out."""
    entry = {key: value for key, value in (YARN | changes).items() if value is not None}
    return {FULL: entry, SLIDING: PLAIN}


CASES: dict[str, dict[str, Any]] = {
    "xs21": {},
    "s21": {
        "num_experts_per_tok": 5,
        "rope_parameters": yarn(factor=128.0, beta_fast=32.0, attention_factor=1.4852030263919618),
    },
    "no_attention_factor": {"rope_parameters": yarn(attention_factor=None)},
    "attention_factor_one": {"rope_parameters": yarn(attention_factor=1.0)},
    "gating_true": {"gating": True},
    "per_element": {"gating": "per-element"},
    "m1": {
        "gating": "per-element",
        "layer_types": [FULL] * 5,
        "num_attention_heads_per_layer": None,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 2,
        "sliding_window": 8,
        "rope_parameters": {FULL: YARN | {"partial_rotary_factor": 1.0}},
    },
    "softcap": {"moe_router_logit_softcapping": 2.0},
    "attention_bias": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "no_rope": {"rope_parameters": None},
    "all_sliding": {"layer_types": [SLIDING] * 5},
    "all_dense": {"mlp_layer_types": ["dense"] * 5},
}


def config_of(name: str) -> dict[str, Any]:
    """The case as transformers 5 saves it; a deep copy, for tests that edit it."""
    return copy.deepcopy({k: v for k, v in (BASE | CASES[name]).items() if v is not None})


def heads_of(config: Mapping[str, Any]) -> list[int]:
    """Query heads of every layer."""
    uniform = [config["num_attention_heads"]] * config["num_hidden_layers"]
    return list(config.get("num_attention_heads_per_layer") or uniform)


def published_shapes(config: Mapping[str, Any], layout: str = "disk") -> Shapes:
    """The key list that a checkpoint ships, with shapes.

    Layouts: ``disk`` (one tensor an expert, as released and as transformers saves), ``packed``
    (names of transformers in memory), ``mlx`` (stacked), ``mlx fused`` (gate and up joined).
    """
    hidden, dim, vocab = (config[key] for key in ("hidden_size", "head_dim", "vocab_size"))
    keys = config["num_key_value_heads"] * dim
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    per_element = config["gating"] == "per-element"
    for index, heads in enumerate(heads_of(config)):
        layer = f"model.layers.{index}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_norm.weight": (dim,),
            f"{layer}self_attn.k_norm.weight": (dim,),
            f"{layer}self_attn.g_proj.weight": (heads * dim if per_element else heads, hidden),
        }
        for name, out, into in (
            ("q", heads * dim, hidden),
            ("k", keys, hidden),
            ("v", keys, hidden),
            ("o", hidden, heads * dim),
        ):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (out, into)
            if config.get("attention_bias"):
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (out,)
        if config["mlp_layer_types"][index] == "dense":
            shapes |= gated(f"{layer}mlp.", hidden, config["intermediate_size"])
        else:
            shapes |= sparse_shapes(config, f"{layer}mlp.", layout)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def gated(prefix: str, hidden: int, inner: int, suffix: str = ".weight") -> Shapes:
    return {
        f"{prefix}gate_proj{suffix}": (inner, hidden),
        f"{prefix}up_proj{suffix}": (inner, hidden),
        f"{prefix}down_proj{suffix}": (hidden, inner),
    }


def sparse_shapes(config: Mapping[str, Any], block: str, layout: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    count, shared = config["num_experts"], config["shared_expert_intermediate_size"]
    router = "gate.proj.weight" if layout.startswith("mlx") else "gate.weight"
    holder = "experts" if layout == "disk" else "gate"
    shapes: Shapes = {
        f"{block}{router}": (count, hidden),
        f"{block}{holder}.e_score_correction_bias": (count,),
    }
    if layout == "disk":
        for expert in range(count):
            shapes |= gated(f"{block}experts.{expert}.", hidden, inner)
    elif layout == "packed":
        shapes[f"{block}experts.gate_up_proj"] = (count, 2 * inner, hidden)
        shapes[f"{block}experts.down_proj"] = (count, hidden, inner)
    elif layout == "mlx":
        stacked = gated(f"{block}switch_mlp.", hidden, inner)
        shapes |= {key: (count, *shape) for key, shape in stacked.items()}
    else:
        shapes[f"{block}switch_mlp.gate_up_proj.weight"] = (count, 2 * inner, hidden)
        shapes[f"{block}switch_mlp.down_proj.weight"] = (count, hidden, inner)
    name = "shared_experts" if layout == "packed" else "shared_expert"
    return shapes | gated(f"{block}{name}.", hidden, shared)


def relayout(
    config: Mapping[str, Any], disk: Mapping[str, np.ndarray], layout: str
) -> dict[str, np.ndarray]:
    """Rewrite a checkpoint from the ``disk`` layout, packed triples included."""
    result = dict(disk)
    for index, kind in enumerate(config["mlp_layer_types"]):
        if kind == "dense" or layout == "disk":
            continue
        block = f"model.layers.{index}.mlp."
        stacked: dict[str, np.ndarray] = {}
        for name in PROJECTIONS:
            for part in ("weight", "scales", "biases"):
                if f"{block}experts.0.{name}.{part}" in disk:
                    stacked[f"{name}.{part}"] = np.stack(
                        [
                            result.pop(f"{block}experts.{expert}.{name}.{part}")
                            for expert in range(config["num_experts"])
                        ]
                    )
        if layout != "mlx":
            for part in ("weight", "scales", "biases"):
                if f"gate_proj.{part}" in stacked:
                    pair = [stacked.pop(f"{name}.{part}") for name in PROJECTIONS[:2]]
                    stacked[f"gate_up_proj.{part}"] = np.concatenate(pair, axis=1)
        bias = result.pop(f"{block}experts.e_score_correction_bias")
        result[f"{block}gate.e_score_correction_bias"] = bias
        if layout == "packed":
            moved = {f"experts.{key.removesuffix('.weight')}": v for key, v in stacked.items()}
            for key in [key for key in result if key.startswith(f"{block}shared_expert.")]:
                result[key.replace("shared_expert.", "shared_experts.")] = result.pop(key)
        else:
            moved = {f"switch_mlp.{key}": value for key, value in stacked.items()}
            for part in ("weight", "scales", "biases"):
                if f"{block}gate.{part}" in result:
                    result[f"{block}gate.proj.{part}"] = result.pop(f"{block}gate.{part}")
        result |= {f"{block}{key}": value for key, value in moved.items()}
    return result


def tensor(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """One float32 weight, a function of its name and shape alone."""
    digest = hashlib.sha256(f"{SEED}|{key}|{shape}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    values = generator.standard_normal(shape)
    if key.endswith("norm.weight"):
        values = 1 + 0.2 * values
    elif key.endswith("e_score_correction_bias"):
        values = 0.15 * values
    elif key.endswith(".bias"):
        values = 0.3 * values
    elif "embed_tokens" not in key:
        values = values * (1.5 / shape[-1] ** 0.5)
    return values.astype(np.float32)


def tensors_of(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All weights of a config, ``disk`` layout."""
    return {key: tensor(key, shape) for key, shape in published_shapes(config).items()}


def prompt(length: int = LENGTH, vocab_size: int = BASE["vocab_size"]) -> list[int]:
    """Fixed ids."""
    generator = np.random.Generator(np.random.PCG64(11))
    return [int(token) for token in generator.integers(3, vocab_size, length)]
