"""Tiny random Qwen3.5 checkpoints: each tensor depends on its key and shape alone.

Tensors are made in the published layout (``model.language_model.*``, fused experts, convolutions
``[C, 1, K]``, norms as deltas); ``relayout`` writes the same model in every other one.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

SEED = "engine-qwen35 tiny 1"
VOCABULARY = 160
LENGTH = 137
RECORDED_ROWS = slice(None, None, 4)  # of the prompt, the last one included
FULL, LINEAR = "full_attention", "linear_attention"
TEXT = "model.language_model."

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
BASE: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attn_output_gate": True,
    "max_position_embeddings": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 150,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
IRREGULAR = [FULL, LINEAR, LINEAR, FULL, FULL, LINEAR]
CASES: dict[str, Config] = {
    "dense_tied": {"tie_word_embeddings": True},
    "dense_untied": {"tie_word_embeddings": False},
    "moe_tied": {"tie_word_embeddings": True, **EXPERTS},
    "moe_untied": {"tie_word_embeddings": False, **EXPERTS},
    "irregular": {
        "tie_word_embeddings": False,
        "layer_types": IRREGULAR,
        "num_hidden_layers": len(IRREGULAR),
    },
}
VISION: Config = {
    "model_type": "qwen3_5_vision",
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [],
}


def text_config(name: str, **changes: Any) -> Config:
    """The text fields of a case."""
    text = {**BASE, **CASES[name], **changes}
    if "num_experts" in text:
        del text["intermediate_size"]
    return text


def is_sparse(text: Config) -> bool:
    return "num_experts" in text


def whole_config(text: Config, **changes: Any) -> Config:
    """A multimodal ``config.json`` around text fields; ``changes`` go to the top level."""
    name = "qwen3_5_moe" if is_sparse(text) else "qwen3_5"
    return {
        "model_type": name,
        "architectures": [
            f"Qwen3_5{'Moe' if is_sparse(text) else ''}ForConditionalGeneration",
        ],
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "text_config": {"model_type": f"{name}_text", **text},
        **changes,
    }


def flat_config(text: Config) -> Config:
    """A text-only ``config.json``."""
    sparse = is_sparse(text)
    return {
        "model_type": "qwen3_5_moe_text" if sparse else "qwen3_5_text",
        "architectures": [f"Qwen3_5{'Moe' if sparse else ''}ForCausalLM"],
        **text,
    }


def prompt(length: int = LENGTH) -> list[int]:
    generator = np.random.Generator(np.random.PCG64(5))
    return [int(i) for i in generator.integers(0, VOCABULARY - 10, length)]


def draw(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor from its key; norms are deltas except the gated one."""
    digest = hashlib.sha256(f"{SEED}|{key}|{shape}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
    values = generator.standard_normal(shape)
    if key.endswith("A_log"):
        values = generator.uniform(-2.0, 1.0, shape)
    elif key.endswith("linear_attn.norm.weight"):
        values = 1.0 + 0.3 * values
    elif len(shape) == 1 and not key.endswith("dt_bias"):
        values = 0.3 * values
    elif "conv1d" in key:
        values = 0.4 * values
    elif len(shape) > 1:
        values = values * shape[-1] ** -0.5
    return values.astype(np.float32)


def gated_shapes(block: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{block}gate_proj.weight": (width, hidden),
        f"{block}up_proj.weight": (width, hidden),
        f"{block}down_proj.weight": (hidden, width),
    }


def mlp_shapes(text: Config, block: str) -> dict[str, tuple[int, ...]]:
    hidden = text["hidden_size"]
    if not is_sparse(text):
        return gated_shapes(block, hidden, text["intermediate_size"])
    count, width = text["num_experts"], text["moe_intermediate_size"]
    return {
        f"{block}gate.weight": (count, hidden),
        f"{block}experts.gate_up_proj": (count, 2 * width, hidden),
        f"{block}experts.down_proj": (count, hidden, width),
        **gated_shapes(f"{block}shared_expert.", hidden, text["shared_expert_intermediate_size"]),
        f"{block}shared_expert_gate.weight": (1, hidden),
    }


def attention_shapes(text: Config, block: str) -> dict[str, tuple[int, ...]]:
    hidden, dim = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * dim, text["num_key_value_heads"] * dim
    return {
        f"{block}q_proj.weight": (2 * queries, hidden),
        f"{block}k_proj.weight": (keys, hidden),
        f"{block}v_proj.weight": (keys, hidden),
        f"{block}o_proj.weight": (hidden, queries),
        f"{block}q_norm.weight": (dim,),
        f"{block}k_norm.weight": (dim,),
    }


def linear_shapes(text: Config, block: str) -> dict[str, tuple[int, ...]]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    values = heads * text["linear_value_head_dim"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    return {
        f"{block}in_proj_qkv.weight": (2 * keys + values, hidden),
        f"{block}in_proj_z.weight": (values, hidden),
        f"{block}in_proj_b.weight": (heads, hidden),
        f"{block}in_proj_a.weight": (heads, hidden),
        f"{block}conv1d.weight": (2 * keys + values, 1, text["linear_conv_kernel_dim"]),
        f"{block}A_log": (heads,),
        f"{block}dt_bias": (heads,),
        f"{block}norm.weight": (text["linear_value_head_dim"],),
        f"{block}out_proj.weight": (hidden, values),
    }


def shapes_of(text: Config) -> dict[str, tuple[int, ...]]:
    """Key -> shape of the text tower as published."""
    hidden = text["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{TEXT}embed_tokens.weight": (text["vocab_size"], hidden),
        f"{TEXT}norm.weight": (hidden,),
    }
    if not text.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (text["vocab_size"], hidden)
    for index, kind in enumerate(text["layer_types"]):
        layer = f"{TEXT}layers.{index}."
        shapes[f"{layer}input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        if kind == FULL:
            shapes |= attention_shapes(text, f"{layer}self_attn.")
        else:
            shapes |= linear_shapes(text, f"{layer}linear_attn.")
        shapes |= mlp_shapes(text, f"{layer}mlp.")
    return shapes


def mtp_shapes(text: Config) -> dict[str, tuple[int, ...]]:
    """Key -> shape of the multi-token-prediction module as published."""
    hidden = text["hidden_size"]
    layer = "mtp.layers.0."
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        **attention_shapes(text, f"{layer}self_attn."),
        **mlp_shapes(text, f"{layer}mlp."),
    }


def vision_shapes(vision: Config) -> dict[str, tuple[int, ...]]:
    """Key -> shape of the vision tower as published."""
    tower, width, inner = "model.visual.", vision["hidden_size"], vision["intermediate_size"]
    patch, merged = vision["patch_size"], width * vision["spatial_merge_size"] ** 2
    frames, channels = vision["temporal_patch_size"], vision["in_channels"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}patch_embed.proj.weight": (width, channels, frames, patch, patch),
        f"{tower}patch_embed.proj.bias": (width,),
        f"{tower}pos_embed.weight": (vision["num_position_embeddings"], width),
        f"{tower}merger.norm.weight": (width,),
        f"{tower}merger.norm.bias": (width,),
        f"{tower}merger.linear_fc1.weight": (merged, merged),
        f"{tower}merger.linear_fc1.bias": (merged,),
        f"{tower}merger.linear_fc2.weight": (vision["out_hidden_size"], merged),
        f"{tower}merger.linear_fc2.bias": (vision["out_hidden_size"],),
    }
    for index in range(vision["depth"]):
        block = f"{tower}blocks.{index}."
        for norm in ("norm1", "norm2"):
            shapes |= {f"{block}{norm}.weight": (width,), f"{block}{norm}.bias": (width,)}
        for name, rows, columns in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.linear_fc1", inner, width),
            ("mlp.linear_fc2", width, inner),
        ):
            shapes |= {f"{block}{name}.weight": (rows, columns), f"{block}{name}.bias": (rows,)}
    return shapes


