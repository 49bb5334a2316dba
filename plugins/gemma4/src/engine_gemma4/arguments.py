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
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["DELIMITER", "read_arguments"]

DELIMITER: Final = '<|"|>'
MAX_ENTRIES: Final = 256
MAX_KEY_BYTES: Final = 128
MAX_READINGS: Final = 64
# Strings closed while readings are looked for; every string of a plain call is closed once.
MAX_STEPS: Final = 20_000
# Tokens between two strings.
MAX_EVENTS: Final = 20_000

_SPACE = re.compile(r"\s*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_BARE_KEY = re.compile(r"""[^\s{}\[\],:<"'][^{}\[\],:<"'\n]*+""")
_JSON_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+"')
_KEY = re.compile(r"[^\x00-\x1f\x7f<>{}\[\]\ud800-\udfff]+")
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
        place: The next string; ``None`` at the end of the text.
    """

    events: tuple[_Event, ...]
    place: _Place | None


@attrs.frozen
class _Edge:
    """A string and the delimiter that closes it."""

    place: _Place
    close: int


class _RefusedError(Exception):
    """No reading, or more work than a call is worth."""


def read_arguments(text: str) -> tuple[Mapping[str, Any], ...]:
    """Read the arguments of a call.

    Args:
        text: From the opening brace to the closing one, space around them allowed.

    Returns:
        All readings that take the fewest delimiters for text and repeat no key, at most 64; none
        when the text breaks the grammar or a bound.
    """
    if text.count(DELIMITER) % 2:
        return ()
    try:
        return tuple(_Reader(text).readings())
    except _RefusedError:
        return ()


class _Reader:
    """Finds the readings of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._delimiters = [match.start() for match in re.finditer(re.escape(DELIMITER), text)]
        self._runs: dict[tuple[int, str, bool], _Run | None] = {}

    def readings(self) -> Iterator[Mapping[str, Any]]:
        """Give the readings that repeat no key."""
        start = _SPACE.match(self._text)
        begin = start.end() if start else 0
        if not self._text.startswith("{", begin):
            return
        first = self._run(begin, "", "value")
        if first is None:
            return
        if first.place is None:
            paths: list[list[_Edge]] = [[]]
        else:
            paths = list(self._shortest_paths(first.place))
        for path in paths:
            arguments = _build(self._events(first, path))
            if arguments is not None:
                yield arguments

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

    def _shortest_paths(self, first: _Place) -> Iterator[list[_Edge]]:
        """Find every way to the end that takes the fewest delimiters for text."""
        order = itertools.count()
        into: dict[_Place, list[_Edge]] = {first: []}
        reached = {first: 0}
        ends: list[_Edge] = []
        best = math.inf
        heap = [(0, next(order), first, bisect_left(self._delimiters, first.at) + 1)]
        for _ in range(MAX_STEPS):
            if not heap or heap[0][0] > best:
                return (yield from self._walk(into, ends))
            cost, _number, place, index = heapq.heappop(heap)
            if index == len(self._delimiters):
                continue
            edge = _Edge(place, self._delimiters[index])
            # The alternative: this delimiter is text, and the string goes on.
            heapq.heappush(heap, (cost + 1, next(order), place, index + 1))
            run = self._after(edge)
            if run is None:
                continue
            if run.place is None:
                best = cost
                ends.append(edge)
            elif run.place not in reached:
                reached[run.place] = cost
                into[run.place] = [edge]
                following = bisect_left(self._delimiters, run.place.at) + 1
                heapq.heappush(heap, (cost, next(order), run.place, following))
            elif reached[run.place] == cost:
                into[run.place].append(edge)
        raise _RefusedError

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
        """Read up to the next string in delimiters, or to the end of the text."""
        text = self._text
        events: list[_Event] = []
        while True:
            space = _SPACE.match(text, at)
            at = space.end() if space else at
            if expecting == "next" and not stack:
                return _Run(tuple(events), None) if at == len(text) else None
            if expecting in ("first_key", "key", "value", "first_item") and text.startswith(
                DELIMITER, at
            ):
                return _Run(tuple(events), _Place(at, stack, expecting in ("first_key", "key")))
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
            if _KEY.fullmatch(event.value) is None or len(event.value.encode()) > MAX_KEY_BYTES:
                return None
            keys.append(event.value)
            continue
        value: Any = {"{": {}, "[": []}.get(event.kind, event.value)
        holder = open_values[-1]
        if len(holder) == MAX_ENTRIES:
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
