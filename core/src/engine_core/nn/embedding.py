"""Token tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.nn.module import Module
from engine_core.nn.product import TransposedProduct
from engine_core.nn.quantized import QuantizedEmbedding

if TYPE_CHECKING:
    from engine_core.quantization import QuantizationSpec

__all__ = ["Embedding"]


class Embedding(Module):
    """A table of one row a token, which tied models also use as their output projection.

    Attributes:
        weight: ``[V, H]``.
    """

    def __init__(self, rows: int, width: int) -> None:
        """Make a placeholder table.

        Args:
            rows: V.
            width: H.
        """
        super().__init__()
        self._product = TransposedProduct()
        self.weight = mx.zeros((rows, width))

    def __call__(self, ids: mx.array) -> mx.array:
        """Look rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]``.
        """
        weight: mx.array = self["weight"]
        return weight[ids]

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Score every token: the table as output projection.

        Args:
            hidden: ``[B, N, H]``.

        Returns:
            ``[B, N, V]``.
        """
        return self._product(hidden, self["weight"])

    def to_quantized(self, spec: QuantizationSpec) -> QuantizedEmbedding:
        """Make the packed table that takes this one's place.

        Args:
            spec: How the table is packed.

        Returns:
            A table with placeholder parameters of the same sizes.
        """
        rows, width = self.weight.shape
        return QuantizedEmbedding(rows, width, spec)
