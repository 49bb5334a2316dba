"""The gated delta rule: linear attention whose state forgets and corrects itself.

Per value head, with state ``S`` of shape ``[Dv, Dk]``, decay ``g`` and rate ``b``:
``S <- exp(g) S``, then ``S <- S + b (v - S k) k^T``, and the output is ``S q``.

Source: Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule"; the chunked
form is that of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine_core.kernels import KernelRegistry

__all__ = ["GatedDeltaRule", "chunked_delta_rule", "delta_rule_step", "normalize_heads"]

Arrays = tuple[mx.array, mx.array]

NORM_EPS: Final = 1e-6
# Rows of a chunk. The state is read and written once a chunk, and the work inside a chunk grows
# with its square: with MLX's own BLAS 8 was fastest of 4, 8, 16 and 32 for heads of 32, 64 and
# 128, with OpenBLAS 8 and 16 are within a tenth of each other.
CHUNK_ROWS: Final = 8
# Blocks of this size are inverted at once; every further level joins up to so many blocks.
BLOCK: Final = 4
CHECK_ROWS: Final = 37


def normalize_heads(queries: mx.array, keys: mx.array) -> Arrays:
    """Scale queries and keys to unit length, queries by ``Dk ** -0.5`` besides, in float32.

    Args:
        queries: ``[..., Dk]``.
        keys: ``[..., Dk]``.

    Returns:
        Both in float32.

    Source: ``x / sqrt(sum(x ** 2) + 1e-6)``.
    """
    size = queries.shape[-1]
    # The fused norm divides the sum by the size, so its eps and its scale follow the size.
    eps = NORM_EPS / size
    queries = mx.fast.rms_norm(queries.astype(mx.float32), mx.full((size,), 1.0 / size), eps)
    keys = mx.fast.rms_norm(keys.astype(mx.float32), mx.full((size,), size**-0.5), eps)
    return queries, keys


def delta_rule_step(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> Arrays:
    """Apply the rule to one row.

    Args:
        queries: ``[B, 1, Nk, Dk]`` float32, normalised.
        keys: ``[B, 1, Nk, Dk]`` float32, normalised.
        values: ``[B, 1, Nv, Dv]`` float32; value head ``h`` uses key head ``h // (Nv / Nk)``.
        log_decay: ``[B, 1, Nv]`` float32, at most 0.
        beta: ``[B, 1, Nv]`` float32.
        state: ``[B, Nv, Dv, Dk]`` float32.

    Returns:
        Output ``[B, 1, Nv, Dv]`` and the new state.
    """
    group = values.shape[2] // keys.shape[2]
    # One pass over the state serves both products: S' q = g S q + d (k . q).
    rows = mx.concatenate([keys.swapaxes(1, 2), queries.swapaxes(1, 2)], axis=2)
    rows = mx.repeat(rows, group, axis=1)
    key, query = rows[:, :, :1], rows[:, :, 1:]
    decay = mx.exp(log_decay[:, 0])[..., None, None]
    read = decay * (rows @ state.swapaxes(-1, -2))
    correction = beta[:, 0][..., None, None] * (values.swapaxes(1, 2) - read[:, :, :1])
    out = read[:, :, 1:] + correction * (key * query).sum(axis=-1, keepdims=True)
    state = mx.addmm(decay * state, correction.swapaxes(-1, -2), key)
    return out.swapaxes(1, 2), state


def chunked_delta_rule(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    *,
    chunk: int = CHUNK_ROWS,
) -> Arrays:
    """Apply the rule to many rows, a chunk of them at a time, in plain matrix products.

    Inside a chunk the corrections of all rows solve one triangular system; only the state passes
    from chunk to chunk.

    Args:
        queries: ``[B, L, Nk, Dk]`` float32, normalised.
        keys: ``[B, L, Nk, Dk]`` float32, normalised.
        values: ``[B, L, Nv, Dv]`` float32; value head ``h`` uses key head ``h // (Nv / Nk)``.
        log_decay: ``[B, L, Nv]`` float32, at most 0.
        beta: ``[B, L, Nv]`` float32.
        state: ``[B, Nv, Dv, Dk]`` float32.
        chunk: Rows of a chunk.

    Returns:
        Output ``[B, L, Nv, Dv]`` and the new state.
    """
    batch, length, key_heads, key_dim = keys.shape
    heads, value_dim = values.shape[2:]
    group = heads // key_heads
    # Fewer rows than a chunk make a smaller one, rounded up to whole blocks.
    size = min(chunk, -(-length // BLOCK) * BLOCK)
    chunks = -(-length // size)
    # Rows of zeros change nothing: no decay, no correction.
    padding = chunks * size - length

    def split(x: mx.array, dim: int) -> mx.array:
        """Shape ``[B, L, heads, dim]`` to ``[B, Nk, chunks, heads / Nk, size, dim]``."""
        if padding:
            x = mx.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(batch, chunks, size, key_heads, -1, dim)
        return x.transpose(0, 3, 1, 4, 2, 5)

    def widen(x: mx.array) -> mx.array:
        """Shape ``[..., group, rows, Dv]`` to ``[..., rows, group * Dv]``: heads side by side."""
        return x.swapaxes(-2, -3).flatten(-2)

    key, query = split(keys, key_dim)[:, :, :, 0], split(queries, key_dim)[:, :, :, 0]
    probes = mx.concatenate([key, query], axis=-2)
    # Products with a transposed right side are twice as slow in MLX's own BLAS.
    columns = mx.contiguous(key.swapaxes(-1, -2))
    gram = (probes @ columns)[:, :, :, None]
    rate, total = split(beta, 1), mx.cumsum(split(log_decay, 1), axis=-2)
    row, column = mx.arange(size)[:, None], mx.arange(size)[None]
    # Masked before the exponential, which overflows above the diagonal.
    between = mx.exp(mx.where(column <= row, total - total.swapaxes(-1, -2), -mx.inf))
    coupling = mx.where(column < row, rate * gram[..., :size, :] * between, 0.0)
    attention = gram[..., size:, :] * between
    since_start, until_end = mx.exp(total), mx.exp(total[..., -1:, :] - total)
    inverse = _invert_unit_lower(coupling)
    fresh = inverse @ (rate * split(values, value_dim))
    seen = inverse * (rate * since_start).swapaxes(-1, -2)
    decay = widen(mx.broadcast_to(since_start[..., -1:, :], (*fresh.shape[:-2], 1, value_dim)))
    # The value heads of a key head stand side by side: [B, Nk, Dk, group * Dv].
    current = mx.contiguous(
        widen(state.reshape(batch, key_heads, group, value_dim, key_dim).swapaxes(-1, -2))
    )
    corrections, reads = [], []
    for index in range(chunks):
        read = (probes[:, :, index] @ current).reshape(batch, key_heads, 2 * size, group, value_dim)
        read = read.swapaxes(2, 3)
        correction = mx.addmm(
            fresh[:, :, index], seen[:, :, index], read[..., :size, :], alpha=-1.0
        )
        corrections.append(correction)
        reads.append(read[..., size:, :])
        update = widen(correction * until_end[:, :, index])
        current = mx.addmm(current * decay[:, :, index], columns[:, :, index], update)
    out = mx.stack(reads, axis=2) * since_start + attention @ mx.stack(corrections, axis=2)
    out = out.transpose(0, 2, 4, 1, 3, 5).reshape(batch, chunks * size, heads, value_dim)
    current = current.reshape(batch, key_heads, key_dim, group, value_dim)
    return out[:, :length], current.transpose(0, 1, 3, 4, 2).reshape(state.shape)


def _invert_unit_lower(coupling: mx.array) -> mx.array:
    """Compute ``(I + A)^-1`` of strictly lower triangular matrices.

    The plain series in A cancels huge powers when keys repeat. So small diagonal blocks are
    inverted first, and each level joins four neighbouring blocks into one, where the series has
    four terms only.

    Args:
        coupling: A, ``[..., C, C]`` float32.

    Returns:
        ``[..., C, C]``.
    """
    size = coupling.shape[-1]
    identity = mx.eye(size)
    place = mx.arange(size)
    inverse, block = identity, 1
    while block < size:
        joined = min(block * BLOCK, size)
        inside = (place[:, None] // joined == place[None] // joined) & (
            place[:, None] // block != place[None] // block
        )
        step = mx.where(inside, coupling, 0.0)
        if block > 1:
            step = inverse @ step
        series = identity - step
        if joined > 2 * block:
            series = series @ (identity + step @ step)
        inverse = series if block == 1 else series @ inverse
        block = joined
    return inverse


def plain_delta_rule(*inputs: Any) -> Arrays:
    """Apply the rule in plain operations: a step for one row, chunks for more.

    Args:
        *inputs: As of :func:`chunked_delta_rule`.

    Returns:
        Output and new state.
    """
    return delta_rule_step(*inputs) if inputs[0].shape[1] == 1 else chunked_delta_rule(*inputs)


class GatedDeltaRule:
    """The rule in the fastest form that is right on this device.

    MLX's fused kernel serves a GPU, once it agreed with plain operations there. On a CPU it walks
    over the rows one by one: 2,048 rows of 32 heads of 128 took 17 s, the chunked form 1.7 s.
    """

    def __init__(
        self,
        kernels: KernelRegistry,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> None:
        """Register the kernel for these sizes.

        Args:
            kernels: The model's registry.
            key_heads: Nk.
            value_heads: Nv.
            key_dim: Dk.
            value_dim: Dv.
        """
        sizes = (key_heads, value_heads, key_dim, value_dim)
        self._kernel = kernels.register(
            name="gated_delta_update",
            source=f"mlx.core.fast.gated_delta_update {sizes}",
            build=lambda _: _fused_delta_rule,
            reference=plain_delta_rule,
            exact=_exact_delta_rule,
            check_inputs=lambda: _check_inputs(*sizes),
        )

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        log_decay: mx.array,
        beta: mx.array,
        state: mx.array,
    ) -> Arrays:
        """Apply the rule.

        Args:
            queries: ``[B, L, Nk, Dk]`` float32, normalised.
            keys: ``[B, L, Nk, Dk]`` float32, normalised.
            values: ``[B, L, Nv, Dv]`` float32.
            log_decay: ``[B, L, Nv]`` float32, at most 0.
            beta: ``[B, L, Nv]`` float32.
            state: ``[B, Nv, Dv, Dk]`` float32.

        Returns:
            Output ``[B, L, Nv, Dv]`` and the new state, float32.
        """
        inputs = (queries, keys, values, log_decay, beta, state)
        if mx.default_device().type == mx.DeviceType.cpu:
            return plain_delta_rule(*inputs)
        out, state = self._kernel(*inputs)
        return out, state


def _fused_delta_rule(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
) -> Arrays:
    out, state = mx.fast.gated_delta_update(queries, keys, values, mx.exp(log_decay), beta, state)
    return out, state


def _exact_delta_rule(
    *inputs: mx.array,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Apply the rule row by row in float64 on the host."""
    queries, keys, values, log_decay, beta, state = (
        np.array(array).astype(np.float64) for array in inputs
    )
    group = values.shape[2] // keys.shape[2]
    queries, keys = np.repeat(queries, group, axis=2), np.repeat(keys, group, axis=2)
    rows = []
    for row in range(values.shape[1]):
        key = keys[:, row, :, :, None]
        state = state * np.exp(log_decay[:, row])[..., None, None]
        error = values[:, row, :, :, None] - state @ key
        state = state + beta[:, row][..., None, None] * error * key.swapaxes(-1, -2)
        rows.append((state @ queries[:, row, :, :, None])[..., 0])
    return np.stack(rows, axis=1), state


def _check_inputs(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[mx.array, ...]:
    """Make rows and a state on which kernel and plain operations are compared."""
    keys = iter(mx.random.split(mx.random.key(0), 6))
    queries, directions = normalize_heads(
        mx.random.normal((1, CHECK_ROWS, key_heads, key_dim), key=next(keys)),
        mx.random.normal((1, CHECK_ROWS, key_heads, key_dim), key=next(keys)),
    )
    per_head = (1, CHECK_ROWS, value_heads)
    return (
        queries,
        directions,
        mx.random.normal((*per_head, value_dim), key=next(keys)),
        -mx.random.uniform(0.0, 0.5, per_head, key=next(keys)),
        mx.random.uniform(0.0, 1.0, per_head, key=next(keys)),
        mx.random.normal((1, value_heads, value_dim, key_dim), key=next(keys)),
    )
