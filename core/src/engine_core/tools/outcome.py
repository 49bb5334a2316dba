"""Whether a finished reply is what the request asked for; the answer is a result, not an error.

Decoding is not constrained to a schema or a call, so a model may fail to comply; the reply is the
caller's all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError
from engine_core.limits import LIMITS
from engine_core.tools.validation import ValidationBudgetError, violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.messages import ToolCall
    from engine_core.request import ToolChoice
    from engine_core.tools.schema import CompiledSchema

__all__ = ["StructuredResult", "ToolChoiceResult", "judge_structured", "judge_tool_choice"]


@attrs.frozen(kw_only=True)
class ToolChoiceResult:
    """Whether a reply did what ``tool_choice`` asked for; decoding was not constrained to it.

    Attributes:
        choice: What was asked for, ``required`` or ``named``.
        is_met: Whether the model made such a call.
        code: ``"tools.not_called"`` when it made none, ``"tools.refused"`` when what it wrote was
            no valid call, empty when it did.
        reason: The same in words.
    """

    choice: ToolChoice
    is_met: bool
    code: str = ""
    reason: str = ""


@attrs.frozen(kw_only=True)
class StructuredResult:
    """What the final text is to the response schema; decoding was not constrained to it.

    Attributes:
        is_valid: Whether the text is JSON that satisfies the schema.
        value: The JSON value of the text, valid or not; ``None`` also when it is no JSON.
        code: ``"output.json"`` (no strict JSON), ``"output.schema"`` (breaks the schema),
            ``"output.budget"`` (too large to check), ``"output.tool_calls"`` (the reply calls
            tools instead of answering), or empty.
        reason: The same in words.
    """

    is_valid: bool
    value: Any = None
    code: str = ""
    reason: str = ""


def judge_tool_choice(
    choice: ToolChoice, calls: Sequence[ToolCall], refusals: Sequence[str] = ()
) -> ToolChoiceResult | None:
    """Compare the calls of a reply with what ``tool_choice`` asked for.

    Args:
        choice: What was asked for.
        calls: Accepted calls.
        refusals: Why other markup is no call.

    Returns:
        The result; ``None`` when no call was asked for.
    """
    if choice.mode not in ("required", "named"):
        return None
    if calls:
        return ToolChoiceResult(choice=choice, is_met=True)
    if refusals:
        return ToolChoiceResult(
            choice=choice, is_met=False, code="tools.refused", reason=refusals[-1]
        )
    wanted = "a tool" if choice.name is None else f"the tool {choice.name!r}"
    return ToolChoiceResult(
        choice=choice,
        is_met=False,
        code="tools.not_called",
        reason=f"reply: must call {wanted}, got none",
    )


def judge_structured(
    text: str, schema: CompiledSchema, *, has_calls: bool = False
) -> StructuredResult:
    """Read a finished text as JSON and check it against the response schema.

    Args:
        text: The final text; white space around the JSON is allowed.
        schema: What it must satisfy.
        has_calls: Whether the reply calls tools, and so is no final answer.

    Returns:
        The result.
    """
    if has_calls:
        return StructuredResult(
            is_valid=False,
            code="output.tool_calls",
            reason="reply: must be an answer, got tool calls",
        )
    try:
        value = parse_json(text.encode(), "reply", LIMITS)
    except (EngineError, UnicodeEncodeError) as exc:
        return StructuredResult(is_valid=False, code="output.json", reason=str(exc))
    try:
        broken = violation(schema, value)
    except ValidationBudgetError as exc:
        return StructuredResult(is_valid=False, value=value, code="output.budget", reason=str(exc))
    if broken is None:
        return StructuredResult(is_valid=True, value=value)
    return StructuredResult(
        is_valid=False,
        value=value,
        code="output.schema",
        reason=f"reply: must satisfy the response schema, but {broken}",
    )
