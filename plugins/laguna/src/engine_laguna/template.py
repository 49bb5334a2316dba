"""The dialect of Laguna chat templates.

Three published revisions differ in newlines, in their default system text and in whether thinking
is on when nobody says so; all read the same input. They silently render nothing for content that
is no string, so anything else is refused here instead of being lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.builtin_chatml import message_to_dict, tool_to_dict
from engine_core.errors import TemplateError
from engine_core.family import ReasoningMarkers, TemplateDialect, TemplateInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.messages import Message, ToolDecl

__all__ = ["LAGUNA_DIALECT"]


def _spell(message: Message) -> dict[str, Any]:
    """Spell one message; every template reads ``reasoning`` before its other name."""
    spelled = message_to_dict(message)
    if not isinstance(spelled["content"], str):
        raise TemplateError(
            f"{message.role} message: content must be text for this template, "
            f"got {len(message.content)} parts",
            code="template.input",
            hint="send text only",
        )
    if "reasoning_content" in spelled:
        spelled["reasoning"] = spelled.pop("reasoning_content")
    return spelled


def prepare(
    messages: Sequence[Message],
    tools: Sequence[ToolDecl],
    options: Mapping[str, Any],  # noqa: ARG001 - the shape of every dialect
) -> TemplateInput:
    """Turn records into what the templates read.

    Args:
        messages: The conversation, text only.
        tools: Advertised tools.
        options: Template options; this dialect needs none.

    Returns:
        Messages whose content is a string and whose call arguments are mappings.

    Raises:
        TemplateError: Code ``template.input``; a message holds more than text.
    """
    return TemplateInput(
        messages=[_spell(message) for message in messages],
        tools=[tool_to_dict(tool) for tool in tools] or None,
    )


LAGUNA_DIALECT = TemplateDialect(
    name="laguna",
    prepare=prepare,
    reasoning=ReasoningMarkers(open="<think>", close="</think>"),
    end_of_turn=("</assistant>",),
)
