"""Build a model and fill it from a checkpoint, on the thread that will own it."""

from __future__ import annotations

import math
import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from engine_core.checkpoint.matching import (
    FLOATING,
    check_expected,
    check_floating,
    check_parameters,
)
from engine_core.checkpoint.quantization import plan_quantization
from engine_core.checkpoint.weights import ARRAY_TYPES, Job, materialise
from engine_core.errors import CheckpointError, EngineError, InvalidRequest, PluginError
from engine_core.limits import LIMITS
from engine_core.nn.activations import computes_on_cpu
from engine_core.nn.linear import Linear, arrange_weight
from engine_core.nn.quantized import dequantize, quantize_module
from engine_core.quantization import QuantizationPlan, QuantizationSpec
from engine_core.step import BuildContext
from engine_core.values import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine_core.checkpoint.reader import Checkpoint
    from engine_core.kernels import KernelRegistry
    from engine_core.limits import Limits
    from engine_core.spec import SpecAnswers
    from engine_core.weight_nodes import TensorInfo

__all__ = ["LoadedModel", "choose_compute_dtype", "load_model"]

_COMPUTE_DTYPES: Final = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
}
_POLICIES: Final = ("auto", "keep", "dequantize")
_PARTS: Final = ("weight", "scales", "biases")
_MEMORY_SHARE: Final = 4


@attrs.frozen(kw_only=True, eq=False)
class LoadedModel:
    """A model with its weights.

    Attributes:
        model: The family's model; every parameter is evaluated.
        quantization: How layers are packed in memory; empty after dequantization.
        compute_dtype: Dtype of activations and ordinary parameters.
        digests: Shard name -> SHA-256 (hex).
        notes: Remarks for the user.
    """

    model: Any
    quantization: QuantizationPlan
    compute_dtype: mx.Dtype
    digests: Mapping[str, str]
    notes: tuple[str, ...]


def choose_compute_dtype(choice: str, infos: Mapping[str, TensorInfo]) -> mx.Dtype:
    """Choose the dtype of activations.

    On a CPU MLX's bfloat16 and float16 kernels are many times slower than float32, so ``auto``
    means float32 there, and the checkpoint's own dtype on a GPU.

    Args:
        choice: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        infos: Mapped key -> header facts.

    Returns:
        The dtype.

    Raises:
        InvalidRequest: Another choice.
    """
    if choice in _COMPUTE_DTYPES:
        return _COMPUTE_DTYPES[choice]
    if choice != "auto":
        raise InvalidRequest(
            f"compute_dtype: must be 'auto' or one of {sorted(_COMPUTE_DTYPES)}, got {choice!r}",
            code="request.compute_dtype",
            hint="leave it out",
        )
    values: Counter[str] = Counter()
    for info in infos.values():
        if info.dtype in FLOATING:
            values[info.dtype] += math.prod(info.shape)
    if computes_on_cpu() or not values:
        return mx.float32
    return ARRAY_TYPES[values.most_common(1)[0][0]][1]


