"""Reading of conversations: records and OpenAI-style dicts alike become checked records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from engine_core.errors import InvalidRequest
from engine_core.limits import LIMITS, Limits
from engine_core.message_order import order_turns
from engine_core.message_parts import part_bytes, read_part
from engine_core.messages import MediaPart, Message, TextPart, TranslationPart
from engine_core.tool_parsing import read_call_id, read_tool_call
from engine_core.values import is_empty, shown, text_size

if TYPE_CHECKING:
    from engine_core.messages import Part, Role, ToolCall

__all__ = ["parse_messages"]

_FIELDS = (
    "role",
    "content",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
    "name",
)
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def _fail(where: str, rule: str, got: str, field: str, hint: str = "") -> NoReturn:
    raise InvalidRequest(f"{where}: {rule}, got {got}", code=f"request.messages.{field}", hint=hint)


def parse_messages(
    raw: Sequence[Message | Mapping[str, Any]], limits: Limits = LIMITS
) -> tuple[Message, ...]:
    """Read a conversation.

    Records are checked exactly as dicts are. Nothing that the caller passed is kept by reference.

    Args:
        raw: Turns in order: ``Message`` records, OpenAI-style dicts, or both.
        limits: Bounds.

    Returns:
        Checked turns, system first, tool results in the order of their calls.

    Raises:
        InvalidRequest: A turn breaks a rule; the message names its index and field.
    """
    if isinstance(raw, (str, bytes, Mapping)) or not isinstance(raw, Sequence):
        hint = "wrap a text as [{'role': 'user', 'content': text}], or use complete() for raw text"
        _fail("messages", "must be a list of turns", shown(raw), "limit", hint)
    if not raw:
        _fail("messages", "must hold at least one turn", "none", "limit")
    if len(raw) > limits.messages:
        _fail("messages", f"must be at most {limits.messages} turns", str(len(raw)), "limit")
    reader = _Reader(limits)
    return order_turns([reader.message(item, f"messages[{i}]") for i, item in enumerate(raw)])


@attrs.define
class _Reader:
    """Reads turn after turn and counts what the whole conversation may hold."""

    limits: Limits
    parts: int = 0
    media: int = 0
    content_bytes: int = 0
    reasoning_bytes: int = 0
    calls: int = 0
    arguments_bytes: int = 0

    def message(self, raw: object, where: str) -> Message:
        """Read one turn."""
        fields = _fields(raw, where)
        role = _role(fields.get("role"), f"{where}.role")
        return Message(
            role=role,
            content=self._content(fields.get("content"), role, f"{where}.content"),
            reasoning=self._reasoning(fields, role, where),
            tool_calls=self._tool_calls(fields.get("tool_calls"), role, f"{where}.tool_calls"),
            tool_call_id=self._tool_call_id(fields.get("tool_call_id"), role, where),
            name=self._name(fields.get("name"), where),
        )

    def _content(self, raw: object, role: Role, where: str) -> tuple[Part, ...]:
        limits = self.limits
        if raw is None:
            items: Sequence[object] = ()
        elif isinstance(raw, str):
            items = (TextPart(raw),)
        elif isinstance(raw, (list, tuple)):
            items = raw
        else:
            _fail(where, "must be text or a list of parts", shown(raw), "content")
        if not items and role != "assistant":
            _fail(where, f"a {role} turn must have content", "none", "content")
        if len(items) > limits.parts_per_message:
            rule = f"must be at most {limits.parts_per_message} parts"
            _fail(where, rule, str(len(items)), "limit")
        self._charge("parts", len(items), limits.parts_total, where, "parts")
        parts: list[Part] = []
        size = 0
        for index, item in enumerate(items):
            # A plain string is no list of parts: name the field, not a part nobody wrote.
            place = where if isinstance(raw, str) else f"{where}[{index}]"
            part = read_part(item, place, limits)
            if isinstance(part, MediaPart):
                if role != "user":
                    _fail(place, "media may stand on user turns only", role, "content")
                self._charge("media", 1, limits.media_parts, where, "media parts")
            if isinstance(part, TranslationPart) and (role != "user" or len(items) != 1):
                rule = "a translation must be the only part of a user turn"
                _fail(place, rule, f"{len(items)} parts on a {role} turn", "content")
            size += part_bytes(part)
            if size > limits.content_bytes_per_message:
                rule = f"must fit {limits.content_bytes_per_message} bytes"
                _fail(where, rule, "more", "limit")
            parts.append(part)
        self._charge("content_bytes", size, limits.content_bytes_total, where, "content bytes")
        return tuple(parts)

    def _reasoning(self, fields: Mapping[str, Any], role: Role, where: str) -> str | None:
        reasoning, other = fields.get("reasoning"), fields.get("reasoning_content")
        if is_empty(reasoning):
            reasoning, other = other, None
        if is_empty(reasoning):
            return None
        where = f"{where}.reasoning"
        if not isinstance(reasoning, str):
            _fail(where, "must be a string", shown(reasoning), "reasoning")
        if not is_empty(other) and other != reasoning:
            _fail(
                where, "must equal reasoning_content when both are given", shown(other), "reasoning"
            )
        if role != "assistant":
            _fail(where, "may stand on assistant turns only", role, "reasoning")
        size = text_size(reasoning, where, "request.messages.reasoning")
        if size > self.limits.reasoning_bytes_per_message:
            rule = f"must fit {self.limits.reasoning_bytes_per_message} bytes"
            _fail(where, rule, str(size), "limit")
        bound = self.limits.reasoning_bytes_total
        self._charge("reasoning_bytes", size, bound, where, "reasoning bytes")
        return reasoning

    def _tool_calls(self, raw: object, role: Role, where: str) -> tuple[ToolCall, ...]:
        if is_empty(raw):
            return ()
        if not isinstance(raw, (list, tuple)):
            _fail(where, "must be a list of calls", shown(raw), "tool_calls")
        if role != "assistant":
            _fail(where, "may stand on assistant turns only", role, "tool_calls")
        limits = self.limits
        self._charge("calls", len(raw), limits.tool_calls, where, "tool calls")
        calls: list[ToolCall] = []
        for index, item in enumerate(raw):
            call, size = read_tool_call(item, f"{where}[{index}]", limits)
            bound = limits.arguments_total_bytes
            self._charge("arguments_bytes", size, bound, where, "argument bytes")
            calls.append(call)
        return tuple(calls)

    def _tool_call_id(self, raw: object, role: Role, where: str) -> str | None:
        where = f"{where}.tool_call_id"
        if role == "tool":
            return read_call_id(raw, where, "request.messages.tool_call_id", self.limits)
        if not is_empty(raw):
            _fail(where, "may stand on tool turns only", role, "tool_call_id")
        return None

    def _name(self, raw: object, where: str) -> str | None:
        where = f"{where}.name"
        if is_empty(raw):
            return None
        if not isinstance(raw, str) or len(raw) > self.limits.tool_name_chars:
            rule = f"must be a string of at most {self.limits.tool_name_chars} characters"
            _fail(where, rule, shown(raw), "name")
        text_size(raw, where, "request.messages.name")
        return raw

    def _charge(self, counter: str, amount: int, bound: int, where: str, what: str) -> None:
        """Add to a total of the conversation."""
        total = getattr(self, counter) + amount
        if total > bound:
            _fail(where, f"{what} must be at most {bound} together", str(total), "limit")
        setattr(self, counter, total)


def _fields(raw: object, where: str) -> Mapping[str, Any]:
    """Give a turn's fields by name, whichever way it was written."""
    if isinstance(raw, Message):
        return {
            "role": raw.role,
            "content": raw.content,
            "reasoning": raw.reasoning,
            "tool_calls": raw.tool_calls,
            "tool_call_id": raw.tool_call_id,
            "name": raw.name,
        }
    if not isinstance(raw, Mapping):
        _fail(where, "must be a message record or a dict", shown(raw), "field")
    for key, value in raw.items():
        # Clients send back what they received: fields without a value say nothing.
        if key not in _FIELDS and not is_empty(value):
            _fail(where, "must have known fields only", shown(key), "field")
    return raw


def _role(raw: object, where: str) -> Role:
    role = _ROLES.get(raw) if isinstance(raw, str) else None
    if role is None:
        _fail(where, f"must be one of {', '.join(_ROLES)}", shown(raw), "role")
    return role
