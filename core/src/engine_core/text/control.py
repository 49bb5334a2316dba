"""Keeps control-token text inside content from being read as control tokens.

Before rendering, a shield puts a mark (one private-use character that occurs nowhere else) into
every piece of content wherever a control token would be read. Templates carry the mark along. In
the rendered text a control token without a mark is one that the template wrote; there the text is
split, and the marks are removed from the runs in between.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from engine_core.text.tokenizer import AddedToken

__all__ = ["ControlShield", "iter_texts", "split_at_controls"]

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
        elif isinstance(one, Mapping):
            pending.extend(one.keys())
            pending.extend(one.values())
        elif isinstance(one, (list, tuple)):
            pending.extend(one)
        else:
            kind = type(one)
            if attrs.has(kind):
                pending.extend(getattr(one, field.name) for field in attrs.fields(kind))


@attrs.frozen
class ControlShield:
    """Marks control-token text in content; call it on every piece before rendering.

    Attributes:
        controls: Control tokens.
        mark: The private-use character.
    """

    controls: tuple[AddedToken, ...] = attrs.field(repr=False)
    mark: str

    @classmethod
    def avoiding(cls, controls: tuple[AddedToken, ...], values: Iterable[object]) -> ControlShield:
        """Choose a mark that is free.

        Args:
            controls: Control tokens.
            values: Everything the prompt may be made from.

        Returns:
            The shield.
        """
        texts = [text for value in values for text in iter_texts(value)]
        texts += [token.text for token in controls]
        candidates = (chr(code) for block in _PRIVATE for code in block)
        first = next(candidates)
        if not any(first in text or _escaped(first) in text for text in texts):
            return cls(controls, first)
        joined = "\n".join(texts)
        used, lowered = set(joined), joined.lower()
        free = (mark for mark in candidates if mark not in used and _escaped(mark) not in lowered)
        return cls(controls, next(free))

    def __call__(self, content: str) -> str:
        """Mark a piece of content.

        Args:
            content: User, system, tool-result or tool-declaration text.

        Returns:
            The content with marks; unchanged when it holds nothing like a control token.
        """
        patterns = _patterns(self.controls)
        if patterns is None:
            return content
        cuts: set[int] = set()
        doubled: set[int] = set()
        for found in patterns.first_characters.finditer(content):
            start = found.start()
            # A mark inside breaks the text; a text of one character can only be announced.
            if content[start] in patterns.single_characters:
                doubled.add(start)
            if patterns.long.match(content, start):
                cuts.add(start + 1)
        # Two pieces of content may touch in the prompt and together spell a control token.
        if patterns.ends(content):
            cuts.add(len(content))
        if patterns.starts(content):
            cuts.add(0)
        if not cuts and not doubled:
            return content
        pieces: list[str] = []
        at = 0
        for cut in sorted(cuts | doubled):
            pieces.append(content[at:cut])
            pieces.append(self.mark * (2 * (cut in doubled) + (cut in cuts)))
            at = cut
        pieces.append(content[at:])
        return "".join(pieces)

    def is_in(self, text: str) -> bool:
        """Tell whether a text holds a mark.

        Args:
            text: Rendered text.

        Returns:
            Whether it does, also in the form that JSON escapes give it.
        """
        return self.mark in text or _escaped(self.mark) in text

    def remove(self, text: str) -> str:
        """Take the marks out again.

        Args:
            text: Rendered text.

        Returns:
            The text as it reads without a shield.
        """
        return text.replace(self.mark, "").replace(_escaped(self.mark), "")


def _escaped(mark: str) -> str:
    """Spell a character as ``json.dumps`` escapes it (a surrogate pair above U+FFFF)."""
    units = mark.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


@attrs.frozen(eq=False)
class _Patterns:
    """Compiled searches for one set of control tokens."""

    first_characters: re.Pattern[str]
    long: re.Pattern[str]
    single_characters: frozenset[str]
    suffixes: frozenset[str]
    prefixes: frozenset[str]
    longest: int

    def ends(self, content: str) -> bool:
        """Whether the end is the beginning of a control token."""
        return any(content[-size:] in self.prefixes for size in self._sizes(content))

    def starts(self, content: str) -> bool:
        """Whether the start is the end of a control token."""
        return any(content[:size] in self.suffixes for size in self._sizes(content))

    def _sizes(self, content: str) -> range:
        return range(1, min(self.longest - 1, len(content)) + 1)


@functools.lru_cache(maxsize=16)
def _patterns(controls: tuple[AddedToken, ...]) -> _Patterns | None:
    texts = sorted({token.text for token in controls})
    if not texts:
        return None
    long = [text for text in texts if len(text) > 1]
    return _Patterns(
        first_characters=re.compile(f"[{re.escape(''.join({text[0] for text in texts}))}]"),
        long=re.compile(_alternatives(long) if long else "(?!)"),
        single_characters=frozenset(text for text in texts if len(text) == 1),
        suffixes=frozenset(text[at:] for text in long for at in range(1, len(text))),
        prefixes=frozenset(text[:at] for text in long for at in range(1, len(text))),
        longest=max(len(text) for text in texts),
    )


def _alternatives(texts: Iterable[str]) -> str:
    """Spell a choice in which the longest text wins, as the tokenizers library matches."""
    ordered = sorted(texts, key=len, reverse=True)
    return "(?:" + "|".join(re.escape(text) for text in ordered) + ")"


def split_at_controls(
    text: str, controls: Sequence[AddedToken], shield: ControlShield
) -> Iterator[tuple[bool, int | str]]:
    """Split rendered text at the control tokens that bear no mark.

    Args:
        text: Rendered text with marks.
        controls: Control tokens.
        shield: Whose marks to respect and remove.

    Yields:
        In order, ids of control tokens and non-empty runs of text without marks, each with
        whether it stands at the very start.
    """
    parts: list[int | str] = [text.replace(_escaped(shield.mark), shield.mark)]
    # The library matches on the text as written first, then on the normalized rest.
    for normalized in (False, True):
        chosen = {token.text: token for token in controls if token.normalized is normalized}
        if chosen:
            parts = [
                piece
                for part in parts
                for piece in ([part] if isinstance(part, int) else _split(part, chosen, shield))
            ]
    by_id = {token.id: token for token in controls}
    for index, part in enumerate(parts):
        if isinstance(part, int):
            yield index == 0, part
            continue
        run = shield.remove(part)
        before = parts[index - 1] if index else None
        after = parts[index + 1] if index + 1 < len(parts) else None
        if isinstance(before, int) and by_id[before].rstrip:
            run = run.lstrip(_WHITE_SPACE)
        if isinstance(after, int) and by_id[after].lstrip:
            run = run.rstrip(_WHITE_SPACE)
        if run:
            yield index == 0, run


def _split(
    text: str, chosen: Mapping[str, AddedToken], shield: ControlShield
) -> Iterator[int | str]:
    single = [re.escape(one) for one in chosen if len(one) == 1]
    choices = (
        [_alternatives(one for one in chosen if len(one) > 1)] if len(single) < len(chosen) else []
    )
    if single:
        choices.append(f"(?<!{re.escape(shield.mark * 2)})(?:{'|'.join(single)})")
    at = 0
    for found in re.finditer("|".join(choices), text):
        token = chosen[found.group()]
        if token.single_word and _touches_word(text, found.start(), found.end()):
            continue
        yield text[at : found.start()]
        yield token.id
        at = found.end()
    yield text[at:]


def _touches_word(text: str, start: int, stop: int) -> bool:
    before, after = text[start - 1 : start], text[stop : stop + 1]
    return any(char and _WORD.match(char) is not None for char in (before, after))
