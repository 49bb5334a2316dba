"""Teacher-forced logits of a whole sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from engine_core.backend import evaluate
from engine_core.cache.layers import cache_arrays
from engine_core.decode.forward import head_rows, non_finite_error
from engine_core.decode.prefill import chunk_ends, hidden_chunks
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from engine_core.cache.base import LayerCache
    from engine_core.step import CausalLM

__all__ = ["score"]


def score(
    model: CausalLM,
    caches: Sequence[LayerCache],
    ids: Sequence[int],
    *,
    chunk: int = LIMITS.prefill_chunk_tokens,
    checkpoint: Callable[[], None] | None = None,
) -> NDArray[np.float32]:
    """Compute the logits of every row of a sequence.

    Args:
        model: The family's model.
        caches: One cache a layer; they grow by ``T`` rows.
        ids: ``T`` token ids, at least one.
        chunk: Rows a chunk (tokens).
        checkpoint: Polled before and after each chunk; raises to cancel.

    Returns:
        ``[T, V]`` float32; row ``t`` scores the token after ``ids[t]``.

    Raises:
        ModelError: There is nothing to feed, the forward failed, or a row is not finite.
        BackendError: An evaluation failed.
    """
    total = len(ids)
    rows = np.empty((0, 0), dtype=np.float32)
    done = 0
    ends = chunk_ends(total, chunk)
    chunks = hidden_chunks(model, caches, ids, start=0, ends=ends, checkpoint=checkpoint)
    for end, hidden in chunks:
        logits = head_rows(model, hidden, done).astype(mx.float32)
        evaluate(logits, *cache_arrays(caches))
        block = np.array(logits)
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            raise non_finite_error(done + int(np.argmin(finite)))
        if done == 0:
            rows = np.empty((total, block.shape[1]), dtype=np.float32)
        rows[done:end] = block
        done = end
    return rows
