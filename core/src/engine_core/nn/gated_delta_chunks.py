"""The gated delta rule over many rows in matrix products, for devices without a kernel for it.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length".
"""

from __future__ import annotations

import itertools
from typing import Final

import attrs
import mlx.core as mx

__all__ = ["chunked_delta_rule"]

Arrays = tuple[mx.array, mx.array]

# Rows of a chunk. The state is read and written once a chunk, and the work inside a chunk grows
# with its square: 4 to 8 rows were within a twentieth of each other for heads of 32, 64 and 128
# with MLX's own BLAS, 6 to 10 with OpenBLAS.
CHUNK_ROWS: Final = 6


def chunked_delta_rule(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    *,
    ends: tuple[int, ...] = (),
    chunk: int = CHUNK_ROWS,
) -> tuple[mx.array, ...]:
    """Apply the rule to many rows, a chunk of them at a time, in plain matrix products.

    Inside a chunk the corrections of all rows solve one triangular system; only the state passes
    from chunk to chunk, so a state that is wanted between two rows costs no more than a chunk that
    ends there.

    Args:
        queries: ``[B, L, Nk, Dk]`` float32, normalised.
        keys: ``[B, L, Nk, Dk]`` float32, normalised.
        values: ``[B, L, Nv, Dv]`` float32; value head ``h`` uses key head ``h // (Nv / Nk)``.
        log_decay: ``[B, L, Nv]`` float32, at most 0.
        beta: ``[B, L, Nv]`` float32.
        state: ``[B, Nv, Dv, Dk]`` float32.
        ends: Ascending row counts after which the state is wanted, the last of them L; empty for
            L alone.
        chunk: Rows of a chunk.

    Returns:
        Output ``[B, L, Nv, Dv]`` and the state after each of ``ends``.
    """
    batch, length, key_heads, key_dim = keys.shape
    heads, value_dim = values.shape[2:]
    layout = _Layout.of(ends or (length,), chunk)
    size, chunks = layout.size, sum(layout.chunks)

    def split(x: mx.array) -> mx.array:
        """Shape ``[B, L, heads, ...]`` to ``[B, chunks, size, Nk, heads / Nk, ...]``."""
        return layout.pad(x).reshape(batch, chunks, size, key_heads, -1, *x.shape[3:])

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
    corrections, reads, states = [], [], []
    parts = (mx.split(x, chunks) for x in (fresh, seen, probes, updates, decay))
    for base, reading, probe, update, kept in zip(*parts, strict=True):
        correction = mx.addmm(base, reading, current)
        corrections.append(correction)
        reads.append(probe @ current)
        current = mx.addmm(current * kept, update, correction)
        states.append(current)
    attention = matrices(gram[size:] * between)
    out = mx.addmm(mx.concatenate(reads), attention, mx.concatenate(corrections))
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, chunks * size, heads, value_dim)
    wanted = (states[count - 1] for count in itertools.accumulate(layout.chunks))
    return (
        layout.unpad(out),
        *(one.reshape(batch, heads, key_dim, value_dim).swapaxes(-1, -2) for one in wanted),
    )


@attrs.frozen
class _Layout:
    """How rows are divided into chunks so that one ends at every wanted place.

    Attributes:
        pieces: Rows up to each wanted place from the one before.
        size: Rows of a chunk.
    """

    pieces: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, ends: tuple[int, ...], chunk: int) -> _Layout:
        """Lay out rows for wanted places and chunks of at most so many rows."""
        pieces = tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
        return cls(pieces, min(chunk, max(pieces)))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of each piece."""
        return tuple(-(-rows // self.size) for rows in self.pieces)

    def pad(self, x: mx.array) -> mx.array:
        """Fill pieces up with rows of zeros, which change nothing: no decay, no correction."""
        parts, start = [], 0
        for rows, chunks in zip(self.pieces, self.chunks, strict=True):
            parts.append(x[:, start : start + rows])
            start += rows
            missing = chunks * self.size - rows
            if missing:
                parts.append(mx.zeros((x.shape[0], missing, *x.shape[2:]), x.dtype))
        return x if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def unpad(self, x: mx.array) -> mx.array:
        """Take out the rows that :meth:`pad` put in."""
        parts, start = [], 0
        for rows, chunks in zip(self.pieces, self.chunks, strict=True):
            parts.append(x[:, start : start + rows])
            start += chunks * self.size
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


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
