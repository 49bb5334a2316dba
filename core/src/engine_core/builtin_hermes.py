"""The tool syntax that writes each call as JSON between ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Final

import attrs

from engine_core.limits import LIMITS
from engine_core.tools.markup import json_call

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_core.family import Proposal
    from engine_core.messages import ToolDecl

__all__ = ["HERMES", "HermesSyntax"]

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
# A string without an end matches to the end, so that its inner quotes are not tried in turn.
_JSON_STEP = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|[{}\[\]]', re.DOTALL)
_SPACE = re.compile(r"\s*")


@attrs.frozen
class HermesSyntax:
    """Reads ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    name: ClassVar[str] = "hermes"
    markers: ClassVar[tuple[tuple[str, str], ...]] = ((_OPEN, _CLOSE),)
    probe_rounds: ClassVar[int] = 2

    def parse(self, text: str, tools: Sequence[ToolDecl]) -> tuple[Proposal, ...]:  # noqa: ARG002 - the types are in the JSON
        """Read the completed calls of a reply.

        The JSON is read first and the closing marker required after it, so a marker inside a
        JSON string cuts nothing.

        Args:
            text: The answer part of a finished reply.
            tools: Advertised tools; the markup states all types itself.

        Returns:
            Proposals in order, at most 64.
        """
        return tuple(_proposals(text))


def _proposals(text: str) -> Iterator[Proposal]:
    found = at = read = 0
    for _ in range(LIMITS.call_openers):
        start = text.find(_OPEN, at)
        if start < 0 or found == LIMITS.reply_calls or read > LIMITS.arguments_total_bytes:
            return
        at = start + len(_OPEN)
        proposal = _read_call(text, start, at)
        # A call without an end was looked at up to the bound of one call.
        read += LIMITS.arguments_bytes if proposal is None else proposal.span[1] - start
        if proposal is not None:
            found += 1
            at = proposal.span[1]
            yield proposal


def _read_call(text: str, start: int, at: int) -> Proposal | None:
    begin = _skip_space(text, at)
    end = _object_end(text, begin)
    if end is None:
        return None
    close = _skip_space(text, end)
    if not text.startswith(_CLOSE, close):
        return None
    span = (start, close + len(_CLOSE))
    return json_call(text[begin:end], span, arguments_key="arguments")


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _object_end(text: str, begin: int) -> int | None:
    """Find where the JSON object that starts here ends, strings taken into account."""
    if not text.startswith("{", begin):
        return None
    depth = 0
    for match in _JSON_STEP.finditer(text, begin, begin + LIMITS.arguments_bytes):
        piece = match[0]
        if piece in "{[":
            depth += 1
        elif piece in "}]":
            depth -= 1
            if depth == 0:
                return match.end()
        if depth > LIMITS.json_depth:
            return None
    return None


HERMES = HermesSyntax()
