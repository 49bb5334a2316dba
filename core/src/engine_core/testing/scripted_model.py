"""The model of :mod:`engine_core.testing.scripted`; apart, because it imports MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.nn import Embedding, Linear, Module
from engine_core.step import StepInput, StepOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.cache.base import LayerCache

__all__ = ["ScriptedModel"]


class ScriptedModel(Module):
    """One-hot embedding, one attention layer of small weight, and a head of successors."""

    def __init__(self, vocab_size: int, head_dim: int) -> None:
        """Make the layers with placeholder parameters.

        Args:
            vocab_size: V, also H.
            head_dim: D of the only head.
        """
        super().__init__()
        self.embedding = Embedding(vocab_size, vocab_size)
        self.query = Linear(vocab_size, head_dim)
        self.key = Linear(vocab_size, head_dim)
        self.value = Linear(vocab_size, head_dim)
        self.output = Linear(head_dim, vocab_size)
        self.head_projection = Linear(vocab_size, vocab_size)

    def embed(self, ids: mx.array) -> mx.array:
        """Look rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]``.
        """
        return self.embedding(ids)

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> StepOutput:
        """Add a little of every earlier row.

        Args:
            step: Ids or embeddings.
            caches: One full-attention cache.

        Returns:
            Hidden rows.
        """
        rows = self.embed(step.ids) if step.embeddings is None else step.embeddings
        query, key, value = (layer(rows)[:, None] for layer in (self.query, self.key, self.value))
        keys, values = caches[0].append(key, value)  # type: ignore[attr-defined]
        mixed = mx.fast.scaled_dot_product_attention(
            query, keys, values, scale=query.shape[-1] ** -0.5, mask="causal"
        )
        return StepOutput(hidden=rows + self.output(mixed[:, 0]))

    def head(self, hidden: mx.array) -> mx.array:
        """Score the next token.

        Args:
            hidden: ``[B, N, H]``.

        Returns:
            ``[B, N, V]``.
        """
        return self.head_projection(hidden)
