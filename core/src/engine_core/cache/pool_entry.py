"""What a stored prefix is: why it is kept and the caches that hold its state."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.cache.pool_tree import Node

__all__ = ["Entry", "EntryKind"]


class EntryKind(enum.IntEnum):
    """Why a prefix is stored; a greater kind is never given up for a lesser one."""

    REPLY = 1
    """A prompt with what was generated after it."""
    BOUNDARY = 2
    """A conversation without the opening of the next turn: what the next request continues."""
    OPENING = 3
    """The system and tools block, which other conversations share."""


@attrs.define(eq=False)
class Entry:
    """A stored prefix.

    Attributes:
        fingerprint: Identity of the model.
        caches: One a layer; views of shared buffers, or memory of their own.
        kind: Why it is stored.
        node: Its place in the tree.
        order: Grows with every use; the least goes first.
        used: When it was last used (seconds of the pool's clock).
    """

    fingerprint: str
    caches: Sequence[LayerCache]
    kind: EntryKind
    node: Node[Entry]
    order: int = 0
    used: float = 0.0

    @property
    def length(self) -> int:
        """Tokens."""
        return self.node.depth
