"""Feeding a prompt in chunks; the head runs only for rows somebody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mlx.core as mx

from engine_core.backend import evaluate
from engine_core.cache.layers import cache_arrays
from engine_core.decode.forward import (
    forward_hidden,
    head_rows,
    queue,
)
from engine_core.errors import ModelError
from engine_core.limits import LIMITS
from engine_core.nn.activations import computes_on_cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.step import CausalLM

__all__ = ["chunk_ends", "feed_prompt", "hidden_chunks", "run_prefill"]

# Rows of a chunk that a forward of one row is taken to cost as much as, with a margin for a GPU.
LAST_ROW_COST: Final = 64


def hidden_chunks(
    model: CausalLM,
    caches: Sequence[LayerCache],
    ids: Sequence[int],
    *,
    start: int,
    ends: Iterable[int],
    checkpoint: Callable[[], None] | None,
) -> Iterator[tuple[int, mx.array]]:
    """Run the layers over a prompt chunk by chunk; the one path for every caller.

    Whoever iterates evaluates what it wants of a chunk before asking for the next one.

    Args:
        model: The family's model.
        caches: One cache a layer; they grow by ``len(ids)`` rows.
        ids: Token ids to feed, at least one.
        start: Absolute position of ``ids[0]`` (tokens).
        ends: How many rows are fed after each chunk, from :func:`chunk_ends`.
        checkpoint: Polled before and after each chunk; raises to cancel.

    Yields:
        How many rows are fed so far, and the chunk's hidden rows ``[1, L, H]``.

    Raises:
        ModelError: There is nothing to feed, or the forward failed.
    """
    total = len(ids)
    if total == 0:
        raise ModelError("prefill: at least one token must be fed, got 0", code="model.empty")
    begin = 0
    for end in ends:
        if checkpoint is not None:
            checkpoint()
        block = mx.array([ids[begin:end]], dtype=mx.int32)
        yield end, forward_hidden(model, caches, block, start + begin)
        begin = end
        if checkpoint is not None:
            checkpoint()


def chunk_ends(total: int, chunk: int) -> list[int]:
    """Divide rows into chunks.

    Args:
        total: Rows to feed (tokens).
        chunk: Rows a chunk (tokens).

    Returns:
        How many rows are fed after each chunk.
    """
    return [*range(chunk, total, chunk), total]


def _prompt_ends(total: int, chunk: int, caches: Sequence[LayerCache]) -> list[int]:
    """Divide a prompt whose last row is read, that row alone where it pays.

    Layers at the end that only read what an earlier layer stores leave no state, so in a chunk
    that nobody reads they are never computed: 18 of 42 layers in some models. A forward of the
    last row alone costs a CPU as much as 10 to 20 rows of a chunk.
    """
    ends = chunk_ends(total, chunk)
    stateless = 0
    for index in range(len(caches) - 1, 0, -1):
        if not any(cache is caches[index] for cache in caches[:index]):
            break
        stateless += 1
    last = ends[-1] - (ends[-2] if len(ends) > 1 else 0)
    if last > 1 and last * stateless >= LAST_ROW_COST * len(caches):
        ends.insert(-1, total - 1)
    return ends


def _feed(
    model: CausalLM,
    caches: Sequence[LayerCache],
    ids: Sequence[int],
    *,
    start: int,
    ends: Iterable[int],
    checkpoint: Callable[[], None] | None,
    on_chunk: Callable[[int, int], None] | None,
    read: Callable[[mx.array], list[mx.array]],
) -> list[mx.array]:
    total = len(ids)
    overlaps = not computes_on_cpu()
    outputs: list[mx.array] = []
    running: mx.array | None = None
    chunks = hidden_chunks(model, caches, ids, start=start, ends=ends, checkpoint=checkpoint)
    for done, hidden in chunks:
        if done == total:
            outputs = read(hidden)
            evaluate(*outputs, *cache_arrays(caches))
        elif overlaps:
            # One chunk runs while the next is queued. What is waited for is a copy of one
            # element: a reference to a cache buffer would make its next append copy it.
            arrays = cache_arrays(caches)
            end_mark = mx.concatenate(
                [array.reshape(-1)[:1].astype(mx.float32) for array in arrays]
            )
            queue([*arrays, end_mark])
            del arrays
            if running is not None:
                evaluate(running)
            running = end_mark
        else:
            evaluate(*cache_arrays(caches))
        # Not computed, it refers to the keys and values it would be computed from, and the next
        # append would have to copy them.
        del hidden
        if on_chunk is not None:
            on_chunk(done, total)
    return outputs


def run_prefill(
    model: CausalLM,
    caches: Sequence[LayerCache],
    ids: Sequence[int],
    *,
    start: int = 0,
    chunk: int = LIMITS.prefill_chunk_tokens,
    checkpoint: Callable[[], None] | None = None,
    on_chunk: Callable[[int, int], None] | None = None,
) -> mx.array:
    """Feed a prompt and give back the logits of its last row.

    The last token is part of the last chunk, unless layers without a state of their own make a
    forward for it pay. Chunks before the last evaluate cache state only, so neither the head nor
    the last layer's output is computed for them. On a GPU one further chunk may be queued while
    one runs.

    Args:
        model: The family's model.
        caches: One cache a layer; they grow by ``len(ids)`` rows.
        ids: Token ids to feed, at least one.
        start: Absolute position of ``ids[0]`` (tokens).
        chunk: Rows a chunk (tokens).
        checkpoint: Polled before and after each chunk; raises ``Cancelled`` to stop there. The
            caches then hold whole chunks only.
        on_chunk: Called with the rows fed and the rows to feed, after each chunk.

    Returns:
        ``[V]`` logits of the last row, evaluated, and so is every cache.

    Raises:
        ModelError: There is nothing to feed, or the forward failed.
        BackendError: An evaluation failed.
    """
    last = start + len(ids) - 1
    [row] = _feed(
        model,
        caches,
        ids,
        start=start,
        ends=_prompt_ends(len(ids), chunk, caches),
        checkpoint=checkpoint,
        on_chunk=on_chunk,
        read=lambda hidden: [head_rows(model, hidden[:, -1:], last)[0]],
    )
    return row


def feed_prompt(
    model: CausalLM,
    caches: Sequence[LayerCache],
    ids: Sequence[int],
    *,
    start: int = 0,
    chunk: int = LIMITS.prefill_chunk_tokens,
    checkpoint: Callable[[], None] | None = None,
    on_chunk: Callable[[int, int], None] | None = None,
) -> None:
    """Feed a part of a prompt whose logits nobody reads; the head does not run at all.

    Args:
        model: The family's model.
        caches: One cache a layer; they grow by ``len(ids)`` rows.
        ids: Token ids to feed, at least one.
        start: Absolute position of ``ids[0]`` (tokens).
        chunk: Rows a chunk (tokens).
        checkpoint: As for :func:`run_prefill`.
        on_chunk: As for :func:`run_prefill`.

    Raises:
        ModelError: There is nothing to feed, or the forward failed.
        BackendError: An evaluation failed.
    """
    _feed(
        model,
        caches,
        ids,
        start=start,
        ends=chunk_ends(len(ids), chunk),
        checkpoint=checkpoint,
        on_chunk=on_chunk,
        read=lambda _: [],
    )
