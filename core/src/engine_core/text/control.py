"""Keeps control-token text inside content from being read as control tokens.

Before rendering, a shield puts a mark (one private-use character that occurs nowhere else) into
every piece of content wherever a control token would be read. Templates carry the mark along. In
the rendered text a control token without a mark is one that the template wrote; there the text is
split, and the marks are removed from the runs in between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from engine_core.text.tokenizer import AddedToken

__all__ = ["ControlShield", "ControlTokens", "iter_texts"]

# The blocks of private-use characters, rarest first.
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0xE000, 0xF900))
# What the tokenizers library strips: the Unicode property White_Space.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_WORD = re.compile(r"\w")


def iter_texts(value: object) -> Iterator[str]:
    """Walk every text inside a value.

    Args:
        value: Text, mapping, list, tuple, attrs record, or anything else (which holds no text).

    Yields:
        Texts, keys included.
    """
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, (list, tuple)):
            pending += one
        elif fields := getattr(type(one), "__attrs_attrs__", None):
            pending += [entry for at in fields if (entry := getattr(one, at.name)) is not None]
        elif isinstance(one, (dict, Mapping)):
            pending += one
            pending += one.values()


class ControlTokens:
    """The control tokens of one tokenizer, with the searches that find them in text.

    Attributes:
        tokens: The tokens.
        texts: Their texts.
    """

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        """Compile the searches.

        Args:
            tokens: Control tokens.
        """
        self.tokens = tuple(tokens)
        self.texts = frozenset(token.text for token in self.tokens)
        long = [text for text in self.texts if len(text) > 1]
        short = self.texts.difference(long)
        self._firsts = _any_of(text[0] for text in self.texts)
        self._lasts = _any_of(text[-1] for text in long)
        self._short = _any_of(short) if short else None
        self._starts = _starts_of(long)
        self._prefixes = frozenset(text[:at] for text in long for at in range(1, len(text)))
        self._suffixes = frozenset(text[at:] for text in long for at in range(1, len(text)))
        self._longest = max(map(len, long), default=1)
        self._by_id = {token.id: token for token in self.tokens}
        # The library matches on the text as written first, then on the normalized rest.
        self._passes = []
        for normalized in (False, True):
            chosen = {one.text: one for one in self.tokens if one.normalized is normalized}
            if chosen:
                self._passes.append((re.compile(_longest_of(chosen)), chosen))

    def breaks(self, content: str) -> tuple[set[int], set[int]]:
        """Find where content has to be marked.

        Args:
            content: A piece of content.

        Returns:
            Positions of single marks and of double marks.
        """
        part = self._longest - 1
        if not (self._firsts.search(content) or self._lasts.search(content, 0, part)):
            return set(), set()  # as for most content
        # A mark inside breaks the text; a text of one character can only be announced.
        single = {found.end() for found in self._starts.finditer(content)}
        double = set()
        if self._short is not None:
            double = {found.start() for found in self._short.finditer(content)}
        # Two pieces of content may touch in the prompt and together spell a control token.
        for found in self._firsts.finditer(content, max(len(content) - part, 0)):
            if content[found.start() :] in self._prefixes:
                single.add(len(content))
        for found in self._lasts.finditer(content, 0, part):
            if content[: found.end()] in self._suffixes:
                single.add(0)
        return single, double

    def split(self, text: str, shield: ControlShield) -> list[int | str]:
        """Split rendered text at the control tokens that bear no mark.

        Args:
            text: Rendered text with marks.
            shield: Whose marks to respect.

        Returns:
            In order, ids of control tokens and what stands between them as it was written; see
            :meth:`runs`.
        """
        parts: list[int | str] = [shield.unescape(text)]
        for pattern, chosen in self._passes:
            whole, parts = parts, []
            for part in whole:
                if isinstance(part, int):
                    parts.append(part)
                else:
                    parts += _split(part, pattern, chosen, shield.mark * 2)
        return parts

    def runs(
        self, parts: Sequence[int | str], shield: ControlShield
    ) -> Iterator[tuple[bool, int | str]]:
        """Give the parts of a split text as they are encoded.

        Args:
            parts: What :meth:`split` returned.
            shield: Whose marks to remove.

        Yields:
            In order, ids of control tokens and non-empty runs of text without marks, each with
            whether it stands at the very start.
        """
        for index, part in enumerate(parts):
            if isinstance(part, int):
                yield index == 0, part
                continue
            run = part.replace(shield.mark, "")
            before = parts[index - 1] if index else None
            after = parts[index + 1] if index + 1 < len(parts) else None
            if isinstance(before, int) and self._by_id[before].rstrip:
                run = run.lstrip(_WHITE_SPACE)
            if isinstance(after, int) and self._by_id[after].lstrip:
                run = run.rstrip(_WHITE_SPACE)
            if run:
                yield index == 0, run


@attrs.frozen(eq=False)
class ControlShield:
    """Marks control-token text in content; call it on every piece before rendering.

    Attributes:
        controls: Control tokens.
        mark: The private-use character.
    """

    controls: ControlTokens = attrs.field(repr=False)
    mark: str
    _escape: str = attrs.field(init=False, repr=False)

    @_escape.default
    def _(self) -> str:
        return _escaped(self.mark)

    @classmethod
    def avoiding(cls, controls: ControlTokens, values: Iterable[object]) -> ControlShield:
        """Choose a mark that is free.

        Args:
            controls: Control tokens.
            values: Everything the prompt may be made from.

        Returns:
            The shield.
        """
        texts = [text for value in values for text in iter_texts(value)]
        texts += controls.texts
        candidates = (chr(code) for block in _PRIVATE for code in block)
        first = next(candidates)
        escape = _escaped(first)
        if not any(first in text or escape in text for text in texts):
            return cls(controls, first)
        joined = "\n".join(texts)
        used = set(joined)
        free = (mark for mark in candidates if mark not in used and _escaped(mark) not in joined)
        return cls(controls, next(free))

    def __call__(self, content: str) -> str:
        """Mark a piece of content.

        Args:
            content: Any text of a conversation or of its tools.

        Returns:
            The content with marks; unchanged when it holds nothing like a control token.
        """
        single, double = self.controls.breaks(content)
        if not single and not double:
            return content
        pieces: list[str] = []
        at = 0
        for cut in sorted(single | double):
            pieces.append(content[at:cut])
            pieces.append(self.mark * ((cut in single) + 2 * (cut in double)))
            at = cut
        pieces.append(content[at:])
        return "".join(pieces)

    def unescape(self, text: str) -> str:
        """Turn marks that a template wrote as JSON escapes back into characters.

        Args:
            text: Rendered text.

        Returns:
            The text with plain marks.
        """
        return text.replace(self._escape, self.mark)

    def remove(self, text: str) -> str:
        """Take the marks out again.

        Args:
            text: Rendered text.

        Returns:
            The text as it reads without a shield.
        """
        return self.unescape(text).replace(self.mark, "")


def _escaped(mark: str) -> str:
    """Spell a character as ``json.dumps`` escapes it (a surrogate pair above U+FFFF)."""
    units = mark.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    chosen = "".join(sorted(set(characters)))
    return re.compile(f"[{re.escape(chosen)}]" if chosen else "(?!)")


def _longest_of(texts: Iterable[str]) -> str:
    """Write a choice in which the longest text wins, as the tokenizers library matches."""
    # A search tries one alternative after the other, and a vocabulary may have thousands.
    groups: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):
        groups.setdefault(text[:2], []).append(re.escape(text))
    return "|".join(f"(?:{'|'.join(group)})" for group in groups.values()) or "(?!)"


def _starts_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a search for the first character of a text, so that texts may overlap."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    found = (f"{re.escape(first)}(?={_longest_of(rest)})" for first, rest in rests.items())
    return re.compile("|".join(found) or "(?!)")


def _split(
    text: str, pattern: re.Pattern[str], chosen: Mapping[str, AddedToken], guard: str
) -> list[int | str]:
    parts: list[int | str] = []
    at = 0
    for found in pattern.finditer(text):
        token = chosen[found.group()]
        start, stop = found.span()
        if stop - start == 1 and text.endswith(guard, 0, start):
            continue
        if token.single_word and _touches_word(text, start, stop):
            continue
        parts += (text[at:start], token.id)
        at = stop
    parts.append(text[at:])
    return parts


def _touches_word(text: str, start: int, stop: int) -> bool:
    before, after = text[start - 1 : start], text[stop : stop + 1]
    return any(char and _WORD.match(char) is not None for char in (before, after))
