"""Gemma 3 text forward in NumPy float64, written from the formulas.

Independent of the engine: it reads transformers' configuration names and Hugging Face tensor names
and shares no code with the plugin.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray
PREFIX = "model."


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (1.0 + weight)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def rotate(x: Array, theta: float, factor: float) -> Array:
    """Rotate ``[N, T, D]`` half-split by position / factor."""
    tokens, dim = x.shape[1:]
    frequencies = theta ** (-np.arange(0, dim, 2) / dim) / factor
    angles = np.arange(tokens)[:, None] * frequencies[None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(q: Array, k: Array, v: Array, scale: float, window: int | None) -> Array:
    """``[N, T, D]`` queries over ``[K, T, D]`` keys, causal, last ``window`` keys only."""
    tokens = q.shape[1]
    repeat = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, repeat, 0), np.repeat(v, repeat, 0)
    scores = q @ k.swapaxes(1, 2) * scale
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def forward(config: dict[str, Any], tensors: dict[str, Array], ids: list[int]) -> Array:
    """Logits ``[T, V]`` of a transformers-5 style flat text config."""
    w = {key: value.astype(np.float64) for key, value in tensors.items()}
    eps, dim = config["rms_norm_eps"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    scale = config["query_pre_attn_scalar"] ** -0.5
    x = w[f"{PREFIX}embed_tokens.weight"][ids] * np.sqrt(config["hidden_size"])

    def split(y: Array, count: int) -> Array:
        return y.reshape(len(ids), count, dim).swapaxes(0, 1)

    for index, kind in enumerate(config["layer_types"]):
        p = f"{PREFIX}layers.{index}."
        rope = config["rope_parameters"][kind]
        theta, factor = rope["rope_theta"], rope.get("factor", 1.0)
        n = rms_norm(x, w[f"{p}input_layernorm.weight"], eps)
        q = split(n @ w[f"{p}self_attn.q_proj.weight"].T, heads)
        k = split(n @ w[f"{p}self_attn.k_proj.weight"].T, kv_heads)
        v = split(n @ w[f"{p}self_attn.v_proj.weight"].T, kv_heads)
        q = rotate(rms_norm(q, w[f"{p}self_attn.q_norm.weight"], eps), theta, factor)
        k = rotate(rms_norm(k, w[f"{p}self_attn.k_norm.weight"], eps), theta, factor)
        window = config["sliding_window"] if kind == "sliding_attention" else None
        a = attention(q, k, v, scale, window).swapaxes(0, 1).reshape(len(ids), -1)
        a = a @ w[f"{p}self_attn.o_proj.weight"].T
        x = x + rms_norm(a, w[f"{p}post_attention_layernorm.weight"], eps)
        n = rms_norm(x, w[f"{p}pre_feedforward_layernorm.weight"], eps)
        gate = gelu_tanh(n @ w[f"{p}mlp.gate_proj.weight"].T)
        m = (gate * (n @ w[f"{p}mlp.up_proj.weight"].T)) @ w[f"{p}mlp.down_proj.weight"].T
        x = x + rms_norm(m, w[f"{p}post_feedforward_layernorm.weight"], eps)
    x = rms_norm(x, w[f"{PREFIX}norm.weight"], eps)
    logits = x @ w[f"{PREFIX}embed_tokens.weight"].T
    cap = config.get("final_logit_softcapping")
    return cap * np.tanh(logits / cap) if cap else logits
