"""What a running request reports, and the token that cancels it."""

from __future__ import annotations

import enum
import threading
import time
from typing import TYPE_CHECKING, Literal

import attrs

from engine_core.errors import Cancelled, DeadlineExceeded, InvalidRequest
from engine_core.limits import LIMITS
from engine_core.values import shown

if TYPE_CHECKING:
    from engine_core.request import GenerateReply, TokenLogprob

__all__ = ["CancelToken", "Completed", "Event", "Phase", "Progress", "Segment", "TokenKind"]

Phase = Literal["prompt", "prefill", "decode"]
"""Where a request stands: rendered and tokenized, being fed, or producing tokens."""


class TokenKind(enum.StrEnum):
    """What a piece of generated text is part of."""

    TEXT = "text"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"


@attrs.frozen(kw_only=True)
class Segment:
    """Newly final text of one kind.

    One token may give no segment (a withheld marker, half a character) or several, which then
    share its id and ordinal. Count ordinals, not segments.

    Attributes:
        kind: What the text is part of; wire markers belong to none and are left out.
        text: The text; empty at the start of a tool call.
        token_id: Token that completed the text.
        ordinal: Position of that token among the emitted ones, from 0.
        logprob: Log-probabilities at that token, ``None`` when they were not asked for.
    """

    kind: TokenKind
    text: str
    token_id: int
    ordinal: int
    logprob: TokenLogprob | None = None


@attrs.frozen(kw_only=True)
class Progress:
    """How far a request has come (all counts in tokens).

    Attributes:
        phase: ``prompt`` once, before the context check; ``prefill`` at its start, after each
            fed chunk; ``decode`` once an emitted token.
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens served by the prompt pool; ``None`` before the lookup.
        completion_tokens: Emitted so far.
        max_tokens: Longest reply.
        context_limit: Most tokens prompt and reply may have together, ``None`` without a limit.
        done_tokens: Prompt tokens whose state is in the caches, cached ones included.
    """

    phase: Phase
    prompt_tokens: int
    max_tokens: int
    context_limit: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    done_tokens: int = 0


@attrs.frozen(kw_only=True)
class Completed:
    """The last event of a stream.

    Attributes:
        reply: The finished reply.
    """

    reply: GenerateReply


Event = Segment | Progress | Completed
"""What a stream yields."""


class CancelToken:
    """Cancels requests from any thread, by hand or when a deadline passes.

    A cancelled token stays cancelled. One token may serve several requests.
    """

    def __init__(self, *, deadline: float | None = None) -> None:
        """Make a token.

        Args:
            deadline: Seconds from now after which the token counts as cancelled; ``None`` for
                no deadline.

        Raises:
            InvalidRequest: ``deadline`` is no positive number in range.
        """
        if deadline is not None and (
            isinstance(deadline, bool)
            or not isinstance(deadline, (int, float))
            or not 0 < deadline <= LIMITS.deadline_seconds
        ):
            raise InvalidRequest(
                "cancel token: deadline must be above 0 and at most "
                f"{LIMITS.deadline_seconds} seconds, got {shown(deadline)}",
                code="request.deadline_range",
            )
        self._event = threading.Event()
        self._seconds = deadline
        self._expires = None if deadline is None else time.monotonic() + deadline

    def cancel(self) -> None:
        """Cancel; idempotent."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called or the deadline has passed."""
        return self._event.is_set() or self._is_late()

    def checkpoint(self) -> None:
        """Do nothing until the token is cancelled, then raise.

        Raises:
            Cancelled: :meth:`cancel` was called.
            DeadlineExceeded: The deadline has passed.
        """
        if self._event.is_set():
            raise Cancelled("request: was cancelled by its token")
        if self._is_late():
            raise DeadlineExceeded(
                f"request: must finish before its deadline, got {self._seconds!r} seconds",
                hint="allow more time or ask for fewer tokens",
            )

    def _is_late(self) -> bool:
        return self._expires is not None and time.monotonic() >= self._expires
