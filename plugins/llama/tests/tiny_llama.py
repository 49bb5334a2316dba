"""Tiny llama checkpoints made of nothing but a seed: configs, keys, and weights by key name."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

SEED = "engine-llama tiny 1"
LENGTH = 24
BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 96,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
YARN |= {"original_max_position_embeddings": 32}
BAND = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
BAND |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def _rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 1e4, **values}


CASES: dict[str, dict[str, Any]] = {
    "multi_head": {"num_key_value_heads": 4, "rope_parameters": _rope("default")},
    "grouped_theta": {"rope_parameters": _rope("default", rope_theta=5e5)},
    "llama3": {"rope_parameters": BAND},
    "llama3_tied": {"tie_word_embeddings": True, "rope_parameters": BAND | {"factor": 32.0}},
    "llama3_no_original": {
        "max_position_embeddings": 32,
        "rope_parameters": {k: v for k, v in BAND.items() if not k.startswith("original")},
    },
    "biased": {"attention_bias": True, "mlp_bias": True, "rope_parameters": _rope("default")},
    "head_dim": {"head_dim": 32, "rope_parameters": _rope("default")},
    "linear": {"rope_parameters": _rope("linear", factor=4.0)},
    "dynamic": {"rope_parameters": _rope("dynamic", factor=2.0)},
    "dynamic_at_limit": {
        "max_position_embeddings": LENGTH,
        "rope_parameters": _rope("dynamic", factor=2.0),
    },
    "yarn": {"rope_parameters": YARN},
    "yarn_attention_factor": {"rope_parameters": YARN | {"attention_factor": 1.0}},
    "yarn_mscale": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn_betas": {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}},
    "yarn_no_truncation": {
        "rope_parameters": YARN | {"truncate": False, "original_max_position_embeddings": 64}
    },
}


def config_of(name: str) -> dict[str, Any]:
    """The case as transformers 5 saves it: one ``rope_parameters`` entry."""
    return BASE | CASES[name]


def hub_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same with ``rope_theta`` beside ``rope_scaling``, and its older ``type``."""
    rope = dict(config["rope_parameters"])
    result = {key: value for key, value in config.items() if key != "rope_parameters"}
    result["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    result["rope_scaling"] = None if rope["type"] == "default" else rope
    return result


def published_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The key list that a checkpoint of this config ships, with shapes."""
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        for part, name, out, into, bias in (
            ("self_attn", "q", queries, hidden, "attention_bias"),
            ("self_attn", "k", keys, hidden, "attention_bias"),
            ("self_attn", "v", keys, hidden, "attention_bias"),
            ("self_attn", "o", hidden, queries, "attention_bias"),
            ("mlp", "gate", inner, hidden, "mlp_bias"),
            ("mlp", "up", inner, hidden, "mlp_bias"),
            ("mlp", "down", hidden, inner, "mlp_bias"),
        ):
            shapes[f"{layer}{part}.{name}_proj.weight"] = (out, into)
            if config.get(bias):
                shapes[f"{layer}{part}.{name}_proj.bias"] = (out,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def tensor(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """One float32 weight, a function of its name and shape alone."""
    digest = hashlib.sha256(f"{SEED}|{key}|{shape}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    values = generator.standard_normal(shape)
    if key.endswith("norm.weight"):
        values = 1 + 0.2 * values
    elif key.endswith(".bias"):
        values = 0.3 * values
    elif "embed_tokens" not in key:
        values = values * (1.5 / shape[-1] ** 0.5)
    return values.astype(np.float32)


def tensors_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """All weights of a config."""
    return {key: tensor(key, shape) for key, shape in published_shapes(config).items()}


def prompt(length: int = LENGTH, vocab_size: int = BASE["vocab_size"]) -> list[int]:
    """Fixed ids."""
    generator = np.random.Generator(np.random.PCG64(11))
    return [int(token) for token in generator.integers(3, vocab_size, length)]
