"""Tiny random Gemma 3 checkpoints: weights depend on key and shape alone."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

S, F = "sliding_attention", "full_attention"


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A flat text config that ends on a sliding layer, its window shorter than the prompt."""
    config: dict[str, Any] = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 160,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "max_position_embeddings": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [S, S, S, S, S, F, S],
        "rope_parameters": {
            S: {"rope_type": "default", "rope_theta": 10_000.0},
            F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    }
    return config | changes


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        p = f"model.layers.{index}."
        result |= {
            f"{p}input_layernorm.weight": (hidden,),
            f"{p}post_attention_layernorm.weight": (hidden,),
            f"{p}pre_feedforward_layernorm.weight": (hidden,),
            f"{p}post_feedforward_layernorm.weight": (hidden,),
            f"{p}self_attn.q_norm.weight": (dim,),
            f"{p}self_attn.k_norm.weight": (dim,),
            f"{p}self_attn.q_proj.weight": (query, hidden),
            f"{p}self_attn.k_proj.weight": (key, hidden),
            f"{p}self_attn.v_proj.weight": (key, hidden),
            f"{p}self_attn.o_proj.weight": (hidden, query),
            f"{p}mlp.gate_proj.weight": (inner, hidden),
            f"{p}mlp.up_proj.weight": (inner, hidden),
            f"{p}mlp.down_proj.weight": (hidden, inner),
        }
    return result


def draw(key: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(f"{key}{shape}".encode()).digest()[:8], "little")
    values = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)
    scale = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
    return (values * scale).astype(np.float32)


def tiny_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    return {key: draw(key, shape) for key, shape in shapes(config).items()}
