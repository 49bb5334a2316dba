"""The template dialect of Gemma 3, FunctionGemma and TranslateGemma.

The templates read OpenAI-style messages, a translation being a list of one mapping. Two things
differ from core's dialect: no reasoning span exists, so ``<think>`` in a reply is text; and a tool
result must carry the function's name, which is looked up by the call's id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from engine_core.builtin_chatml import message_to_dict, tool_to_dict
from engine_core.family import TemplateDialect, TemplateInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from engine_core.messages import Message, ToolDecl

__all__ = ["GEMMA3_DIALECT", "prepare"]


def prepare(
    messages: Sequence[Message],
    tools: Sequence[ToolDecl],
    options: Mapping[str, Any],  # noqa: ARG001 - the shape of every dialect
) -> TemplateInput:
    """Turn records into what the templates read.

    Args:
        messages: The conversation.
        tools: Advertised tools.
        options: Template options; this dialect needs none.

    Returns:
        What the template reads.
    """
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    named = [
        attrs.evolve(message, name=names.get(message.tool_call_id, message.name))
        if message.role == "tool" and message.tool_call_id is not None
        else message
        for message in messages
    ]
    return TemplateInput(
        messages=[message_to_dict(message) for message in named],
        tools=[tool_to_dict(tool) for tool in tools] or None,
    )


GEMMA3_DIALECT = TemplateDialect(name="gemma3", prepare=prepare, end_of_turn=("<end_of_turn>",))
