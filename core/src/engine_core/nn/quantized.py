"""Layers that compute on packed weights, and how dense layers become packed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import mlx.core as mx

from engine_core.backend import backend_report
from engine_core.errors import ModelError
from engine_core.nn.activations import computes_on_cpu
from engine_core.nn.module import Module, module_at, replace_module

if TYPE_CHECKING:
    from engine_core.quantization import QuantizationPlan, QuantizationSpec

__all__ = [
    "Quantizable",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "dequantize",
    "quantize_module",
    "unpacks_from",
]

# Bytes of a weight that are unpacked at a time, so that the memory a product needs besides does
# not grow with the layer: an output projection has 20 times the size of the others. A CPU works
# some 50 blocks ahead of its products, and small blocks are still in its cache: 48 layers of 16 MB
# over 64 rows took 81 MiB and 0.74 s in blocks of 4 MiB, 653 MiB and 1.0 s whole.
CPU_BLOCK_BYTES: Final = 4 * 1024**2
GPU_BLOCK_BYTES: Final = 128 * 1024**2


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


def quantize_module(module: Module, plan: QuantizationPlan, dtype: mx.Dtype = mx.float32) -> None:
    """Replace every layer the plan names by its packed form, in place.

    Args:
        module: The model, parameters still placeholders.
        plan: Mapped module path -> how it is packed.
        dtype: Compute dtype, in which a packed table gives its rows.

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
        packed = layer.to_quantized(spec)
        if isinstance(packed, QuantizedEmbedding):
            packed.row_dtype = dtype
        replace_module(module, path, packed)


def unpacks_from(spec: QuantizationSpec) -> int | None:
    """Say from how many rows on a weight is unpacked for a product instead of read packed.

    Unpacking costs the same however many rows there are. On a CPU it pays with a fast BLAS only:
    a weight of 1024 x 1024 takes 1 to 2 ms to unpack where an element does not straddle bytes and
    8 to 11 ms otherwise, a row 0.5 to 1.9 ms packed and 0.07 ms unpacked. With CUDA the affine
    products of 128 rows and more take 2.4 times as long packed. Metal
    reads them packed.

    Args:
        spec: How the weight is packed.

    Returns:
        The least number of rows; ``None`` for never.
    """
    if computes_on_cpu():
        if backend_report().blas == "bundled":
            return None
        return 8 if spec.bits in (2, 8) or (spec.affine and spec.bits == 4) else 32
    return 128 if spec.affine and mx.cuda.is_available() else None


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
        self._unpacks_from = unpacks_from(spec)
        self._in_float32 = computes_on_cpu()
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
        """Multiply by the transposed unpacked weight.

        A CPU computes in float32 whatever the dtype: its packed products of half precision take
        8 times (bfloat16) and 30 times (float16) as long.
        """
        width = x.shape[-1]
        # Several sequences of one row each would run as that many products of one row.
        rows = x.reshape(-1, width) if x.ndim > 2 and x.shape[0] > 1 else x
        if self._in_float32 and x.dtype != mx.float32:
            rows = rows.astype(mx.float32)
        if self._unpacks_from is not None and x.size >= self._unpacks_from * width:
            out = self._project_unpacked(rows)
        else:
            spec = self._spec
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
        return out if rows is x else out.astype(x.dtype).reshape(*x.shape[:-1], out.shape[-1])

    def _project_unpacked(self, rows: mx.array) -> mx.array:
        """Unpack blocks of the weight's rows one after the other, as the products need them."""
        spec, weight, scales, biases = self._spec, self["weight"], self["scales"], None
        if spec.affine:
            # Unpacked in the dtype of the product: only that rounds.
            scales, biases = scales.astype(rows.dtype), self["biases"].astype(rows.dtype)
        bound = CPU_BLOCK_BYTES if self._in_float32 else GPU_BLOCK_BYTES
        step = max(1, bound // (rows.shape[-1] * rows.dtype.size))
        parts = []
        for start in range(0, weight.shape[0], step):
            block = slice(start, start + step)
            unpacked = mx.dequantize(
                weight[block],
                scales[block],
                None if biases is None else biases[block],
                group_size=spec.group_size,
                bits=spec.bits,
                mode=spec.mode,
                dtype=rows.dtype,
            )
            parts.append(rows @ unpacked.T)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


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
    """A token table whose rows are unpacked as they are looked up.

    Attributes:
        row_dtype: Dtype of the rows.
    """

    row_dtype: mx.Dtype = mx.float32

    def __call__(self, ids: mx.array) -> mx.array:
        """Look rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]``, in ``row_dtype``.
        """
        biases = self.get("biases")
        return dequantize(
            self["weight"][ids],
            self["scales"][ids],
            None if biases is None else biases[ids],
            self._spec,
            self.row_dtype,
        )

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Score every token: the table as output projection.

        Args:
            hidden: ``[B, N, H]``.

        Returns:
            ``[B, N, V]``.
        """
        return self._project(hidden)
