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

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engine_core.messages import ToolDecl

__all__ = ["LAGUNA_SYNTAX", "LagunaSyntax"]

MAX_CALLS: Final = 64
MAX_OPENERS: Final = 256
MAX_ARGUMENTS: Final = 256
MAX_READINGS: Final = 16
MAX_KEY_BYTES: Final = 128

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
KEY_OPEN: Final = "<arg_key>"
KEY_CLOSE: Final = "</arg_key>"
VALUE_OPEN: Final = "<arg_value>"
VALUE_CLOSE: Final = "</arg_value>"

_TAG = re.compile(r"</?(?:tool_call|arg_key|arg_value)>")
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LIMITS.tool_name_chars}}}")
_KEY = re.compile(r"[^\x00-\x1f\x7f<>{}\[\]]+")

Pair = tuple[str, str]


@attrs.frozen
class LagunaSyntax:
    """Reads ``<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>``."""

    name: ClassVar[str] = "laguna"
    markers: ClassVar[tuple[tuple[str, str], ...]] = ((OPEN, CLOSE),)
    probe_rounds: ClassVar[int] = 2

    def parse(self, text: str, tools: Sequence[ToolDecl]) -> tuple[Proposal, ...]:  # noqa: ARG002 - core types the values
        """Read the completed calls of a reply.

        A call must follow the grammar from its opener to its closer; prose between the two is no
        call. Tags inside a value are text only where no reading without them exists.

        Args:
            text: The answer part of a finished reply.
            tools: Advertised tools; they play no part in the grammar.

        Returns:
            Proposals in order, at most 64.
        """
        return tuple(_proposals(text))


def _proposals(text: str) -> Iterator[Proposal]:
    found = at = read = 0
    for _ in range(MAX_OPENERS):
        start = text.find(OPEN, at)
        if start < 0 or found == MAX_CALLS or read > LIMITS.arguments_total_bytes:
            return
        at = start + len(OPEN)
        end, proposal = _read_call(text, start)
        read += end - start
        if proposal is not None:
            found += 1
            at = end
            yield proposal


@attrs.frozen
class _Reading:
    """One way to read a call up to a tag.

    Attributes:
        inside: Tags that it takes for text of a value.
        pairs: Completed keys and values, newest first as a linked list.
        key: Key whose value is being read.
        start: Where the text after the last structural tag begins.
    """

    inside: int
    start: int
    pairs: tuple[Pair, object] | None = None
    key: str = ""


def _read_call(text: str, start: int) -> tuple[int, Proposal | None]:
    """Read one call; give where reading stopped, and the call when it is one.

    All readings advance tag by tag, and of those in one state only the ones with the fewest tags
    inside values live on: what follows treats them alike, so no other can win. The first closer
    that a reading reaches ends the call: a later one would count more tags as text.
    """
    begin = start + len(OPEN)
    states: dict[str, list[_Reading]] = {OPEN: [_Reading(inside=0, start=begin)]}
    name = ""
    for tag in _TAG.finditer(text, begin, min(len(text), begin + LIMITS.arguments_bytes)):
        if OPEN in states:
            name = text[begin : tag.start()].strip()
            if _NAME.fullmatch(name) is None:
                return tag.end(), None
        states = _advance(text, states, tag)
        if CLOSE in states:
            readings = _accept(states[CLOSE])
            span = (start, tag.end())
            if not readings:
                return tag.end(), None
            return tag.end(), Proposal(span=span, name=name, readings=readings)
        if not states:
            return tag.end(), None
    return min(len(text), begin + LIMITS.arguments_bytes), None


# Structural successors: the last tag read -> the tags that may follow it.
_FOLLOWERS: Final[Mapping[str, tuple[str, ...]]] = {
    OPEN: (KEY_OPEN, CLOSE),
    KEY_OPEN: (KEY_CLOSE,),
    KEY_CLOSE: (VALUE_OPEN,),
    VALUE_OPEN: (VALUE_CLOSE,),
    VALUE_CLOSE: (KEY_OPEN, CLOSE),
}


def _advance(
    text: str, states: Mapping[str, list[_Reading]], tag: re.Match[str]
) -> dict[str, list[_Reading]]:
    """Move every reading over one tag."""
    following: dict[str, list[_Reading]] = {}
    for state, readings in states.items():
        for reading in readings:
            before = text[reading.start : tag.start()] if state != VALUE_OPEN else ""
            if tag[0] in _FOLLOWERS[state] and _separates(state, before):
                step = _step(text, reading, state, tag)
                _keep(following, tag[0], step)
            if state == VALUE_OPEN:
                inside = attrs.evolve(reading, inside=reading.inside + 1)
                _keep(following, VALUE_OPEN, inside)
    return following


def _separates(state: str, before: str) -> bool:
    """Tell whether what stands before a tag is allowed there: white space between two pairs' tags.

    The name after the opener is checked by itself; keys and values are content.
    """
    return state in (OPEN, KEY_OPEN, VALUE_OPEN) or not before.strip()


def _step(text: str, reading: _Reading, state: str, tag: re.Match[str]) -> _Reading:
    content = text[reading.start : tag.start()] if state in (KEY_OPEN, VALUE_OPEN) else ""
    if state == KEY_OPEN:
        return attrs.evolve(reading, start=tag.end(), key=content)
    if state == VALUE_OPEN:
        pairs = ((reading.key, content), reading.pairs)
        return attrs.evolve(reading, start=tag.end(), pairs=pairs, key="")
    return attrs.evolve(reading, start=tag.end())


def _keep(states: dict[str, list[_Reading]], state: str, reading: _Reading) -> None:
    """Add a reading to a state unless a better one stands there."""
    present = states.setdefault(state, [])
    if present and present[0].inside < reading.inside:
        return
    if present and present[0].inside > reading.inside:
        present.clear()
    # One more than is allowed shows that there were too many.
    if len(present) <= MAX_READINGS:
        present.append(reading)


def _accept(readings: Sequence[_Reading]) -> tuple[Mapping[str, str], ...]:
    """Turn the finished readings into arguments; nothing when they are too many to tell apart.

    A reading with a repeated or impossible key is refused, not replaced by a worse reading.
    """
    if len(readings) > MAX_READINGS:
        return ()
    accepted = []
    for reading in readings:
        pairs = _pairs(reading)
        arguments = dict(pairs)
        usable = len(arguments) == len(pairs) <= MAX_ARGUMENTS
        if usable and all(map(_is_key, arguments)):
            accepted.append(arguments)
    return tuple(accepted)


def _pairs(reading: _Reading) -> list[Pair]:
    found: list[Pair] = []
    link: object = reading.pairs
    while isinstance(link, tuple):
        pair, link = link
        found.append(pair)
    return found[::-1]


def _is_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None and len(key.encode()) <= MAX_KEY_BYTES


LAGUNA_SYNTAX = LagunaSyntax()
