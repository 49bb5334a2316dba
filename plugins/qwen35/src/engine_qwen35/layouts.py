"""Tensors of the modules that are not built: multi-token prediction and the vision tower.

Their names and shapes follow from the configuration, so a checkpoint is checked against them
although nothing of them is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from engine_core.errors import CheckpointError
from engine_core.family import TensorInfo
from engine_qwen35.weights import MTP, VISION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_qwen35.config import Qwen35Config

__all__ = ["check_layout", "mtp_layout", "vision_layout"]

Shape = tuple[int, ...]

PATCH_WEIGHT: Final = f"{VISION}patch_embed.proj.weight"
SCALES: Final = ".scales"


def mtp_layout(config: Qwen35Config, tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """Name the tensors of the multi-token-prediction module with their shapes.

    Args:
        config: Sizes of the text tower; the module's decoder layers have them too.
        tensors: Mapped key -> header facts.

    Returns:
        Mapped key -> expected facts, empty when the checkpoint carries no such module.
    """
    if not any(key.startswith(MTP) for key in tensors):
        return {}
    return _expect(_mtp_shapes(config), tensors)


def vision_layout(
    config: Qwen35Config, vision: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> Mapping[str, TensorInfo]:
    """Name the tensors of the vision tower with their shapes.

    Args:
        config: Sizes of the text tower, which the tower's output feeds.
        vision: ``vision_config``.
        tensors: Mapped key -> header facts; a converted patch weight has its channels last.

    Returns:
        Mapped key -> expected facts, empty when the checkpoint carries no tower.

    Raises:
        ConfigError: The tower has a form that this family does not have.
    """
    if vision.sequence("deepstack_visual_indexes", default=()):
        rule = "must be empty for this family"
        raise vision.error("deepstack_visual_indexes", rule, vision.get("deepstack_visual_indexes"))
    if not any(key.startswith(VISION) for key in tensors):
        return {}
    width = vision.integer("out_hidden_size", default=config.hidden_size)
    if width != config.hidden_size:
        rule = f"must equal the text tower's hidden_size ({config.hidden_size})"
        raise vision.error("out_hidden_size", rule, width)
    expected = dict(_expect(_vision_shapes(vision, width), tensors))
    patch = expected[PATCH_WEIGHT]
    moved = (patch.shape[0], *patch.shape[2:], patch.shape[1])
    if PATCH_WEIGHT in tensors and tensors[PATCH_WEIGHT].shape == moved:
        expected[PATCH_WEIGHT] = attrs.evolve(patch, shape=moved)
    return expected


def check_layout(
    expected: Mapping[str, TensorInfo], tensors: Mapping[str, TensorInfo], prefix: str
) -> None:
    """Demand exactly these tensors under a prefix.

    Args:
        expected: Mapped key -> expected facts.
        tensors: Mapped key -> header facts.
        prefix: Start of the module's keys.

    Raises:
        CheckpointError: A tensor is missing, unknown or of another shape.
    """
    for key, info in expected.items():
        found = tensors.get(key)
        if found is None:
            raise _mismatch(key, "must exist", "tensor_missing")
        if found.shape != info.shape:
            rule = f"must have shape {list(info.shape)}, got {list(found.shape)}"
            raise _mismatch(key, rule, "tensor_shape")
    for key in tensors:
        if key.startswith(prefix) and key not in expected:
            raise _mismatch(key, "must belong to the model", "tensor_extra")


def _mismatch(key: str, rule: str, code: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {key!r}: {rule}",
        code=f"checkpoint.{code}",
        hint="the checkpoint does not match its config.json",
    )


def _expect(
    shapes: Iterable[tuple[str, Shape]], tensors: Mapping[str, TensorInfo]
) -> Mapping[str, TensorInfo]:
    """Turn shapes into facts; a packed module keeps its stored columns, its rows are demanded."""
    expected: dict[str, TensorInfo] = {}
    for key, shape in shapes:
        path = key.removesuffix(".weight")
        if f"{path}{SCALES}" not in tensors:
            info = tensors.get(key)
            dtype, shard = ("BF16", 0) if info is None else (info.dtype, info.shard)
            expected[key] = TensorInfo(shape=shape, dtype=dtype, shard=shard)
            continue
        for part in ("weight", "scales", "biases"):
            stored = tensors.get(f"{path}.{part}")
            if stored is not None:
                packed = (*shape[:-1], *stored.shape[-1:])
                expected[f"{path}.{part}"] = attrs.evolve(stored, shape=packed)
    return expected


def _mtp_shapes(config: Qwen35Config) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    yield f"{MTP}fc.weight", (hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"{MTP}{name}.weight", (hidden,)
    for index in range(max(1, config.mtp_layers)):
        layer = f"{MTP}layers.{index}."
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        yield f"{layer}self_attn.q_proj.weight", (2 * queries, hidden)
        yield f"{layer}self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}self_attn.q_norm.weight", (config.head_dim,)
        yield f"{layer}self_attn.k_norm.weight", (config.head_dim,)
        yield from _mlp_shapes(config, f"{layer}mlp.")


def _mlp_shapes(config: Qwen35Config, block: str) -> Iterator[tuple[str, Shape]]:
    hidden, experts = config.hidden_size, config.experts
    if experts is None:
        yield from _gated_shapes(block, hidden, config.intermediate_size)
        return
    yield f"{block}gate.weight", (experts.count, hidden)
    yield f"{block}shared_expert_gate.weight", (1, hidden)
    yield from _gated_shapes(f"{block}shared_expert.", hidden, experts.shared_intermediate_size)
    stack, width = f"{block}switch_mlp.", experts.intermediate_size
    yield f"{stack}gate_proj.weight", (experts.count, width, hidden)
    yield f"{stack}up_proj.weight", (experts.count, width, hidden)
    yield f"{stack}down_proj.weight", (experts.count, hidden, width)


def _gated_shapes(block: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{block}gate_proj.weight", (width, hidden)
    yield f"{block}up_proj.weight", (width, hidden)
    yield f"{block}down_proj.weight", (hidden, width)


def _vision_shapes(vision: CheckpointConfig, out: int) -> Iterator[tuple[str, Shape]]:
    width = vision.integer("hidden_size", minimum=1)
    inner = vision.integer("intermediate_size", minimum=1)
    patch = vision.integer("patch_size", default=16, minimum=1, maximum=4096)
    frames = vision.integer("temporal_patch_size", default=2, minimum=1, maximum=4096)
    channels = vision.integer("in_channels", default=3, minimum=1, maximum=4096)
    merged = width * vision.integer("spatial_merge_size", default=2, minimum=1, maximum=4096) ** 2
    yield PATCH_WEIGHT, (width, channels, frames, patch, patch)
    yield f"{VISION}patch_embed.proj.bias", (width,)
    positions = vision.integer("num_position_embeddings", default=2304, minimum=1)
    yield f"{VISION}pos_embed.weight", (positions, width)
    for index in range(vision.integer("depth", minimum=1, maximum=1024)):
        block = f"{VISION}blocks.{index}."
        for norm in ("norm1", "norm2"):
            yield f"{block}{norm}.weight", (width,)
            yield f"{block}{norm}.bias", (width,)
        yield from _affine(f"{block}attn.qkv", 3 * width, width)
        yield from _affine(f"{block}attn.proj", width, width)
        yield from _affine(f"{block}mlp.linear_fc1", inner, width)
        yield from _affine(f"{block}mlp.linear_fc2", width, inner)
    yield f"{VISION}merger.norm.weight", (width,)
    yield f"{VISION}merger.norm.bias", (width,)
    yield from _affine(f"{VISION}merger.linear_fc1", merged, merged)
    yield from _affine(f"{VISION}merger.linear_fc2", out, merged)


def _affine(path: str, rows: int, columns: int) -> Iterator[tuple[str, Shape]]:
    yield f"{path}.weight", (rows, columns)
    yield f"{path}.bias", (rows,)
