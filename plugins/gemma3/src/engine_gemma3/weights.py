"""Weight keys of Gemma 3: one canonical tree, norm folding, tower tensors.

Canonical names: ``language_model.model.*``, ``language_model.lm_head.*``, ``vision_tower.*`` and
``multi_modal_projector.*``. The rules are constants, so the very same mapping serves tensors and
quantization overrides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_core.family import Drop, NormFold, Rename, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine_core.checkpoint.config import CheckpointConfig

__all__ = ["CANONICAL_RULES", "norm_fold", "tower_layout"]

TEXT: Final = "language_model.model."

CANONICAL_RULES: Final = (
    # Conversions of transformers 4.52 and newer, and some third-party quantizations.
    Rename(prefix="model.language_model.", to=TEXT),
    Rename(prefix="model.vision_tower.", to="vision_tower."),
    Rename(prefix="model.multi_modal_projector.", to="multi_modal_projector."),
    # Wrapped towers saved without their inner "model" level.
    Rename(prefix="language_model.layers.", to=f"{TEXT}layers."),
    Rename(prefix="language_model.embed_tokens.", to=f"{TEXT}embed_tokens."),
    Rename(prefix="language_model.norm.", to=f"{TEXT}norm."),
    # Text-only files, then base-model saves.
    Rename(prefix="model.", to=TEXT),
    Rename(prefix="lm_head.", to="language_model.lm_head."),
    Rename(prefix="layers.", to=f"{TEXT}layers."),
    Rename(prefix="embed_tokens.", to=f"{TEXT}embed_tokens."),
    Rename(prefix="norm.", to=f"{TEXT}norm."),
    # Hub files have one more level in the tower than transformers 5 writes.
    Rename(prefix="vision_tower.vision_model.", to="vision_tower."),
    Drop(suffix=".rotary_emb.inv_freq", reason="frequencies are computed from the configuration"),
    Drop(suffix=".position_ids", reason="positions are counted"),
)

PATCH_WEIGHT: Final = "vision_tower.embeddings.patch_embedding.weight"
LAYER_NORMS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)


def norm_fold(layers: int) -> NormFold:
    """Name the text norms, all stored as deltas from 1.

    Args:
        layers: Number of decoder layers.

    Returns:
        The fold of every text norm. The projector's norm is folded where the projector is built.
    """
    keys = {f"{TEXT}norm.weight"}
    keys |= {f"{TEXT}layers.{i}.{name}.weight" for i in range(layers) for name in LAYER_NORMS}
    return NormFold(keys=frozenset(keys))


def tower_layout(
    vision: CheckpointConfig, hidden_size: int, tensors: Mapping[str, TensorInfo]
) -> Mapping[str, TensorInfo]:
    """Name the tensors of the vision tower and the projector with their shapes.

    Args:
        vision: ``vision_config``; the published tower's values where a field is absent.
        hidden_size: H of the text tower.
        tensors: Mapped key -> header facts; a converted patch weight has its channels last.

    Returns:
        Mapped key -> expected facts, empty when the checkpoint carries no tower. A tensor whose
        module is packed keeps its stored facts: packing is checked with the quantization plan.
    """
    present = {
        key for key in tensors if key.startswith(("vision_tower.", "multi_modal_projector."))
    }
    if not present:
        return {}
    packed = {key.removesuffix("scales") for key in present if key.endswith(".scales")}
    expected = {}
    for key, shape in _tower_shapes(vision, hidden_size):
        info = tensors.get(key)
        stem = key[: key.rfind(".") + 1]
        if info is None:
            expected[key] = TensorInfo(shape=shape, dtype="BF16")
        elif stem in packed:
            expected |= {name: tensors[name] for name in present if name.startswith(stem)}
        else:
            if key == PATCH_WEIGHT and info.shape == (shape[0], *shape[2:], shape[1]):
                shape = info.shape  # a converter moved the channels to the end
            expected[key] = TensorInfo(shape=shape, dtype=info.dtype, shard=info.shard)
    return expected


def _tower_shapes(
    vision: CheckpointConfig, hidden_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List the tower's tensors (SigLIP) and the projector's two."""
    width = vision.integer("hidden_size", default=1152, minimum=1)
    depth = vision.integer("num_hidden_layers", default=27, minimum=1, maximum=1024)
    inner = vision.integer("intermediate_size", default=4304, minimum=1)
    patch = vision.integer("patch_size", default=14, minimum=1)
    image = vision.integer("image_size", default=896, minimum=1)
    channels = vision.integer("num_channels", default=3, minimum=1)
    tower = "vision_tower."
    yield f"{tower}embeddings.patch_embedding.weight", (width, channels, patch, patch)
    yield f"{tower}embeddings.patch_embedding.bias", (width,)
    yield f"{tower}embeddings.position_embedding.weight", ((image // patch) ** 2, width)
    for index in range(depth):
        layer = f"{tower}encoder.layers.{index}."
        for norm in ("layer_norm1", "layer_norm2"):
            yield f"{layer}{norm}.weight", (width,)
            yield f"{layer}{norm}.bias", (width,)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{layer}self_attn.{projection}.weight", (width, width)
            yield f"{layer}self_attn.{projection}.bias", (width,)
        yield f"{layer}mlp.fc1.weight", (inner, width)
        yield f"{layer}mlp.fc1.bias", (inner,)
        yield f"{layer}mlp.fc2.weight", (width, inner)
        yield f"{layer}mlp.fc2.bias", (width,)
    yield f"{tower}post_layernorm.weight", (width,)
    yield f"{tower}post_layernorm.bias", (width,)
    yield "multi_modal_projector.mm_input_projection_weight", (width, hidden_size)
    yield "multi_modal_projector.mm_soft_emb_norm.weight", (width,)
