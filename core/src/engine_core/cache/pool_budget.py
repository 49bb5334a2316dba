"""Measuring what stored prefixes hold, and choosing which of them go."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from engine_core.cache.layers import distinct_caches
from engine_core.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_core.cache.base import LayerCache
    from engine_core.cache.pool_entry import Entry

__all__ = ["Ledger"]


class Ledger:
    """Which entries hold which buffers, and how large each buffer is now.

    Made for one settlement and dropped with it, as buffers grow while a request runs.

    Attributes:
        total: Bytes of all distinct buffers.
        failures: Buffers that could not be cut because the device failed; they stay as they are.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        """Cut every buffer to what is still held, and measure it.

        Args:
            entries: All entries.
        """
        self.total = 0
        self.failures = 0
        self._sizes: dict[int, int] = {}
        self._views: dict[int, list[LayerCache]] = defaultdict(list)
        self._held: dict[Entry, list[int]] = {}
        for entry in entries:
            self._held[entry] = []
            for cache in distinct_caches(entry.caches):
                for identity in cache.buffers():
                    self._views[identity].append(cache)
                    self._held[entry].append(identity)
        for identity in self._views:
            self._measure(identity)

    def size(self, entry: Entry) -> int:
        """Bytes that an entry holds, what others share included."""
        return sum(self._sizes[identity] for identity in self._held[entry])

    def remove(self, entry: Entry) -> None:
        """Count an entry off, let go of its views, and cut what was only held for it.

        Args:
            entry: An entry that leaves the pool.
        """
        own = set(map(id, entry.caches))
        for cache in distinct_caches(entry.caches):
            cache.reset()
        for identity in self._held.pop(entry):
            left = [view for view in self._views[identity] if id(view) not in own]
            self._views[identity] = left
            if left:
                self._measure(identity)
            else:
                self.total -= self._sizes.pop(identity)
                del self._views[identity]

    def _measure(self, identity: int) -> None:
        view = self._views[identity][0]
        try:
            view.shrink()
        except BackendError:
            self.failures += 1
        size = view.buffers()[identity]
        self.total += size - self._sizes.get(identity, 0)
        self._sizes[identity] = size
