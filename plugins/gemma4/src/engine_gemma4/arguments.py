"""The argument language of Gemma 4's calls, whose strings have no escape.

    object = "{" [ key ":" value *( "," key ":" value ) ] "}"
    value  = string / number / "true" / "false" / "null" / object / "[" [ values ] "]"
    string = D text D, or a JSON string;   key = string / bare word;   D = <|"|>

A delimiter inside a text stands for a double quote, so one writing can have several readings. Only
those that take the fewest delimiters for text count: they are the shortest paths in a graph whose
nodes are the places where a string opens, and whose edges are the delimiters that may close it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError
from engine_core.limits import LIMITS
from engine_core.tools.markup import is_argument_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["CLOSE", "DELIMITER", "OPEN", "Arguments", "read_arguments"]

OPEN: Final = "<|tool_call>"
CLOSE: Final = "<tool_call|>"
DELIMITER: Final = '<|"|>'
MAX_READINGS: Final = 64
# Strings closed while readings are looked for; every string of a plain call is closed once.
MAX_STEPS: Final = 20_000
# Tokens between two strings.
MAX_EVENTS: Final = 20_000

_SPACE = re.compile(r"\s*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_BARE_KEY = re.compile(r"""[^\s{}\[\],:<"'][^{}\[\],:<"'\n]*+""")
_JSON_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+"')
_LITERALS: Final = {"true": True, "false": False, "null": None}

Expecting = Literal["first_key", "key", "colon", "first_item", "value", "next"]
"""What the grammar allows at a place."""


@attrs.frozen
class _Event:
    """One step of a reading.

    Attributes:
        kind: ``"{"``, ``"["``, ``"}"``, ``"]"``, ``"key"`` or ``"value"``.
        value: The key, or the value.
    """

    kind: str
    value: Any = None


@attrs.frozen
class _Place:
    """A node: where a string opens.

    Attributes:
        at: Place of its delimiter.
        stack: Open containers, outermost first.
        is_key: Whether the string is a key.
    """

    at: int
    stack: str
    is_key: bool


@attrs.frozen
class _Run:
    """What follows without any choice from one place on.

    Attributes:
        events: Steps in order.
        place: The next string, ``None`` at the end of the call.
        end: Place after the closer at the end of the call.
    """

    events: tuple[_Event, ...]
    place: _Place | None
    end: int = 0


@attrs.frozen
class _Edge:
    """A string and the delimiter that closes it."""

    place: _Place
    close: int


@attrs.frozen
class Arguments:
    """The arguments of one call.

    Attributes:
        end: Place after the closer of the call.
        readings: What they may mean; more than one only where delimiters inside texts allow it.
    """

    end: int
    readings: tuple[Mapping[str, Any], ...]


class _RefusedError(Exception):
    """No reading, or more work than a call is worth."""


def read_arguments(text: str, begin: int, stop: int) -> Arguments | None:
    """Read the arguments of a call and its closer.

    Args:
        text: The reply.
        begin: Place of the opening brace, space before it allowed.
        stop: Nothing is read from here on.

    Returns:
        All readings that take the fewest delimiters for text and repeat no key, at most 64;
        ``None`` when the text breaks the grammar or a bound.
    """
    try:
        return _Reader(text, stop).read(begin)
    except _RefusedError:
        return None


class _Reader:
    """Finds the readings of one call."""

    def __init__(self, text: str, stop: int) -> None:
        self._text = text
        self._stop = stop
        self._runs: dict[tuple[int, str, bool], _Run | None] = {}

    def read(self, begin: int) -> Arguments | None:
        """Read from the opening brace to the closer."""
        begin = _skip_space(self._text, begin, self._stop)
        if not self._text.startswith("{", begin):
            return None
        first = self._run(begin, "", "value")
        if first is None:
            return None
        paths: list[list[_Edge]] = [[]]
        end = first.end
        if first.place is not None:
            end, paths = self._shortest_paths(first.place)
        built = [_build(self._events(first, path)) for path in paths]
        readings = tuple(arguments for arguments in built if arguments is not None)
        return Arguments(end, readings) if readings else None

    def _events(self, first: _Run, path: list[_Edge]) -> Iterator[_Event]:
        """Lay out the steps of one reading."""
        yield from first.events
        for edge in path:
            inside = self._text[edge.place.at + len(DELIMITER) : edge.close]
            yield _Event("key" if edge.place.is_key else "value", inside.replace(DELIMITER, '"'))
            run = self._after(edge)
            if run is not None:
                yield from run.events

    def _after(self, edge: _Edge) -> _Run | None:
        """Go on after a closed string; what follows does not depend on where it opened."""
        place = edge.place
        state = (edge.close, place.stack, place.is_key)
        if state not in self._runs:
            at = edge.close + len(DELIMITER)
            expecting: Expecting = "colon" if place.is_key else "next"
            self._runs[state] = self._run(at, place.stack, expecting)
        return self._runs[state]

    def _shortest_paths(self, first: _Place) -> tuple[int, list[list[_Edge]]]:
        """Find the end of the call, and every way there with the fewest delimiters in texts."""
        order = itertools.count()
        into: dict[_Place, list[_Edge]] = {first: []}
        reached = {first: 0}
        ends: list[_Edge] = []
        end, best = 0, math.inf
        # Delimiters taken for text, a number that keeps order, the string, where to look for its
        # close, and how many of them are in this string.
        heap = [(0, next(order), first, first.at + len(DELIMITER), 0)]
        for _ in range(MAX_STEPS):
            if not heap or heap[0][0] > best:
                return end, list(self._walk(into, ends))
            cost, _number, place, begin, inside = heapq.heappop(heap)
            close = self._text.find(DELIMITER, begin, self._stop)
            if close < 0 or not self._may_hold(place.at, close, inside):
                continue
            # The alternative: this delimiter is text, and the string goes on.
            further = (cost + 1, next(order), place, close + len(DELIMITER), inside + 1)
            heapq.heappush(heap, further)
            edge = _Edge(place, close)
            run = self._after(edge)
            if run is None:
                continue
            if run.place is None:
                # An odd number of delimiters, or two places to end at, leave the meaning open.
                if cost % 2 or (ends and run.end != end):
                    raise _RefusedError
                end, best = run.end, cost
                ends.append(edge)
            elif run.place not in reached:
                reached[run.place] = cost
                into[run.place] = [edge]
                begin = run.place.at + len(DELIMITER)
                heapq.heappush(heap, (cost, next(order), run.place, begin, 0))
            elif reached[run.place] == cost:
                into[run.place].append(edge)
        raise _RefusedError

    def _may_hold(self, at: int, close: int, inside: int) -> bool:
        """Whether a string may hold the markers in it.

        A text may quote one. But a text with delimiters in it that goes on beyond a marker is a
        broken call that swallows the next one, and so is one that ends a call and begins another.
        """
        opener = self._text.rfind(OPEN, at, close)
        closer = self._text.find(CLOSE, at, close)
        if inside:
            return opener < 0 and closer < 0
        return opener < 0 or closer < 0 or opener < closer

    @staticmethod
    def _walk(into: Mapping[_Place, list[_Edge]], ends: list[_Edge]) -> Iterator[list[_Edge]]:
        """Follow the edges back from the end, one path a reading."""
        found = 0
        pending: list[tuple[_Edge, Any]] = [(edge, None) for edge in ends]
        while pending:
            edge, tail = pending.pop()
            path = (edge, tail)
            before = into[edge.place]
            if before:
                pending += [(one, path) for one in before]
                continue
            found += 1
            if found > MAX_READINGS:
                raise _RefusedError
            yield _unlink(path)

    def _run(self, at: int, stack: str, expecting: Expecting) -> _Run | None:
        """Read up to the next string in delimiters, or to the closer of the call."""
        text, stop = self._text, self._stop
        events: list[_Event] = []
        while True:
            at = _skip_space(text, at, stop)
            if expecting == "next" and not stack:
                closed = text.startswith(CLOSE, at, stop)
                return _Run(tuple(events), None, at + len(CLOSE)) if closed else None
            if expecting not in ("colon", "next") and text.startswith(DELIMITER, at, stop):
                return _Run(tuple(events), _Place(at, stack, expecting in ("first_key", "key")))
            if at >= stop:
                return None
            step = _step(text, at, stack, expecting)
            if step is None:
                return None
            at, stack, expecting, event = step
            if len(stack) > LIMITS.json_depth or len(events) == MAX_EVENTS:
                return None
            if event is not None:
                events.append(event)


def _step(
    text: str, at: int, stack: str, expecting: Expecting
) -> tuple[int, str, Expecting, _Event | None] | None:
    """Read one token; give the place after it, the open containers and what may follow."""
    sign = text[at : at + 1]
    if expecting == "colon":
        return (at + 1, stack, "value", None) if sign == ":" else None
    if expecting == "next":
        if sign == ",":
            return at + 1, stack, "key" if stack[-1] == "{" else "value", None
        if (sign, stack[-1]) in (("}", "{"), ("]", "[")):
            return at + 1, stack[:-1], "next", _Event(sign)
        return None
    if (sign, expecting) in (("}", "first_key"), ("]", "first_item")):
        return at + 1, stack[:-1], "next", _Event(sign)
    if expecting in ("first_key", "key"):
        found = _json_string(text, at) if sign == '"' else _bare_key(text, at)
        return None if found is None else (found[0], stack, "colon", _Event("key", found[1]))
    if sign in ("{", "["):
        return at + 1, stack + sign, "first_key" if sign == "{" else "first_item", _Event(sign)
    found = _json_string(text, at) if sign == '"' else _scalar(text, at)
    return None if found is None else (found[0], stack, "next", _Event("value", found[1]))


def _skip_space(text: str, at: int, stop: int) -> int:
    match = _SPACE.match(text, at, stop)
    return at if match is None else match.end()


def _bare_key(text: str, at: int) -> tuple[int, Any] | None:
    match = _BARE_KEY.match(text, at)
    return None if match is None else (match.end(), match[0].rstrip())


def _json_string(text: str, at: int) -> tuple[int, Any] | None:
    match = _JSON_STRING.match(text, at)
    return None if match is None else _json_value(match)


def _scalar(text: str, at: int) -> tuple[int, Any] | None:
    for word, value in _LITERALS.items():
        if text.startswith(word, at):
            return at + len(word), value
    match = _NUMBER.match(text, at)
    return None if match is None else _json_value(match)


def _json_value(match: re.Match[str]) -> tuple[int, Any] | None:
    """Read strict JSON: integers keep every digit, and no number overflows."""
    try:
        return match.end(), parse_json(match[0].encode(), "argument", LIMITS)
    except (EngineError, UnicodeEncodeError):
        return None


def _unlink(path: tuple[_Edge, Any]) -> list[_Edge]:
    edges: list[_Edge] = []
    link: tuple[_Edge, Any] | None = path
    while link is not None:
        edge, link = link
        edges.append(edge)
    return edges


def _build(events: Iterator[_Event]) -> dict[str, Any] | None:
    """Build the object of one reading; ``None`` when it repeats a key or breaks a bound."""
    outer: list[Any] = []
    open_values: list[Any] = [outer]
    keys: list[str] = []
    for event in events:
        if event.kind in ("}", "]"):
            open_values.pop()
            continue
        if event.kind == "key":
            if not is_argument_key(event.value):
                return None
            keys.append(event.value)
            continue
        value: Any = {"{": {}, "[": []}.get(event.kind, event.value)
        holder = open_values[-1]
        if len(holder) == LIMITS.checked_entries:
            return None
        if isinstance(holder, dict):
            key = keys.pop()
            if key in holder:
                return None
            holder[key] = value
        else:
            holder.append(value)
        if event.kind in ("{", "["):
            open_values.append(value)
    arguments: dict[str, Any] = outer[0]
    return arguments
