"""Which finish reason a reply carries when several hold."""

from __future__ import annotations

from engine_core.messages import FinishReason

__all__ = ["finish_reason", "stronger_reason"]

# Members are declared strongest first.
_RANK = {reason: rank for rank, reason in enumerate(FinishReason)}


def stronger_reason(first: FinishReason, second: FinishReason) -> FinishReason:
    """Pick the reason that wins; a reply has exactly one.

    Args:
        first: One reason that holds.
        second: Another one.

    Returns:
        The stronger by tool_calls > stop > aborted > length.
    """
    return min(first, second, key=_RANK.__getitem__)


def finish_reason(ended: FinishReason, *, has_tool_calls: bool) -> FinishReason:
    """Combine how the decode loop ended with what the reply holds.

    Args:
        ended: The decode loop's own reason.
        has_tool_calls: At least one tool call of the reply was accepted.

    Returns:
        The reason to report.
    """
    return stronger_reason(ended, FinishReason.TOOL_CALLS) if has_tool_calls else ended
