"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.errors import ModelError
from engine_core.nn.module import Module

if TYPE_CHECKING:
    from engine_core.rope_spec import RopeSpec

__all__ = ["Rope"]


class Rope(Module):
    """Rotate the first ``dims`` dimensions of each head by position.

    It has no parameters. Dimension ``i`` is paired with ``i + dims / 2``.

    Source: Su et al. 2021, "RoFormer"; half-split pairing as in transformers ``rotate_half``.
    """

    def __init__(self, spec: RopeSpec) -> None:
        """Compute the frequencies.

        Args:
            spec: Rotary parameters.
        """
        super().__init__()
        self._spec = spec
        self._dims = spec.dims
        self._limit = spec.limit
        # MLX takes the reciprocal of a frequency; that of a pair which stands still is infinite.
        periods = [1.0 / value if value else math.inf for value in spec.frequencies()]
        self._periods = mx.array(periods, dtype=mx.float32)
        factor = spec.attention_factor
        self._amplitude: mx.array | None = None
        if factor != 1.0:
            rotated = [factor] * spec.dims
            self._amplitude = mx.array(rotated + [1.0] * (spec.head_dim - spec.dims))

    def __call__(self, x: mx.array, positions: int | mx.array = 0) -> mx.array:
        """Rotate.

        Args:
            x: ``[B, N, L, D]``.
            positions: Position of the first row as an int (tokens), or int32 ``[B, L]``.

        Returns:
            The same shape and dtype.

        Raises:
            ModelError: The positions have another shape, or an int offset leads beyond the
                positions that the spec is exact for.
        """
        if self._amplitude is not None:
            x = x * self._amplitude.astype(x.dtype)
        if isinstance(positions, int):
            self._check_limit(positions + x.shape[2])
            return self._rotate(x, positions)
        if positions.shape != (x.shape[0], x.shape[2]):
            raise ModelError(
                "rope: positions must be an offset or one position a row, shape "
                f"{(x.shape[0], x.shape[2])}, got {tuple(positions.shape)}",
                code="model.positions",
            )
        if x.shape[2] == 1:
            return self._rotate(x, positions[:, 0])
        return self._rotate_each(x, positions)

    def _rotate(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Rotate consecutive rows from an offset, one for all or one a sequence."""
        return mx.fast.rope(
            x,
            self._dims,
            traditional=False,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._periods,
        )

    def _rotate_each(self, x: mx.array, positions: mx.array) -> mx.array:
        """Rotate every row by its own position: each row is a sequence of one row."""
        batch, heads, rows, size = x.shape
        single = x.swapaxes(1, 2).reshape(batch * rows, heads, 1, size)
        rotated = self._rotate(single, positions.reshape(-1))
        return rotated.reshape(batch, rows, heads, size).swapaxes(1, 2)

    def _check_limit(self, stop: int) -> None:
        if self._limit is not None and stop > self._limit:
            raise ModelError(
                f"rope: dynamic scaling is exact up to {self._limit} positions, got {stop}",
                code="model.rope_limit",
                hint="shorten the conversation",
            )
