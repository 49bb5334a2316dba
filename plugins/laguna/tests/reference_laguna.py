"""The Laguna forward pass in NumPy float64, from the formulas; shares nothing with the plugin.

It reads configurations as transformers 5 saves them and tensors in the released layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.testing import reference as ref

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What transformers fills in when a configuration has no rotary parameters at all.
SILENT = {
    "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 1e4},
}


def frequencies(config: Mapping[str, Any], kind: str) -> tuple[np.ndarray, float]:
    """Frequencies and amplitude of one layer kind."""
    rope = (config.get("rope_parameters") or SILENT)[kind]
    dims = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type", "default") == "default":
        return ref.default_frequencies(dims, rope["rope_theta"]), 1.0
    borders = {key: rope[key] for key in ("beta_fast", "beta_slow", "truncate") if key in rope}
    turning = ref.yarn_frequencies(
        dims,
        rope["rope_theta"],
        factor=rope["factor"],
        original=rope["original_max_position_embeddings"],
        **borders,
    )
    amplitude = ref.yarn_amplitude(rope["factor"], attention_factor=rope.get("attention_factor"))
    return turning, amplitude


def softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def forward(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], ids: Sequence[int]
) -> np.ndarray:
    """Logits ``[L, V]`` float64 of one uncached pass."""
    weights = {key: np.asarray(value, np.float64) for key, value in tensors.items()}
    dim, kv_heads, length = config["head_dim"], config["num_key_value_heads"], len(ids)
    positions = np.arange(length)

    def project(x: np.ndarray, path: str) -> np.ndarray:
        out = x @ weights[f"{path}.weight"].T
        return out + weights[f"{path}.bias"] if f"{path}.bias" in weights else out

    def norm(x: np.ndarray, path: str) -> np.ndarray:
        return ref.rms_norm(x, weights[f"{path}.weight"], config["rms_norm_eps"])

    def swiglu(x: np.ndarray, path: str) -> np.ndarray:
        names = ("gate_proj", "up_proj", "down_proj")
        return ref.swiglu(x, *(weights[f"{path}.{name}.weight"] for name in names))

    def attention(x: np.ndarray, path: str, kind: str, heads: int) -> np.ndarray:
        turning, amplitude = frequencies(config, kind)
        q = norm(project(x, f"{path}.q_proj").reshape(length, heads, dim), f"{path}.q_norm")
        k = norm(project(x, f"{path}.k_proj").reshape(length, kv_heads, dim), f"{path}.k_norm")
        v = project(x, f"{path}.v_proj").reshape(length, kv_heads, dim)
        window = config["sliding_window"] if kind == "sliding_attention" else None
        mixed = ref.attention(
            ref.rotate(q, positions, turning, amplitude),
            ref.rotate(k, positions, turning, amplitude),
            v,
            scale=dim**-0.5,
            mask=ref.causal_mask(length, window),
        )
        gate = softplus(project(x, f"{path}.g_proj"))
        gate = gate.reshape(length, heads, -1)
        return project((mixed * gate).reshape(length, -1), f"{path}.o_proj")

    def mixture(x: np.ndarray, path: str) -> np.ndarray:
        logits = x @ weights[f"{path}.gate.weight"].T
        cap = config.get("moe_router_logit_softcapping") or 0.0
        if cap:
            logits = cap * np.tanh(logits / cap)
        scores = sigmoid(logits)
        ranked = scores + weights[f"{path}.experts.e_score_correction_bias"]
        chosen = np.argsort(-ranked, axis=-1)[:, : config["num_experts_per_tok"]]
        shares = np.zeros_like(scores)
        np.put_along_axis(shares, chosen, np.take_along_axis(scores, chosen, -1), -1)
        shares /= shares.sum(-1, keepdims=True)
        out = np.zeros_like(x)
        for expert in range(config["num_experts"]):
            out += shares[:, expert, None] * swiglu(x, f"{path}.experts.{expert}")
        return config["moe_routed_scaling_factor"] * out + swiglu(x, f"{path}.shared_expert")

    uniform = [config["num_attention_heads"]] * config["num_hidden_layers"]
    heads = config.get("num_attention_heads_per_layer") or uniform
    hidden = weights["model.embed_tokens.weight"][list(ids)]
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        x = norm(hidden, f"{layer}.input_layernorm")
        hidden = hidden + attention(x, f"{layer}.self_attn", kind, heads[index])
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        sparse = config["mlp_layer_types"][index] == "sparse"
        hidden = hidden + (mixture if sparse else swiglu)(x, f"{layer}.mlp")
    hidden = norm(hidden, "model.norm")
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return hidden @ weights[f"{head}.weight"].T
