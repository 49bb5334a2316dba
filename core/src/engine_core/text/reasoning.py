"""The parts of a finished reply, read in one go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from engine_core.text.stream import DUPLICATE_SPACE, OPENER_SPACE

if TYPE_CHECKING:
    from engine_core.family import ReasoningMarkers

__all__ = ["ReplyParts", "split_reply"]


@attrs.frozen
class ReplyParts:
    """A finished reply.

    Attributes:
        reasoning: Text of the reasoning span, ``None`` when there is none or it is empty.
        answer: Everything else as written, tool-call markup included; not trimmed.
    """

    reasoning: str | None
    answer: str


def split_reply(
    text: str,
    markers: ReasoningMarkers | None,
    *,
    open_reasoning: bool = False,
    forced_close: bool = False,
) -> ReplyParts:
    """Split a finished reply; equal to what ``StreamClassifier`` gives for any cut of it.

    Args:
        text: The decoded reply without stop tokens.
        markers: Reasoning markers, ``None`` when there are none.
        open_reasoning: Whether the prompt ended inside a reasoning span.
        forced_close: Whether the close was forced; the model may then have repeated it.

    Returns:
        The parts.
    """
    if markers is None:
        return ReplyParts(None, text)
    if open_reasoning:
        inside = text
    else:
        body = text.lstrip()
        gap = text[: len(text) - len(body)]
        if len(gap.encode()) > OPENER_SPACE or not body.startswith(markers.open):
            return ReplyParts(None, text)
        inside = body.removeprefix(markers.open)
    reasoning, _, answer = inside.partition(markers.close)
    if forced_close:
        body = answer.lstrip()
        gap = answer[: len(answer) - len(body)]
        if len(gap.encode()) <= DUPLICATE_SPACE:
            answer = body.removeprefix(markers.close) if body.startswith(markers.close) else answer
    return ReplyParts(reasoning or None, answer)
