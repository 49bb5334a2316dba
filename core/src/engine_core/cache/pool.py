"""The pool of stored prompt prefixes: what a new prompt can start from instead of from nothing.

A hit forks the stored caches, so it copies nothing; the request that continues a buffer at its end
appends in place, and only one that branches off copies. Because requests thus write into buffers
that entries share (beyond their lengths), entries are only trusted as long as no device fault
happened to such a request: see :meth:`PromptPool.discard_sharing`.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING

import attrs

from engine_core.cache.layers import detach_caches, distinct_caches, fork_caches, reset_caches
from engine_core.cache.pool_budget import Ledger
from engine_core.cache.pool_entry import Entry, EntryKind
from engine_core.cache.pool_tree import PrefixTree
from engine_core.errors import BackendError
from engine_core.info import PromptCacheInfo
from engine_core.limits import LIMITS, Limits
from engine_core.option_checks import integer, nullable, number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.cache.pool_tree import Node
    from engine_core.prompt_key import PromptKey

__all__ = ["Hit", "PromptPool", "make_pool"]

MEMORY_SHARE = 8


@attrs.frozen(eq=False)
class Hit:
    """What a prompt can start from.

    Attributes:
        caches: Forks that hold exactly the first ``length`` tokens; the request's own.
        length: Tokens, at least one.
        is_exact: Whether the whole entry was used, without rewinding.
    """

    caches: list[LayerCache]
    length: int
    is_exact: bool


class PromptPool:
    """Stored prefixes of one session, bounded in bytes; only its thread may use it.

    The budget holds between requests: while one runs, entries may share the buffers it fills.

    Attributes:
        budget_bytes: Bound on the bytes that all entries hold.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        ttl_seconds: float | None = None,
        max_entries: int = LIMITS.prompt_cache_entries,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty.

        Args:
            budget_bytes: Bound on the bytes that all entries hold, shared buffers counted once.
            ttl_seconds: Age at which an unused entry is dropped; ``None`` for no such bound.
            max_entries: Bound on the number of entries.
            clock: Seconds.
        """
        self.budget_bytes = budget_bytes
        self._ttl = ttl_seconds
        self._max_entries = max_entries
        self._clock = clock
        self._trees: dict[str, PrefixTree[Entry]] = {}
        self._orders = itertools.count(1)
        self._bytes = 0
        self._hits = self._misses = self._reused = 0
        self._evicted = self._refused = self._failed = 0

    def find(self, fingerprint: str, key: PromptKey) -> Hit | None:
        """Find the longest stored prefix a prompt can start from.

        At least the last token is left to be fed, because its logits are wanted.

        Args:
            fingerprint: Identity of the model.
            key: The prompt.

        Returns:
            The hit, ``None`` when there is none.
        """
        self._expire()
        found = self._longest(fingerprint, key, len(key.ids) - 1)
        if found is None:
            self._misses += 1
            return None
        entry, length = found
        self._touch(entry, length)
        self._hits += 1
        self._reused += length
        return _hit(entry, length)

    def peek(self, fingerprint: str, key: PromptKey) -> tuple[PromptKey, Hit] | None:
        """Find the longest stored prefix of a prompt, the whole of it included, without using it.

        Args:
            fingerprint: Identity of the model.
            key: The prompt.

        Returns:
            The prefix and its forked caches, ``None`` when nothing is stored.
        """
        self._expire()
        found = self._longest(fingerprint, key, len(key.ids))
        if found is None:
            return None
        entry, length = found
        return key.first(length), _hit(entry, length)

    def publish(
        self, fingerprint: str, key: PromptKey, caches: Sequence[LayerCache], kind: EntryKind
    ) -> bool:
        """Store a prefix; nothing is evicted before :meth:`settle`.

        Args:
            fingerprint: Identity of the model.
            key: The prefix, at least one token.
            caches: Forks that hold exactly it, which become the pool's own.
            kind: Why it is stored.

        Returns:
            Whether the prefix is stored now. It is not when a layer does not hold exactly the
            prefix (a family may leave a cache unused), when it is larger than the whole budget, or
            when the device could not copy its state.
        """
        if {cache.offset for cache in caches} != {len(key.ids)}:
            self._failed += 1
            return False
        tree = self._trees.setdefault(fingerprint, PrefixTree())
        node = tree.place(key.symbols())
        if node.entry is not None:
            # Equal prefixes have equal states, so the one that is shared already stays.
            node.entry.kind = max(node.entry.kind, kind)
            self._touch(node.entry, node.depth)
            return True
        if sum(cache.state_nbytes() for cache in distinct_caches(caches)) > self.budget_bytes:
            self._refused += 1
            tree.remove(node)
            return False
        try:
            detach_caches(caches)
        except BackendError:
            # The reply does not depend on what is kept for later ones.
            self._failed += 1
            tree.remove(node)
            return False
        entry = Entry(fingerprint, caches, kind, node)
        tree.store(node, entry, max(cache.earliest for cache in caches))
        self._use(entry)
        return True

    def settle(self) -> None:
        """Meet the budget again; call it when a request has let go of its caches.

        Buffers are cut to what is still held. Entries larger than the whole budget go first and
        take nothing else with them; then the least recently used ones go.
        """
        self._expire()
        entries = self._entries()
        ledger = Ledger(entries)
        for entry in sorted(entries, key=lambda one: one.length, reverse=True):
            if ledger.size(entry) > self.budget_bytes:
                ledger.remove(entry)
                self._unlink(entry)
                entries.remove(entry)
                self._refused += 1
        entries.sort(key=lambda one: one.order, reverse=True)
        while entries and (ledger.total > self.budget_bytes or len(entries) > self._max_entries):
            entry = entries.pop()
            ledger.remove(entry)
            self._unlink(entry)
            self._evicted += 1
        self._failed += ledger.failures
        self._bytes = ledger.total

    def discard_sharing(self, caches: Iterable[LayerCache]) -> None:
        """Drop every entry that shares a buffer with caches whose state is unknown.

        After a device fault an array may read as if it had been computed. A copy that was under
        way when the fault happened is then all wrong, rows of the entry included.

        Args:
            caches: Those of the failed request.
        """
        foreign = {identity for cache in caches for identity in cache.buffers()}
        for entry in self._entries():
            if any(not foreign.isdisjoint(cache.buffers()) for cache in entry.caches):
                self._drop(entry)
                self._failed += 1

    def clear(self) -> None:
        """Drop every entry."""
        for entry in self._entries():
            self._drop(entry)
        self._bytes = 0

    def report(self) -> PromptCacheInfo:
        """Describe the pool.

        Returns:
            Plain data.
        """
        entries = self._entries()
        return PromptCacheInfo(
            entries=len(entries),
            boundaries=sum(entry.kind >= EntryKind.BOUNDARY for entry in entries),
            bytes=self._bytes,
            budget_bytes=self.budget_bytes,
            ttl_seconds=self._ttl,
            hits=self._hits,
            misses=self._misses,
            reused_tokens=self._reused,
            evicted=self._evicted,
            refused=self._refused,
            failed=self._failed,
        )

    def _longest(self, fingerprint: str, key: PromptKey, most: int) -> tuple[Entry, int] | None:
        tree = self._trees.get(fingerprint)
        if tree is None:
            return None
        for shared, node in tree.matches(key.symbols()):
            length = key.floor(min(shared, most))
            if length > 0 and node.reach <= length:
                entry = tree.pick(node, length).entry
                if entry is not None:
                    return entry, length
        return None

    def _entries(self) -> list[Entry]:
        return [
            node.entry
            for tree in self._trees.values()
            for node in tree.nodes()
            if node.entry is not None
        ]

    def _use(self, entry: Entry) -> None:
        entry.order = next(self._orders)
        entry.used = self._clock()

    def _touch(self, entry: Entry, length: int) -> None:
        """Count a use of an entry and of the stored prefixes of what was used.

        The shorter a prefix the more prompts begin with it, so it counts as used later and goes
        later.
        """
        self._use(entry)
        node: Node[Entry] | None = entry.node.parent
        while node is not None:
            if node.entry is not None and node.depth <= length:
                self._use(node.entry)
            node = node.parent

    def _unlink(self, entry: Entry) -> None:
        tree = self._trees[entry.fingerprint]
        tree.remove(entry.node)
        if tree.is_empty:
            del self._trees[entry.fingerprint]

    def _drop(self, entry: Entry) -> None:
        reset_caches(entry.caches)
        self._unlink(entry)

    def _expire(self) -> None:
        if self._ttl is None:
            return
        oldest = self._clock() - self._ttl
        for entry in self._entries():
            if entry.used < oldest:
                self._drop(entry)
                self._evicted += 1


def make_pool(
    budget_bytes: int | None, ttl_seconds: float | None, limits: Limits = LIMITS
) -> PromptPool | None:
    """Make the pool that a caller asked for.

    Args:
        budget_bytes: Bytes; ``None`` for the smaller of 2 GiB and an eighth of the memory, 0 for
            no pool.
        ttl_seconds: Seconds; ``None`` for no bound on age.
        limits: Bounds.

    Returns:
        The pool, ``None`` for a budget of 0.

    Raises:
        InvalidRequest: A value is no number in range.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if budget_bytes is None:
        budget_bytes = min(limits.prompt_cache_bytes, memory // MEMORY_SHARE)
    budget = integer(0, memory)("prompt_cache_bytes", budget_bytes)
    ttl = nullable(number(0.0, limits.prompt_cache_ttl_seconds, above=True))(
        "prompt_cache_ttl", ttl_seconds
    )
    if budget == 0:
        return None
    return PromptPool(budget, ttl_seconds=ttl, max_entries=limits.prompt_cache_entries)


def _hit(entry: Entry, length: int) -> Hit:
    forks = fork_caches(entry.caches)
    for cache in distinct_caches(forks):
        cache.trim_to(length)
    return Hit(forks, length, is_exact=length == entry.length)
