"""Gemma 4 text forward in NumPy float64, written from the formulas.

Independent of the engine: it reads transformers' configuration names and Hugging Face tensor names
and shares no code with the plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Array = np.ndarray
SLIDING, FULL = "sliding_attention", "full_attention"


def rms_norm(x: Array, eps: float, weight: Array | None = None) -> Array:
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def frequencies(rope: Mapping[str, Any], dim: int) -> Array:
    """Radians a token of the ``dim / 2`` pairs (i, i + dim / 2)."""
    pairs = np.arange(dim // 2)
    turning = rope["rope_theta"] ** (-2.0 * pairs / dim) / rope.get("factor", 1.0)
    if rope["rope_type"] != "proportional":
        return turning
    return np.where(pairs < int(rope["partial_rotary_factor"] * dim // 2), turning, 0.0)


def rotate(x: Array, rates: Array) -> Array:
    """Rotate ``[N, T, D]`` half-split."""
    angles = np.arange(x.shape[1])[:, None] * rates[None]
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def seen_keys(
    tokens: int, window: int | None, spans: Sequence[tuple[int, int]], rule: str
) -> Array:
    """Which keys each row sees, by kind of layer and span rule."""
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None]
    block = np.zeros((tokens, tokens), bool)
    for start, stop in spans:
        block[start:stop, start:stop] = True
    causal = distance >= 0
    if rule == "sliding":
        return causal if window is None else (causal | block) & (distance < window)
    inside = causal if window is None else causal & (distance < window)
    return inside | block if rule == "all" else inside


def attention(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """``[N, T, D]`` queries over ``[K, T, D]`` keys, scale 1."""
    repeat = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, repeat, 0), np.repeat(v, repeat, 0)
    scores = np.where(seen, q @ k.swapaxes(1, 2), -np.inf)
    return softmax(scores) @ v


def experts(w: Mapping[str, Array], layer: str, x: Array, top_k: int, eps: float) -> Array:
    """The sparse branch over the residual stream, one token and one expert at a time."""
    router_in = rms_norm(x, eps) * w[f"{layer}router.scale"] * x.shape[-1] ** -0.5
    probabilities = softmax(router_in @ w[f"{layer}router.proj.weight"].T)
    rows = rms_norm(x, eps, w[f"{layer}pre_feedforward_layernorm_2.weight"])
    out = np.zeros_like(x)
    for token, shares in enumerate(probabilities):
        chosen = np.argsort(shares)[::-1][:top_k]
        for expert in chosen:
            both = w[f"{layer}experts.gate_up_proj"][expert] @ rows[token]
            gate, up = np.split(both, 2)
            result = w[f"{layer}experts.down_proj"][expert] @ (gelu_tanh(gate) * up)
            share = shares[expert] / shares[chosen].sum()
            out[token] += share * w[f"{layer}router.per_expert_scale"][expert] * result
    return out


def per_layer_inputs(
    config: Mapping[str, Any], w: Mapping[str, Array], ids: Sequence[int], x: Array
) -> Array | None:
    """``[T, layers, P]``, or nothing for models without per-layer embeddings."""
    inner = config.get("hidden_size_per_layer_input", 0)
    if not inner:
        return None
    shape = (len(ids), config["num_hidden_layers"], inner)
    token = (w["model.embed_tokens_per_layer.weight"][list(ids)] * np.sqrt(inner)).reshape(shape)
    context = x @ w["model.per_layer_model_projection.weight"].T * config["hidden_size"] ** -0.5
    norm = w["model.per_layer_projection_norm.weight"]
    context = rms_norm(context.reshape(shape), config["rms_norm_eps"], norm)
    return (context + token) / np.sqrt(2.0)


def forward(
    config: Mapping[str, Any],
    tensors: Mapping[str, Array],
    ids: Sequence[int],
    *,
    media: Mapping[int, Array] | None = None,
    spans: Sequence[tuple[int, int]] = (),
    rule: str = "none",
) -> Array:
    """Logits ``[T, V]`` of a transformers-5 style flat text config.

    ``media`` replaces the embeddings of some rows (index -> ``[H]``, not scaled); their per-layer
    embedding is that of id 0.
    """
    w = {key: value.astype(np.float64) for key, value in tensors.items()}
    eps, heads = config["rms_norm_eps"], config["num_attention_heads"]
    x = w["model.embed_tokens.weight"][list(ids)] * np.sqrt(config["hidden_size"])
    plain = list(ids)
    for row, embedding in (media or {}).items():
        x[row] = embedding
        plain[row] = 0
    per_layer = per_layer_inputs(config, w, plain, x)
    overrides = {int(key): value for key, value in config["per_layer_config"].items()}
    first_shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    attended: dict[str, tuple[Array, Array]] = {}
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}."
        dim = overrides.get(index, {}).get("head_dim", config["head_dim"])
        rates = frequencies(config["rope_parameters"][kind], dim)

        def split(y: Array, size: int = dim) -> Array:
            return y.reshape(len(ids), -1, size).swapaxes(0, 1)

        n = rms_norm(x, eps, w[f"{layer}input_layernorm.weight"])
        q = split(n @ w[f"{layer}self_attn.q_proj.weight"].T)
        q = rotate(rms_norm(q, eps, w[f"{layer}self_attn.q_norm.weight"]), rates)
        if index < first_shared:
            raw = split(n @ w[f"{layer}self_attn.k_proj.weight"].T)
            k = rotate(rms_norm(raw, eps, w[f"{layer}self_attn.k_norm.weight"]), rates)
            if config["attention_k_eq_v"] and kind == FULL:
                v = raw
            else:
                v = split(n @ w[f"{layer}self_attn.v_proj.weight"].T)
            attended[kind] = (k, rms_norm(v, eps))
        window = config["sliding_window"] if kind == SLIDING else None
        mixed = attention(q, *attended[kind], seen_keys(len(ids), window, spans, rule))
        assert mixed.shape[0] == heads
        out = mixed.swapaxes(0, 1).reshape(len(ids), -1) @ w[f"{layer}self_attn.o_proj.weight"].T
        x = x + rms_norm(out, eps, w[f"{layer}post_attention_layernorm.weight"])
        n = rms_norm(x, eps, w[f"{layer}pre_feedforward_layernorm.weight"])
        gate = gelu_tanh(n @ w[f"{layer}mlp.gate_proj.weight"].T)
        m = (gate * (n @ w[f"{layer}mlp.up_proj.weight"].T)) @ w[f"{layer}mlp.down_proj.weight"].T
        if config.get("enable_moe_block"):
            sparse = experts(w, layer, x, config["top_k_experts"], eps)
            m = rms_norm(m, eps, w[f"{layer}post_feedforward_layernorm_1.weight"])
            m = m + rms_norm(sparse, eps, w[f"{layer}post_feedforward_layernorm_2.weight"])
        x = x + rms_norm(m, eps, w[f"{layer}post_feedforward_layernorm.weight"])
        if per_layer is not None:
            gate = gelu_tanh(x @ w[f"{layer}per_layer_input_gate.weight"].T)
            p = (gate * per_layer[:, index]) @ w[f"{layer}per_layer_projection.weight"].T
            x = x + rms_norm(p, eps, w[f"{layer}post_per_layer_input_norm.weight"])
        x = x * w[f"{layer}layer_scalar"]
    x = rms_norm(x, eps, w["model.norm.weight"])
    logits = x @ w["model.embed_tokens.weight"].T
    cap = config.get("final_logit_softcapping")
    return cap * np.tanh(logits / cap) if cap else logits
