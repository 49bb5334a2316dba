"""Masks and attention over caches against an uncached NumPy float64 pass."""

import mlx.core as mx
import numpy as np
import pytest

from engine_core.cache.kv import KvCache
from engine_core.nn import (
    Linear,
    Module,
    attend,
    attention_mask,
    attention_masks,
    project_heads,
)
from engine_core.testing import reference

N, K, D, T = 6, 2, 8, 23
RNG = np.random.default_rng(8)
Q, KEYS, VALUES = (RNG.normal(size=(T, heads, D)).astype(np.float32) for heads in (N, K, K))
CHUNKS = [[T], [1] * T, [7, 7, 9], [20, 1, 1, 1], [3, 1, 16, 3]]


@pytest.fixture(autouse=True, params=["processor", "gpu"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of a layer, wherever the tests run: MLX's fused functions run on any device."""
    monkeypatch.setattr(
        "engine_core.nn.attention.computes_on_cpu", lambda: request.param == "processor"
    )


def cache_of(window: int | None) -> KvCache:
    return KvCache(kv_heads=K, head_dim=D, dtype=mx.float32, window=window, growth=4)


def batch(rows: np.ndarray) -> mx.array:
    return mx.array(rows).swapaxes(0, 1)[None]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 22, 23, 40])
def test_attend_chunked_over_cache_equals_one_pass(window: int | None, chunks: list[int]) -> None:
    expected = reference.attention(
        Q, KEYS, VALUES, scale=0.3, mask=reference.causal_mask(T, window)
    )
    cache, out, start = cache_of(window), [], 0
    for rows in chunks:
        part = slice(start, start + rows)
        mask = attention_mask(cache, rows)
        keys, values = cache.append(batch(KEYS[part]), batch(VALUES[part]))
        mixed = attend(batch(Q[part]), keys, values, 0.3, mask)
        out.append(np.array(mixed)[0].swapaxes(0, 1))
        start += rows
    assert np.abs(np.concatenate(out) - expected).max() < 1e-5


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("before", [0, 4])
def test_attend_spans_see_both_ways(window: int | None, before: int) -> None:
    spans = [(2, 6), (9, 13)]
    absolute = [(before + start, before + stop) for start, stop in spans]
    expected = reference.attention(
        Q, KEYS, VALUES, scale=0.3, mask=reference.causal_mask(T, window, absolute)
    )
    cache = cache_of(window)
    if before:
        cache.append(batch(KEYS[:before]), batch(VALUES[:before]))
    mask = attention_mask(cache, T - before, spans)
    keys, values = cache.append(batch(KEYS[before:]), batch(VALUES[before:]))
    out = np.array(attend(batch(Q[before:]), keys, values, 0.3, mask))[0].swapaxes(0, 1)
    assert np.abs(out - expected[before:]).max() < 1e-5


@pytest.mark.parametrize("before", [0, 4])
def test_attend_window_bounds_spans_towards_the_past(before: int) -> None:
    window, spans = 3, [(2, 8), (9, 13)]
    absolute = [(before + start, before + stop) for start, stop in spans]
    distance = np.arange(T)[:, None] - np.arange(T)[None]
    seen = reference.causal_mask(T, None, absolute) & (distance < window)
    expected = reference.attention(Q, KEYS, VALUES, scale=0.3, mask=seen)
    cache = cache_of(window)
    if before:
        cache.append(batch(KEYS[:before]), batch(VALUES[:before]))
    mask = attention_mask(cache, T - before, spans, window_bounds_spans=True)
    keys, values = cache.append(batch(KEYS[before:]), batch(VALUES[before:]))
    out = np.array(attend(batch(Q[before:]), keys, values, 0.3, mask))[0].swapaxes(0, 1)
    assert np.abs(out - expected[before:]).max() < 1e-5


@pytest.mark.parametrize(
    ("window", "before", "rows", "expected"),
    [
        (None, 0, 1, None),
        (None, 50, 1, None),
        (None, 0, 5, "causal"),
        (None, 50, 5, "causal"),
        (8, 0, 8, "causal"),
        (8, 3, 5, "causal"),
        (8, 50, 1, None),
    ],
)
def test_attention_mask_names_causal_where_exact(window, before, rows, expected) -> None:
    cache = cache_of(window)
    for _ in range(before):
        cache.append(mx.zeros((1, K, 1, D)), mx.zeros((1, K, 1, D)))
    assert attention_mask(cache, rows) == expected


@pytest.mark.parametrize("cached", [0, 3])
def test_attention_mask_wide_append_is_an_array_for_the_returned_keys(cached: int) -> None:
    cache = cache_of(4)
    if cached:
        cache.append(mx.zeros((1, K, cached, D)), mx.zeros((1, K, cached, D)))
    mask = attention_mask(cache, 6)
    assert isinstance(mask, mx.array)
    keys, _ = cache.append(mx.zeros((1, K, 6, D)), mx.zeros((1, K, 6, D)))
    assert mask.shape == (6, keys.shape[2])
    assert np.array(mask).sum(axis=1).max() == 4


def test_masks_of_a_window_are_one() -> None:
    caches = [cache_of(None), cache_of(5), cache_of(None), cache_of(5), cache_of(40)]
    for cache in caches:
        cache.append(batch(KEYS[:6]), batch(VALUES[:6]))
    full, sliding, *others, wide = attention_masks(caches, 3)
    assert full == wide == others[0] == "causal"
    assert others[1] is sliding
    assert np.array_equal(np.array(sliding), np.array(attention_mask(caches[1], 3)))
    assert attention_masks([], 3) == []


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("joined", [True, False])
def test_heads_of_joined_and_of_separate_projections(joined: bool, rows: int) -> None:
    hidden = RNG.normal(size=(2, rows, 10)).astype(np.float32)
    weight = RNG.normal(size=((N + 2 * K) * D, 10)).astype(np.float32)
    layer, ends = Module(), [0, N * D, (N + K) * D, (N + 2 * K) * D]
    if joined:
        layer.qkv_proj = Linear(10, len(weight))
        layer.qkv_proj.weight = mx.array(weight)
    else:
        for name, start, stop in zip("qkv", ends, ends[1:], strict=False):
            projection = Linear(10, stop - start)
            projection.weight = mx.array(weight[start:stop])
            setattr(layer, f"{name}_proj", projection)
    expected = np.float64(hidden) @ np.float64(weight).T
    parts = project_heads(layer, mx.array(hidden), N, K, D)
    for part, start, stop in zip(parts, ends, ends[1:], strict=False):
        wanted = expected[..., start:stop].reshape(2, rows, -1, D).swapaxes(1, 2)
        np.testing.assert_allclose(np.array(part), wanted, atol=1e-5)