def load_model(
    checkpoint: Checkpoint,
    answers: SpecAnswers,
    *,
    kernels: KernelRegistry,
    compute_dtype: mx.Dtype,
    quantized_weights: str = "auto",
    memory_budget: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    limits: Limits = LIMITS,
) -> LoadedModel:
    """Build the model and read its weights.

    Args:
        checkpoint: The open checkpoint.
        answers: The owner's answers.
        kernels: Registry of custom kernels.
        compute_dtype: Dtype of activations and ordinary parameters.
        quantized_weights: ``keep`` computes on packed weights; ``dequantize`` unpacks them at
            load; ``auto`` unpacks on a CPU when the unpacked model fits ``memory_budget``.
        memory_budget: Bytes for ``auto``; a quarter of the physical memory when omitted.
        on_progress: Told bytes done and bytes in all; what it raises ends the load.
        limits: Bounds on quantization overrides.

    Returns:
        The loaded model.

    Raises:
        CheckpointError: Tensors do not match the model, or a file changed.
        ConfigError: The quantization entry cannot be honoured.
        InvalidRequest: ``quantized_weights`` is none of the three.
    """
    if quantized_weights not in _POLICIES:
        raise InvalidRequest(
            f"quantized_weights: must be one of {_POLICIES}, got {quantized_weights!r}",
            code="request.quantized_weights",
            hint="leave it out",
        )
    weights, shards = answers.weights, checkpoint.shards
    excluded = _check_optional_modules(answers, checkpoint)
    plan_layers = partial(
        plan_quantization, checkpoint.config, answers.weight_plan, weights.infos, limits=limits
    )
    context = BuildContext(compute_dtype=compute_dtype, quantization=plan_layers(), kernels=kernels)
    model = _build(answers, context)
    dense = _shapes(model)
    stored = _of_model(plan_layers(widths=_widths(dense)), dense)
    expected = _packed_shapes(dense, stored)
    check_parameters(expected, weights, excluded, shards)
    check_floating(
        [key for key in dense if key in expected and not _is_packed(key, stored)], weights, shards
    )
    kept, notes = _apply_policy(stored, dense, compute_dtype, quantized_weights, memory_budget)
    linear = _linear_weights(model)
    quantize_module(model, kept, compute_dtype)
    _check_packed(_shapes(model), _packed_shapes(dense, kept))
    jobs = _plan_jobs(expected, stored, kept, linear, answers, compute_dtype)
    digests = materialise(shards, jobs, partial(_store, model), on_progress)
    return LoadedModel(
        model=model,
        quantization=kept,
        compute_dtype=compute_dtype,
        digests=digests,
        notes=(*stored.notes, *notes),
    )


def _build(answers: SpecAnswers, context: BuildContext) -> Any:
    """Let the plugin make its model.

    Every model is an ``nn.Module``, which the protocol cannot say; its methods have no types.
    """
    try:
        model = answers.architecture.build(context)
    except EngineError:
        raise
    except (Exception, SystemExit) as exc:
        # The plugin boundary: whatever a family's code raises becomes one typed error.
        raise PluginError(
            f"build: must make the model, got {reason_of(exc)}",
            code="plugin.build",
            hint="the family plugin's build raised; its own error is the cause",
        ) from exc
    if not isinstance(model, nn.Module):
        raise PluginError(
            f"build: must give an mlx.nn.Module, got {type(model).__name__}", code="plugin.build"
        )
    return model


def _check_optional_modules(answers: SpecAnswers, checkpoint: Checkpoint) -> frozenset[str]:
    """Check the tensors of modules that are not built; give the keys to leave unread."""
    excluded: set[str] = set()
    if answers.mtp is not None:
        excluded.update(answers.mtp.expected)
        if not answers.mtp.reason:
            check_expected(answers.mtp.expected, answers.weights, checkpoint.shards)
    if answers.media is not None:
        excluded.update(answers.media.expected)
        check_expected(answers.media.expected, answers.weights, checkpoint.shards)
    return frozenset(excluded)


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    flat: Any = tree_flatten(model.parameters())
    return {key: tuple(value.shape) for key, value in flat}


