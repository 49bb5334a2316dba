"""The published sizes: configs as their repositories spell them, and the keys that they ship.

``keys_of`` writes a size's key list out from the tables of the public model descriptions, without
the plugin's help; ``read_listing`` expands a listing of shapes by layer ranges into the same form.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tiny_gemma4 import F, S, published_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Shapes = dict[str, tuple[int, ...]]

COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_global_key_value_heads": None,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        F: {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
        S: {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
}
SMALL = {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
}
LARGE = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}


def mix(period: int, count: int) -> list[str]:
    """Every ``period``-th layer is a full one."""
    return [S if (index + 1) % period else F for index in range(count)]


SMALL_VISION = {
    "hidden_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "intermediate_size": 3072,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10_240,
    "standardize": False,
    "use_clipped_linears": True,
}
LARGE_VISION = SMALL_VISION | {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "intermediate_size": 4304,
    "standardize": True,
    "use_clipped_linears": False,
}
AUDIO = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "conv_kernel_size": 5,
    "output_proj_dims": 1536,
    "subsampling_conv_channels": [128, 32],
    "use_clipped_linears": True,
}


def whole(text: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A multimodal config as the hub spells it."""
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": COMMON | text,
        "image_token_id": 258_880,
        "audio_token_id": 258_881,
        "eos_token_id": [1, 106, 50],
        **sections,
    }


