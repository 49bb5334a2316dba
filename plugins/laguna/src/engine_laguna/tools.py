"""The tool syntax of Laguna: a name, then keys and values, each between tags of its own.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

Between tags there is nothing or white space (one revision of the template writes a newline there);
a value is everything between its tags, so that leading spaces and final newlines of code survive.
Values carry no types: core reads each by the declared schema.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Final

import attrs

from engine_core.family import Proposal
from engine_core.limits import LIMITS
from engine_core.tools.markup import find_calls, text_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.messages import ToolDecl

__all__ = ["LAGUNA_SYNTAX", "LagunaSyntax"]

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
# Either the end of the call or the tags around the next key, up to where its value begins.
_NEXT: Final = (
    rf"\s*+(?:(?P<close>{CLOSE})"
    r"|<arg_key>(?P<key>(?:(?!</?(?:tool_call|arg_key|arg_value)>).)*+)</arg_key>\s*+<arg_value>)"
)
_HEAD = re.compile(rf"\s*+(?P<name>[A-Za-z0-9_.-]{{1,{LIMITS.tool_name_chars}}}){_NEXT}", re.DOTALL)
_VALUE_END = re.compile(rf"</arg_value>{_NEXT}", re.DOTALL)


@attrs.frozen
class LagunaSyntax:
    """Reads ``<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>``."""

    name: ClassVar[str] = "laguna"
    markers: ClassVar[tuple[tuple[str, str], ...]] = ((OPEN, CLOSE),)
    probe_rounds: ClassVar[int] = 2

    def parse(self, text: str, tools: Sequence[ToolDecl]) -> tuple[Proposal, ...]:  # noqa: ARG002 - core types the values
        """Read the completed calls of a reply.

        A call must follow the grammar from its opener to its closer; prose between the two is no
        call. Tags inside a value are text only where no reading without them exists: a value ends
        at the first of its closing tags that the grammar can go on from, which is the one reading
        with the fewest tags taken for text.

        Args:
            text: The answer part of a finished reply.
            tools: Advertised tools; they play no part in the grammar.

        Returns:
            Proposals in order, at most 64.
        """
        return find_calls(text, OPEN, _read_call)


def _read_call(text: str, start: int) -> tuple[int, Proposal | None]:
    """Read one call; give where reading stopped, and the call when it is one."""
    begin = start + len(OPEN)
    stop = min(len(text), begin + LIMITS.arguments_bytes)
    head = _HEAD.match(text, begin, stop)
    if head is None:
        return begin, None
    pairs: list[tuple[str, str]] = []
    step = head
    while step["close"] is None:
        value_begin = step.end()
        following = _VALUE_END.search(text, value_begin, stop)
        if following is None:
            return stop, None
        pairs.append((step["key"], text[value_begin : following.start()]))
        step = following
    arguments = text_arguments(pairs)
    if arguments is None:
        return step.end(), None
    span = (start, step.end())
    return step.end(), Proposal(span=span, name=head["name"], readings=(arguments,))


LAGUNA_SYNTAX = LagunaSyntax()
