"""Compare what a model wants with what a checkpoint holds, in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_core.errors import CheckpointError
from engine_core.weight_nodes import sources

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from engine_core.checkpoint.index import ShardSet
    from engine_core.weight_nodes import Node, ResolvedWeights, TensorInfo

__all__ = ["FLOATING", "check_expected", "check_floating", "check_parameters", "describe_tensor"]

FLOATING: Final = frozenset({"F16", "BF16", "F32", "F64"})
_SHOWN: Final = 3


def describe_tensor(node: Node, key: str, shards: ShardSet) -> str:
    """Name a tensor for an error: its file, its checkpoint key and what it maps to.

    Args:
        node: How the tensor is made.
        key: Mapped key.
        shards: The checkpoint's files.

    Returns:
        For example ``"model.safetensors: tensor 'a.weight' (model parameter 'b.weight')"``.
    """
    source = next(sources(node))
    mapped = "" if source.key == key else f" (model parameter {key!r})"
    return f"{shards.shards[source.info.shard].name}: tensor {source.key!r}{mapped}"


def check_parameters(
    parameters: Mapping[str, tuple[int, ...]],
    weights: ResolvedWeights,
    excluded: Collection[str],
    shards: ShardSet,
) -> None:
    """Demand that the model's parameters are exactly the checkpoint's tensors.

    Args:
        parameters: Parameter path -> shape, packed layers as they are packed.
        weights: The mapped checkpoint.
        excluded: Mapped keys that belong to modules which are not built.
        shards: The checkpoint's files, for errors.

    Raises:
        CheckpointError: Codes ``checkpoint.tensor_missing``, ``checkpoint.tensor_extra`` and
            ``checkpoint.tensor_shape``.
    """
    infos = weights.infos
    missing = [key for key in parameters if key not in infos]
    if missing:
        raise CheckpointError(
            f"checkpoint: tensor {missing[0]!r} must exist{_more(missing)}",
            code="checkpoint.tensor_missing",
            hint="the checkpoint is incomplete or does not match its config.json",
        )
    extra = [key for key in infos if key not in parameters and key not in excluded]
    if extra:
        where = describe_tensor(weights.targets[extra[0]], extra[0], shards)
        raise CheckpointError(
            f"{where} must belong to the model{_more(extra)}",
            code="checkpoint.tensor_extra",
            hint="the checkpoint does not match its config.json",
        )
    for key, shape in parameters.items():
        if infos[key].shape != shape:
            where = describe_tensor(weights.targets[key], key, shards)
            raise CheckpointError(
                f"{where} must have shape {list(shape)}, got {list(infos[key].shape)}",
                code="checkpoint.tensor_shape",
                hint="the checkpoint does not match its config.json",
            )


def check_floating(keys: Collection[str], weights: ResolvedWeights, shards: ShardSet) -> None:
    """Demand that tensors which are not packed hold floating numbers.

    Args:
        keys: Mapped keys.
        weights: The mapped checkpoint.
        shards: The checkpoint's files, for errors.

    Raises:
        CheckpointError: Code ``checkpoint.tensor_dtype``.
    """
    for key in keys:
        if weights.infos[key].dtype not in FLOATING:
            where = describe_tensor(weights.targets[key], key, shards)
            raise CheckpointError(
                f"{where} must be one of {sorted(FLOATING)}, got {weights.infos[key].dtype}",
                code="checkpoint.tensor_dtype",
                hint="convert the checkpoint to bfloat16 or to MLX's own quantization",
            )


def check_expected(
    expected: Mapping[str, TensorInfo], weights: ResolvedWeights, shards: ShardSet
) -> None:
    """Demand that the tensors of an optional module have the shapes that its plan names.

    Args:
        expected: Mapped key -> header facts.
        weights: The mapped checkpoint.
        shards: The checkpoint's files, for errors.

    Raises:
        CheckpointError: Codes ``checkpoint.tensor_missing`` and ``checkpoint.tensor_shape``.
    """
    shapes = {key: info.shape for key, info in expected.items()}
    others = weights.infos.keys() - shapes.keys()
    check_parameters(shapes, weights, others, shards)


def _more(keys: list[str]) -> str:
    rest = len(keys) - 1
    if not rest:
        return ""
    shown = ", ".join(repr(key) for key in keys[1 : 1 + _SHOWN])
    return f" (and {rest} more: {shown}{', ...' if rest > _SHOWN else ''})"
