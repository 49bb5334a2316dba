"""The dialect of Gemma 4 chat templates.

All published revisions read results from ``tool_responses`` beside the calls; the first ones print
a message of the role ``tool`` as a turn that the models never saw. So results are folded into the
turn of their calls, and the answer that follows them joins it: the first revisions leave a turn
without content open, and the next message would start another inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine_core.builtin_chatml import message_to_dict, tool_to_dict
from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError, InvalidRequest
from engine_core.family import ReasoningMarkers, TemplateDialect, TemplateInput
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engine_core.messages import Message, ToolCall, ToolDecl

__all__ = ["GEMMA4_DIALECT", "prepare"]

# How the visible control tokens of this vocabulary begin.
CONTROL_STARTS: Final = ("<", "[")


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
        Messages with results beside their calls, and tools with one type a parameter.

    Raises:
        InvalidRequest: Results do not answer the calls before them, each once.
    """
    declared = []
    for tool in tools:
        spelled = tool_to_dict(tool)
        spelled["function"]["parameters"] = _one_type(spelled["function"]["parameters"])
        declared.append(spelled)
    return TemplateInput(messages=list(_fold(messages)), tools=declared or None)


def _fold(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Join each calling turn with its results and the answer after them."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message.role == "tool":
            raise _unmatched(message.tool_call_id)
        spelled = message_to_dict(message)
        if message.reasoning is not None:
            # The templates write these two newlines themselves.
            reasoning = message.reasoning.removeprefix("\n").removesuffix("\n")
            spelled["reasoning_content"] = reasoning
        results: list[Message] = []
        while message.tool_calls and at < len(messages) and messages[at].role == "tool":
            results.append(messages[at])
            at += 1
        if results:
            spelled["tool_responses"] = _responses(message.tool_calls, results)
            if at < len(messages) and _is_answer(messages[at]):
                # Reasoning of the answer has no place here: what precedes calls is not its own.
                spelled["content"] = _joined(spelled["content"], message_to_dict(messages[at]))
                at += 1
        yield spelled


def _is_answer(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls


def _joined(content: str | list[Any], answer: Mapping[str, Any]) -> Any:
    """Put the answer's content after that of the calling turn."""
    more = answer["content"]
    if not content or not more:
        return more or content
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}\n{more}"
    return [*_parts(content), *_parts(more)]


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _responses(calls: Sequence[ToolCall], results: Sequence[Message]) -> list[dict[str, Any]]:
    """Match results to calls by id, in the order of the calls."""
    by_id = {result.tool_call_id: result for result in results}
    for result in results:
        if not any(call.id == result.tool_call_id for call in calls):
            raise _unmatched(result.tool_call_id)
    if len(by_id) != len(results) or len(results) != len(calls):
        raise InvalidRequest(
            f"tool results: must answer each call once, got {len(results)} for {len(calls)} calls",
            code="request.messages.order",
            hint="send one result a call, directly after the calls",
        )
    return [{"name": call.name, "response": _response(by_id[call.id].text)} for call in calls]


def _unmatched(call_id: str | None) -> InvalidRequest:
    return InvalidRequest(
        f"tool result: must name a call of the turn before it, got {call_id!r}",
        code="request.messages.order",
        hint="send the calling turn, then one result a call",
    )


def _response(text: str) -> Any:
    """Give a result as the object that it spells, else as its text."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        value = parse_json(text.encode(), "tool result", LIMITS)
    except (EngineError, UnicodeEncodeError):
        return text
    # Control tokens were made harmless in the text as it stands. An escape in it may spell one that
    # only appears when it is decoded, so a text changed by decoding must not hold a beginning.
    if any(one not in text and any(map(one.__contains__, CONTROL_STARTS)) for one in _texts(value)):
        return text
    return value if isinstance(value, dict) else text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield key
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)


def _one_type(schema: Any) -> Any:
    """Spell "this or null" as the templates do: they print one type and the word ``nullable``.

    ``{"type": ["string", "null"]}`` and ``{"anyOf": [{"type": "string"}, {"type": "null"}]}`` would
    be printed as a list, or as nothing at all.
    """
    if isinstance(schema, list):
        return [_one_type(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    options = result.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options and len(options) == 2:
        del result["anyOf"]
        other = next(option for option in options if option != {"type": "null"})
        result = {**(other if isinstance(other, dict) else {}), **result, "nullable": True}
    types = result.get("type")
    if isinstance(types, list) and "null" in types and len(types) == 2:
        result["type"] = next(name for name in types if name != "null")
        result["nullable"] = True
    for name in ("items", "properties"):
        inner = result.get(name)
        if name == "items" or not isinstance(inner, dict):
            if inner is not None:
                result[name] = _one_type(inner)
        else:
            result[name] = {key: _one_type(entry) for key, entry in inner.items()}
    return result


GEMMA4_DIALECT = TemplateDialect(
    name="gemma4",
    prepare=prepare,
    reasoning=ReasoningMarkers(open="<|channel>thought", close="<channel|>"),
    end_of_turn=("<turn|>",),
)
