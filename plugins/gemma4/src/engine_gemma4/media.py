"""Tensors of Gemma 4's media towers, recognised and checked by shape, never read for text.

Two forms exist: towers (image, and sound in the small models), and the unified model's embedders,
which take patches and waveforms directly. A converter may have moved the channels of convolutions
to the end and packed projections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_core.family import MediaPlan, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_gemma4.config import Gemma4Config

__all__ = ["media_plan"]

Shapes = dict[str, tuple[int, ...]]

PREFIXES: Final = {
    "image": ("vision_tower.", "vision_embedder.", "embed_vision."),
    "audio": ("audio_tower.", "embed_audio."),
}
PLACEHOLDERS: Final = {"image": "<|image|>", "audio": "<|audio|>"}
CLIP_BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
WORD_BITS: Final = 32
COLOURS: Final = 3
MEL_BANDS: Final = 128
# Two convolutions of stride 2.
MEL_SUBSAMPLING: Final = 4


def media_plan(
    config: CheckpointConfig, parsed: Gemma4Config, tensors: Mapping[str, TensorInfo]
) -> MediaPlan | None:
    """Describe the media modules that the checkpoint carries.

    Args:
        config: The whole ``config.json``.
        parsed: The text tower's configuration.
        tensors: Mapped key -> header facts.

    Returns:
        The plan, ``None`` for a checkpoint without any such tensor.

    Raises:
        ConfigError: A field of the towers' sections is malformed.
    """
    vision, audio = config.section("vision_config"), config.section("audio_config")
    hidden = parsed.hidden_size
    layouts = {
        "image": _unified_image if parsed.unified else _image_tower,
        "audio": _unified_audio if parsed.unified else _audio_tower,
    }
    expected: dict[str, TensorInfo] = {}
    modalities = []
    for modality, section in (("image", vision), ("audio", audio)):
        present = [key for key in tensors if key.startswith(PREFIXES[modality])]
        if present:
            modalities.append(modality)
            shapes = dict(layouts[modality](section, hidden))
            expected |= _expected(shapes, tensors, present)
    if not modalities:
        return None
    return MediaPlan(
        modalities=frozenset(modalities),
        expected=expected,
        placeholders={modality: PLACEHOLDERS[modality] for modality in modalities},
    )


def _expected(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, TensorInfo], present: list[str]
) -> dict[str, TensorInfo]:
    """Turn dense shapes into the facts that this checkpoint must show."""
    packed = {key.removesuffix("scales") for key in present if key.endswith(".scales")}
    expected: dict[str, TensorInfo] = {}
    for key, shape in shapes.items():
        info = tensors.get(key)
        stem = key.removesuffix("weight")
        if key.endswith(".weight") and stem in packed and len(shape) > 1:
            expected |= _packed_module(stem, shape, tensors)
            continue
        if info is not None and len(shape) > 2 and info.shape == _channels_last(key, shape):
            shape = info.shape  # a converter moved the channels
        expected[key] = TensorInfo(shape, "BF16" if info is None else info.dtype)
    return expected


def _channels_last(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Move the input channels of a convolution to the end; other tensors have none."""
    return (shape[0], *shape[2:], shape[1]) if "conv" in key else shape


