"""Rotary positions of text (one stream) and of media (temporal, height, width)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.errors import ModelError
from engine_core.nn import Module, Rope

if TYPE_CHECKING:
    from engine_core.rope_spec import RopeSpec

__all__ = ["Rotation", "StreamRope"]

Rotation = int | mx.array | tuple[mx.array, mx.array]
"""What one forward call rotates by: an offset, ``[B, L]`` positions, or cosines and sines."""


class StreamRope(Module):
    """Rotary embedding whose channels belong to three position streams, interleaved.

    Channel ``j`` takes the height stream when ``j % 3 == 1``, the width stream when
    ``j % 3 == 2``, as long as the stream's section lasts, else the temporal one. Equal streams, as
    text has them, give the ordinary rotation.

    Source: Qwen2-VL technical report 2024, section 2.1 (M-RoPE); interleaved as in transformers
    ``Qwen3VLTextRotaryEmbedding``.
    """

    def __init__(self, spec: RopeSpec, section: tuple[int, int, int] | None) -> None:
        """Compute frequencies and channel owners.

        Args:
            spec: Rotary parameters.
            section: Channels of each stream, ``None`` when only text can be rotated.
        """
        super().__init__()
        self._plain = Rope(spec)
        self._half = spec.dims // 2
        self._frequencies = mx.array(spec.frequencies(), dtype=mx.float32)
        self._amplitude = spec.attention_factor
        self._owners: mx.array | None = None
        if section is not None:
            owners = [0] * self._half
            for stream in (1, 2):
                for turn in range(section[stream]):
                    owners[stream + 3 * turn] = stream
            self._owners = mx.array(owners, dtype=mx.int32)

    def prepare(self, positions: int | mx.array) -> Rotation:
        """Compute once what all layers of a call rotate by.

        Args:
            positions: Offset of the first row, or int32 ``[B, L]`` or ``[3, B, L]``.

        Returns:
            The rotation for :meth:`__call__`.

        Raises:
            ModelError: Three streams were given without knowledge of their channels.
        """
        if isinstance(positions, int) or positions.ndim != 3:
            return positions
        if self._owners is None or positions.shape[0] != 3:
            raise ModelError(
                "rope: three position streams need shape [3, B, L] and config.json's "
                f"mrope_section, got {tuple(positions.shape)}",
                code="model.positions",
            )
        # [3, B, L] to [B, L, half]: each channel reads its own stream.
        owned = positions.transpose(1, 2, 0)[..., self._owners].astype(mx.float32)
        angles = (owned * self._frequencies)[:, None]
        return mx.cos(angles) * self._amplitude, mx.sin(angles) * self._amplitude

    def __call__(self, x: mx.array, rotation: Rotation) -> mx.array:
        """Rotate.

        Args:
            x: ``[B, N, L, D]``.
            rotation: From :meth:`prepare`.

        Returns:
            The same shape and dtype.

        Raises:
            ModelError: The positions have another shape.
        """
        if not isinstance(rotation, tuple):
            return self._plain(x, rotation)
        cos, sin = rotation
        if cos.shape[0] != x.shape[0] or cos.shape[2] != x.shape[2]:
            raise ModelError(
                "rope: positions must be one a row, "
                f"got {cos.shape[0]} x {cos.shape[2]} for {x.shape[0]} x {x.shape[2]} rows",
                code="model.positions",
            )
        half = self._half
        wide = x[..., : 2 * half].astype(mx.float32)
        first, second = wide[..., :half], wide[..., half:]
        turned = mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return mx.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
