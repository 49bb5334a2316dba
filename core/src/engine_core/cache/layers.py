"""What is done to the caches of all layers together; layers that share one repeat it there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.backend import evaluate
from engine_core.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import mlx.core as mx

    from engine_core.cache.base import LayerCache, Mark

__all__ = [
    "cache_arrays",
    "cache_nbytes",
    "detach_caches",
    "distinct_caches",
    "fork_caches",
    "keep_caches",
    "mark_caches",
    "plan_fork",
    "reset_caches",
]


def distinct_caches(caches: Iterable[LayerCache]) -> list[LayerCache]:
    """Each cache object once: a layer that shares a donor's cache repeats it in the list.

    Args:
        caches: One entry a layer.

    Returns:
        The distinct objects in order.
    """
    return list(dict.fromkeys(caches))


def cache_arrays(caches: Iterable[LayerCache]) -> list[mx.array]:
    """All arrays that must be evaluated for the state of all layers to be real."""
    return [array for cache in distinct_caches(caches) for array in cache.arrays()]


def cache_nbytes(caches: Iterable[LayerCache]) -> int:
    """Bytes held by any number of caches, every distinct buffer counted once.

    Args:
        caches: Caches of one request, or of several requests and stored prefixes together.
    """
    total: dict[int, int] = {}
    for cache in caches:
        total.update(cache.buffers())
    return sum(total.values())


def fork_caches(caches: Sequence[LayerCache], length: int | None = None) -> list[LayerCache]:
    """Fork every layer; layers that shared one cache share its fork.

    Args:
        caches: One entry a layer.
        length: Tokens the forks hold, as :meth:`LayerCache.fork_at` takes them; ``None`` for all.

    Returns:
        One fork a layer.

    Raises:
        CacheError: A layer does not hold its state at that length.
    """
    forks = {
        id(cache): cache.fork() if length is None else cache.fork_at(length)
        for cache in distinct_caches(caches)
    }
    return [forks[id(cache)] for cache in caches]


def plan_fork(caches: Sequence[LayerCache], length: int, after: int) -> bool:
    """Plan a fork of every layer; see :meth:`LayerCache.plan_fork`.

    Args:
        caches: One entry a layer.
        length: Absolute position (tokens).
        after: Rows that will be fed beyond it before the fork.

    Returns:
        Whether ``fork_caches`` will succeed for that length.
    """
    return all(cache.plan_fork(length, after) for cache in distinct_caches(caches))


def detach_caches(caches: Iterable[LayerCache]) -> None:
    """Detach every layer with one evaluation; see :meth:`LayerCache.detach`.

    Args:
        caches: Forks about to be stored.

    Raises:
        BackendError: The device failed to compute the state; drop the caches.
    """
    layers = distinct_caches(caches)
    for cache in layers:
        cache._let_go()  # noqa: SLF001
    evaluate(*cache_arrays(layers))


def reset_caches(caches: Iterable[LayerCache]) -> None:
    """Make every layer let go of its memory; see :meth:`LayerCache.reset`.

    Args:
        caches: Caches nobody needs any more, though a stored exception may refer to them.
    """
    for cache in distinct_caches(caches):
        cache.reset()


def mark_caches(caches: Sequence[LayerCache]) -> tuple[Mark, ...]:
    """Mark every layer once.

    Returns:
        One mark a distinct cache, for :func:`keep_caches`.
    """
    return tuple(cache.mark() for cache in distinct_caches(caches))


def keep_caches(caches: Sequence[LayerCache], marks: Sequence[Mark], rows: int) -> None:
    """Keep the first ``rows`` rows since the marks on every layer.

    Everything is checked before anything changes, so a refusal leaves all layers as they were.

    Args:
        caches: The list given to :func:`mark_caches`.
        marks: Its result.
        rows: 0 to 16.

    Raises:
        CacheError: A layer refuses.
    """
    layers = distinct_caches(caches)
    if len(layers) != len(marks):
        raise CacheError(
            f"cache: keep needs one mark a cache, got {len(marks)!r} for {len(layers)!r}",
            code="cache.mark_invalid",
        )
    for cache, mark in zip(layers, marks, strict=True):
        cache._check_keep(mark, rows)  # noqa: SLF001
    for cache, mark in zip(layers, marks, strict=True):
        cache.keep(mark, rows)
