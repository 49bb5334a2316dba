"""Sizes and key lists of the published models; no weights are needed.

The sizes are those of the vendor's configuration files where they could be read; the 2B and the two
largest models are partly inferred, and their key lists follow from the sizes in any case.
"""

from __future__ import annotations

from typing import Any

from tiny_qwen35 import mtp_shapes, shapes_of, vision_shapes, whole_config

COMMON: dict[str, Any] = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262_144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "mlp_only_layers": [],
    "eos_token_id": 248_044,
    "bos_token_id": None,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}


def dense(hidden: int, layers: int, heads: int, kv: int, values: int, inner: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "linear_num_value_heads": values,
        "intermediate_size": inner,
    }


def sparse(
    hidden: int, layers: int, heads: int, values: int, experts: int, chosen: int, inner: int
) -> dict[str, Any]:
    sizes = dense(hidden, layers, heads, 2, values, 0)
    del sizes["intermediate_size"]
    return {
        **sizes,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


# Text sizes, whether tied, and the vision tower's depth, width and inner width.
MODELS: dict[str, tuple[dict[str, Any], bool, tuple[int, int, int]]] = {
    "0.8B": (dense(1024, 24, 8, 2, 16, 3584), True, (12, 768, 3072)),
    "2B": (dense(2048, 24, 8, 2, 16, 6144), True, (24, 1024, 4096)),
    "4B": (dense(2560, 32, 16, 4, 32, 9216), True, (24, 1024, 4096)),
    "9B": (dense(4096, 32, 16, 4, 32, 12_288), False, (27, 1152, 4304)),
    "27B": (dense(5120, 64, 24, 4, 48, 17_408), False, (27, 1152, 4304)),
    "35B-A3B": (sparse(2048, 40, 16, 32, 256, 8, 512), False, (27, 1152, 4304)),
    "122B-A10B": (sparse(3072, 48, 32, 64, 256, 8, 1024), False, (27, 1152, 4304)),
    "397B-A17B": (sparse(4096, 60, 32, 64, 512, 10, 1024), False, (27, 1152, 4304)),
}
# Text tensors: 14 a linear layer, 11 a full one (18 and 15 when sparse), and 2 or 3 more.
TEXT_TENSORS = {
    "0.8B": 18 * 14 + 6 * 11 + 2,
    "2B": 18 * 14 + 6 * 11 + 2,
    "4B": 24 * 14 + 8 * 11 + 2,
    "9B": 24 * 14 + 8 * 11 + 3,
    "27B": 48 * 14 + 16 * 11 + 3,
    "35B-A3B": 30 * 18 + 10 * 15 + 3,
    "122B-A10B": 36 * 18 + 12 * 15 + 3,
    "397B-A17B": 45 * 18 + 15 * 15 + 3,
}


def published_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a published model."""
    sizes, tied, (depth, width, inner) = MODELS[name]
    layers = sizes["num_hidden_layers"]
    types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    text = {**COMMON, **sizes, "layer_types": types, "tie_word_embeddings": tied}
    vision = {
        "model_type": "qwen3_5_moe" if "num_experts" in text else "qwen3_5",
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 2304,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }
    return whole_config(
        text,
        vision_config=vision,
        image_token_id=248_056,
        video_token_id=248_057,
        vision_start_token_id=248_053,
        vision_end_token_id=248_054,
        language_model_only=False,
    )


def split_shapes(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """One tensor an expert, as the multi-token-prediction module of the first releases has it."""
    result: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        if key.endswith("experts.gate_up_proj"):
            stem = key.removesuffix("gate_up_proj")
            half = (shape[1] // 2, shape[2])
            for index in range(shape[0]):
                result |= {f"{stem}{index}.{n}_proj.weight": half for n in ("gate", "up")}
        elif key.endswith("experts.down_proj"):
            stem = key.removesuffix("down_proj")
            result |= {f"{stem}{index}.down_proj.weight": shape[1:] for index in range(shape[0])}
        else:
            result[key] = shape
    return result


def published_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Key -> shape of every tensor of a published model."""
    config = published_config(name)
    text = config["text_config"]
    mtp = mtp_shapes(text)
    return {
        **shapes_of(text),
        **(split_shapes(mtp) if name == "35B-A3B" else mtp),
        **vision_shapes(config["vision_config"]),
    }
