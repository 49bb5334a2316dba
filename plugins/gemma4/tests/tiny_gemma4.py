"""Tiny Gemma 4 checkpoints made of nothing but a seed: configs, keys, and weights by key name.

Every norm and scalar is random, so that no term is a silent identity; query and key norms are small
because the softmax scale is 1; the window is shorter than the prompt and sqrt(H) is not exact.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

SEED = "engine-gemma4 tiny 1"
LENGTH = 40
S, F = "sliding_attention", "full_attention"
ROPE = {
    S: {"rope_type": "default", "rope_theta": 10_000.0},
    F: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
BASE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 72,
    "intermediate_size": 48,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "vocab_size": 160,
    "vocab_size_per_layer_input": 160,
}
# E2B's and E4B's structure: per-layer embeddings, shared keys and values, wide shared blocks.
DENSE = BASE | {
    "num_hidden_layers": 10,
    "layer_types": [S, S, S, S, F] * 2,
    "per_layer_config": {"4": {"head_dim": 32}, "9": {"head_dim": 32}},
    "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 5,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
}
# 26B-A4B's structure: experts beside every dense block, raw keys as values of full layers.
MOE = BASE | {
    "num_hidden_layers": 6,
    "layer_types": [S] * 5 + [F],
    "per_layer_config": {"05": {"head_dim": 32, "num_key_value_heads": 1}},
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
# 31B's structure: dense, raw keys as values.
PLAIN = {
    key: value
    for key, value in MOE.items()
    if key not in ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
} | {"use_bidirectional_attention": "vision"}
# The unified 12B's text section leaves out what it does not have.
UNIFIED = {
    key: value
    for key, value in PLAIN.items()
    if key not in ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
} | {"model_type": "gemma4_unified_text", "architectures": ["Gemma4UnifiedForCausalLM"]}
CASES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "moe": MOE,
    "plain": PLAIN,
    "unified": UNIFIED,
    "irregular": DENSE
    | {
        "layer_types": [S, F, S, S, F, S, F, S, S, F],
        "per_layer_config": {str(index): {"head_dim": 32} for index in (1, 4, 6, 9)},
        "num_kv_shared_layers": 3,
        "final_logit_softcapping": None,
    },
    "window_of_one": PLAIN | {"sliding_window": 1},
}
TOKENS = {
    "boi_token_id": 150,
    "eoi_token_id": 151,
    "image_token_id": 152,
    "boa_token_id": 153,
    "eoa_token_index": 154,
    "audio_token_id": 155,
    "video_token_id": 156,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
    "use_clipped_linears": True,
    "standardize": False,
}
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [128, 32],
    "output_proj_dims": 40,
    "use_clipped_linears": True,
}


def multimodal(text: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A conditional-generation config around a text section."""
    unified = "unified" in text["model_type"]
    name = "Gemma4UnifiedForConditionalGeneration" if unified else "Gemma4ForConditionalGeneration"
    return {
        "model_type": "gemma4_unified" if unified else "gemma4",
        "architectures": [name],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        **TOKENS,
        **sections,
    }


def layer_sizes(config: dict[str, Any], index: int) -> tuple[int, int]:
    """Head size and key heads of a layer."""
    overrides = {int(key): value for key, value in config["per_layer_config"].items()}
    entry = overrides.get(index, {})
    return (
        entry.get("head_dim", config["head_dim"]),
        entry.get("num_key_value_heads", config["num_key_value_heads"]),
    )


def published_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The key list that a text checkpoint of this config ships, with shapes."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    depth, inner = config["num_hidden_layers"], config.get("hidden_size_per_layer_input", 0)
    first_shared = depth - config["num_kv_shared_layers"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config["vocab_size"], hidden)}
    for index, kind in enumerate(config["layer_types"]):
        dim, kv_heads = layer_sizes(config, index)
        layer = f"layers.{index}."
        width = config["intermediate_size"]
        width *= 2 if config.get("use_double_wide_mlp") and index >= first_shared else 1
        shapes |= {
            f"{layer}layer_scalar": (1,),
            f"{layer}self_attn.q_proj.weight": (heads * dim, hidden),
            f"{layer}self_attn.q_norm.weight": (dim,),
            f"{layer}self_attn.o_proj.weight": (hidden, heads * dim),
            f"{layer}mlp.gate_proj.weight": (width, hidden),
            f"{layer}mlp.up_proj.weight": (width, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, width),
        }
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        shapes |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in norms}
        if index < first_shared:
            shapes[f"{layer}self_attn.k_norm.weight"] = (dim,)
            shapes[f"{layer}self_attn.k_proj.weight"] = (kv_heads * dim, hidden)
            if kind == S or not config["attention_k_eq_v"]:
                shapes[f"{layer}self_attn.v_proj.weight"] = (kv_heads * dim, hidden)
        if inner:
            shapes[f"{layer}per_layer_input_gate.weight"] = (inner, hidden)
            shapes[f"{layer}per_layer_projection.weight"] = (hidden, inner)
            shapes[f"{layer}post_per_layer_input_norm.weight"] = (hidden,)
        if config.get("enable_moe_block"):
            experts, narrow = config["num_experts"], config["moe_intermediate_size"]
            shapes |= {
                f"{layer}router.proj.weight": (experts, hidden),
                f"{layer}router.scale": (hidden,),
                f"{layer}router.per_expert_scale": (experts,),
                f"{layer}experts.gate_up_proj": (experts, 2 * narrow, hidden),
                f"{layer}experts.down_proj": (experts, hidden, narrow),
                f"{layer}post_feedforward_layernorm_1.weight": (hidden,),
                f"{layer}pre_feedforward_layernorm_2.weight": (hidden,),
                f"{layer}post_feedforward_layernorm_2.weight": (hidden,),
            }
    shapes["norm.weight"] = (hidden,)
    if inner:
        shapes |= {
            "embed_tokens_per_layer.weight": (config["vocab_size_per_layer_input"], depth * inner),
            "per_layer_model_projection.weight": (depth * inner, hidden),
            "per_layer_projection_norm.weight": (inner,),
        }
    return {f"model.{key}": shape for key, shape in shapes.items()}


def tensor(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """One float32 weight, a function of its name and shape alone."""
    digest = hashlib.sha256(f"{SEED}|{key}|{shape}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    values = generator.standard_normal(shape)
    if key.endswith(("q_norm.weight", "k_norm.weight")):
        values = 0.3 * (1 + 0.2 * values)
    elif key.endswith(("layer_scalar", "scale")) or len(shape) == 1:
        values = 1 + 0.2 * values
    elif shape:
        values = values / shape[-1] ** 0.5
    return np.asarray(values, np.float32)


def tensors_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """All weights of a text config, in the spelling of a text-only Hugging Face checkpoint."""
    return {key: tensor(key, shape) for key, shape in published_shapes(config).items()}


def prompt(length: int = LENGTH) -> list[int]:
    """Fixed ids below the media placeholders."""
    generator = np.random.Generator(np.random.PCG64(11))
    return [int(token) for token in generator.integers(3, 140, length)]
