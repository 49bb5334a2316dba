"""Keys and values of an attention layer, full or sliding, in buffers that views share.

A buffer is append-only. Any number of views (the request being served, stored prefixes) share it
through one holder, each with its own length, and rows below the length of a live view are never
rewritten. So a stored prefix costs nothing beside the request that made it, a hit copies nothing,
and only a request that branches off copies.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.backend import evaluate
from engine_core.cache.base import KEEP_ROWS, LayerCache, Mark, StateShape
from engine_core.cache.detach import fresh_copy
from engine_core.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["KvCache"]

# Rows by which buffers are rounded up. Beyond 2,048 rows an eighth is added instead, so that a
# long context is copied a bounded number of times.
GROWTH_ROWS = 256
GROWTH_DIVISOR = 8
ROW_AXIS = 2


def _rows(start: int, stop: int) -> tuple[slice, ...]:
    """Index rows of a buffer. Places known on the host spare a GPU a kernel for each."""
    return (slice(None), slice(None), slice(start, stop))


class _Holder:
    """One pair of buffers and the views that read it.

    Attributes:
        keys: ``[B, K, S, D]``.
        values: ``[B, K, S, Dv]``.
        origin: Absolute position of buffer row 0.
        end: No live view reaches beyond this absolute position.
    """

    __slots__ = ("_views", "end", "keys", "origin", "values")

    def __init__(self, keys: mx.array, values: mx.array, origin: int, end: int) -> None:
        self.keys = keys
        self.values = values
        self.origin = origin
        self.end = end
        self._views: list[weakref.ref[KvCache]] = []

    @property
    def capacity(self) -> int:
        """S, rows of the buffers."""
        return self.keys.shape[ROW_AXIS]

    def attach(self, view: KvCache) -> None:
        """Register a view, weakly: a dropped view protects nothing."""
        self._views = [ref for ref in self._views if ref() is not None]
        self._views.append(weakref.ref(view))

    def release(self, view: KvCache) -> None:
        """Forget a view that moved to another holder."""
        self._views = [ref for ref in self._views if ref() not in (None, view)]

    def others(self, view: KvCache) -> Iterator[KvCache]:
        """Live views except one."""
        for ref in self._views:
            other = ref()
            if other is not None and other is not view:
                yield other

    def cut(self, rows: int) -> None:
        """Move to buffers of fewer rows, all views together.

        Args:
            rows: Rows to keep, at least those of every live view.
        """
        keys = fresh_copy(self.keys[:, :, :rows])
        values = fresh_copy(self.values[:, :, :rows])
        evaluate(keys, values)
        self.keys, self.values = keys, values
        self.end = min(self.end, self.origin + rows)

    def furthest(self) -> int:
        """Absolute end of the longest live view."""
        return max((view.offset for ref in self._views if (view := ref())), default=self.origin)

    def may_append(self, view: KvCache) -> bool:
        """Whether no other live view holds rows beyond the end of ``view``."""
        if view.offset >= self.end:
            return True
        return all(other.offset <= view.offset for other in self.others(view))


class KvCache(LayerCache):
    """Cache of a full (``window=None``) or sliding attention layer.

    A sliding cache is the same buffer with a moving start: it keeps at least ``window - 1 + 16``
    positions before each append, so that chunked prefill is exact and 16 rows can be taken back,
    and moves what is left to a fresh buffer when it reaches the end.
    """

    __slots__ = (
        "_growth",
        "_holder",
        "batch",
        "dtype",
        "head_dim",
        "kv_heads",
        "value_dim",
        "window",
    )

    def __init__(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        value_dim: int | None = None,
        window: int | None = None,
        batch: int = 1,
        growth: int = GROWTH_ROWS,
    ) -> None:
        """Start empty; no buffer is allocated before the first append.

        Args:
            kv_heads: K.
            head_dim: D of the keys.
            dtype: Dtype of keys and values.
            value_dim: Dv, ``head_dim`` when omitted.
            window: Positions one query sees, itself included; ``None`` for all.
            batch: B.
            growth: Rows by which buffers are rounded up.
        """
        super().__init__()
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.dtype = dtype
        self.window = window
        self.batch = batch
        self._growth = growth
        self._holder: _Holder | None = None

    def visible(self, rows: int) -> int:
        """Count the keys that ``append`` of ``rows`` rows will return.

        Args:
            rows: L of the coming append.

        Returns:
            Earlier positions the new rows may see, plus ``rows``.
        """
        if self.window is None:
            return self.offset + rows
        return min(self.offset, self.window - 1) + rows

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add the rows of a forward call.

        Args:
            keys: ``[B, K, L, D]`` in the cache's dtype, already rotated.
            values: ``[B, K, L, Dv]`` in the cache's dtype.

        Returns:
            Keys ``[B, K, S, D]`` and values ``[B, K, S, Dv]`` that the new rows may see, in order
            of position and ending with them: all positions, or for a sliding cache the last
            ``window - 1`` earlier ones and the new rows.

        Raises:
            CacheError: A shape or dtype is not the declared one.
        """
        rows = self._check_rows(keys, values)
        start = self.offset
        retain = self._retained(start)
        holder = self._holder
        if holder is not None and holder.may_append(self) and self._fits(holder, retain, rows):
            place = _rows(start - holder.origin, start - holder.origin + rows)
            holder.keys[place] = keys
            holder.values[place] = values
        else:
            holder = self._rebuild(keys, values, retain)
        self.offset = holder.end = start + rows
        self._last_start = max(self._last_start, start)
        stop = self.offset - holder.origin
        first = 0
        if self.window is not None:
            first = max(start - self.window + 1, 0) - holder.origin
        seen = _rows(first, stop)
        return holder.keys[seen], holder.values[seen]

    def arrays(self) -> list[mx.array]:
        """Arrays that must be evaluated for the state to be real."""
        return [] if self._holder is None else [self._holder.keys, self._holder.values]

    def buffers(self) -> dict[int, int]:
        """Bytes of the buffer pair, by the identity of its holder."""
        holder = self._holder
        if holder is None:
            return {}
        return {id(holder): holder.keys.nbytes + holder.values.nbytes}

    @property
    def layout(self) -> tuple[object, ...]:
        """Batch, heads, widths, dtype and window."""
        sizes = (self.batch, self.kv_heads, self.head_dim, self.value_dim)
        return (*sizes, self.dtype, self.window)

    def state_nbytes(self) -> int:
        """Bytes of the rows up to the offset."""
        holder = self._holder
        if holder is None:
            return 0
        row = (holder.keys.nbytes + holder.values.nbytes) // holder.capacity
        return row * self._retained(self.offset)

    def fork(self) -> KvCache:
        """Make another view of the same buffers; nothing is copied."""
        twin = KvCache(
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            value_dim=self.value_dim,
            window=self.window,
            batch=self.batch,
            growth=self._growth,
        )
        twin.offset = self.offset
        if self._holder is not None:
            twin._holder = self._holder
            self._holder.attach(twin)
        return twin

    def reset(self) -> None:
        """Let go of the buffers."""
        if self._holder is not None:
            self._holder.release(self)
        self._holder = None
        self.offset = self._last_start = 0
        self._marks.clear()

    def state(self) -> dict[str, mx.array]:
        """Give the rows up to the offset that a view of its own would hold."""
        holder = self._holder
        if holder is None:
            return {}
        stop = self.offset - holder.origin
        first = stop - self._retained(self.offset)
        return {
            "keys": holder.keys[:, :, first:stop],
            "values": holder.values[:, :, first:stop],
        }

    def accepts(self, length: int, shapes: Mapping[str, StateShape]) -> bool:
        """Whether these are keys and values of all rows that the next query may see."""
        keys = shapes.get("keys")
        if keys is None or len(keys.shape) != 4:
            return False
        rows = keys.shape[ROW_AXIS]
        head = (self.batch, self.kv_heads, rows)
        least = most = length
        if self.window is not None:
            least = min(length, max(self.window - 1, 1))
            most = min(length, self.window - 1 + KEEP_ROWS)
        return 0 < least <= rows <= most and dict(shapes) == {
            "keys": StateShape((*head, self.head_dim), self.dtype),
            "values": StateShape((*head, self.value_dim), self.dtype),
        }

    def restore(self, length: int, state: Mapping[str, mx.array]) -> None:
        """Take the rows over."""
        self.reset()
        self.offset = self._last_start = length
        # Array objects of its own: an append changes them in place, and the state is the caller's.
        keys, values = mx.array(state["keys"]), mx.array(state["values"])
        self._move_to(_Holder(keys, values, length - keys.shape[ROW_AXIS], length))

    @property
    def earliest(self) -> int:
        """Least length for which the rows that the next query sees are all held."""
        origin = 0 if self._holder is None else self._holder.origin
        return 0 if origin == 0 or self.window is None else origin + self.window - 1

    @property
    def spare_rows(self) -> int | None:
        """All rows of a full cache; of a sliding one those kept beside its window."""
        return None if self.window is None else KEEP_ROWS

    def shrink(self) -> None:
        """Copy all live rows into smaller buffers when more than half of these is spare.

        A view of few rows would otherwise keep alive what a longer one, now gone, had needed.
        """
        holder = self._holder
        if holder is None:
            return
        rows = self._capacity(holder.furthest() - holder.origin)
        if holder.capacity > 2 * rows:
            holder.cut(rows)

    def _copy_out(self) -> None:
        """Give a sliding view a buffer of its own; a full view keeps sharing.

        The append buffer of a full layer is the state. That of a sliding layer would outlive the
        request that moved on to a fresh one, so what is stored holds its own rows only.
        """
        holder = self._holder
        if holder is None or self.window is None:
            return
        first = self.offset - self._retained(self.offset) - holder.origin
        stop = self.offset - holder.origin
        keys = fresh_copy(holder.keys[:, :, first:stop])
        values = fresh_copy(holder.values[:, :, first:stop])
        self._move_to(_Holder(keys, values, holder.origin + first, self.offset))

    def _rewind(self, mark: Mark, rows: int) -> None:
        """Nothing to undo: rows beyond the offset are not part of the state."""

    def _check_rows(self, keys: mx.array, values: mx.array) -> int:
        """Validate one append and give its number of rows."""
        shape = keys.shape
        rows = shape[ROW_AXIS] if len(shape) == 4 else 0
        head = (self.batch, self.kv_heads, rows)
        if (
            rows < 1
            or shape != (*head, self.head_dim)
            or values.shape != (*head, self.value_dim)
            or keys.dtype != self.dtype
            or values.dtype != self.dtype
        ):
            raise CacheError(
                f"cache: append takes keys [{self.batch}, {self.kv_heads}, L, {self.head_dim}] and "
                f"values [{self.batch}, {self.kv_heads}, L, {self.value_dim}] in {self.dtype}, "
                f"got {keys.shape!r} {keys.dtype} and {values.shape!r} {values.dtype}",
                code="cache.rows",
                hint="the model's layer and its declared layer spec disagree",
            )
        return rows

    def _retained(self, start: int) -> int:
        """Rows before ``start`` that a fresh buffer must carry over."""
        holder = self._holder
        if holder is None:
            return 0
        held = start - holder.origin
        return held if self.window is None else min(held, self.window - 1 + KEEP_ROWS)

    def _capacity(self, needed: int) -> int:
        """Rows to allocate so that appends cost O(new rows) over time."""
        room = needed + needed // GROWTH_DIVISOR
        return -(-room // self._growth) * self._growth

    def _fits(self, holder: _Holder, retain: int, rows: int) -> bool:
        """Whether the rows fit, in a buffer that is not far too large for a window."""
        capacity = holder.capacity
        if self.offset - holder.origin + rows > capacity:
            return False
        return self.window is None or capacity <= 2 * self._capacity(retain + rows)

    def _rebuild(self, keys: mx.array, values: mx.array, retain: int) -> _Holder:
        """Put the retained rows and the new ones into fresh buffers."""
        old = self._holder
        spare = self._capacity(retain + keys.shape[ROW_AXIS]) - retain - keys.shape[ROW_AXIS]
        head = (self.batch, self.kv_heads, spare)
        new_keys = [keys, mx.zeros((*head, self.head_dim), self.dtype)]
        new_values = [values, mx.zeros((*head, self.value_dim), self.dtype)]
        if old is not None and retain:
            stop = self.offset - old.origin
            new_keys.insert(0, old.keys[:, :, stop - retain : stop])
            new_values.insert(0, old.values[:, :, stop - retain : stop])
        joined_keys = mx.concatenate(new_keys, axis=ROW_AXIS)
        joined_values = mx.concatenate(new_values, axis=ROW_AXIS)
        origin = self.offset - retain
        grows = old is not None and old.origin == origin and old.may_append(self)
        if old is not None and grows and (self.window is None or not any(old.others(self))):
            # Growth only: the rows of every view are in the new buffers too, so all move along.
            # Views of a window do not, because this one is about to leave them behind.
            old.keys, old.values = joined_keys, joined_values
            return old
        holder = _Holder(joined_keys, joined_values, origin, self.offset)
        self._move_to(holder)
        return holder

    def _move_to(self, holder: _Holder) -> None:
        """Leave the old holder for another."""
        if self._holder is not None:
            self._holder.release(self)
        self._holder = holder
        holder.attach(self)
