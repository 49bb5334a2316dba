"""Attention over a layer cache: which keys a row sees, and the weighted sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import mlx.core as mx

from engine_core.nn.activations import computes_on_cpu, exponent_scale, power

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.cache.kv import KvCache
    from engine_core.nn.module import Module

__all__ = [
    "AttentionMask",
    "attend",
    "attention_mask",
    "attention_masks",
    "merge_heads",
    "project_heads",
    "split_heads",
]

# Scores of a block (16 MiB in float32), and its rows. A processor works some 20 blocks ahead of its
# products: 512 rows of 8 heads over 40,000 keys took 460 MiB, and 1.3 GiB with four times as many
# scores a block, in the same time.
MOST_SCORES: Final = 1 << 22
LEAST_ROWS, MOST_ROWS = 16, 128

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


def attention_masks(
    caches: Sequence[KvCache], rows: int, spans: Sequence[tuple[int, int]] = ()
) -> list[AttentionMask]:
    """Say for every layer which keys the coming rows see; ask before any is appended.

    Args:
        caches: One cache a layer; those of one window are alike.
        rows: L of the coming append.
        spans: As for :func:`attention_mask`.

    Returns:
        One mask a layer, made once a window.
    """
    masks: dict[int | None, AttentionMask] = {}
    for cache in caches:
        if cache.window not in masks:
            masks[cache.window] = attention_mask(cache, rows, spans)
    return [masks[cache.window] for cache in caches]


def project_heads(
    layer: Module, x: mx.array, heads: int, kv_heads: int, head_dim: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Compute queries, keys and values of a layer whose projections may be joined.

    Args:
        layer: Has ``qkv_proj``, or ``q_proj``, ``k_proj`` and ``v_proj``.
        x: ``[B, L, H]``.
        heads: N.
        kv_heads: K.
        head_dim: D.

    Returns:
        ``[B, N, L, D]``, and ``[B, K, L, D]`` twice.
    """
    if "qkv_proj" in layer:
        joined = split_heads(layer["qkv_proj"](x), head_dim)
        queries, keys, values = mx.split(joined, [heads, heads + kv_heads], axis=1)
    else:
        projections = (layer["q_proj"], layer["k_proj"], layer["v_proj"])
        queries, keys, values = (split_heads(project(x), head_dim) for project in projections)
    return queries, keys, values


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
    if queries.dtype != mx.float32 or not computes_on_cpu():
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    # MLX has no fused attention for a processor. Blocks of rows bound the memory of the scores,
    # and a causal block leaves out the keys that none of its rows sees.
    batch, heads, rows, _ = queries.shape
    stored = keys.shape[2]
    size = max(LEAST_ROWS, min(MOST_ROWS, MOST_SCORES // (batch * heads * stored)))
    if rows <= size and mask is None:
        return _attend_rows(queries, keys, values, scale, None)
    blocks = []
    for start in range(0, rows, size):
        stop, last = min(start + size, rows), stored
        seen = None
        if isinstance(mask, mx.array):
            seen = mask[start:stop]
        elif mask is not None:
            last = stored - rows + stop
            seen = mx.arange(last)[None] <= mx.arange(stored - rows + start, last)[:, None]
        block = (queries[:, :, start:stop], keys[:, :, :last], values[:, :, :last])
        blocks.append(_attend_rows(*block, scale, seen))
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


def split_heads(x: mx.array, head_dim: int) -> mx.array:
    """Bring the heads of joined rows in front of the rows.

    Args:
        x: ``[B, L, N * D]``.
        head_dim: D.

    Returns:
        ``[B, N, L, D]``.
    """
    batch, rows, _ = x.shape
    if rows == 1:
        return x.reshape(batch, -1, 1, head_dim)
    return x.reshape(batch, rows, -1, head_dim).swapaxes(1, 2)


def merge_heads(x: mx.array) -> mx.array:
    """Undo :func:`split_heads`.

    Args:
        x: ``[B, N, L, D]``.

    Returns:
        ``[B, L, N * D]``.
    """
    batch, _, rows, _ = x.shape
    return (x if rows == 1 else x.swapaxes(1, 2)).reshape(batch, rows, -1)


def _attend_rows(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, seen: mx.array | None
) -> mx.array:
    """Attend with all scores of a block in memory; the heads of one key head are one matrix."""
    batch, heads, rows, width = queries.shape
    kv_heads = keys.shape[1]
    unit = exponent_scale(queries)
    grouped = (queries * (scale * unit)).reshape(batch, kv_heads, -1, width)
    scores = grouped @ keys.swapaxes(-1, -2)
    if seen is not None:
        bias = mx.where(seen, 0.0, -mx.inf)
        scores = mx.unflatten(scores, 2, (heads // kv_heads, rows)) + bias
        scores = mx.flatten(scores, 2, 3)
    weights = power(scores - mx.max(scores, axis=-1, keepdims=True), unit)
    total = mx.sum(weights, axis=-1, keepdims=True)
    return ((weights @ values) / total).reshape(batch, heads, rows, -1)
