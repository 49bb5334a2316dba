"""Dense projections, and how their weights lie in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.backend import backend_report
from engine_core.nn.activations import computes_on_cpu
from engine_core.nn.module import Module
from engine_core.nn.product import TransposedProduct
from engine_core.nn.quantized import QuantizedLinear

if TYPE_CHECKING:
    from engine_core.quantization import QuantizationSpec

__all__ = ["Linear", "arrange_weight"]


class Linear(Module):
    """``x @ weight.T + bias``; the weight is ``[out, in]`` as checkpoints store it.

    Attributes:
        weight: ``[out, in]``.
        bias: ``[out]``, present only when asked for.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        """Make placeholder parameters; nothing is allocated before they are used.

        Args:
            in_features: Size of the last axis of the input.
            out_features: Size of the last axis of the output.
            bias: Whether a bias is added.
        """
        super().__init__()
        self._product = TransposedProduct()
        self.weight = mx.zeros((out_features, in_features))
        if bias:
            self.bias = mx.zeros((out_features,))

    def __call__(self, x: mx.array) -> mx.array:
        """Project.

        Args:
            x: ``[..., in]``, the weight's dtype.

        Returns:
            ``[..., out]``.
        """
        out = self._product(x, self["weight"])
        return out + self["bias"] if "bias" in self else out

    def to_quantized(self, spec: QuantizationSpec) -> QuantizedLinear:
        """Make the packed layer that takes this one's place.

        Args:
            spec: How the weight is packed.

        Returns:
            A layer with placeholder parameters of the same sizes.
        """
        out_features, in_features = self.weight.shape
        return QuantizedLinear(in_features, out_features, spec, bias="bias" in self)


def arrange_weight(weight: mx.array) -> mx.array:
    """Lay a projection's weight out as the device reads it fastest; the values do not change.

    The rule: with MLX's own BLAS on a CPU a matrix is stored input-major, so that ``x @ weight.T``
    reads contiguous ``[in, out]`` rows; a fast BLAS and a GPU take the layout of the file. One
    row times all the layers of a 135M-parameter model (425 MB, so nothing stays in a cache) took
    39 instead of 87 ms with MLX's own BLAS, and with OpenBLAS 34 ms output-major against 43
    input-major; 256 rows cost the same in both layouts (two cores).

    Args:
        weight: ``[out, in]``, any floating dtype.

    Returns:
        The same shape and values, lazily.
    """
    if weight.ndim != 2 or not computes_on_cpu():
        return weight
    if backend_report().blas != "bundled":
        return weight
    return mx.contiguous(weight.T).T
