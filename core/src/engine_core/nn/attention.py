"""Attention over a layer cache: which keys a row sees, and the weighted sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.cache.kv import KvCache

__all__ = ["AttentionMask", "attend", "attention_mask"]

AttentionMask = mx.array | Literal["causal"] | None
"""``None`` when every row sees every key, ``"causal"`` for the triangle ending at the last key, or
a boolean array ``[L, S]``, true where a row sees a key."""


def attention_mask(
    cache: KvCache,
    rows: int,
    spans: Sequence[tuple[int, int]] = (),
    *,
    window_bounds_spans: bool = False,
) -> AttentionMask:
    """Say which keys the coming rows see; ask before they are appended.

    The mask depends on the cache's kind and offset alone, so one serves all layers of a kind. The
    name ``"causal"`` is given wherever it is exact, because an array disables fused kernels.

    Args:
        cache: Cache of a layer of this kind.
        rows: L of the coming append.
        spans: Half-open ranges of these rows that see one another in both directions.
        window_bounds_spans: Whether a row of a span, too, sees no key older than the window.

    Returns:
        A mask for the keys that ``cache.append`` will return.
    """
    keys = cache.visible(rows)
    wide = cache.window is not None and keys > cache.window
    if not wide and not spans:
        return None if rows == 1 else "causal"
    # Distances count from the newest key backwards, so they need no absolute position.
    row = mx.arange(keys - rows, keys)[:, None]
    key = mx.arange(keys)[None]
    inside = None if cache.window is None else row - key < cache.window
    seen = key <= row
    if inside is not None and not window_bounds_spans:
        seen = seen & inside
    for start, stop in spans:
        first, last = keys - rows + start, keys - rows + stop
        seen = seen | ((row >= first) & (row < last) & (key >= first) & (key < last))
    return seen & inside if inside is not None and window_bounds_spans else seen


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: AttentionMask
) -> mx.array:
    """Compute ``softmax(queries @ keys.T * scale + mask) @ values``.

    Query head ``n`` reads key head ``n // (N / K)``. The softmax runs in float32.

    Args:
        queries: ``[B, N, L, D]``.
        keys: ``[B, K, S, D]``.
        values: ``[B, K, S, Dv]``.
        scale: Factor of the scores. Dimensionless.
        mask: From :func:`attention_mask`.

    Returns:
        ``[B, N, L, Dv]``.
    """
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
