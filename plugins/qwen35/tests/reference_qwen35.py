"""The text tower in NumPy float64, written from the formulas of the family.

Token by token where the formula is a recurrence, head by head where it is attention. Tensors are in
the published layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.testing.reference import (
    attention,
    causal_mask,
    default_frequencies,
    rms_norm,
    silu,
    softmax,
    swiglu,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TEXT = "model.language_model."


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def delta_rule(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Row by row: ``[T, Nk, Dk]`` unnormalised, values ``[T, Nv, Dv]``, state ``[Nv, Dv, Dk]``."""
    group = values.shape[1] // keys.shape[1]

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)

    queries = np.repeat(unit(queries), group, axis=1) * queries.shape[-1] ** -0.5
    keys = np.repeat(unit(keys), group, axis=1)
    outputs = []
    for query, key, value, decay, rate in zip(
        queries, keys, values, np.exp(log_decay), beta, strict=True
    ):
        state = state * decay[:, None, None]
        error = (value - np.einsum("hvk,hk->hv", state, key)) * rate[:, None]
        state = state + error[:, :, None] * key[:, None, :]
        outputs.append(np.einsum("hvk,hk->hv", state, query))
    return np.stack(outputs), state


def delta_layer(x: np.ndarray, weights: Mapping[str, np.ndarray], text: Any) -> np.ndarray:
    """A gated delta layer ``[T, H] -> [T, H]`` from a zero state."""
    key_heads, value_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
    kernel, length = text["linear_conv_kernel_dim"], len(x)
    rows = x @ weights["in_proj_qkv.weight"].T
    padded = np.concatenate([np.zeros((kernel - 1, rows.shape[1])), rows])
    taps = weights["conv1d.weight"][:, 0]
    mixed = silu(sum(padded[tap : tap + length] * taps[:, tap] for tap in range(kernel)))
    queries, keys, values = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=-1)
    beta = sigmoid(x @ weights["in_proj_b.weight"].T)
    step = np.logaddexp(0, x @ weights["in_proj_a.weight"].T + weights["dt_bias"])
    out, _ = delta_rule(
        queries.reshape(length, key_heads, key_dim),
        keys.reshape(length, key_heads, key_dim),
        values.reshape(length, value_heads, value_dim),
        -np.exp(weights["A_log"]) * step,
        beta,
        np.zeros((value_heads, value_dim, key_dim)),
    )
    gate = (x @ weights["in_proj_z.weight"].T).reshape(length, value_heads, value_dim)
    out = rms_norm(out, weights["norm.weight"], text["rms_norm_eps"]) * silu(gate)
    return out.reshape(length, -1) @ weights["out_proj.weight"].T


def rotate_streams(x: np.ndarray, positions: np.ndarray, text: Any) -> np.ndarray:
    """Rotate ``[T, N, D]`` by ``[3, T]`` positions, channel owners interleaved."""
    rope = text["rope_parameters"]
    dims = int(text["head_dim"] * rope["partial_rotary_factor"])
    half = dims // 2
    frequencies = default_frequencies(dims, rope["rope_theta"])
    _, height, width = rope["mrope_section"]
    angles = np.empty((x.shape[0], half))
    for channel in range(half):
        stream = 0
        if channel % 3 == 1 and channel < 3 * height:
            stream = 1
        elif channel % 3 == 2 and channel < 3 * width:
            stream = 2
        angles[:, channel] = positions[stream] * frequencies[channel]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:dims]
    turned = [first * cos - second * sin, second * cos + first * sin, x[..., dims:]]
    return np.concatenate(turned, axis=-1)


