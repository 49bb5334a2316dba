"""Layers that compute on packed weights, and how dense layers become packed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import mlx.core as mx

from engine_core.errors import ModelError
from engine_core.nn.module import Module, module_at, replace_module

if TYPE_CHECKING:
    from engine_core.quantization import QuantizationPlan, QuantizationSpec

__all__ = [
    "Quantizable",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "dequantize",
    "quantize_module",
]


@runtime_checkable
class Quantizable(Protocol):
    """A dense layer that knows its packed form."""

    def to_quantized(self, spec: QuantizationSpec) -> Module:
        """Make the packed layer that takes this one's place.

        Args:
            spec: How the weight is packed.

        Returns:
            A layer with placeholder parameters of the same sizes.
        """
        ...


def quantize_module(module: Module, plan: QuantizationPlan) -> None:
    """Replace every layer the plan names by its packed form, in place.

    Args:
        module: The model, parameters still placeholders.
        plan: Mapped module path -> how it is packed.

    Raises:
        ModelError: A path names no layer, or a layer without a packed form.
    """
    for path, spec in plan.layers.items():
        layer = module_at(module, path)
        if not isinstance(layer, Quantizable):
            raise ModelError(
                f"layer {path!r}: must have a packed form, got {type(layer).__name__}",
                code="model.not_quantizable",
                hint="load with quantized_weights='dequantize'",
            )
        replace_module(module, path, layer.to_quantized(spec))


def dequantize(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    spec: QuantizationSpec,
    dtype: mx.Dtype,
) -> mx.array:
    """Unpack a weight, in float32 whatever the scales' dtype, so that only the last cast rounds.

    Args:
        weight: ``[..., words]`` uint32.
        scales: ``[..., groups]``, floating or one byte each by mode.
        biases: ``[..., groups]`` for affine packing, else ``None``.
        spec: How the weight is packed.
        dtype: Dtype of the result.

    Returns:
        ``[..., words * 32 / bits]``.
    """
    if spec.affine:
        scales = scales.astype(mx.float32)
        biases = None if biases is None else biases.astype(mx.float32)
    return mx.dequantize(
        weight,
        scales,
        biases,
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
        dtype=mx.float32,
    ).astype(dtype)


class _Packed(Module):
    """Parameters that all packed layers have.

    Attributes:
        weight: ``[rows, words]`` uint32.
        scales: ``[rows, groups]``.
        biases: ``[rows, groups]``, affine packing only.
    """

    def __init__(self, rows: int, width: int, spec: QuantizationSpec) -> None:
        """Make placeholders.

        Args:
            rows: Rows of the unpacked weight.
            width: Columns of the unpacked weight.
            spec: How it is packed.
        """
        super().__init__()
        self._spec = spec
        groups = (rows, width // spec.group_size)
        self.weight = mx.zeros((rows, spec.words(width)), dtype=mx.uint32)
        self.scales = mx.zeros(groups, dtype=mx.float32 if spec.affine else mx.uint8)
        if spec.affine:
            self.biases = mx.zeros(groups)

    @property
    def spec(self) -> QuantizationSpec:
        """How the weight is packed."""
        return self._spec

    def _project(self, x: mx.array) -> mx.array:
        """Multiply by the transposed unpacked weight."""
        spec = self._spec
        # Several sequences of one row each would run as that many products of one row.
        rows = x.reshape(-1, x.shape[-1]) if x.ndim > 2 and x.shape[0] > 1 else x
        out = mx.quantized_matmul(
            rows,
            self["weight"],
            self["scales"],
            self.get("biases"),
            transpose=True,
            group_size=spec.group_size,
            bits=spec.bits,
            mode=spec.mode,
        )
        return out if rows is x else out.reshape(*x.shape[:-1], out.shape[-1])


class QuantizedLinear(_Packed):
    """A projection that computes on its packed weight.

    Attributes:
        bias: ``[out]``, present only when asked for; not to be confused with ``biases``.
    """

    def __init__(
        self, in_features: int, out_features: int, spec: QuantizationSpec, *, bias: bool = False
    ) -> None:
        """Make placeholder parameters.

        Args:
            in_features: Size of the last axis of the input.
            out_features: Size of the last axis of the output.
            spec: How the weight is packed.
            bias: Whether a bias is added.
        """
        super().__init__(out_features, in_features, spec)
        if bias:
            self.bias = mx.zeros((out_features,))

    def __call__(self, x: mx.array) -> mx.array:
        """Project.

        Args:
            x: ``[..., in]``, compute dtype.

        Returns:
            ``[..., out]``.
        """
        out = self._project(x)
        return out + self["bias"] if "bias" in self else out


class QuantizedEmbedding(_Packed):
    """A token table whose rows are unpacked as they are looked up."""

    def __call__(self, ids: mx.array) -> mx.array:
        """Look rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]``, dtype of the affine scales, float32 in the other modes.
        """
        biases = self.get("biases")
        dtype = self["scales"].dtype if self._spec.affine else mx.float32
        return dequantize(
            self["weight"][ids],
            self["scales"][ids],
            None if biases is None else biases[ids],
            self._spec,
            dtype,
        )

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Score every token: the table as output projection.

        Args:
            hidden: ``[B, N, H]``.

        Returns:
            ``[B, N, V]``.
        """
        return self._project(hidden)
