"""Encoding texts that begin like earlier ones, as the turns of a conversation do.

The tokenizers library cuts a text at its added tokens first and encodes what lies between them
piece by piece, so what comes before an added token does not depend on what follows it. A text that
agrees with an earlier one up to such a token, and as far beyond it as a token is long, has the
earlier ids up to there; only the rest is encoded.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import tokenizers

    from engine_core.text.tokenizer import AddedToken

__all__ = ["RepeatingEncoder", "shared_length"]

# Texts this short are encoded faster than they are compared and kept.
LEAST_CHARS: Final = 2048
# Conversations that may take turns without losing their place.
KEPT_TEXTS: Final = 4
_BLOCK_CHARS: Final = 4096


@attrs.frozen(eq=False)
class _Encoded:
    """A text, its ids, and the added tokens it can be cut at: places (characters) and indices."""

    text: str
    ids: tuple[int, ...]
    places: tuple[int, ...]
    indices: tuple[int, ...]


class RepeatingEncoder:
    """Encodes like the tokenizer, from the last added token shared with an earlier text.

    Usable on any thread: what is kept is replaced as a whole and never changed.
    """

    def __init__(
        self, tokens: Iterable[AddedToken], encode: Callable[[str], tokenizers.Encoding]
    ) -> None:
        """Start with nothing kept.

        Args:
            tokens: All added tokens.
            encode: The library's own encoding of a text, without what a post-processor adds.
        """
        added = tuple(tokens)
        self._encode = encode
        self._longest = max((len(token.text) for token in added), default=0)
        # The others are matched after normalization, or depend on what stands before them.
        self._cuts = {
            token.id: token.text
            for token in added
            if not (token.normalized or token.lstrip or token.single_word)
        }
        self._kept: tuple[_Encoded, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Encode a text.

        Args:
            text: Any text.

        Returns:
            The ids that encoding all of it gives.

        Raises:
            TokenizerError: As the tokenizer's own encoding.
        """
        if len(text) < LEAST_CHARS or not self._cuts:
            return list(self._encode(text).ids)
        kept = self._kept
        base, cuts = _Encoded("", (), (), ()), 0
        for one in kept:
            count = bisect_right(one.places, shared_length(one.text, text) - self._longest)
            if one.places[:count][-1:] > base.places[:cuts][-1:]:
                base, cuts = one, count
        # The cut itself is encoded again with what follows it.
        known = max(cuts - 1, 0)
        at, index = (base.places[known], base.indices[known]) if cuts else (0, 0)
        encoding = self._encode(text[at:])
        found = [
            (at + start, number)
            for number, (token, (start, _)) in enumerate(
                zip(encoding.ids, encoding.offsets, strict=True), index
            )
            if token in self._cuts and text.startswith(self._cuts[token], at + start)
        ]
        ids = (*base.ids[:index], *encoding.ids)
        whole = _Encoded(
            text,
            ids,
            (*base.places[:known], *(place for place, _ in found)),
            (*base.indices[:known], *(number for _, number in found)),
        )
        # What goes on replaces what it goes on from; a branch stands beside it.
        goes_on = len(base.text) - at < LEAST_CHARS
        others = [one for one in kept if one is not base]
        if cuts and not goes_on:
            others.insert(0, base)
        self._kept = (whole, *others[: KEPT_TEXTS - 1])
        return list(ids)


def shared_length(text: str, other: str) -> int:
    """Count the characters two texts begin with.

    Args:
        text: One text.
        other: Another one.

    Returns:
        The length of their longest common prefix.
    """
    size = min(len(text), len(other))
    done = 0
    while done < size:
        stop = min(done + _BLOCK_CHARS, size)
        if text[done:stop] != other[done:stop]:
            while text[done] == other[done]:
                done += 1
            return done
        done = stop
    return done
