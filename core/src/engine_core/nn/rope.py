"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.errors import ModelError
from engine_core.nn.activations import computes_on_cpu
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
        self._tables = _Tables(spec)
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
        if isinstance(positions, int):
            self._check_limit(positions + x.shape[2])
        elif positions.shape != (x.shape[0], x.shape[2]):
            raise ModelError(
                "rope: positions must be an offset or one position a row, shape "
                f"{(x.shape[0], x.shape[2])}, got {tuple(positions.shape)}",
                code="model.positions",
            )
        if x.dtype == mx.float32 and computes_on_cpu():
            return self._tables.rotate(x, positions)
        if self._amplitude is not None:
            x = x * self._amplitude.astype(x.dtype)
        if isinstance(positions, int):
            return self._rotate(x, positions)
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


class _Tables:
    """Cosines and sines of a call's rows; from an offset, once for all layers of a rotation.

    MLX's own rotation is made of some 15 operations on a processor, sines included, in every
    layer: 50 us for one row of 12 heads, of which these 5 operations leave 12.
    """

    def __init__(self, spec: RopeSpec) -> None:
        self._half, self._dims = spec.dims // 2, spec.dims
        self._partial = spec.dims < spec.head_dim
        self._factor = spec.attention_factor
        self._frequencies = mx.array(spec.frequencies(), dtype=mx.float32)
        self._known = (0, 0)
        self._pair: tuple[mx.array, mx.array] | None = None

    def rotate(self, x: mx.array, positions: int | mx.array) -> mx.array:
        """Rotate float32 rows ``[B, N, L, D]``."""
        cos, sin = self._of(positions, x.shape[2])
        if not self._partial:
            return x * cos + mx.roll(x, self._half, -1) * sin
        turned, rest = mx.split(x, [self._dims], axis=-1)
        turned = turned * cos + mx.roll(turned, self._half, -1) * sin
        return mx.concatenate([turned, rest], axis=-1)

    def _of(self, positions: int | mx.array, rows: int) -> tuple[mx.array, mx.array]:
        """Make ``[..., L, dims]`` cosines, and sines negative where the partner comes second."""
        if isinstance(positions, mx.array):
            # Not kept: an array can be changed in place, and then its tables would be stale.
            return self._compute(positions[:, None, :, None])
        if self._pair is None or self._known != (positions, rows):
            self._pair = self._compute(mx.arange(positions, positions + rows)[:, None])
            self._known = (positions, rows)
        return self._pair

    def _compute(self, steps: mx.array) -> tuple[mx.array, mx.array]:
        angles = steps.astype(mx.float32) * self._frequencies
        cos, sin = mx.cos(angles), mx.sin(angles)
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
