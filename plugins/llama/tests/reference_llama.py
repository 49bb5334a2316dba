"""The llama forward pass in NumPy float64, from the formulas; shares nothing with the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.testing import reference as ref

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def frequencies(config: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Frequencies and amplitude from a ``rope_parameters`` entry."""
    rope = config["rope_parameters"]
    theta, kind = rope["rope_theta"], rope["rope_type"]
    dims = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "linear":
        return ref.linear_frequencies(dims, theta, rope["factor"]), 1.0
    if kind == "llama3":
        return ref.band_frequencies(
            dims,
            theta,
            factor=rope["factor"],
            low=rope["low_freq_factor"],
            high=rope["high_freq_factor"],
            original=original,
        ), 1.0
    if kind == "yarn":
        borders = {key: rope[key] for key in ("beta_fast", "beta_slow", "truncate") if key in rope}
        scales = {
            key: rope[key]
            for key in ("attention_factor", "mscale", "mscale_all_dim")
            if key in rope
        }
        return (
            ref.yarn_frequencies(dims, theta, factor=rope["factor"], original=original, **borders),
            ref.yarn_amplitude(rope["factor"], **scales),
        )
    assert kind in ("default", "dynamic"), kind
    return ref.default_frequencies(dims, theta), 1.0


def forward(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], ids: Sequence[int]
) -> np.ndarray:
    """Logits ``[L, V]`` float64 of one uncached pass."""
    weights = {key: np.asarray(value, np.float64) for key, value in tensors.items()}
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    freqs, amplitude = frequencies(config)
    length, positions = len(ids), np.arange(len(ids))
    windows = [
        config["sliding_window"] if kind == "sliding_attention" else None
        for kind in config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    ]

    def project(x: np.ndarray, path: str) -> np.ndarray:
        out = x @ weights[f"{path}.weight"].T
        return out + weights[f"{path}.bias"] if f"{path}.bias" in weights else out

    def norm(x: np.ndarray, path: str) -> np.ndarray:
        return ref.rms_norm(x, weights[f"{path}.weight"], config["rms_norm_eps"])

    hidden = weights["model.embed_tokens.weight"][list(ids)]
    for index, window in enumerate(windows):
        layer = f"model.layers.{index}"
        x = norm(hidden, f"{layer}.input_layernorm")
        q = project(x, f"{layer}.self_attn.q_proj").reshape(length, heads, head_dim)
        k = project(x, f"{layer}.self_attn.k_proj").reshape(length, kv_heads, head_dim)
        v = project(x, f"{layer}.self_attn.v_proj").reshape(length, kv_heads, head_dim)
        mixed = ref.attention(
            ref.rotate(q, positions, freqs, amplitude),
            ref.rotate(k, positions, freqs, amplitude),
            v,
            scale=head_dim**-0.5,
            mask=ref.causal_mask(length, window),
        )
        hidden = hidden + project(mixed.reshape(length, -1), f"{layer}.self_attn.o_proj")
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        gate = ref.silu(project(x, f"{layer}.mlp.gate_proj"))
        hidden = hidden + project(
            gate * project(x, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj"
        )
    hidden = norm(hidden, "model.norm")
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return hidden @ weights[f"{head}.weight"].T
