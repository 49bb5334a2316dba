"""The tool syntax of Qwen3.5: function and parameters between tags that name them.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

A value is everything between its tags without the one newline that the template writes on each
side, so leading spaces and final newlines of code survive. Values carry no types: core reads each
by the declared schema.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs

from engine_core.family import Proposal
from engine_core.limits import LIMITS
from engine_core.tools.markup import find_calls, text_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.messages import ToolDecl

__all__ = ["QWEN_XML", "QwenXmlSyntax"]

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_END: Final = rf"</function>\s*+{CLOSE}"
_CALL: Final = rf"{OPEN}\s*+<function="
# What may follow a complete part of a call: the next parameter, or the end.
_NEXT: Final = rf"\s*+(?:<parameter=(?P<key>[^<>]*+)>|(?P<end>{_END}))"
_HEAD = re.compile(
    rf"{OPEN}\s*+<function=(?P<name>[A-Za-z0-9_.-]{{1,{LIMITS.tool_name_chars}}})>{_NEXT}"
)
_VALUE_STEP = re.compile(
    rf"(?P<stop></parameter>{_NEXT})|(?P<broken>{CLOSE}\s*+(?={_CALL}))"
    rf"|(?P<nested>{_CALL})|(?P<close>{CLOSE})"
)


@attrs.frozen
class QwenXmlSyntax:
    """Reads ``<tool_call><function=F><parameter=K>V</parameter>...</function></tool_call>``."""

    name: ClassVar[str] = "qwen_xml"
    markers: ClassVar[tuple[tuple[str, str], ...]] = ((OPEN, CLOSE),)
    # The template writes scalars through Python's str, and a model writes what it has seen.
    literals: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"True": True, "False": False, "None": None}
    )
    probe_rounds: ClassVar[int] = 2

    def parse(self, text: str, tools: Sequence[ToolDecl]) -> tuple[Proposal, ...]:  # noqa: ARG002 - core types the values
        """Read the completed calls of a reply.

        A call must follow the grammar from its opener to its closer; JSON or prose between the
        two is no call. Tags inside a value are text only where no reading without them exists: a
        value ends at the first of its closing tags that the grammar can go on from, which is the
        one reading with the fewest tags taken for text. A whole call quoted inside a value belongs
        to the value.

        Args:
            text: The answer part of a finished reply.
            tools: Advertised tools; they play no part in the grammar.

        Returns:
            Proposals in order, at most 64.
        """
        return find_calls(text, OPEN, _read_call)


def _read_call(text: str, start: int) -> tuple[int, Proposal | None]:
    """Read one call; give where reading stopped, and the call when it is one."""
    limit = min(len(text), start + LIMITS.arguments_bytes)
    head = _HEAD.match(text, start, limit)
    if head is None:
        return start + len(OPEN), None
    pairs: list[tuple[str, str]] = []
    step = head
    while step["end"] is None:
        begin = step.end()
        at, following = _end_of_value(text, begin, limit)
        if following is None:
            return at, None
        pairs.append((step["key"], _without_newlines(text[begin : following.start()])))
        step = following
    arguments = text_arguments(pairs)
    if arguments is None:
        return step.end(), None
    span = (start, step.end())
    return step.end(), Proposal(span=span, name=head["name"], readings=(arguments,))


def _end_of_value(text: str, begin: int, limit: int) -> tuple[int, re.Match[str] | None]:
    """Find the closing tag of a value with what follows it; else give where to go on."""
    depth = 0
    for step in _VALUE_STEP.finditer(text, begin, limit):
        if step["nested"] is not None:
            depth += 1
        elif depth > 0:
            # The end of a quoted call, of either form; a quoted parameter ends nothing.
            depth -= (
                step["end"] is not None or step["close"] is not None or step["broken"] is not None
            )
        elif step["stop"] is not None:
            return step.end(), step
        elif step["broken"] is not None:
            # This call was closed without its end tags, and another one begins.
            return step.end(), None
    return limit, None


def _without_newlines(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


QWEN_XML = QwenXmlSyntax()