def drawn(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return {key: draw(key, shape) for key, shape in shapes.items()}


def tensors_of(text: Config) -> Tensors:
    """The text tower as published."""
    return drawn(shapes_of(text))


def is_delta(key: str) -> bool:
    """Whether a published tensor is a norm stored as its difference from 1."""
    norm = key.endswith(
        ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
    )
    return norm and "linear_attn" not in key and "visual" not in key


def split_experts(tensors: Tensors) -> Tensors:
    """Write one tensor an expert and projection, as transformers saves."""
    result: Tensors = {}
    for key, value in tensors.items():
        if key.endswith("experts.gate_up_proj"):
            stem = key.removesuffix("gate_up_proj")
            half = value.shape[1] // 2
            for index, expert in enumerate(value):
                result[f"{stem}{index}.gate_proj.weight"] = expert[:half]
                result[f"{stem}{index}.up_proj.weight"] = expert[half:]
        elif key.endswith("experts.down_proj"):
            stem = key.removesuffix("down_proj")
            result |= {f"{stem}{i}.down_proj.weight": expert for i, expert in enumerate(value)}
        else:
            result[key] = value
    return result


def stack_experts(tensors: Tensors) -> Tensors:
    """Write one stack a projection, as MLX conversions have it."""
    result: Tensors = {}
    for key, value in tensors.items():
        if key.endswith("experts.gate_up_proj"):
            stem = key.removesuffix("experts.gate_up_proj")
            half = value.shape[1] // 2
            result[f"{stem}switch_mlp.gate_proj.weight"] = value[:, :half].copy()
            result[f"{stem}switch_mlp.up_proj.weight"] = value[:, half:].copy()
        elif key.endswith("experts.down_proj"):
            stem = key.removesuffix("experts.down_proj")
            result[f"{stem}switch_mlp.down_proj.weight"] = value
        else:
            result[key] = value
    return result


def text_only(tensors: Tensors) -> Tensors:
    """Keys of a text-only save."""
    return {key.replace(TEXT, "model.", 1): value for key, value in tensors.items()}


def converted(tensors: Tensors) -> Tensors:
    """The layout of MLX converters: other keys, moved kernel axis, folded norms, stacks."""
    result: Tensors = {}
    for key, value in stack_experts(tensors).items():
        if key.startswith("model.visual."):
            name = "vision_tower." + key.removeprefix("model.visual.")
        elif key.startswith("lm_head."):
            name = "language_model." + key
        else:
            name = key.replace(TEXT, "language_model.model.", 1)
        if "conv1d" in key:
            value = np.ascontiguousarray(value.transpose(0, 2, 1))
        elif "patch_embed.proj.weight" in key:
            value = np.ascontiguousarray(value.transpose(0, 2, 3, 4, 1))
        elif is_delta(key):
            value = value + np.float32(1.0)
        result[name] = value
    return result
