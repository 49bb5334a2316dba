"""Products with the transpose of a weight, which stays the same from call to call."""

from __future__ import annotations

from typing import Final, NamedTuple

import mlx.core as mx

from engine_core.backend import backend_report
from engine_core.nn.activations import computes_on_cpu
from engine_core.nn.module import Derived

__all__ = ["TransposedProduct"]

# Elements of a block. OpenBLAS repacks a large matrix before it multiplies, even by one row, and
# has a kernel without that step for small ones. One row times a [4096, 2048] matrix read 2.8 GB/s
# whole and 15 GB/s in 32 blocks; [49152, 576], 3.5 and 7 GB/s (two cores, shared with others).
BLOCK_ELEMENTS: Final = 1 << 19


class _Views(NamedTuple):
    """A weight as products read it.

    Attributes:
        whole: ``[in, out]``.
        blocks: ``[count, in, rows]``, ``None`` when the weight is best left whole.
        rest: ``[in, out - count * rows]``, ``None`` when the blocks leave nothing over.
    """

    whole: mx.array
    blocks: mx.array | None = None
    rest: mx.array | None = None


class TransposedProduct:
    """Computes ``x @ weight.T``, and one row with an optimised BLAS in blocks of output rows."""

    __slots__ = ("_views",)

    def __init__(self) -> None:
        """Start without a weight."""
        self._views = Derived(_views_of)

    def __call__(self, x: mx.array, weight: mx.array) -> mx.array:
        """Multiply.

        Args:
            x: ``[..., in]``, the weight's dtype.
            weight: ``[out, in]``.

        Returns:
            ``[..., out]``.
        """
        whole, blocks, rest = self._views.of(weight)
        if blocks is None or x.size != x.shape[-1]:
            return x @ whole
        row = x.reshape(1, -1)
        out = (row @ blocks).reshape(1, -1)
        if rest is not None:
            out = mx.concatenate([out, row @ rest], axis=-1)
        return out.reshape(*x.shape[:-1], -1)


def _views_of(weight: mx.array) -> _Views:
    rows = _block_rows(weight)
    if not rows:
        return _Views(weight.T)
    count, left = divmod(weight.shape[0], rows)
    stacked = weight[: count * rows].reshape(count, rows, -1)
    rest = weight[count * rows :].T if left else None
    return _Views(weight.T, stacked.swapaxes(-1, -2), rest)


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