def _packed_module(
    stem: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Expect a packed projection's rows, and words and groups that can hold its columns."""
    *rows, width = shape
    scales = tensors[f"{stem}scales"]
    groups = scales.shape[-1] if scales.shape else 0
    weight = tensors.get(f"{stem}weight")
    words = weight.shape[-1] if weight is not None and weight.shape else 0
    fits = groups > 0 and width % groups == 0 and words > 0 and words * WORD_BITS % width == 0
    expected = {
        f"{stem}weight": TensorInfo((*rows, words if fits else width), "U32"),
        f"{stem}scales": TensorInfo((*rows, groups if fits else width), scales.dtype),
    }
    if f"{stem}biases" in tensors:
        expected[f"{stem}biases"] = TensorInfo(expected[f"{stem}scales"].shape, scales.dtype)
    return expected


def _clipped(
    path: str, shape: tuple[int, ...], *, bounds: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A projection whose input and output are clamped to bounds in the checkpoint."""
    yield f"{path}.linear.weight", shape
    if bounds:
        for name in CLIP_BOUNDS:
            yield f"{path}.{name}", ()


def _image_tower(vision: CheckpointConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = vision.integer("hidden_size", default=768, minimum=1)
    depth = vision.integer("num_hidden_layers", default=16, minimum=1, maximum=1024)
    inner = vision.integer("intermediate_size", default=3072, minimum=1)
    head_dim = vision.integer("head_dim", default=64, minimum=1)
    heads = vision.integer("num_attention_heads", default=12, minimum=1)
    kv_heads = vision.integer("num_key_value_heads", default=heads, minimum=1)
    patch = vision.integer("patch_size", default=16, minimum=1)
    positions = vision.integer("position_embedding_size", default=10_240, minimum=1)
    bounds = vision.boolean("use_clipped_linears", default=False)
    tower = "vision_tower."
    yield f"{tower}patch_embedder.input_proj.weight", (width, COLOURS * patch * patch)
    yield f"{tower}patch_embedder.position_embedding_table", (2, positions, width)
    if vision.boolean("standardize", default=False):
        yield f"{tower}std_bias", (width,)
        yield f"{tower}std_scale", (width,)
    query, key = heads * head_dim, kv_heads * head_dim
    for index in range(depth):
        layer = f"{tower}encoder.layers.{index}."
        for name, shape in (
            ("self_attn.q_proj", (query, width)),
            ("self_attn.k_proj", (key, width)),
            ("self_attn.v_proj", (key, width)),
            ("self_attn.o_proj", (width, query)),
            ("mlp.gate_proj", (inner, width)),
            ("mlp.up_proj", (inner, width)),
            ("mlp.down_proj", (width, inner)),
        ):
            yield from _clipped(layer + name, shape, bounds=bounds)
        for norm in ("q_norm", "k_norm"):
            yield f"{layer}self_attn.{norm}.weight", (head_dim,)
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            yield f"{layer}{norm}.weight", (width,)
    yield "embed_vision.embedding_projection.weight", (hidden, width)


def _audio_tower(audio: CheckpointConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = audio.integer("hidden_size", default=1024, minimum=1)
    depth = audio.integer("num_hidden_layers", default=12, minimum=1, maximum=1024)
    heads = audio.integer("num_attention_heads", default=8, minimum=1)
    kernel = audio.integer("conv_kernel_size", default=5, minimum=1)
    out = audio.integer("output_proj_dims", default=1536, minimum=1)
    bounds = audio.boolean("use_clipped_linears", default=True)
    channels = audio.sequence("subsampling_conv_channels", default=(128, 32))
    if len(channels) != 2 or not all(isinstance(one, int) and one > 0 for one in channels):
        raise audio.error("subsampling_conv_channels", "must be two positive integers", channels)
    first, second = channels
    tower = "audio_tower."
    subsample = f"{tower}subsample_conv_projection."
    yield f"{subsample}layer0.conv.weight", (first, 1, 3, 3)
    yield f"{subsample}layer0.norm.weight", (first,)
    yield f"{subsample}layer1.conv.weight", (second, first, 3, 3)
    yield f"{subsample}layer1.norm.weight", (second,)
    flattened = second * (MEL_BANDS // MEL_SUBSAMPLING)
    yield f"{subsample}input_proj_linear.weight", (width, flattened)
    for index in range(depth):
        layer = f"{tower}layers.{index}."
        for block in ("feed_forward1", "feed_forward2"):
            for norm in ("pre_layer_norm", "post_layer_norm"):
                yield f"{layer}{block}.{norm}.weight", (width,)
            yield from _clipped(f"{layer}{block}.ffw_layer_1", (4 * width, width), bounds=bounds)
            yield from _clipped(f"{layer}{block}.ffw_layer_2", (width, 4 * width), bounds=bounds)
        for name in ("q_proj", "k_proj", "v_proj", "post"):
            yield from _clipped(f"{layer}self_attn.{name}", (width, width), bounds=bounds)
        yield f"{layer}self_attn.relative_k_proj.weight", (width, width)
        yield f"{layer}self_attn.per_dim_scale", (width // heads,)
        yield from _clipped(f"{layer}lconv1d.linear_start", (2 * width, width), bounds=bounds)
        yield from _clipped(f"{layer}lconv1d.linear_end", (width, width), bounds=bounds)
        yield f"{layer}lconv1d.depthwise_conv1d.weight", (width, 1, kernel)
        for norm in (
            "lconv1d.pre_layer_norm",
            "lconv1d.conv_norm",
            "norm_pre_attn",
            "norm_post_attn",
            "norm_out",
        ):
            yield f"{layer}{norm}.weight", (width,)
    yield f"{tower}output_proj.weight", (out, width)
    yield f"{tower}output_proj.bias", (out,)
    yield "embed_audio.embedding_projection.weight", (hidden, out)


def _unified_image(vision: CheckpointConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = vision.integer("mm_embed_dim", default=3840, minimum=1)
    positions = vision.integer("mm_posemb_size", default=1120, minimum=1)
    side = vision.integer("patch_size", default=16, minimum=1)
    side *= vision.integer("pooling_kernel_size", default=3, minimum=1)
    patch = COLOURS * side * side
    embedder = "vision_embedder."
    for name, size in (("patch_ln1", patch), ("patch_ln2", width), ("pos_norm", width)):
        yield f"{embedder}{name}.weight", (size,)
        yield f"{embedder}{name}.bias", (size,)
    yield f"{embedder}patch_dense.weight", (width, patch)
    yield f"{embedder}patch_dense.bias", (width,)
    yield f"{embedder}pos_embedding", (positions, 2, width)
    yield "embed_vision.embedding_projection.weight", (hidden, width)


def _unified_audio(audio: CheckpointConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = audio.integer("audio_embed_dim", default=640, minimum=1)
    yield "embed_audio.embedding_projection.weight", (hidden, width)