UNIFIED_TEXT = {
    key: value
    for key, value in (COMMON | LARGE).items()
    if key not in ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
} | {
    "model_type": "gemma4_unified_text",
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
    "layer_types": mix(6, 48),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "E2B": whole(
        SMALL
        | {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": mix(5, 35),
        },
        vision_config=SMALL_VISION,
        audio_config=AUDIO,
    ),
    "E4B": whole(
        SMALL
        | {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
            "use_double_wide_mlp": False,
            "layer_types": mix(6, 42),
        },
        vision_config=SMALL_VISION,
        audio_config=AUDIO,
    ),
    "26B-A4B": whole(
        LARGE
        | {
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "layer_types": mix(6, 30),
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        vision_config=LARGE_VISION,
        audio_config=None,
    ),
    "31B": whole(
        LARGE
        | {
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "layer_types": mix(6, 60),
        },
        vision_config=LARGE_VISION,
        audio_config=None,
    ),
    "12B-unified": whole(
        {},
        vision_config={"mm_embed_dim": 3840, "mm_posemb_size": 1120, "patch_size": 16},
        audio_config={"audio_embed_dim": 640},
    )
    | {"model_type": "gemma4_unified", "text_config": UNIFIED_TEXT},
}
# Parameters and buffers of each size, tied head not counted again.
TOTALS = {
    "E2B": 5_104_298_467,
    "26B-A4B": 25_805_936_206,
    "31B": 31_273_088_876,
    "12B-unified": 11_959_730_224,
}


def listed_per_layer(text: dict[str, Any]) -> dict[str, Any]:
    """The same text section as transformers 5.15 and later save it."""
    newer = {key: value for key, value in text.items() if "global" not in key}
    entry = {"head_dim": text["global_head_dim"]}
    if text["attention_k_eq_v"]:
        entry["num_key_value_heads"] = text["num_global_key_value_heads"]
    full = [index for index, kind in enumerate(text["layer_types"]) if kind == F]
    return newer | {"per_layer_config": {str(index): entry for index in full}}


def keys_of(config: dict[str, Any]) -> Shapes:
    """All keys that a multimodal checkpoint ships, in the hub's spelling."""
    text = listed_per_layer(config["text_config"])
    shapes = {
        key.replace("model.", "model.language_model.", 1): shape
        for key, shape in published_shapes(
            text | {"per_layer_config": text["per_layer_config"]}
        ).items()
    }
    hidden = text["hidden_size"]
    media = _unified if "unified" in config["model_type"] else _towers
    return shapes | {f"model.{key}": shape for key, shape in media(config, hidden)}


def _clipped(path: str, rows: int, columns: int, clips: bool) -> Shapes:
    names = ["input_min", "input_max", "output_min", "output_max"] if clips else []
    bounds: Shapes = {f"{path}.{name}": () for name in names}
    return {f"{path}.linear.weight": (rows, columns), **bounds}


def _towers(config: dict[str, Any], hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    vision, audio = config["vision_config"], config["audio_config"]
    yield from _vision(vision).items()
    yield "embed_vision.embedding_projection.weight", (hidden, vision["hidden_size"])
    if audio is not None:
        yield from _audio(audio).items()
        yield "embed_audio.embedding_projection.weight", (hidden, audio["output_proj_dims"])


def _vision(vision: dict[str, Any]) -> Shapes:
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    clips, dim = vision["use_clipped_linears"], vision["head_dim"]
    shapes: Shapes = {
        "patch_embedder.input_proj.weight": (width, 3 * vision["patch_size"] ** 2),
        "patch_embedder.position_embedding_table": (2, vision["position_embedding_size"], width),
    }
    if vision["standardize"]:
        shapes |= {"std_bias": (width,), "std_scale": (width,)}
    for index in range(vision["num_hidden_layers"]):
        layer = f"encoder.layers.{index}."
        for name in "qkvo":
            shapes |= _clipped(f"{layer}self_attn.{name}_proj", width, width, clips)
        shapes |= _clipped(f"{layer}mlp.gate_proj", inner, width, clips)
        shapes |= _clipped(f"{layer}mlp.up_proj", inner, width, clips)
        shapes |= _clipped(f"{layer}mlp.down_proj", width, inner, clips)
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        shapes |= {f"{layer}{name}_layernorm.weight": (width,) for name in norms}
    return {f"vision_tower.{key}": shape for key, shape in shapes.items()}


def _audio(audio: dict[str, Any]) -> Shapes:
    width, out = audio["hidden_size"], audio["output_proj_dims"]
    clips = audio["use_clipped_linears"]
    shapes: Shapes = {
        "subsample_conv_projection.layer0.conv.weight": (128, 1, 3, 3),
        "subsample_conv_projection.layer0.norm.weight": (128,),
        "subsample_conv_projection.layer1.conv.weight": (32, 128, 3, 3),
        "subsample_conv_projection.layer1.norm.weight": (32,),
        "subsample_conv_projection.input_proj_linear.weight": (width, 1024),
        "output_proj.weight": (out, width),
        "output_proj.bias": (out,),
    }
    for index in range(audio["num_hidden_layers"]):
        layer = f"layers.{index}."
        for block in ("feed_forward1", "feed_forward2"):
            shapes |= _clipped(f"{layer}{block}.ffw_layer_1", 4 * width, width, clips)
            shapes |= _clipped(f"{layer}{block}.ffw_layer_2", width, 4 * width, clips)
            shapes |= {f"{layer}{block}.{n}_layer_norm.weight": (width,) for n in ("pre", "post")}
        for name in ("q_proj", "k_proj", "v_proj", "post"):
            shapes |= _clipped(f"{layer}self_attn.{name}", width, width, clips)
        shapes |= _clipped(f"{layer}lconv1d.linear_start", 2 * width, width, clips)
        shapes |= _clipped(f"{layer}lconv1d.linear_end", width, width, clips)
        names = ["lconv1d.pre_layer_norm", "lconv1d.conv_norm", "norm_pre_attn"]
        names += ["norm_post_attn", "norm_out"]
        shapes |= {f"{layer}{name}.weight": (width,) for name in names}
        shapes |= {
            f"{layer}self_attn.relative_k_proj.weight": (width, width),
            f"{layer}self_attn.per_dim_scale": (width // audio["num_attention_heads"],),
            f"{layer}lconv1d.depthwise_conv1d.weight": (width, 1, 5),
        }
    return {f"audio_tower.{key}": shape for key, shape in shapes.items()}


def _unified(config: dict[str, Any], hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    vision, audio = config["vision_config"], config["audio_config"]
    width, patch = vision["mm_embed_dim"], (3 * vision["patch_size"]) ** 2 * 3
    for name, size in (("patch_ln1", patch), ("patch_ln2", width), ("pos_norm", width)):
        yield f"vision_embedder.{name}.weight", (size,)
        yield f"vision_embedder.{name}.bias", (size,)
    yield "vision_embedder.patch_dense.weight", (width, patch)
    yield "vision_embedder.patch_dense.bias", (width,)
    yield "vision_embedder.pos_embedding", (vision["mm_posemb_size"], 2, width)
    yield "embed_vision.embedding_projection.weight", (hidden, width)
    yield "embed_audio.embedding_projection.weight", (hidden, audio["audio_embed_dim"])


_LINE = re.compile(r"(\S+)  \[([\d, ]*)\](?:  layers (\d+)\.\.(\d+) \((\d+)x\))?")


def read_listing(path: Path, layer_types: list[str]) -> Shapes:
    """Expand a listing: a key with ``.N.`` stands for a range of layers, or those of one kind."""
    shapes: Shapes = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        assert match is not None, line
        key, sizes, first, last, count = match.groups()
        shape = tuple(int(size) for size in sizes.split(",") if size.strip())
        if first is None:
            shapes[key] = shape
            continue
        layers = list(range(int(first), int(last) + 1))
        if len(layers) != int(count):
            kind = layer_types[int(first)]
            layers = [index for index in layers if layer_types[index] == kind]
        assert len(layers) == int(count), line
        shapes |= {key.replace(".N.", f".{index}."): shape for index in layers}
    return shapes


def converted(shapes: Shapes) -> Shapes:
    """The same keys as MLX converters write them: bare towers, channels last."""
    result: Shapes = {}
    for key, shape in shapes.items():
        name = key.removeprefix("model.")
        if name.startswith("language_model."):
            name = name.replace("language_model.", "language_model.model.", 1)
        if "conv" in name and len(shape) > 2:
            shape = (shape[0], *shape[2:], shape[1])
        result[name] = shape
    return result
