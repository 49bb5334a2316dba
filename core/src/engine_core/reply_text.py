"""From emitted tokens to segments, and to the texts and log-probabilities of the reply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.events import Segment, TokenKind
from engine_core.request import TokenLogprob
from engine_core.text.stream import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine_core.decode.loop import DecodeStep
    from engine_core.messages import ToolCall
    from engine_core.text.reply import ReplyDecoder
    from engine_core.tools.accept import Acceptance

    Accept = Callable[[str, int], Acceptance]

__all__ = ["ReasoningBudget", "ReplyText"]


class ReplyText:
    """The text side of one reply.

    Without a tokenizer every token gives one empty text segment, so that callbacks and streams
    still see the token.

    Attributes:
        logprobs: One record an emitted token; a forced token was certain.
        tool_calls: Accepted calls, known at the end.
        refusals: Why each other proposal is no call.
    """

    def __init__(self, decoder: ReplyDecoder | None, accept: Accept | None = None) -> None:
        """Start a reply.

        Args:
            decoder: Turns tokens into pieces, ``None`` without a tokenizer.
            accept: Takes the calls out of a finished answer; its second argument says how much
                of it was delivered as text. ``None`` when no tool is advertised.
        """
        self._decoder = decoder
        self._accept = accept
        self.tool_calls: tuple[ToolCall, ...] = ()
        self.refusals: tuple[str, ...] = ()
        self._last: DecodeStep | None = None
        self._texts: dict[TokenKind, list[str]] = {kind: [] for kind in TokenKind}
        self.logprobs: list[TokenLogprob] = []

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text was found; it and everything after it are dropped."""
        return self._decoder is not None and self._decoder.stopped

    @property
    def in_reasoning(self) -> bool:
        """Whether a reasoning span is open."""
        return self._decoder is not None and self._decoder.in_reasoning

    @property
    def text(self) -> str:
        """The answer delivered so far."""
        return "".join(self._texts[TokenKind.TEXT])

    @property
    def reasoning(self) -> str | None:
        """The reasoning delivered so far, ``None`` when there is none."""
        return "".join(self._texts[TokenKind.REASONING]) or None

    def push(self, step: DecodeStep) -> list[Segment]:
        """Take an emitted token.

        Args:
            step: The token.

        Returns:
            Segments that became final with it.
        """
        self._last = step
        self.logprobs.append(step.logprobs or TokenLogprob(token_id=step.token, logprob=0.0))
        if self._decoder is None:
            return [self._segment(step, TokenKind.TEXT, "")]
        # The text of an end-of-sequence token is no part of the reply, special or not.
        return [] if step.is_eos else self._segments(self._decoder.push(step.token))

    def finish(self) -> list[Segment]:
        """Take the end of the reply.

        Calls are accepted now; what stands between and after them, and every refused call with
        its markers, is text. A stop text in it drops what follows, calls included.

        Returns:
            What was withheld.
        """
        decoder = self._decoder
        if decoder is None:
            return []
        pieces = decoder.finish()
        if self._accept is not None:
            found = self._accept(decoder.answer, len(decoder.delivered))
            runs = decoder.cut([found.runs[0][len(decoder.delivered) :], *found.runs[1:]])
            self.tool_calls, self.refusals = found.calls[: len(runs) - 1], found.refusals
            held = "".join(runs)
            pieces += [Piece(TokenKind.TEXT, held, held)] if held else []
        return self._segments(pieces)

    def record(self, segment: Segment) -> None:
        """Note a segment that is being delivered.

        Args:
            segment: The segment.
        """
        self._texts[segment.kind].append(segment.text)

    def expect_duplicate_close(self) -> None:
        """Swallow one repetition of a reasoning close that was forced."""
        if self._decoder is not None:
            self._decoder.expect_duplicate_close()

    def _segments(self, pieces: Iterable[Piece]) -> list[Segment]:
        step = self._last
        if step is None:
            return []
        return [self._segment(step, piece.kind, piece.text) for piece in pieces]

    @staticmethod
    def _segment(step: DecodeStep, kind: TokenKind, text: str) -> Segment:
        return Segment(
            kind=kind,
            text=text,
            token_id=step.token,
            ordinal=step.ordinal,
            logprob=step.logprobs,
        )


class ReasoningBudget:
    """Counts the tokens of a reasoning span and says once when it must be closed.

    The token that opens the span is free, also when it carries the first content.
    """

    def __init__(self, tokens: int | None, *, is_open: bool) -> None:
        """Start a reply.

        Args:
            tokens: Longest reasoning; ``None`` for no bound.
            is_open: Whether the prompt opened the span.
        """
        self._left = tokens
        self._was_open = is_open

    def observe(self, *, is_open: bool) -> bool:
        """Take note of a token the model chose.

        Args:
            is_open: Whether the span is open after it.

        Returns:
            Whether the span must be closed now; true at most once.
        """
        counts = self._was_open and is_open
        self._was_open = is_open
        if self._left is None or not counts:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self._left = None
        return True
