"""The gated delta rule: linear attention whose state forgets and corrects itself.

Per value head, with state ``S`` of shape ``[Dv, Dk]``, decay ``g`` and rate ``b``:
``S <- exp(g) S``, then ``S <- S + b (v - S k) k^T``, and the output is ``S q``.

Source: Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule"; the chunked
form is that of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length".
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np

from engine_core.backend import evaluate
from engine_core.nn.activations import computes_on_cpu
from engine_core.nn.gated_delta_cuda import SOURCE, build_cuda_delta_rule, fits_cuda_kernel
from engine_core.nn.norms import normalize_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from engine_core.kernels import KernelRegistry

__all__ = ["GatedDeltaRule", "chunked_delta_rule", "delta_rule_step", "normalize_heads"]

Arrays = tuple[mx.array, mx.array]

NORM_EPS: Final = 1e-6
# Rows of a chunk. The state is read and written once a chunk, and the work inside a chunk grows
# with its square: 4 to 8 rows were within a twentieth of each other for heads of 32, 64 and 128
# with MLX's own BLAS, 6 to 10 with OpenBLAS.
CHUNK_ROWS: Final = 6
CHECK_ROWS: Final = 37


def normalize_heads(joined: mx.array) -> Arrays:
    """Scale query and key heads to unit length, queries by ``Dk ** -0.5`` besides, in float32.

    Args:
        joined: ``[..., 2 * Nk, Dk]``, query heads first.

    Returns:
        Queries and keys ``[..., Nk, Dk]`` in float32.

    Source: ``x / sqrt(sum(x ** 2) + 1e-6)``.
    """
    heads, size = joined.shape[-2] // 2, joined.shape[-1]
    wide = joined.astype(mx.float32)
    if computes_on_cpu():
        unit = normalize_sum(wide, NORM_EPS, _head_scales(heads, size**-0.5, 1.0))
    else:
        # The fused norm divides the sum by the size, so its eps follows the size, and its result.
        scales = _head_scales(heads, 1.0 / size, size**-0.5)
        unit = mx.fast.rms_norm(wide, None, NORM_EPS / size) * scales
    queries, keys = mx.split(unit, 2, axis=-2)
    return queries, keys


@functools.cache
def _head_scales(heads: int, query: float, key: float) -> mx.array:
    """Scales ``[2 * heads, 1]`` of normalised query and key heads."""
    scales = mx.array([[query]] * heads + [[key]] * heads)
    evaluate(scales)
    return scales


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
    batch, _, key_heads, key_dim = keys.shape
    heads, value_dim = values.shape[2:]
    per_group = (batch, key_heads, 1, heads // key_heads)
    decay = mx.exp(log_decay).reshape(*per_group, 1)
    # The value heads of one key head are one matrix, and one pass over it serves both products:
    # S' q = g S q + d (k . q).
    stacked = state.reshape(batch, key_heads, -1, key_dim)
    rows = mx.concatenate([keys, queries], axis=1).swapaxes(1, 2)
    read = (rows @ stacked.swapaxes(-1, -2)).reshape(*per_group[:2], 2, -1, value_dim) * decay
    read_key, read_query = mx.split(read, 2, axis=2)
    correction = beta.reshape(*per_group, 1) * (values.reshape(*per_group, value_dim) - read_key)
    overlap = (keys * queries).sum(axis=-1).reshape(batch, key_heads, 1, 1, 1)
    out = read_query + correction * overlap
    decayed = state.reshape(*per_group, value_dim, key_dim) * decay[..., None]
    state = mx.addmm(
        decayed.reshape(stacked.shape),
        correction.reshape(batch, key_heads, -1, 1),
        keys.reshape(batch, key_heads, 1, key_dim),
    )
    return (
        out.reshape(batch, 1, heads, value_dim),
        state.reshape(batch, heads, value_dim, key_dim),
    )


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
    size = min(chunk, length)
    chunks = -(-length // size)
    # Rows of zeros change nothing: no decay, no correction.
    padding = chunks * size - length

    def split(x: mx.array) -> mx.array:
        """Shape ``[B, L, heads, ...]`` to ``[B, chunks, size, Nk, heads / Nk, ...]``."""
        if padding:
            x = mx.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(batch, chunks, size, key_heads, -1, *x.shape[3:])

    def rows(x: mx.array) -> mx.array:
        """Shape ``[B, L, heads, dim]`` to ``[chunks, B, Nk, heads / Nk, size, dim]``."""
        return split(x).transpose(1, 0, 3, 4, 2, 5)

    def scalars(x: mx.array) -> mx.array:
        """Shape ``[B, L, Nv]`` to ``[size, Nv / Nk, chunks, B, Nk]``."""
        return mx.contiguous(split(x).transpose(2, 4, 1, 0, 3))

    def factors(x: mx.array) -> mx.array:
        """Shape ``[size, Nv / Nk, chunks, B, Nk]`` to ``[chunks, B, Nk, Nv / Nk, size, 1]``."""
        return mx.contiguous(x.transpose(2, 3, 4, 1, 0))[..., None]

    def matrices(x: mx.array) -> mx.array:
        """Shape ``[size, size, ...]``, chunks last, to ``[chunks, B, Nk, Nv / Nk, size, size]``."""
        return mx.contiguous(x.transpose(3, 4, 5, 2, 0, 1))

    key, query = mx.contiguous(rows(keys)), rows(queries)
    # Products with a transposed right side are four times as slow in MLX's own BLAS, so the
    # transposed rows are copied.
    columns = mx.concatenate([key.swapaxes(-1, -2), query.swapaxes(-1, -2)], axis=-1)
    # What couples two rows of a chunk, all chunks side by side: [2 size, size, 1, chunks, B, Nk].
    gram = mx.contiguous((key @ columns)[:, :, :, 0].transpose(4, 3, 0, 1, 2)[:, :, None])
    rate = scalars(beta)
    between, since_start = _decay_inside(mx.exp(scalars(log_decay)))
    inverse = _invert_unit_lower(rate[:, None] * gram[:size] * between) * rate
    # The corrections of a chunk are what they would be without a state, less what it gives.
    fresh = matrices(inverse) @ rows(values)
    seen = matrices(-inverse * since_start) @ key
    probes = factors(since_start) * query
    updates = (factors(between[-1]) * key).swapaxes(-1, -2)
    decay = since_start[-1].transpose(1, 2, 3, 0)[..., None, None]
    current = mx.contiguous(state.swapaxes(-1, -2)).reshape(
        1, batch, key_heads, heads // key_heads, key_dim, value_dim
    )
    corrections, reads = [], []
    parts = (mx.split(x, chunks) for x in (fresh, seen, probes, updates, decay))
    for base, reading, probe, update, kept in zip(*parts, strict=True):
        correction = mx.addmm(base, reading, current)
        corrections.append(correction)
        reads.append(probe @ current)
        current = mx.addmm(current * kept, update, correction)
    attention = matrices(gram[size:] * between)
    out = mx.addmm(mx.concatenate(reads), attention, mx.concatenate(corrections))
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, chunks * size, heads, value_dim)
    current = current.reshape(batch, heads, key_dim, value_dim)
    return out[:, :length], current.swapaxes(-1, -2)


def _decay_inside(decay: mx.array) -> Arrays:
    """Multiply up the decay between the rows of a chunk.

    Products, because the difference of two sums of logarithms cancels, and only the decay of a
    row itself needs an exponential.

    Args:
        decay: ``[C, ...]``, of each row, 0 to 1.

    Returns:
        From row j to row i ``[C, C, ...]``, zero above the diagonal, one on it; and from before
        the chunk to row i ``[C, ...]``.
    """
    identity = _identity(decay)
    row, start = identity[0] * mx.ones_like(decay), decay[0]
    between, since_start = [row], [start]
    for one, step in zip(identity[1:], decay[1:], strict=True):
        row, start = row * step + one, start * step
        between.append(row)
        since_start.append(start)
    return mx.stack(between), mx.stack(since_start)


def _invert_unit_lower(coupling: mx.array) -> mx.array:
    """Compute ``(I + A)^-1`` of strictly lower triangular matrices, by substitution.

    A power series in A would cancel huge terms when keys repeat. The matrices stand last, so
    that each of the few steps is one long elementwise operation.

    Args:
        coupling: A, ``[C, C, ...]`` float32.

    Returns:
        ``[C, C, ...]``.
    """
    identity = _identity(coupling)
    inverse = (identity[0] * mx.ones_like(coupling[0]))[None]
    for index in range(1, coupling.shape[0]):
        known = (coupling[index, :index, None] * inverse).sum(axis=0)
        inverse = mx.concatenate([inverse, (identity[index] - known)[None]])
    return inverse


def _identity(like: mx.array) -> mx.array:
    """Make ``[C, C, 1, ...]`` for arrays ``[C, ...]`` whose last four axes are the matrices'."""
    size = like.shape[0]
    return mx.eye(size).reshape(size, size, 1, 1, 1, 1)


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

    A fused kernel serves a GPU once it proved right there: MLX's own with Metal, one of this
    package with CUDA. On a CPU MLX's walks over the rows one by one: 2,048 rows of 32 heads of 128
    took 17 s, the chunked form 1.7 s.
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
        self._kernel: Callable[..., Any] = plain_delta_rule
        on_cuda = mx.cuda.is_available()
        if on_cuda and not fits_cuda_kernel(key_dim, value_dim):
            return
        self._kernel = kernels.register(
            name="gated_delta_cuda" if on_cuda else "gated_delta_update",
            source=f"{SOURCE if on_cuda else 'mlx.core.fast'} {sizes}",
            build=build_cuda_delta_rule if on_cuda else lambda _: _fused_delta_rule,
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
        if computes_on_cpu():
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
    keys = iter(mx.random.split(mx.random.key(0), 5))
    joined = mx.random.normal((1, CHECK_ROWS, 2 * key_heads, key_dim), key=next(keys))
    queries, directions = normalize_heads(joined)
    per_head = (1, CHECK_ROWS, value_heads)
    return (
        queries,
        directions,
        mx.random.normal((*per_head, value_dim), key=next(keys)),
        -mx.random.uniform(0.0, 0.5, per_head, key=next(keys)),
        mx.random.uniform(0.0, 1.0, per_head, key=next(keys)),
        mx.random.normal((1, value_heads, value_dim, key_dim), key=next(keys)),
    )
