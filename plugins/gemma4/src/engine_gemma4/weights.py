"""Weight keys of Gemma 4's text tower: one canonical tree, experts, fusion, stray tensors.

Canonical names: ``language_model.model.*``, ``language_model.lm_head.*`` and the bare names of
towers and embedders. The plan serves tensors and quantization overrides alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_core.family import Drop, Rename, Rule, Split, WeightPlan
from engine_core.fusion import fuse_rows, mlp_fusions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engine_core.family import TensorInfo
    from engine_gemma4.config import Gemma4Config
    from engine_gemma4.layers import LayerConfig

__all__ = ["HEAD", "LAYERS", "TEXT", "missing_modules", "weight_plan"]

TEXT: Final = "language_model.model."
LAYERS: Final = f"{TEXT}layers."
HEAD: Final = "language_model.lm_head.weight"
TOWERS: Final = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
UNIFIED_EMBEDDER: Final = "vision_embedder."
GLOBALS: Final = (
    "layers.",
    "embed_tokens.",
    "embed_tokens_per_layer.",
    "per_layer_model_projection.",
    "per_layer_projection_norm.",
    "norm.",
)

CANONICAL_RULES: Final[tuple[Rule, ...]] = (
    # Hub files and transformers saves, and third-party MLX quantizations.
    Rename("model.language_model.", TEXT),
    *(Rename(f"model.{name}", name) for name in (*TOWERS, UNIFIED_EMBEDDER)),
    # Wrapped towers saved without their inner "model" level.
    *(Rename(f"language_model.{name}", f"{TEXT}{name}") for name in GLOBALS),
    # Text-only files, then base-model saves.
    Rename("model.", TEXT),
    Rename("lm_head.", "language_model.lm_head."),
    *(Rename(name, f"{TEXT}{name}") for name in GLOBALS),
    # transformers holds the encoder-free image embedder inside embed_vision, but stores it beside.
    *(
        Rename(f"embed_vision.{name}", f"{UNIFIED_EMBEDDER}{name}")
        for name in ("patch_ln1.", "patch_dense.", "patch_ln2.", "pos_norm.", "pos_embedding")
    ),
    Rename("embed_vision.multimodal_embedder.", "embed_vision."),
    Drop(suffix=".rotary_emb.inv_freq", reason="frequencies are computed from the configuration"),
)


def weight_plan(config: Gemma4Config, tensors: Mapping[str, TensorInfo]) -> WeightPlan:
    """Say how checkpoint tensors become parameters.

    Args:
        config: Sizes and kinds of the layers.
        tensors: Checkpoint-verbatim key -> header facts.

    Returns:
        Canonical names, shared layers' stray tensors dropped, projections stored alike joined.
    """
    rules = (*CANONICAL_RULES, *_shared_layers(config.layers))
    mapped = WeightPlan(rules).resolve(tensors).infos
    rules += tuple(_expert_stacks(config, mapped))
    mapped = WeightPlan(rules).resolve(tensors).infos
    return WeightPlan((*rules, *_fusions(config, mapped)))


def missing_modules(config: Gemma4Config, keys: frozenset[str]) -> tuple[str, ...]:
    """Name modules that requests need and the checkpoint lacks.

    Args:
        config: Sizes and kinds of the layers.
        keys: Mapped keys of the checkpoint.

    Returns:
        Mapped module paths; a request that reaches one raises.
    """
    wanted: list[tuple[str, ...]] = []
    for index, layer in enumerate(config.layers):
        block = f"{LAYERS}{index}."
        attention = f"{block}self_attn."
        if layer.donor is None:
            joined = f"{attention}{'qk' if layer.key_is_value else 'qkv'}_proj"
            wanted += [(f"{attention}k_proj", joined), (f"{attention}k_norm",)]
            if not layer.key_is_value:
                wanted.append((f"{attention}v_proj", joined))
        if config.per_layer_width:
            wanted += [
                (f"{block}per_layer_input_gate",),
                (f"{block}per_layer_projection",),
                (f"{block}post_per_layer_input_norm",),
            ]
        if config.moe is not None:
            names = ("router.proj", "experts.gate_proj", "experts.up_proj", "experts.down_proj")
            wanted += [(block + name,) for name in names]
    if config.per_layer_width:
        wanted += [
            (f"{TEXT}embed_tokens_per_layer",),
            (f"{TEXT}per_layer_model_projection",),
            (f"{TEXT}per_layer_projection_norm",),
        ]
    return tuple(
        paths[0] for paths in wanted if not any(f"{path}.weight" in keys for path in paths)
    )


def _shared_layers(layers: Sequence[LayerConfig]) -> Iterator[Rule]:
    """Drop keys and values of layers that read another layer's: older exports carry them."""
    for index, layer in enumerate(layers):
        if layer.donor is not None:
            for name in ("k_proj", "v_proj", "k_norm"):
                yield Drop(
                    prefix=f"{LAYERS}{index}.self_attn.{name}.",
                    reason=f"the layer reads keys and values of layer {layer.donor}",
                )


def _expert_stacks(config: Gemma4Config, mapped: Mapping[str, TensorInfo]) -> Iterator[Rule]:
    """Bring both layouts of the experts to one stack a projection."""
    if config.moe is None:
        return
    width = config.moe.width
    for index in range(len(config.layers)):
        experts = f"{LAYERS}{index}.experts."
        yield Rename(f"{experts}switch_glu.", experts)
        # The original layout joins gate and up, and stores its tensors without a ".weight" ending.
        parts = (f"{experts}gate_proj.weight", f"{experts}up_proj.weight")
        yield Split(f"{experts}gate_up_proj", into=parts, sizes=(width, width), axis=1)
        if f"{experts}down_proj" in mapped:
            yield Rename(f"{experts}down_proj", f"{experts}down_proj.weight")


def _fusions(config: Gemma4Config, mapped: Mapping[str, TensorInfo]) -> Iterator[Rule]:
    """Join projections that read the same input."""
    for index, layer in enumerate(config.layers):
        block = f"{LAYERS}{index}.self_attn."
        if layer.donor is None:
            names = ("q", "k") if layer.key_is_value else ("q", "k", "v")
            parts = [f"{block}{name}_proj" for name in names]
            yield from fuse_rows(parts, f"{block}{''.join(names)}_proj", mapped)
    yield from mlp_fusions(LAYERS.removesuffix("."), len(config.layers), mapped)
