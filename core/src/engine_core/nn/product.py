"""Products with the transpose of a weight, which stays the same from call to call."""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from engine_core.backend import backend_report
from engine_core.nn.activations import computes_on_cpu

__all__ = ["TransposedProduct"]

# Elements of a block. OpenBLAS repacks a large matrix before it multiplies, even by one row, and
# has a kernel without that step for small ones. One row times a [4096, 2048] matrix read 2.8 GB/s
# whole and 15 GB/s in 32 blocks; [49152, 576], 3.5 and 7 GB/s (two cores, shared with others).
BLOCK_ELEMENTS: Final = 1 << 19


class TransposedProduct:
    """Computes ``x @ weight.T``, and one row with an optimised BLAS in blocks of output rows.

    The views of the weight are made once an array object, so that no call builds them again.
    """

    __slots__ = ("_in_features", "_rest", "_stack", "_transposed", "_weight")

    def __init__(self) -> None:
        """Start without a weight."""
        self._weight: mx.array | None = None
        self._transposed = mx.zeros(())
        self._stack: mx.array | None = None
        self._rest: mx.array | None = None
        self._in_features = 0

    def __call__(self, x: mx.array, weight: mx.array) -> mx.array:
        """Multiply.

        Args:
            x: ``[..., in]``, the weight's dtype.
            weight: ``[out, in]``.

        Returns:
            ``[..., out]``.
        """
        if self._weight is not weight:
            self._take(weight)
        if self._stack is None or x.size != self._in_features:
            return x @ self._transposed
        row = x.reshape(1, -1)
        out = (row @ self._stack).reshape(1, -1)
        if self._rest is not None:
            out = mx.concatenate([out, row @ self._rest], axis=-1)
        return out.reshape(*x.shape[:-1], -1)

    def _take(self, weight: mx.array) -> None:
        self._weight, self._transposed = weight, weight.T
        self._stack = self._rest = None
        self._in_features = weight.shape[1]
        rows = _block_rows(weight)
        if rows:
            count = weight.shape[0] // rows
            stacked = weight[: count * rows].reshape(count, rows, -1)
            self._stack = stacked.swapaxes(-1, -2)
            if count * rows < weight.shape[0]:
                self._rest = weight[count * rows :].T


def _block_rows(weight: mx.array) -> int:
    """Rows of a block, 0 when the matrix is best left whole."""
    if weight.dtype != mx.float32 or weight.size <= BLOCK_ELEMENTS or not computes_on_cpu():
        return 0
    if not backend_report().blas.startswith("openblas"):
        return 0
    out_features, in_features = weight.shape
    most = max(BLOCK_ELEMENTS // in_features, 1)
    # Blocks that leave nothing over, unless they would be much smaller than the bound.
    for rows in range(most, most // 2, -1):
        if out_features % rows == 0:
            return rows
    return most
