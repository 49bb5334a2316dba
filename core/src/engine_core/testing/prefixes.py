"""What the prompt cache promises, written as a list of stored prefixes and a loop over it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from engine_core.family import Recurrent, Sliding
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine_core.family import LayerSpec

__all__ = ["PromisedPrefixes"]


@attrs.frozen
class _Stored:
    """A prefix; a rewind below ``earliest`` is never, one to ``certain`` is always possible."""

    ids: tuple[int, ...]
    earliest: float
    certain: float


class PromisedPrefixes:
    """Predicts how many tokens of a prompt are served, as long as nothing is evicted.

    A recurrent layer cannot be rewound at all. A sliding one holds its window and 16 rows more, as
    far as they had been fed to it: right after a rewind there may be fewer. A model without layers
    has nothing to store.
    """

    def __init__(self, layers: Iterable[LayerSpec]) -> None:
        """Start with nothing stored.

        Args:
            layers: The model's.
        """
        layers = tuple(layers)
        self._has_state = bool(layers)
        self._is_fixed = any(isinstance(layer, Recurrent) for layer in layers)
        self._windows = [layer.window for layer in layers if isinstance(layer, Sliding)]
        self._stored: dict[tuple[int, ...], _Stored] = {}

    def store(self, ids: Sequence[int], *, fed_after: int = 0, is_certain: bool = True) -> None:
        """Note that a prefix is stored.

        Args:
            ids: The prefix.
            fed_after: Tokens its request was served: of the rows before, no more are held than
                what served them held.
            is_certain: Whether it is, and not only may be stored.
        """
        if not ids or not self._has_state:
            return
        key = tuple(ids)
        earliest, certain = self._bounds(key, fed_after)
        if not is_certain:
            certain = math.inf
        known = self._stored.get(key)
        if known is not None:
            # The one that was there first stays.
            earliest, certain = min(known.earliest, earliest), min(known.certain, certain)
        self._stored[key] = _Stored(key, earliest, certain)

    def _bounds(self, key: tuple[int, ...], fed_after: int) -> tuple[float, float]:
        length = len(key)
        if self._is_fixed:
            return length, length
        earliest = certain = 0
        for window in self._windows:
            kept = window - 1 + LIMITS.keep_rows
            origins = [max(length - kept, 0)]
            if fed_after:
                origins += [
                    max(len(one.ids) - kept, 0)
                    for one in self._stored.values()
                    if _shared(one.ids, key) >= fed_after
                ]
            least, most = min(origins), max(origins)
            earliest = max(earliest, least and least + window - 1)
            certain = max(certain, most and most + window - 1)
        return earliest, min(certain, length)

    def reusable(self, ids: Sequence[int]) -> tuple[int, int]:
        """Predict a lookup.

        Args:
            ids: A prompt.

        Returns:
            The fewest and the most tokens that may be served; nearly always the same.
        """
        prompt = tuple(ids)
        shared = [
            (min(_shared(one.ids, prompt), len(prompt) - 1), one) for one in self._stored.values()
        ]
        return (
            max((length for length, one in shared if length >= one.certain), default=0),
            max((length for length, one in shared if length >= one.earliest), default=0),
        )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
