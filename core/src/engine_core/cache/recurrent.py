"""State of a recurrent layer: arrays that every step replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx

from engine_core.cache.base import KEEP_ROWS, LayerCache, Mark, StateShape
from engine_core.cache.detach import fresh_copy
from engine_core.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["RecurrentCache", "Replay"]

Arrays = tuple[mx.array, ...]
Replay = Callable[[Arrays, Arrays, int], Arrays]
"""``replay(slots, inputs, rows) -> slots``: the state after ``rows`` rows of ``inputs``."""


@attrs.frozen(eq=False)
class _Segment:
    """Rows recorded while a mark is alive.

    Attributes:
        start: Absolute position of the first row.
        rows: Recorded rows.
        inputs: Arrays with rows on axis 1.
        replay: The layer's own recurrence.
    """

    start: int
    rows: int
    inputs: Arrays
    replay: Replay

    def first(self, rows: int) -> _Segment:
        """Cut to the first ``rows`` rows."""
        if rows == self.rows:
            return self
        return attrs.evolve(self, rows=rows, inputs=_first_rows(self.inputs, rows))


class RecurrentCache(LayerCache):
    """Cache of a recurrent layer, such as a convolution window and a matrix state.

    The state cannot be truncated, so taking rows back means running the recurrence again from a
    mark over the rows to keep. Their inputs are recorded only while a mark is alive, at most 16
    rows after it.
    """

    __slots__ = ("_dtypes", "_shapes", "_tape", "slots")

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
        self.slots: Arrays = self._zeros()

    def advance(self, slots: Arrays, rows: int, inputs: Arrays, replay: Replay) -> None:
        """Replace the state after a forward call.

        Args:
            slots: New state, shapes and dtypes as declared.
            rows: L, rows the call fed.
            inputs: What the recurrence consumed, rows on axis 1 (``[B, L, ...]``).
            replay: Runs the recurrence over inputs like these. Kept only while a mark is alive.

        Raises:
            CacheError: Slots or inputs are not as declared. The state does not change.
        """
        self._check(slots, rows, inputs)
        self._record(rows, inputs, replay)
        # A slice of a long chunk would pin the whole chunk until the next call.
        self.slots = tuple(map(mx.contiguous, slots)) if rows > KEEP_ROWS else tuple(slots)
        self._last_start = max(self._last_start, self.offset)
        self.offset += rows

    def arrays(self) -> list[mx.array]:
        """Arrays that must be evaluated for the state, and for replaying it, to be real."""
        return [*self.slots, *(array for segment in self._tape for array in segment.inputs)]

    def buffers(self) -> dict[int, int]:
        """Bytes of every slot and recorded input."""
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

    def reset(self) -> None:
        """Go back to zeros, which take no memory before they are used."""
        self.slots = self._zeros()
        self.offset = self._last_start = 0
        self._marks.clear()
        self._tape = []

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

    def _capture(self) -> Arrays:
        return self.slots

    def _rewind(self, mark: Mark, rows: int) -> None:
        """Run the recurrence again over the rows to keep."""
        slots = mark.slots
        end = mark.offset + rows
        kept = [
            segment.first(min(segment.rows, end - segment.start))
            for segment in self._tape
            if segment.start < end
        ]
        for segment in kept:
            if segment.start >= mark.offset:
                slots = segment.replay(slots, segment.inputs, segment.rows)
        self._check(slots, max(rows, 1), ())
        self.slots = tuple(slots)
        self._tape = kept

    def _record(self, rows: int, inputs: Arrays, replay: Replay) -> None:
        """Extend the tape for the marks that are alive, and drop what none of them needs."""
        if not self._marks and not self._tape:
            return
        marks = [m for m in self._live_marks() if self.offset - m.offset <= KEEP_ROWS]
        if not marks:
            self._tape = []
            return
        oldest = marks[0].offset
        self._tape = [segment for segment in self._tape if segment.start >= oldest]
        wanted = min(rows, marks[-1].offset + KEEP_ROWS - self.offset)
        if wanted > 0:
            segment = _Segment(self.offset, rows, tuple(inputs), replay)
            self._tape.append(segment.first(wanted))

    def _check(self, slots: Arrays, rows: int, inputs: Arrays) -> None:
        """Refuse a state or inputs that replay could not use."""
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise CacheError(
                f"cache: advance takes a positive number of rows, got {rows!r}", code="cache.rows"
            )
        shapes = tuple(slot.shape for slot in slots)
        dtypes = tuple(slot.dtype for slot in slots)
        if shapes != self._shapes or dtypes != self._dtypes:
            raise CacheError(
                f"cache: slots must be {self._shapes!r} in {self._dtypes!r}, "
                f"got {shapes!r} in {dtypes!r}",
                code="cache.slots",
                hint="the model's layer and its declared layer spec disagree",
            )
        for array in inputs:
            if array.ndim < 2 or array.shape[1] != rows:
                raise CacheError(
                    f"cache: recurrent inputs carry their {rows!r} rows on axis 1, "
                    f"got shape {array.shape!r}",
                    code="cache.rows",
                )


def _first_rows(inputs: Arrays, rows: int) -> Arrays:
    """Copy the first rows out, so that a long chunk is not pinned."""
    return tuple(mx.contiguous(array[:, :rows]) for array in inputs)
