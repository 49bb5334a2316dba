"""State of a recurrent layer: arrays that every step replaces."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import attrs
import mlx.core as mx

from engine_core.cache.base import KEEP_ROWS, LayerCache, Mark, StateShape
from engine_core.cache.detach import fresh_copy
from engine_core.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Recurrence", "RecurrentCache"]

Arrays = tuple[mx.array, ...]


class Recurrence(Protocol):
    """The recurrence of one layer; what it refers to besides its arguments never changes."""

    def __call__(
        self,
        slots: Arrays,
        inputs: Arrays,
        lengths: mx.array | None,
        ends: tuple[int, ...],
        /,
    ) -> tuple[mx.array, Sequence[Arrays]]:
        """Run over the rows of some inputs.

        Args:
            slots: State before the rows.
            inputs: What it consumes, rows on axis 1 (``[B, L, ...]``).
            lengths: Valid rows of each sequence ``[B]``; the rest leave no trace in the state.
                ``None`` when all are.
            ends: Ascending row counts, the last of them L.

        Returns:
            Output ``[B, L, ...]``, and the state after the first rows, for each of ``ends``.
        """
        ...


@attrs.frozen(eq=False)
class _Segment:
    """Rows recorded while a mark is alive.

    Attributes:
        start: Absolute position of the first row.
        count: Recorded rows.
        inputs: Arrays with rows on axis 1.
        lengths: Valid rows of each sequence, ``None`` when all are.
        recurrence: The layer's own.
    """

    start: int
    count: int
    inputs: Arrays
    lengths: mx.array | None
    recurrence: Recurrence

    def until(self, stop: int) -> _Segment:
        """Cut to what lies before an absolute position."""
        count = stop - self.start
        if count >= self.count:
            return self
        # Copied, so that a long chunk is not pinned.
        inputs = tuple(mx.contiguous(array[:, :count]) for array in self.inputs)
        lengths = None if self.lengths is None else mx.minimum(self.lengths, count)
        return attrs.evolve(self, count=count, inputs=inputs, lengths=lengths)

    def replay(self, slots: Arrays) -> Arrays:
        """Give the state after the rows."""
        _, (after,) = self.recurrence(slots, self.inputs, self.lengths, (self.count,))
        return after


class RecurrentCache(LayerCache):
    """Cache of a recurrent layer, such as a convolution window and a matrix state.

    The state cannot be truncated, so taking rows back means running the recurrence again from a
    mark over the rows to keep. Their inputs are recorded only while a mark is alive, at most 16
    rows after it.
    """

    __slots__ = ("_dtypes", "_planned", "_shapes", "_tape", "slots")

    def __init__(self, *, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[mx.Dtype]) -> None:
        """Start from zeros.

        Args:
            shapes: Shape of each slot, batch axis included.
            dtypes: Dtype of each slot.
        """
        super().__init__()
        self._shapes = tuple(tuple(shape) for shape in shapes)
        self._dtypes = tuple(dtypes)
        self._tape: list[_Segment] = []
        # Positions whose state is wanted, and that state once it was passed.
        self._planned: dict[int, Arrays | None] = {}
        self.slots: Arrays = self._zeros()

    def run(
        self, recurrence: Recurrence, inputs: Arrays, lengths: mx.array | None = None
    ) -> mx.array:
        """Run the layer's recurrence over the rows of a forward call and keep the state after them.

        Args:
            recurrence: The layer's own. It also runs later, to take rows back.
            inputs: What it consumes, rows on axis 1 (``[B, L, ...]``), at least one array.
            lengths: Valid rows of each sequence ``[B]`` int32, ``None`` when all are.

        Returns:
            The recurrence's output ``[B, L, ...]``.

        Raises:
            CacheError: Inputs or new slots are not as declared. The state does not change.
        """
        inputs = tuple(inputs)
        start, count = self.offset, _count_rows(inputs)
        passed = sorted(at for at in self._planned if start < at <= start + count)
        ends = tuple(dict.fromkeys((*(at - start for at in passed), count)))
        out, states = recurrence(self.slots, inputs, lengths, ends)
        self._check(states, len(ends))
        # A slice of a long chunk would pin the whole chunk until the next call.
        held = [tuple(map(mx.contiguous, s)) if count > KEEP_ROWS else tuple(s) for s in states]
        self._record(_Segment(start, count, inputs, lengths, recurrence))
        self._planned.update(zip(passed, held, strict=False))
        self.slots = held[-1]
        self._last_start = max(self._last_start, start)
        self.offset = start + count
        return out

    def arrays(self) -> list[mx.array]:
        """Arrays that must be evaluated for the state, and for replaying it, to be real."""
        planned = (slots for slots in self._planned.values() if slots is not None)
        inputs = (segment.inputs for segment in self._tape)
        return [*self.slots, *itertools.chain.from_iterable((*planned, *inputs))]

    def buffers(self) -> dict[int, int]:
        """Bytes of every slot, planned state and recorded input."""
        return {id(array): array.nbytes for array in self.arrays()}

    @property
    def layout(self) -> tuple[object, ...]:
        """Shape and dtype of each slot."""
        return (self._shapes, self._dtypes)

    def state_nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.nbytes for slot in self.slots)

    def fork(self) -> RecurrentCache:
        """Make an independent cache; slots are replaced and never written, so they are shared."""
        twin = RecurrentCache(shapes=self._shapes, dtypes=self._dtypes)
        twin.slots = self.slots
        twin.offset = self.offset
        return twin

    def plan_fork(self, length: int, after: int) -> bool:
        """Have the recurrence give that state on its way, however far it is from the end."""
        del after
        self._planned.setdefault(length, self.slots if length == self.offset else None)
        return True

    def fork_at(self, length: int) -> LayerCache:
        """Fork the present state, or a planned one, which is not kept any longer then."""
        slots = self._planned.get(length)
        if slots is None:
            return super().fork_at(length)
        del self._planned[length]
        twin = self.fork()
        twin.slots, twin.offset = slots, length
        return twin

    def reset(self) -> None:
        """Go back to zeros, which take no memory before they are used."""
        self.slots = self._zeros()
        self.offset = self._last_start = 0
        self._marks.clear()
        self._tape = []
        self._planned = {}

    def state(self) -> dict[str, mx.array]:
        """Give the slots by number."""
        return {f"slots.{index}": slot for index, slot in enumerate(self.slots)}

    def accepts(self, length: int, shapes: Mapping[str, StateShape]) -> bool:
        """Whether these are the declared slots."""
        declared = zip(self._shapes, self._dtypes, strict=True)
        return length > 0 and dict(shapes) == {
            f"slots.{index}": StateShape(*one) for index, one in enumerate(declared)
        }

    def restore(self, length: int, state: Mapping[str, mx.array]) -> None:
        """Take the slots over."""
        self.reset()
        self.slots = tuple(state[f"slots.{index}"] for index in range(len(self._shapes)))
        self.offset = self._last_start = length

    @property
    def earliest(self) -> int:
        """The present position: a recurrent state has no past."""
        return self.offset

    @property
    def spare_rows(self) -> int:
        """None can be taken back."""
        return 0

    def shrink(self) -> None:
        """Nothing to give back: slots have the size of the state."""

    def _zeros(self) -> Arrays:
        return tuple(
            mx.zeros(shape, dtype) for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        )

    def _copy_out(self) -> None:
        """Copy every slot out of the buffer it may be a slice of."""
        self.slots = tuple(map(fresh_copy, self.slots))
        self._tape = []
        self._planned = {}

    def _capture(self) -> Arrays:
        return self.slots

    def _rewind(self, mark: Mark, rows: int) -> None:
        """Run the recurrence again over the rows to keep."""
        slots = mark.slots
        end = mark.offset + rows
        kept = [segment.until(end) for segment in self._tape if segment.start < end]
        for segment in kept:
            if segment.start >= mark.offset:
                slots = segment.replay(slots)
        self._check([slots], 1)
        self.slots = tuple(slots)
        self._tape = kept
        self._planned = {p: s if p <= end else None for p, s in self._planned.items()}

    def _record(self, segment: _Segment) -> None:
        """Extend the tape for the marks that are alive, and drop what none of them needs."""
        if not self._marks and not self._tape:
            return
        marks = [m for m in self._live_marks() if self.offset - m.offset <= KEEP_ROWS]
        if not marks:
            self._tape = []
            return
        oldest = marks[0].offset
        self._tape = [segment for segment in self._tape if segment.start >= oldest]
        stop = marks[-1].offset + KEEP_ROWS
        if stop > self.offset:
            self._tape.append(segment.until(stop))

    def _check(self, states: Sequence[Arrays], count: int) -> None:
        """Refuse states that are not as declared, or not as many as asked for."""
        if len(states) != count:
            raise CacheError(
                f"cache: a recurrence gives one state an end, got {len(states)!r} for {count!r}",
                code="cache.slots",
                hint="give the slots after each of ends, as a tuple of arrays each",
            )
        for slots in states:
            shapes = tuple(slot.shape for slot in slots)
            dtypes = tuple(slot.dtype for slot in slots)
            if shapes != self._shapes or dtypes != self._dtypes:
                raise CacheError(
                    f"cache: slots must be {self._shapes!r} in {self._dtypes!r}, "
                    f"got {shapes!r} in {dtypes!r}",
                    code="cache.slots",
                    hint="the model's layer and its declared layer spec disagree",
                )


def _count_rows(inputs: Arrays) -> int:
    """Count the rows of a call, and refuse inputs that have none or do not agree."""
    counts = {array.shape[1] if array.ndim > 1 else 0 for array in inputs}
    if len(counts) != 1 or 0 in counts:
        raise CacheError(
            "cache: recurrent inputs carry the same rows on axis 1, at least one, "
            f"got shapes {[array.shape for array in inputs]!r}",
            code="cache.rows",
        )
    return counts.pop()
