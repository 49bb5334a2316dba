"""Stop strings: the earliest match ends the answer, wherever tokens begin and end."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["StopMatcher"]


class StopMatcher:
    """Finds the stop string that begins earliest and drops it with all that follows.

    Exactly what ``min(text.find(stop) for each found stop)`` gives on the whole text, whatever
    the pieces. Text waits only while it may still be the beginning of a stop string. The work is
    linear in the text for any number of stop strings.

    Source: Aho and Corasick, "Efficient string matching", 1975 (one automaton for all strings).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Prepare the search.

        Args:
            stops: Stop strings; empty ones are ignored.
        """
        strings = sorted({stop for stop in stops if stop})
        # State 0 is the root; a state's depth is the length of the beginning that it stands for.
        self._edges: dict[tuple[int, str], int] = {}
        self._depths = [0]
        self._fallbacks = [0]
        # Length of the longest stop string that ends in a state, 0 when none does.
        self._matches = [0]
        self._build(strings)
        firsts = "".join(sorted({stop[0] for stop in strings}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if firsts else None
        self._state = 0
        self._held = ""
        self._match: int | None = None  # start in ``_held`` of the best match so far
        self.matched = False

    def _build(self, strings: list[str]) -> None:
        levels: list[list[tuple[int, str, int]]] = []
        for string in strings:
            state = 0
            for depth, char in enumerate(string):
                following = self._edges.get((state, char))
                if following is None:
                    following = len(self._depths)
                    self._edges[state, char] = following
                    self._depths.append(depth + 1)
                    self._fallbacks.append(0)
                    self._matches.append(0)
                    if depth == len(levels):
                        levels.append([])
                    levels[depth].append((state, char, following))
                state = following
            self._matches[state] = len(string)
        for parent, char, state in (edge for level in levels for edge in level):
            if parent:
                self._fallbacks[state] = self._step(self._fallbacks[parent], char)
            if not self._matches[state]:
                self._matches[state] = self._matches[self._fallbacks[state]]

    def _step(self, state: int, char: str) -> int:
        while True:
            following = self._edges.get((state, char))
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallbacks[state]

    def push(self, text: str) -> tuple[str, bool]:
        """Take answer text.

        Args:
            text: The next piece.

        Returns:
            Text that no stop string can take back, and whether the answer has ended.
        """
        if self.matched or self._first is None:
            return ("" if self.matched else text), self.matched
        at = len(self._held)
        text = self._held + text
        while at < len(text):
            if self._state == 0 and self._match is None:
                found = self._first.search(text, at)
                if found is None:
                    at = len(text)
                    break
                at = found.start()
            self._state = self._step(self._state, text[at])
            at += 1
            length = self._matches[self._state]
            if length and (self._match is None or at - length < self._match):
                self._match = at - length
            # A beginning that starts before the match may still become an earlier one.
            if self._match is not None and at - self._depths[self._state] >= self._match:
                return self._end_at(text)
        keep = self._depths[self._state]
        if self._match is not None:
            keep = max(keep, at - self._match)
        self._held = text[at - keep :]
        if self._match is not None:
            self._match -= at - keep
        return text[: at - keep], False

    def finish(self) -> str:
        """Take the end of the text; the matcher can then be used for a further, separate text.

        ``matched`` says whether the end decided for a match that had waited for an earlier one.

        Returns:
            The text withheld, up to a match.
        """
        released, self._held, self._state = self._held, "", 0
        if self._match is not None:
            return self._end_at(released)[0]
        return released

    def _end_at(self, text: str) -> tuple[str, bool]:
        released = text[: self._match]
        self.matched = True
        self._held, self._state, self._match = "", 0, None
        return released, True