def _widths(dense: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    return {
        key.removesuffix(".weight"): shape[-1]
        for key, shape in dense.items()
        if key.endswith(".weight") and shape
    }


def _of_model(plan: QuantizationPlan, dense: Mapping[str, tuple[int, ...]]) -> QuantizationPlan:
    """Leave out packed layers that the model does not have; they count as extra tensors."""
    layers = {path: spec for path, spec in plan.layers.items() if f"{path}.weight" in dense}
    return attrs.evolve(plan, layers=layers)


def _packed_shapes(
    dense: Mapping[str, tuple[int, ...]], plan: QuantizationPlan
) -> dict[str, tuple[int, ...]]:
    """Replace the weights of packed layers by their packed tensors."""
    shapes = dict(dense)
    for path, spec in plan.layers.items():
        *rows, width = dense[f"{path}.weight"]
        shapes[f"{path}.weight"] = (*rows, spec.words(width))
        for part in _PARTS[1 : 3 if spec.affine else 2]:
            shapes[f"{path}.{part}"] = (*rows, width // spec.group_size)
    return shapes


def _is_packed(key: str, plan: QuantizationPlan) -> bool:
    path, _, part = key.rpartition(".")
    return part in _PARTS and path in plan.layers


def _apply_policy(
    stored: QuantizationPlan,
    dense: Mapping[str, tuple[int, ...]],
    compute_dtype: mx.Dtype,
    policy: str,
    memory_budget: int | None,
) -> tuple[QuantizationPlan, tuple[str, ...]]:
    """Decide whether packed layers stay packed; give what stays and a remark."""
    if not stored.layers or policy == "keep":
        return stored, ()
    needed = compute_dtype.size * sum(math.prod(shape) for shape in dense.values())
    if policy == "auto":
        if not computes_on_cpu():
            return stored, ()
        budget = _default_budget() if memory_budget is None else memory_budget
        if needed > budget:
            note = f"quantized weights are kept: unpacked they need {needed} of {budget} bytes"
            return stored, (note,)
    return QuantizationPlan(), (f"quantized weights are unpacked: the model holds {needed} bytes",)


def _default_budget() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MEMORY_SHARE


def _linear_weights(model: Any) -> frozenset[str]:
    return frozenset(
        f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Linear)
    )


def _check_packed(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Demand that every packed layer was replaced; a layer without that ability is an error."""
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise CheckpointError(
                f"model parameter {key!r}: must have shape {expected.get(key)} when packed, "
                f"got {found.get(key)}",
                code="checkpoint.quantization",
                hint="this layer cannot be packed; load with quantized_weights='dequantize'",
            )


def _store(model: Any, group: Mapping[str, mx.array]) -> None:
    model.update(tree_unflatten(list(group.items())))


def _plan_jobs(
    expected: Mapping[str, tuple[int, ...]],
    stored: QuantizationPlan,
    kept: QuantizationPlan,
    linear: frozenset[str],
    answers: SpecAnswers,
    compute_dtype: mx.Dtype,
) -> list[Job]:
    """Say for every parameter how it is made of the checkpoint's tensors."""
    targets = answers.weights.targets
    keep_float32 = answers.architecture.keep_float32
    fold = answers.norm_fold
    jobs: list[Job] = []
    for key in expected:
        path, _, part = key.rpartition(".")
        dtype = mx.float32 if key in keep_float32 else compute_dtype
        if not _is_packed(key, stored):
            offset = fold.offset if fold is not None and key in fold.keys else None
            finish = partial(_finish_dense, key, dtype, offset, key in linear)
            jobs.append(Job(nodes=(targets[key],), finish=finish))
        elif path in kept.layers:
            cast_to = dtype if part != "weight" and kept.layers[path].affine else None
            jobs.append(Job(nodes=(targets[key],), finish=partial(_finish_packed, key, cast_to)))
        elif part == "weight":
            spec = stored.layers[path]
            parts = _PARTS if spec.affine else _PARTS[:2]
            nodes = tuple(targets[f"{path}.{one}"] for one in parts)
            jobs.append(Job(nodes=nodes, finish=partial(_unpack, key, dtype, spec, key in linear)))
    return jobs


def _finish_dense(
    key: str,
    dtype: mx.Dtype,
    offset: float | None,
    linear: bool,  # noqa: FBT001
    arrays: Sequence[mx.array],
) -> Mapping[str, mx.array]:
    """Fold in float32, then cast once: a fold in bfloat16 would round the sum."""
    (array,) = arrays
    if offset is not None:
        array = array.astype(mx.float32) + offset
    array = array.astype(dtype)
    return {key: arrange_weight(array) if linear else array}


def _finish_packed(
    key: str, dtype: mx.Dtype | None, arrays: Sequence[mx.array]
) -> Mapping[str, mx.array]:
    (array,) = arrays
    return {key: array if dtype is None else array.astype(dtype)}


def _unpack(
    key: str,
    dtype: mx.Dtype,
    spec: QuantizationSpec,
    linear: bool,  # noqa: FBT001
    arrays: Sequence[mx.array],
) -> Mapping[str, mx.array]:
    words, scales, *biases = arrays
    array = dequantize(words, scales, biases[0] if biases else None, spec, dtype)
    return {key: arrange_weight(array) if linear else array}
