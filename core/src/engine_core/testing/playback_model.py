"""The model of :mod:`engine_core.testing.playback`; apart, because it imports MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.nn import Embedding, Module
from engine_core.step import StepInput, StepOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.testing.playback import Playback

__all__ = ["PlaybackModel"]


class PlaybackModel(Module):
    """Hidden rows carry their position; the head looks up which token the script has next."""

    def __init__(self, script: Playback, vocab_size: int, width: int) -> None:
        """Make the only parameter.

        Args:
            script: Says which ids follow the prompt.
            vocab_size: V.
            width: H, also D of the only cache.
        """
        super().__init__()
        self._script = script
        self._rows = vocab_size
        self.embedding = Embedding(vocab_size, width)

    def embed(self, ids: mx.array) -> mx.array:
        """Look rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]``.
        """
        return self.embedding(ids)

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> StepOutput:
        """Fill the cache and note each row's position.

        Args:
            step: Ids and an offset.
            caches: One full-attention cache.

        Returns:
            Rows whose entries are all their position.
        """
        rows = self.embed(step.ids)
        caches[0].append(rows[:, None], rows[:, None])  # type: ignore[attr-defined]
        positions = mx.arange(rows.shape[1], dtype=mx.float32) + step.positions
        return StepOutput(hidden=rows + positions[None, :, None])

    def head(self, hidden: mx.array) -> mx.array:
        """Score the next token.

        Args:
            hidden: ``[B, N, H]``.

        Returns:
            ``[B, N, V]``.
        """
        script = mx.array([*self._script.ids, self._script.end])
        ordinal = hidden[..., 0].astype(mx.int32) - (self._script.origin - 1)
        token = script[mx.clip(ordinal, 0, script.size - 1)]
        return 8.0 * (mx.arange(self._rows) == token[..., None]).astype(mx.float32)
