"""The tool syntax of FunctionGemma: calls between markers, texts between ``<escape>`` tokens.

    <start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3}<end_function_call>

One token delimits a text on both sides, so a text ends at the next one: a reading that took a
delimiter for text would turn one value into another. A bare value carries no type at the top,
where core reads it by the declared schema; inside lists and objects it must be a JSON scalar.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs

from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError
from engine_core.family import Proposal, Typed
from engine_core.limits import LIMITS
from engine_core.tools.markup import find_calls, is_argument_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.messages import ToolDecl

__all__ = ["FUNCTION_GEMMA", "FunctionGemmaSyntax"]

OPEN: Final = "<start_function_call>"
CLOSE: Final = "<end_function_call>"
DELIMITER: Final = "<escape>"
_HEAD = re.compile(rf"\s*+call:(?P<name>[A-Za-z0-9_.-]{{1,{LIMITS.tool_name_chars}}})\{{")
_SPACE = re.compile(r"\s*+")
_BARE = re.compile(r"[^\x00-\x1f\x7f<>{}\[\],:]+")


@attrs.frozen
class FunctionGemmaSyntax:
    """Reads ``<start_function_call>call:NAME{KEY:VALUE,...}<end_function_call>``."""

    name: ClassVar[str] = "function_gemma"
    markers: ClassVar[tuple[tuple[str, str], ...]] = ((OPEN, CLOSE),)
    delimiters: ClassVar[tuple[str, ...]] = (DELIMITER,)
    probe_rounds: ClassVar[int] = 2

    def parse(self, text: str, tools: Sequence[ToolDecl]) -> tuple[Proposal, ...]:  # noqa: ARG002 - core types bare values
        """Read the completed calls of a reply.

        Args:
            text: The answer part of a finished reply.
            tools: Advertised tools; they play no part in the grammar.

        Returns:
            Proposals in order, at most 64.
        """
        return find_calls(text, OPEN, _read_call)


class _NoCallError(Exception):
    """The grammar is broken at a place."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


def _read_call(text: str, start: int) -> tuple[int, Proposal | None]:
    """Read one call; give where reading stopped, and the call when it is one."""
    reader = _Reader(text=text, at=start + len(OPEN))
    try:
        name, arguments = reader.call()
    except _NoCallError as broken:
        return broken.at, None
    return reader.at, Proposal(span=(start, reader.at), name=name, readings=(arguments,))


@attrs.define(kw_only=True)
class _Reader:
    """Reads one call from a place on; ``at`` moves with it."""

    text: str
    at: int

    def call(self) -> tuple[str, Mapping[str, Any]]:
        """Read from after the opener to after the closer."""
        head = _HEAD.match(self.text, self.at)
        if head is None:
            raise _NoCallError(self.at)
        self.at = head.end()
        arguments = self._members(1)
        self._space()
        self._expect(CLOSE)
        return head["name"], arguments

    def _members(self, depth: int) -> dict[str, Any]:
        """Read what stands after ``{``, the closing brace included; top values stay untyped."""
        members: dict[str, Any] = {}
        self._space()
        if self._skip("}"):
            return members
        while True:
            key = self._key()
            self._expect(":")
            if key in members or len(members) == LIMITS.checked_entries:
                raise _NoCallError(self.at)
            members[key] = self._value(depth)
            if self._ends("}"):
                return members

    def _key(self) -> str:
        self._space()
        key = self._delimited() if self.text.startswith(DELIMITER, self.at) else self._bare()
        self._space()
        if not is_argument_key(key):
            raise _NoCallError(self.at)
        return key

    def _value(self, depth: int) -> Any:
        """Read a value; at depth 1 texts and bare values stay text, others are ``Typed``."""
        self._space()
        is_top = depth == 1
        if self.text.startswith(DELIMITER, self.at):
            value: Any = self._delimited()
            return Typed(value) if is_top else value
        if self.text.startswith(("{", "["), self.at):
            if depth >= LIMITS.json_depth:
                raise _NoCallError(self.at)
            value = self._members(depth + 1) if self._skip("{") else self._items(depth + 1)
            return Typed(value) if is_top else value
        bare = self._bare()
        return bare if is_top else self._scalar(bare)

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        self._expect("[")
        self._space()
        if self._skip("]"):
            return items
        while True:
            if len(items) == LIMITS.checked_entries:
                raise _NoCallError(self.at)
            items.append(self._value(depth))
            if self._ends("]"):
                return items

    def _scalar(self, bare: str) -> Any:
        try:
            value = parse_json(bare.encode(), "argument", LIMITS)
        except (EngineError, UnicodeEncodeError) as exc:
            raise _NoCallError(self.at) from exc
        if isinstance(value, str):
            raise _NoCallError(self.at)
        return value

    def _delimited(self) -> str:
        begin = self.at + len(DELIMITER)
        end = self.text.find(DELIMITER, begin, begin + LIMITS.arguments_bytes)
        if end < 0:
            raise _NoCallError(len(self.text))
        self.at = end + len(DELIMITER)
        return self.text[begin:end]

    def _bare(self) -> str:
        match = _BARE.match(self.text, self.at, self.at + LIMITS.arguments_bytes)
        if match is None:
            raise _NoCallError(self.at)
        self.at = match.end()
        return match[0].strip()

    def _space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = self.at if match is None else match.end()

    def _skip(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) if found else 0
        return found

    def _expect(self, token: str) -> None:
        if not self._skip(token):
            raise _NoCallError(self.at)

    def _ends(self, close: str) -> bool:
        """Read the comma between two entries, or the closing bracket after the last."""
        self._space()
        if self._skip(close):
            return True
        self._expect(",")
        return False


FUNCTION_GEMMA = FunctionGemmaSyntax()
