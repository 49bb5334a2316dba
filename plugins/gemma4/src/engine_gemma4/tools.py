"""The tool syntax of Gemma 4: calls between markers, arguments in a language of their own.

    <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>

The markup states every type. A block that is not read stays in the reply's text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Final

import attrs

from engine_core.family import Proposal, Typed
from engine_core.limits import LIMITS
from engine_gemma4.arguments import DELIMITER, read_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_core.messages import ToolDecl

__all__ = ["CLOSE", "GEMMA4_SYNTAX", "OPEN", "Gemma4Syntax"]

MAX_CALLS: Final = 64
MAX_OPENERS: Final = 256

OPEN: Final = "<|tool_call>"
CLOSE: Final = "<tool_call|>"
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

        A call ends at the first closer: it is one token, which no text that a model means to write
        contains.

        Args:
            text: The answer part of a finished reply.
            tools: Advertised tools; they play no part in the grammar.

        Returns:
            Proposals in order, at most 64; one with several readings leaves the choice to core.
        """
        return tuple(_proposals(text))


def _proposals(text: str) -> Iterator[Proposal]:
    found = at = 0
    for _ in range(MAX_OPENERS):
        start = text.find(OPEN, at)
        close = text.find(CLOSE, start + len(OPEN))
        if start < 0 or close < 0 or found == MAX_CALLS or at > LIMITS.arguments_total_bytes:
            return
        # What stands inside a refused block is its text, not the place of another call.
        at = close + len(CLOSE)
        proposal = _read_call(text, start, close)
        if proposal is not None:
            found += 1
            yield proposal


def _read_call(text: str, start: int, close: int) -> Proposal | None:
    begin = start + len(OPEN)
    head = _HEAD.match(text, begin, close)
    if head is None or close - begin > LIMITS.arguments_bytes:
        return None
    readings = read_arguments(text[head.end() : close])
    if not readings:
        return None
    return Proposal(
        span=(start, close + len(CLOSE)),
        name=head["name"],
        readings=tuple(
            {key: Typed(value) for key, value in arguments.items()} for arguments in readings
        ),
    )


GEMMA4_SYNTAX = Gemma4Syntax()