def attention_layer(
    x: np.ndarray, weights: Mapping[str, np.ndarray], text: Any, positions: np.ndarray
) -> np.ndarray:
    """A gated full-attention layer ``[T, H] -> [T, H]``."""
    heads, kv_heads, dim = (
        text["num_attention_heads"],
        text["num_key_value_heads"],
        text["head_dim"],
    )
    eps, length = text["rms_norm_eps"], len(x)
    paired = (x @ weights["q_proj.weight"].T).reshape(length, heads, 2 * dim)
    queries, gate = paired[..., :dim], paired[..., dim:]
    keys = (x @ weights["k_proj.weight"].T).reshape(length, kv_heads, dim)
    values = (x @ weights["v_proj.weight"].T).reshape(length, kv_heads, dim)
    queries = rms_norm(queries, 1.0 + weights["q_norm.weight"], eps)
    keys = rms_norm(keys, 1.0 + weights["k_norm.weight"], eps)
    queries = rotate_streams(queries, positions, text)
    keys = rotate_streams(keys, positions, text)
    out = attention(queries, keys, values, scale=dim**-0.5, mask=causal_mask(length))
    return (out * sigmoid(gate)).reshape(length, -1) @ weights["o_proj.weight"].T


def sparse_layer(x: np.ndarray, weights: Mapping[str, np.ndarray], text: Any) -> np.ndarray:
    """A sparse feed-forward block ``[T, H] -> [T, H]``, token by token."""
    width = text["moe_intermediate_size"]
    probabilities = softmax(x @ weights["gate.weight"].T)
    out = np.zeros_like(x)
    for index, row in enumerate(x):
        chosen = np.argsort(-probabilities[index])[: text["num_experts_per_tok"]]
        total = probabilities[index][chosen].sum()
        for expert in chosen:
            joined = weights["experts.gate_up_proj"][expert]
            routed = swiglu(
                row[None], joined[:width], joined[width:], weights["experts.down_proj"][expert]
            )
            out[index] += probabilities[index][expert] / total * routed[0]
    shared = swiglu(
        x,
        weights["shared_expert.gate_proj.weight"],
        weights["shared_expert.up_proj.weight"],
        weights["shared_expert.down_proj.weight"],
    )
    return out + sigmoid(x @ weights["shared_expert_gate.weight"].T) * shared


def forward(
    text: Any,
    tensors: Mapping[str, np.ndarray],
    ids: Sequence[int],
    *,
    positions: np.ndarray | None = None,
    embeddings: np.ndarray | None = None,
) -> np.ndarray:
    """Logits ``[T, V]``; ``positions`` ``[3, T]`` and ``embeddings`` ``[T, H]`` as for media."""
    weights = {
        key.removeprefix(TEXT): np.asarray(value, np.float64) for key, value in tensors.items()
    }
    x = weights["embed_tokens.weight"][list(ids)]
    if embeddings is not None:
        x = np.asarray(embeddings, np.float64)
    if positions is None:
        positions = np.tile(np.arange(len(x)), (3, 1))
    eps = text["rms_norm_eps"]

    def part(prefix: str) -> dict[str, np.ndarray]:
        return {
            key.removeprefix(prefix): value
            for key, value in weights.items()
            if key.startswith(prefix)
        }

    for index, kind in enumerate(text["layer_types"]):
        layer = f"layers.{index}."
        normal = rms_norm(x, 1.0 + weights[f"{layer}input_layernorm.weight"], eps)
        if kind == "full_attention":
            x = x + attention_layer(normal, part(f"{layer}self_attn."), text, positions)
        else:
            x = x + delta_layer(normal, part(f"{layer}linear_attn."), text)
        normal = rms_norm(x, 1.0 + weights[f"{layer}post_attention_layernorm.weight"], eps)
        mlp = part(f"{layer}mlp.")
        if "num_experts" in text:
            x = x + sparse_layer(normal, mlp, text)
        else:
            x = x + swiglu(
                normal, mlp["gate_proj.weight"], mlp["up_proj.weight"], mlp["down_proj.weight"]
            )
    x = rms_norm(x, 1.0 + weights["norm.weight"], eps)
    head = "embed_tokens.weight" if text.get("tie_word_embeddings") else "lm_head.weight"
    return x @ weights[head].T
