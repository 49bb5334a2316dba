"""A reply as it grows: tokens in, pieces to deliver out, the final parts at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.events import TokenKind
from engine_core.text.detokenize import Detokenizer
from engine_core.text.stop import StopMatcher
from engine_core.text.stream import Piece, StreamClassifier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine_core.family import ReasoningMarkers
    from engine_core.text.tokenizer import Tokenizer

__all__ = ["ReplyDecoder"]


class ReplyDecoder:
    """Joins detokenizer, classifier and stop strings for one reply.

    Stop strings are looked for in answer text only, never across a tool call. Answer text after
    the first tool call is kept in ``answer`` and not delivered, because a refused call becomes
    text again in its place; the caller delivers what :meth:`cut` leaves of it at the end.

    Attributes:
        stopped: Whether a stop string ended the reply.
        called: Whether a tool call was opened.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reasoning: ReasoningMarkers | None = None,
        tool_markers: Sequence[tuple[str, str]] = (),
        armed: bool = False,
        delimiters: Sequence[str] = (),
        open_reasoning: bool = False,
        stops: Iterable[str] = (),
    ) -> None:
        """Start a reply.

        Args:
            tokenizer: Whose ids come.
            reasoning: Markers of reasoning spans.
            tool_markers: ``(open, close)`` pairs of tool calls.
            armed: Whether tools were advertised.
            delimiters: Texts inside calls that must not be hidden, with ``armed``.
            open_reasoning: Whether the prompt ended inside a reasoning span.
            stops: Stop strings.
        """
        markers = [] if reasoning is None else [reasoning.open, reasoning.close]
        if armed:
            markers += [*(marker for pair in tool_markers for marker in pair), *delimiters]
        self._detokenizer = Detokenizer(tokenizer, keep=tokenizer.marker_ids(markers))
        self._classifier = StreamClassifier(
            reasoning=reasoning,
            tool_markers=tool_markers,
            armed=armed,
            open_reasoning=open_reasoning,
        )
        self._stops = tuple(stops)
        self._matcher = StopMatcher(self._stops)
        self._reasoning: list[str] = []
        self._answer: list[str] = []
        self._delivered: list[str] = []
        self.stopped = False
        self.called = False

    @property
    def reasoning(self) -> str | None:
        """The reasoning so far, ``None`` when there is none."""
        return "".join(self._reasoning) or None

    @property
    def answer(self) -> str:
        """The answer so far, tool-call markup included: what a tool syntax parses."""
        return "".join(self._answer)

    @property
    def delivered(self) -> str:
        """The TEXT that was given out."""
        return "".join(self._delivered)

    @property
    def in_reasoning(self) -> bool:
        """Whether a reasoning span is open."""
        return self._classifier.in_reasoning

    def push(self, token_id: int) -> list[Piece]:
        """Take a token that is no stop token.

        Args:
            token_id: Its id.

        Returns:
            Pieces to deliver now; nothing once a stop string has ended the reply.
        """
        if self.stopped:
            return []
        return self._filter(self._classifier.push(self._detokenizer.push(token_id)))

    def expect_duplicate_close(self) -> None:
        """Swallow one repetition of the reasoning close; call it after a forced close."""
        self._classifier.expect_duplicate_close()

    def finish(self) -> list[Piece]:
        """Take the end of the reply.

        Returns:
            The last pieces to deliver.
        """
        if self.stopped:
            return []
        pieces = self._classifier.push(self._detokenizer.finish()) + self._classifier.finish()
        ready = self._filter(pieces)
        if not self.stopped:
            self._release(self._matcher.finish(), ready)
            self.stopped = self._matcher.matched
        return ready

    def cut(self, runs: Sequence[str]) -> list[str]:
        """End text that was withheld at the first stop string in it.

        Only now is it known which calls were refused, and so are text in which a stop string
        counts.

        Args:
            runs: Withheld text before, between and after the accepted calls.

        Returns:
            The runs up to the stop string, all of them when there is none.
        """
        kept: list[str] = []
        matcher = StopMatcher(self._stops)
        for run in runs:
            kept.append(matcher.push(run)[0] + matcher.finish())
            if matcher.matched:
                self.stopped = True
                break
        return kept

    def _filter(self, pieces: list[Piece]) -> list[Piece]:
        ready: list[Piece] = []
        for piece in pieces:
            if piece.kind is TokenKind.TEXT:
                text, self.stopped = self._matcher.push(piece.text)
                self._release(text, ready)
            elif piece.kind is TokenKind.REASONING:
                if piece.text:
                    self._reasoning.append(piece.text)
                    ready.append(piece)
            else:
                self._release(self._matcher.finish(), ready)
                self.stopped = self._matcher.matched
                if not self.stopped:
                    self.called = True
                    self._answer.append(piece.wire)
                    if piece.text or piece.opens_call:
                        ready.append(piece)
            if self.stopped:
                break
        return ready

    def _release(self, text: str, ready: list[Piece]) -> None:
        if not text:
            return
        self._answer.append(text)
        if not self.called:
            self._delivered.append(text)
            ready.append(Piece(TokenKind.TEXT, text, text))
