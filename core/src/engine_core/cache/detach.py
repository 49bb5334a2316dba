"""Copies that own their memory."""

from __future__ import annotations

import mlx.core as mx

from engine_core.backend import evaluate

__all__ = ["detach", "fresh_copy"]


def fresh_copy(array: mx.array) -> mx.array:
    """Give a lazy copy that shares no memory with the array it came from, once evaluated.

    A slice keeps the whole buffer it was cut from alive: 4 rows of a 512-row chunk cost 512 rows
    for as long as they are stored.

    Args:
        array: Any shape and dtype, evaluated or not.

    Returns:
        The same values, not evaluated.
    """
    if array.ndim == 0:
        # Nothing to index by: CUDA would keep the zero.
        return fresh_copy(array.reshape(1)).reshape(())
    # ``mx.contiguous`` hands a nearly full parent through (it tolerates 16 KiB of slack), so the
    # copy is forced by writing into fresh storage.
    origin = mx.array([0] * array.ndim, dtype=mx.int32)
    fresh = mx.zeros(array.shape, array.dtype)
    return mx.slice_update(fresh, array, origin, tuple(range(array.ndim)))


def detach(array: mx.array) -> mx.array:
    """Give an evaluated copy that shares no memory with the array it came from.

    Args:
        array: Any shape and dtype, evaluated or not.

    Returns:
        The same values, evaluated, in a buffer of their own.

    Raises:
        BackendError: The device failed to compute the array.
    """
    fresh = fresh_copy(array)
    evaluate(fresh)
    return fresh
