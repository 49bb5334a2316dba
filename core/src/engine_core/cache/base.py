"""The contract of a layer cache."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import attrs

from engine_core.backend import evaluate
from engine_core.errors import CacheError
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mlx.core as mx

__all__ = [
    "LayerCache",
    "Mark",
    "StateShape",
]

KEEP_ROWS = LIMITS.keep_rows


@attrs.frozen
class StateShape:
    """Shape and dtype of one array of a state.

    Attributes:
        shape: Sizes.
        dtype: MLX dtype.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype


@attrs.frozen(eq=False)
class Mark:
    """A position of one cache to which ``keep`` can go back.

    A mark never refers to an append buffer, which would make every later append copy it. Drop the
    mark when it is no longer needed: a recurrent cache records rows only while one is alive.

    Attributes:
        offset: Tokens the cache had been fed.
        slots: State of a recurrent cache at that position, empty for attention.
    """

    offset: int
    slots: tuple[mx.array, ...] = ()


class LayerCache(ABC):
    """State of one layer for one request, or for one stored prefix.

    Attributes:
        offset: Tokens fed so far, absolute.
    """

    __slots__ = ("__weakref__", "_last_start", "_marks", "offset")

    def __init__(self) -> None:
        """Start empty."""
        self.offset = 0
        self._marks: list[weakref.ref[Mark]] = []
        # The furthest position at which an append ever began: what a sliding cache dropped is
        # measured from there, so it decides which marks can still be honoured.
        self._last_start = 0

    @property
    def is_pristine(self) -> bool:
        """Whether nothing has been fed."""
        return self.offset == 0

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """Arrays that must be evaluated for the state to be real."""

    @abstractmethod
    def buffers(self) -> dict[int, int]:
        """Bytes of every buffer held, by an identity that views of one buffer share."""

    def nbytes(self) -> int:
        """Bytes held, shared buffers counted in full."""
        return sum(self.buffers().values())

    @property
    @abstractmethod
    def layout(self) -> tuple[object, ...]:
        """What makes two caches of a class interchangeable: shapes, dtypes, window."""

    @abstractmethod
    def state_nbytes(self) -> int:
        """Bytes of the state alone, without spare rows and rows of other views."""

    @abstractmethod
    def fork(self) -> LayerCache:
        """Make an independent view of the same state without copying an append buffer.

        Marks stay with the original.
        """

    def plan_fork(self, length: int, after: int) -> bool:
        """Announce that the state at a position to come will be wanted; see :meth:`fork_at`.

        Args:
            length: Absolute position, not before the present one (tokens).
            after: Rows that will be fed beyond it before the fork.

        Returns:
            Whether the fork will succeed. If not, fork when exactly ``length`` tokens are fed.
        """
        del length
        return self.spare_rows is None or after <= self.spare_rows

    def fork_at(self, length: int) -> LayerCache:
        """Make an independent view of the state after the first ``length`` tokens.

        Args:
            length: A planned position, or one that ``trim_to`` accepts.

        Raises:
            CacheError: The state at that position is not held.
        """
        twin = self.fork()
        twin.trim_to(length)
        return twin

    @abstractmethod
    def reset(self) -> None:
        """Become empty and let go of all memory, whoever else still refers to this object.

        Every mark becomes invalid.
        """

    @abstractmethod
    def state(self) -> dict[str, mx.array]:
        """Give the arrays of the state alone by name, not evaluated."""

    @abstractmethod
    def accepts(self, length: int, shapes: Mapping[str, StateShape]) -> bool:
        """Whether arrays like these can be the state after so many tokens.

        Args:
            length: Tokens fed.
            shapes: Name -> shape and dtype.
        """

    @abstractmethod
    def restore(self, length: int, state: Mapping[str, mx.array]) -> None:
        """Become what :meth:`state` described; every mark becomes invalid.

        Args:
            length: Tokens fed.
            state: Arrays whose shapes this cache accepts.
        """

    @property
    @abstractmethod
    def earliest(self) -> int:
        """Least length that ``trim_to`` accepts (tokens)."""

    @property
    @abstractmethod
    def spare_rows(self) -> int | None:
        """Rows that ``trim_to`` can take back at any time; ``None`` for all."""

    @abstractmethod
    def _copy_out(self) -> None:
        """Replace what pins foreign memory by lazy copies."""

    def _let_go(self) -> None:
        """Drop the marks and replace what pins foreign memory; the copies are not evaluated."""
        self._copy_out()
        self._marks.clear()

    def detach(self) -> None:
        """Stop pinning memory that is not part of the state; call it before storing a fork.

        Every mark becomes invalid.

        Raises:
            BackendError: The device failed to compute the state; drop the cache.
        """
        self._let_go()
        evaluate(*self.arrays())

    @abstractmethod
    def shrink(self) -> None:
        """Give back buffer space far beyond what any live view of the buffer holds.

        Raises:
            BackendError: The device could not copy the rows; the state does not change.
        """

    def can_trim_to(self, length: int) -> bool:
        """Whether ``trim_to`` would succeed.

        Args:
            length: Absolute position (tokens).
        """
        is_number = isinstance(length, int) and not isinstance(length, bool)
        return is_number and self.earliest <= length <= self.offset

    @abstractmethod
    def _rewind(self, mark: Mark, rows: int) -> None:
        """Make the state that of ``mark`` plus ``rows`` rows; arguments are already checked."""

    def _capture(self) -> tuple[mx.array, ...]:
        """State a mark has to carry, besides the offset."""
        return ()

    def mark(self) -> Mark:
        """Remember this position.

        Returns:
            A mark for :meth:`keep`. It stays usable while appends start at most 16 rows after it
            and until an older mark is kept.
        """
        mark = Mark(self.offset, self._capture())
        self._marks = [ref for ref in self._marks if ref() is not None]
        self._marks.append(weakref.ref(mark))
        return mark

    def keep(self, mark: Mark, rows: int) -> None:
        """Take back all rows after the first ``rows`` rows fed since ``mark``.

        Afterwards the cache is as if only those rows had been fed. Marks newer than ``mark``
        become invalid; ``mark`` itself and older ones stay valid.

        Args:
            mark: A mark of this cache.
            rows: 0 to 16, at most the rows fed since the mark.

        Raises:
            CacheError: The mark belongs to another cache, was invalidated or is too old, or
                ``rows`` is out of range. The state does not change.
        """
        index = self._check_keep(mark, rows)
        if mark.offset + rows != self.offset:
            self._rewind(mark, rows)
            self.offset = mark.offset + rows
        del self._marks[index + 1 :]

    def trim_to(self, length: int) -> None:
        """Rewind to an absolute position; every mark becomes invalid.

        Args:
            length: Tokens to keep, at most ``offset``.

        Raises:
            CacheError: This cache cannot go back that far. The state does not change.
        """
        if not self.can_trim_to(length):
            raise CacheError(
                f"cache: trim_to must name a position whose state is still held, got {length!r} "
                f"at offset {self.offset!r} of a {type(self).__name__}",
                code="cache.cannot_trim",
                hint="feed the tokens again from the nearest stored prefix",
            )
        self.offset = length
        self._last_start = min(self._last_start, length)
        self._marks.clear()

    def _check_keep(self, mark: Mark, rows: int) -> int:
        """Validate a ``keep`` and give the index of its mark."""
        alive = [ref() for ref in self._marks]
        if mark not in alive:
            raise CacheError(
                "cache: keep needs a mark of this cache that no older keep has undone, "
                f"got one at offset {mark.offset!r}",
                code="cache.mark_invalid",
                hint="take a new mark after keeping an older one",
            )
        fed = self.offset - mark.offset
        if isinstance(rows, bool) or not isinstance(rows, int) or not 0 <= rows <= KEEP_ROWS:
            raise CacheError(
                f"cache: keep takes 0 to {KEEP_ROWS} rows, got {rows!r}", code="cache.keep_rows"
            )
        if rows > fed:
            raise CacheError(
                f"cache: keep cannot keep more rows than the {fed!r} fed since the mark, "
                f"got {rows!r}",
                code="cache.keep_rows",
            )
        if self._last_start - mark.offset > KEEP_ROWS:
            raise CacheError(
                f"cache: a mark lasts while appends start at most {KEEP_ROWS} rows after it, "
                f"got one {self._last_start - mark.offset!r} rows after it",
                code="cache.mark_expired",
                hint="mark closer to the rows that may be taken back",
            )
        return alive.index(mark)

    def _live_marks(self) -> list[Mark]:
        """Marks that can still be kept, oldest first."""
        marks = (ref() for ref in self._marks)
        return [
            mark
            for mark in marks
            if mark is not None and self._last_start - mark.offset <= KEEP_ROWS
        ]
