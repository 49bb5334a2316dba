"""The tool syntax of Gemma 4: calls between markers, arguments in a language of their own.

    <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>

The markup states every type. A block that is not read stays in the reply's text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import attrs

from engine_core.family import Proposal, Typed
from engine_core.limits import LIMITS
from engine_core.tools.markup import find_calls
from engine_gemma4.arguments import CLOSE, DELIMITER, OPEN, read_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.messages import ToolDecl

__all__ = ["GEMMA4_SYNTAX", "Gemma4Syntax"]

_HEAD = re.compile(rf"\s*+call\s*+:\s*+(?P<name>[A-Za-z0-9_.:-]{{1,{LIMITS.tool_name_chars}}})")


@attrs.frozen
class Gemma4Syntax:
    """Reads ``<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>``."""

    name: ClassVar[str] = "gemma4"
    markers: ClassVar[tuple[tuple[str, str], ...]] = ((OPEN, CLOSE),)
    delimiters: ClassVar[tuple[str, ...]] = (DELIMITER,)
    probe_rounds: ClassVar[int] = 2

    def parse(self, text: str, tools: Sequence[ToolDecl]) -> tuple[Proposal, ...]:  # noqa: ARG002 - the markup states all types
        """Read the completed calls of a reply.

        The grammar decides where a call ends, so a closer quoted in a text cuts nothing.

        Args:
            text: The answer part of a finished reply.
            tools: Advertised tools; they play no part in the grammar.

        Returns:
            Proposals in order, at most 64; one with several readings leaves the choice to core.
        """
        return find_calls(text, OPEN, _read_call)


def _read_call(text: str, start: int) -> tuple[int, Proposal | None]:
    """Read one call; give where to go on, and the call when it is one."""
    begin = start + len(OPEN)
    stop = min(len(text), begin + LIMITS.arguments_bytes)
    head = _HEAD.match(text, begin, stop)
    if head is None:
        return begin, None
    arguments = read_arguments(text, head.end(), stop)
    if arguments is None:
        # What stands inside a refused call is its text, not the place of another call.
        close = text.find(CLOSE, begin, stop)
        return stop if close < 0 else close + len(CLOSE), None
    readings = tuple(
        {key: Typed(value) for key, value in reading.items()} for reading in arguments.readings
    )
    span = (start, arguments.end)
    return arguments.end, Proposal(span=span, name=head["name"], readings=readings)


GEMMA4_SYNTAX = Gemma4Syntax()
