"""Tells answer, reasoning and tool calls apart while a reply is still being written."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import attrs

from engine_core.events import TokenKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine_core.family import ReasoningMarkers

__all__ = ["Piece", "StreamClassifier"]

OPENER_SPACE: Final = 64
"""Most whitespace before the opener of a reasoning span (bytes)."""

DUPLICATE_SPACE: Final = 8
"""Most whitespace before a close that the model repeats after a forced one (bytes)."""

CALL_START: Final = "{"
"""First character of a reply that is a call as a whole."""


@attrs.frozen
class Piece:
    """Text of one kind.

    The ``wire`` texts of all pieces together are the reply, character by character.

    Attributes:
        kind: What the text is part of.
        text: The text without markers; empty for a marker.
        wire: The same text as the model wrote it: for a marker the marker, with the whitespace
            that is dropped with it.
        opens_call: Whether this is the opener of a tool call, which is reported although empty.
    """

    kind: TokenKind
    text: str
    wire: str
    opens_call: bool = False


class _State(enum.Enum):
    START = enum.auto()  # a reasoning opener may still come
    REASONING = enum.auto()
    DUPLICATE = enum.auto()  # a second close may follow a forced one
    DECIDE = enum.auto()  # the first visible character says whether the reply is a call
    TEXT = enum.auto()
    CALL = enum.auto()
    REST = enum.auto()  # the whole rest is a call


class StreamClassifier:
    """Splits a reply into pieces; the result does not depend on where the pushes are cut.

    A reasoning span opens only at the start of the reply (or was opened by the prompt); later
    markers are text. Tool markers count only when tools were advertised and outside reasoning.
    Text is withheld only while it may be the beginning of a marker that would count there; what
    turns out to be none is given out as it is.

    From the first tool call on, the caller holds further TEXT back: a call that is refused in the
    end becomes text again, with its markers and in its place.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningMarkers | None = None,
        tool_markers: Sequence[tuple[str, str]] = (),
        armed: bool = False,
        open_reasoning: bool = False,
    ) -> None:
        """Start a reply.

        Args:
            reasoning: Markers of reasoning spans, ``None`` when there are none.
            tool_markers: ``(open, close)`` pairs. When armed without any, a call is the whole
                answer and begins with ``{``.
            armed: Whether tools were advertised.
            open_reasoning: Whether the prompt ended inside a reasoning span.
        """
        self._reasoning = reasoning
        self._closers = dict(tool_markers) if armed else {}
        self._close = ""
        self._answer = _State.DECIDE if armed and not tool_markers else _State.TEXT
        self._buffer = ""
        if reasoning is None:
            self._state = self._answer
        else:
            self._state = _State.REASONING if open_reasoning else _State.START

    @property
    def in_reasoning(self) -> bool:
        """Whether a reasoning span is open."""
        return self._state is _State.REASONING

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of the reply.

        Args:
            text: Decoded text, never the text of a stop token.

        Returns:
            Pieces that are certain.
        """
        if not text:
            return []
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        """Take the end of the reply.

        Returns:
            The rest; partial markers are plain text.
        """
        return self._run(final=True)

    def expect_duplicate_close(self) -> None:
        """Swallow one repetition of the reasoning close, right after it was forced.

        Call it when the forced close was pushed; without effect when reasoning is still open or
        answer text is there already.
        """
        if self._state is self._answer and not self._buffer and self._reasoning is not None:
            self._state = _State.DUPLICATE

    def _run(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._buffer:
            before = (self._state, len(self._buffer))
            self._step(pieces, final=final)
            if (self._state, len(self._buffer)) == before:
                break
        return pieces

    def _step(self, pieces: list[Piece], *, final: bool) -> None:
        """Advance by one marker, or as far as the buffer is certain."""
        match self._state:
            case _State.START:
                self._at_border("open", OPENER_SPACE, _State.REASONING, pieces, final=final)
            case _State.DUPLICATE:
                self._at_border("close", DUPLICATE_SPACE, self._answer, pieces, final=final)
            case _State.DECIDE:
                self._decide(final=final)
            case _State.REST:
                self._take(pieces, TokenKind.TOOL_CALL, len(self._buffer))
            case _State.REASONING:
                markers = () if self._reasoning is None else (self._reasoning.close,)
                if self._until(markers, TokenKind.REASONING, pieces, final=final):
                    self._state = self._answer
            case _State.CALL:
                if self._until((self._close,), TokenKind.TOOL_CALL, pieces, final=final):
                    self._state = _State.TEXT
            case _State.TEXT:
                opener = self._until(self._closers, TokenKind.TEXT, pieces, final=final)
                if opener:
                    self._state, self._close = _State.CALL, self._closers[opener]

    def _at_border(
        self, which: str, space: int, following: _State, pieces: list[Piece], *, final: bool
    ) -> None:
        """Recognise a reasoning marker that only whitespace may precede."""
        marker: str = getattr(self._reasoning, which)
        body = self._buffer.lstrip()
        gap = len(self._buffer) - len(body)
        near = len(self._buffer[:gap].encode()) <= space
        if near and body.startswith(marker):
            wire = self._cut(gap + len(marker))
            pieces.append(Piece(TokenKind.REASONING, "", wire))
            self._state = following
        elif final or not near or not marker.startswith(body):
            self._state = self._answer

    def _decide(self, *, final: bool) -> None:
        body = self._buffer.lstrip()
        if body or final:
            self._state = _State.REST if body.startswith(CALL_START) else _State.TEXT

    def _until(
        self, markers: Iterable[str], kind: TokenKind, pieces: list[Piece], *, final: bool
    ) -> str:
        """Give out text up to the first marker and the marker; say which it was, if any."""
        start, marker = _first_marker(self._buffer, markers, final=final)
        self._take(pieces, kind, start)
        if marker:
            opens = kind is TokenKind.TEXT
            marked = TokenKind.TOOL_CALL if opens else kind
            pieces.append(Piece(marked, "", self._cut(len(marker)), opens_call=opens))
        return marker

    def _take(self, pieces: list[Piece], kind: TokenKind, size: int) -> None:
        if size:
            text = self._cut(size)
            pieces.append(Piece(kind, text, text))

    def _cut(self, size: int) -> str:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


def _first_marker(text: str, markers: Iterable[str], *, final: bool) -> tuple[int, str]:
    """Find the marker that begins first, the longest of those.

    Args:
        text: Text that follows the last decision.
        markers: Marker texts.
        final: Whether nothing follows.

    Returns:
        How much text stands before it for certain, and the marker, empty when none is certain.
    """
    start, chosen = len(text), ""
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (at, -len(marker)) < (start, -len(chosen)):
            start, chosen = at, marker
    if final:
        return start, chosen
    waiting = min((_partial_start(text, marker) for marker in markers), default=len(text))
    # A beginning at the same place can only belong to a longer marker.
    if waiting <= start and waiting < len(text):
        return waiting, ""
    return start, chosen


def _partial_start(text: str, marker: str) -> int:
    """Find where the longest end of the text stands that begins the marker without being it."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return at
        at = text.find(marker[0], at + 1)
    return len(text)
