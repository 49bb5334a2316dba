"""The dialect of templates that read plain OpenAI-style messages, ChatML first of all.

Templates of this kind choke on what an OpenAI client may send: ``content: null`` beside calls, an
empty call list, arguments as a JSON string, lists of text parts. So a message reaches them in one
shape only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.family import ReasoningMarkers, TemplateDialect, TemplateInput
from engine_core.messages import (
    Message,
    Part,
    TextPart,
    ToolCall,
    ToolDecl,
    TranslationPart,
)
from engine_core.values import thaw_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CHATML", "message_to_dict", "tool_to_dict"]


def tool_to_dict(tool: ToolDecl) -> dict[str, Any]:
    """Spell a declaration as templates read it.

    Args:
        tool: The declaration.

    Returns:
        An OpenAI-style dict.
    """
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": thaw_json(tool.parameters),
        },
    }


def _call_to_dict(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": thaw_json(call.arguments)},
    }


def _part_to_dict(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, TranslationPart):
        return {
            "type": "text",
            "source_lang_code": part.source_lang,
            "target_lang_code": part.target_lang,
            "text": part.text,
        }
    return {"type": part.modality}


def _content(message: Message) -> str | list[dict[str, Any]]:
    if all(isinstance(part, TextPart) for part in message.content):
        return message.text
    return [_part_to_dict(part) for part in message.content]


def message_to_dict(message: Message) -> dict[str, Any]:
    """Spell a message as templates read it.

    Args:
        message: The message.

    Returns:
        An OpenAI-style dict: text-only content is one string, never ``None``; keys without a
        value are absent.
    """
    result: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.reasoning is not None:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [_call_to_dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    return result


def prepare(
    messages: Sequence[Message],
    tools: Sequence[ToolDecl],
    options: Mapping[str, Any],  # noqa: ARG001 - the shape of every dialect
) -> TemplateInput:
    """Turn records into OpenAI-style dicts.

    Args:
        messages: The conversation.
        tools: Advertised tools.
        options: Template options; this dialect needs none.

    Returns:
        What the template reads.
    """
    return TemplateInput(
        messages=[message_to_dict(message) for message in messages],
        tools=[tool_to_dict(tool) for tool in tools] or None,
    )


CHATML = TemplateDialect(
    name="chatml",
    prepare=prepare,
    reasoning=ReasoningMarkers(open="<think>", close="</think>"),
    end_of_turn=("<|im_end|>", "<end_of_turn>"),
)
