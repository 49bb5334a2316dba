"""Reading of tool declarations and tool calls: records or OpenAI-style dicts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError, InvalidRequest
from engine_core.limits import LIMITS, Limits
from engine_core.messages import ToolCall, ToolDecl
from engine_core.values import freeze_json, is_empty, shown, text_size

if TYPE_CHECKING:
    from engine_core.messages import Message

__all__ = ["check_declared", "parse_tools", "read_call_id", "read_tool_call", "read_tool_name"]

_CALLS = "request.messages.tool_calls"
# The dot is there for namespaced names, which tool servers use.
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def _fail(where: str, rule: str, got: str, code: str, hint: str = "") -> NoReturn:
    raise InvalidRequest(f"{where}: {rule}, got {got}", code=code, hint=hint)


def parse_tools(
    raw: Sequence[ToolDecl | Mapping[str, Any]] | None, limits: Limits = LIMITS
) -> tuple[ToolDecl, ...]:
    """Read tool declarations.

    Args:
        raw: ``ToolDecl`` records, OpenAI-style ``{"type": "function", "function": {...}}`` dicts,
            or the inner dicts alone; ``None`` means none.
        limits: Bounds.

    Returns:
        Declarations in order, names unique, schemas copied and frozen. Whether a schema's
        keywords can be honoured is decided where schemas are compiled.

    Raises:
        InvalidRequest: A declaration breaks a rule; the message names its index and field.
    """
    if raw is None:
        return ()
    if isinstance(raw, (str, bytes)) or not isinstance(raw, Sequence):
        _fail("tools", "must be a list", shown(raw), "request.tools")
    if len(raw) > limits.tools:
        _fail("tools", f"must be at most {limits.tools}", str(len(raw)), "request.tools")
    tools: list[ToolDecl] = []
    names: set[str] = set()
    descriptions = schemas = 0
    for index, item in enumerate(raw):
        where = f"tools[{index}]"
        tool, description_bytes, schema_bytes = _read_tool(item, where, limits)
        if tool.name in names:
            _fail(f"{where}.name", "must be unique", shown(tool.name), "request.tools.name")
        names.add(tool.name)
        descriptions += description_bytes
        schemas += schema_bytes
        if descriptions > limits.tool_descriptions_total_bytes:
            bound = limits.tool_descriptions_total_bytes
            code = "request.tools.description"
            _fail(where, f"descriptions must fit {bound} bytes together", "more", code)
        if schemas > limits.tool_schemas_total_bytes:
            bound = limits.tool_schemas_total_bytes
            code = "request.tools.parameters"
            _fail(where, f"schemas must fit {bound} bytes together", "more", code)
        tools.append(tool)
    return tuple(tools)


def _read_tool(raw: object, where: str, limits: Limits) -> tuple[ToolDecl, int, int]:
    if isinstance(raw, ToolDecl):
        fields: Mapping[str, Any] = {
            "name": raw.name,
            "description": raw.description,
            "parameters": raw.parameters,
        }
    elif isinstance(raw, Mapping):
        fields = raw
        if "function" in raw:
            where, fields = _function(raw, where, {"type", "function"}, "request.tools")
        elif "type" in raw:
            if raw["type"] != "function":
                code = "request.tools.type"
                _fail(f"{where}.type", "must be 'function'", shown(raw["type"]), code)
            fields = {key: value for key, value in raw.items() if key != "type"}
    else:
        _fail(where, "must be a tool record or a dict", shown(raw), "request.tools")
    # Every accepted call satisfies its schema, so "strict" asks for nothing more.
    _only(fields, {"name", "description", "parameters", "strict"}, where, "request.tools")
    strict = fields.get("strict")
    if strict is not None and not isinstance(strict, bool):
        _fail(f"{where}.strict", "must be a boolean", shown(strict), "request.tools.strict")
    name = read_tool_name(fields.get("name"), f"{where}.name", "request.tools.name", limits)
    description, description_bytes = _description(fields.get("description"), where, limits)
    parameters = fields.get("parameters")
    if parameters is None:
        return ToolDecl(name=name, description=description), description_bytes, 0
    frozen, size = _object(
        parameters,
        f"{where}.parameters",
        limits.tool_schema_bytes,
        "request.tools.parameters",
        limits,
    )
    tool = ToolDecl(name=name, description=description, parameters=frozen)
    return tool, description_bytes, size


def _description(raw: object, where: str, limits: Limits) -> tuple[str, int]:
    code, where = "request.tools.description", f"{where}.description"
    if raw is None or raw == "":
        return "", 0
    if not isinstance(raw, str) or not raw.strip():
        _fail(where, "must be a non-blank string", shown(raw), code)
    size = text_size(raw, where, code)
    if size > limits.tool_description_bytes:
        _fail(where, f"must fit {limits.tool_description_bytes} bytes", str(size), code)
    return raw, size


def read_tool_name(raw: object, where: str, code: str, limits: Limits) -> str:
    """Read a function name.

    Args:
        raw: The name.
        where: Its place, for the error.
        code: Error code.
        limits: Bounds.

    Returns:
        The name: letters, digits, ``_``, ``-`` and ``.`` of ASCII.

    Raises:
        InvalidRequest: The name is no such string.
    """
    if not isinstance(raw, str) or not _NAME.fullmatch(raw) or len(raw) > limits.tool_name_chars:
        rule = f"must be 1 to {limits.tool_name_chars} letters, digits, '_', '-' or '.'"
        _fail(where, rule, shown(raw), code)
    return raw


def read_tool_call(raw: object, where: str, limits: Limits) -> tuple[ToolCall, int]:
    """Read one call of an assistant turn.

    Args:
        raw: A ``ToolCall`` record, an OpenAI-style dict whose ``arguments`` are a mapping or a
            JSON text, or the inner dict with an ``id``.
        where: Its place, e.g. ``"messages[2].tool_calls[0]"``.
        limits: Bounds.

    Returns:
        The call and the size of its arguments as compact JSON (bytes, at most).

    Raises:
        InvalidRequest: The call breaks a rule.
    """
    if isinstance(raw, ToolCall):
        identity: object = raw.id
        fields: Mapping[str, Any] = {"name": raw.name, "arguments": raw.arguments}
    elif isinstance(raw, Mapping):
        identity = raw.get("id")
        # Streaming clients leave the position they assembled the call at.
        known = {"id", "index", "type", "function"}
        if "function" in raw:
            place, fields = _function(raw, where, known, _CALLS)
        else:
            place, fields = where, {k: v for k, v in raw.items() if k not in known}
        _only(fields, {"name", "arguments"}, place, _CALLS)
    else:
        _fail(where, "must be a call record or a dict", shown(raw), _CALLS)
    call_id = read_call_id(identity, f"{where}.id", _CALLS, limits)
    name = read_tool_name(fields.get("name"), f"{where}.function.name", _CALLS, limits)
    place = f"{where}.function.arguments"
    arguments = fields.get("arguments")
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments, place, limits)
    frozen, size = _object(arguments, place, limits.arguments_bytes, _CALLS, limits)
    return ToolCall(id=call_id, name=name, arguments=frozen), size


def read_call_id(raw: object, where: str, code: str, limits: Limits) -> str:
    """Read the id of a call.

    Args:
        raw: The id.
        where: Its place, for the error.
        code: Error code.
        limits: Bounds.

    Returns:
        The id, a non-empty text.

    Raises:
        InvalidRequest: The id is missing, no text or too long.
    """
    if not isinstance(raw, str) or not raw:
        _fail(where, "must be a non-empty string", shown(raw), code)
    if text_size(raw, where, code) > limits.tool_call_id_bytes:
        _fail(where, f"must fit {limits.tool_call_id_bytes} bytes", shown(raw), code)
    return raw


def check_declared(messages: Sequence[Message], tools: Sequence[ToolDecl]) -> None:
    """Require that every call in a conversation names a declared tool.

    Args:
        messages: Checked turns.
        tools: Declared tools.

    Raises:
        InvalidRequest: A call names none of them.
    """
    names = {tool.name for tool in tools}
    for index, message in enumerate(messages):
        for position, call in enumerate(message.tool_calls):
            if call.name not in names:
                _fail(
                    f"messages[{index}].tool_calls[{position}].function.name",
                    "must be a declared tool",
                    shown(call.name),
                    _CALLS,
                    "pass the tools that the conversation used",
                )


def _function(
    raw: Mapping[str, Any], where: str, known: set[str], code: str
) -> tuple[str, Mapping[str, Any]]:
    _only(raw, known, where, code)
    if raw.get("type", "function") not in ("function", None):
        _fail(f"{where}.type", "must be 'function'", shown(raw["type"]), f"{code}.type")
    function = raw["function"]
    if not isinstance(function, Mapping):
        _fail(f"{where}.function", "must be a dict", shown(function), code)
    return f"{where}.function", function


def _only(raw: Mapping[str, Any], known: set[str], where: str, code: str) -> None:
    for key, value in raw.items():
        if key not in known and not is_empty(value):
            _fail(where, "must have known fields only", shown(key), code)


def _object(
    raw: object, where: str, max_bytes: int, code: str, limits: Limits
) -> tuple[Mapping[str, Any], int]:
    if not isinstance(raw, Mapping):
        _fail(where, "must be a JSON object", shown(raw), code)
    frozen: Mapping[str, Any]
    frozen, size = freeze_json(
        raw,
        where,
        max_bytes=max_bytes,
        max_depth=limits.json_depth,
        max_digits=limits.json_number_digits,
        code=code,
    )
    return frozen, size


def _parse_arguments(text: str, where: str, limits: Limits) -> Any:
    if text_size(text, where, _CALLS) > limits.arguments_bytes:
        _fail(where, f"must fit {limits.arguments_bytes} bytes", "more", _CALLS)
    try:
        return parse_json(text.encode(), where, limits)
    except EngineError as exc:
        raise InvalidRequest(str(exc), code=_CALLS) from exc
