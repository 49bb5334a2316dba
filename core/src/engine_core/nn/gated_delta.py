"""The gated delta rule: linear attention whose state forgets and corrects itself.

Per value head, with state ``S`` of shape ``[Dv, Dk]``, decay ``g`` and rate ``b``:
``S <- exp(g) S``, then ``S <- S + b (v - S k) k^T``, and the output is ``S q``.

Source: Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np

from engine_core.backend import evaluate
from engine_core.nn.activations import computes_on_cpu
from engine_core.nn.gated_delta_chunks import chunked_delta_rule
from engine_core.nn.gated_delta_cuda import SOURCE, build_cuda_delta_rule, fits_cuda_kernel
from engine_core.nn.norms import normalize_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from engine_core.kernels import KernelRegistry

__all__ = ["GatedDeltaRule", "delta_rule_step", "normalize_heads"]

Arrays = tuple[mx.array, mx.array]

NORM_EPS: Final = 1e-6
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


def plain_delta_rule(*inputs: Any, ends: tuple[int, ...] = ()) -> tuple[mx.array, ...]:
    """Apply the rule in plain operations: a step for one row, chunks for more.

    Args:
        *inputs: As of :func:`chunked_delta_rule`.
        ends: As of :func:`chunked_delta_rule`.

    Returns:
        Output and the states.
    """
    if inputs[0].shape[1] == 1:
        return delta_rule_step(*inputs)
    return chunked_delta_rule(*inputs, ends=ends)


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
        ends: tuple[int, ...] = (),
    ) -> tuple[mx.array, ...]:
        """Apply the rule.

        Args:
            queries: ``[B, L, Nk, Dk]`` float32, normalised.
            keys: ``[B, L, Nk, Dk]`` float32, normalised.
            values: ``[B, L, Nv, Dv]`` float32.
            log_decay: ``[B, L, Nv]`` float32, at most 0.
            beta: ``[B, L, Nv]`` float32.
            state: ``[B, Nv, Dv, Dk]`` float32.
            ends: Ascending row counts after which the state is wanted, the last of them L; empty
                for L alone.

        Returns:
            Output ``[B, L, Nv, Dv]`` and the state after each of ``ends``, float32.
        """
        rows = (queries, keys, values, log_decay, beta)
        if computes_on_cpu():
            return plain_delta_rule(*rows, state, ends=ends)
        outputs, states, start = [], [], 0
        for end in ends or (queries.shape[1],):
            out, state = self._kernel(*(array[:, start:end] for array in rows), state)
            outputs.append(out)
            states.append(state)
            start = end
        return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), *states)


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
