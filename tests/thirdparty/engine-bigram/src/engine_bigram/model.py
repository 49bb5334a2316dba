"""The bigram model: the next token depends on the last one alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.nn import Embedding, Linear, Module, RMSNorm
from engine_core.step import StepInput, StepOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from engine_core.cache.base import LayerCache


class Bigram(Module):
    """``head(norm(embedding[id]))``."""

    def __init__(self, *, vocab_size: int, hidden_size: int, eps: float) -> None:
        """Make the three layers with placeholder parameters.

        Args:
            vocab_size: V.
            hidden_size: H.
            eps: Added to the mean square under the root.
        """
        super().__init__()
        self.embedding = Embedding(vocab_size, hidden_size)
        self.norm = RMSNorm(hidden_size, eps=eps)
        self.output = Linear(hidden_size, vocab_size)

    def embed(self, ids: mx.array) -> mx.array:
        """Look rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]``.
        """
        return self.embedding(ids)

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> StepOutput:
        """Normalise each row; there is nothing to remember.

        Args:
            step: Ids or embeddings.
            caches: Empty.

        Returns:
            Hidden rows.
        """
        del caches
        rows = self.embed(step.ids) if step.embeddings is None else step.embeddings
        return StepOutput(hidden=self.norm(rows))

    def head(self, hidden: mx.array) -> mx.array:
        """Score the next token.

        Args:
            hidden: ``[B, N, H]``.

        Returns:
            ``[B, N, V]``.
        """
        return self.output(hidden)
