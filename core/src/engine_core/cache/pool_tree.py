"""A tree of prompt prefixes: finds what a prompt shares with every stored one in one walk.

An edge holds a run of symbols, so a path costs as many steps as it has branch points, and symbols
are compared run by run. A lookup compares every symbol of the prompt at most once, however many
prefixes are stored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

__all__ = ["Node", "PrefixTree"]

EntryT = TypeVar("EntryT")

# Runs are compared in blocks of this many symbols, each at the speed of one tuple comparison.
BLOCK = 512


class Node(Generic[EntryT]):
    """The end of a stored prefix, or a point where stored prefixes part.

    Attributes:
        edge: Symbols between the parent and this node; empty at the root only.
        parent: The shorter prefix, ``None`` at the root.
        children: First symbol of an edge -> the node below it.
        depth: Symbols from the root.
        entry: What is stored for exactly this prefix.
        earliest: Least length that the entry serves.
        reach: Least length that any entry of this subtree serves.
    """

    __slots__ = ("children", "depth", "earliest", "edge", "entry", "parent", "reach")

    def __init__(self, edge: tuple[Hashable, ...], parent: Node[EntryT] | None, depth: int) -> None:
        self.edge = edge
        self.parent = parent
        self.depth = depth
        self.children: dict[Hashable, Node[EntryT]] = {}
        self.entry: EntryT | None = None
        self.earliest = math.inf
        self.reach = math.inf

    def update_reach(self) -> None:
        """Recompute ``reach`` from here up to the root."""
        node: Node[EntryT] | None = self
        while node is not None:
            below = min((child.reach for child in node.children.values()), default=math.inf)
            node.reach = min(node.earliest, below)
            node = node.parent


class PrefixTree(Generic[EntryT]):
    """Entries by prefix.

    An entry serves any length from its ``earliest`` to its own: a state that can be rewound serves
    every prompt with which it shares at least that much.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._root: Node[EntryT] = Node((), None, 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored."""
        return not self._root.children

    def nodes(self) -> Iterator[Node[EntryT]]:
        """Give every node with an entry."""
        pending = [self._root]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if node.entry is not None:
                yield node

    def place(self, symbols: tuple[Hashable, ...]) -> Node[EntryT]:
        """Give the node of a prefix, made when absent.

        Args:
            symbols: The prefix, at least one symbol. A new node without an entry must get one
                from :meth:`store`.

        Returns:
            Its node.
        """
        node, at = self._root, 0
        while at < len(symbols):
            child = node.children.get(symbols[at])
            if child is None:
                fresh: Node[EntryT] = Node(symbols[at:], node, len(symbols))
                node.children[symbols[at]] = fresh
                return fresh
            shared = _shared(child.edge, symbols, at)
            if shared < len(child.edge):
                child = _split(node, child, shared)
            node, at = child, at + shared
        return node

    def store(self, node: Node[EntryT], entry: EntryT, earliest: int) -> None:
        """Put an entry at a node, in the place of one that is there.

        Args:
            node: From :meth:`place`.
            entry: The entry.
            earliest: Least length it serves.
        """
        node.entry, node.earliest = entry, earliest
        node.update_reach()

    def remove(self, node: Node[EntryT]) -> None:
        """Drop the entry of a node, and the nodes that nothing needs any more.

        Args:
            node: A node of this tree.
        """
        node.entry, node.earliest = None, math.inf
        parent = node.parent
        while parent is not None and node.entry is None and not node.children:
            del parent.children[node.edge[0]]
            node, parent = parent, parent.parent
        node.update_reach()
        if parent is not None and node.entry is None and len(node.children) == 1:
            _merge(parent, node)

    def matches(self, symbols: tuple[Hashable, ...]) -> list[tuple[int, Node[EntryT]]]:
        """Walk along a prompt.

        Args:
            symbols: The prompt.

        Returns:
            Pairs of a number of symbols and a node whose whole subtree shares that many with the
            prompt; the most first. The nodes are nested, and the last is the root.
        """
        found = [(0, self._root)]
        node, at = self._root, 0
        while at < len(symbols) and (child := node.children.get(symbols[at])) is not None:
            shared = _shared(child.edge, symbols, at)
            at += shared
            found.append((at, child))
            if shared < len(child.edge):
                break
            node = child
        found.reverse()
        return found

    @staticmethod
    def pick(node: Node[EntryT], length: int) -> Node[EntryT]:
        """Choose an entry that serves a length.

        Args:
            node: A node whose ``reach`` is at most ``length``.
            length: Length wanted, at most what the subtree shares with the prompt.

        Returns:
            The node of an entry, the one nearest to ``node`` on the first path that has one.
        """
        while node.earliest > length:
            node = next(child for child in node.children.values() if child.reach <= length)
        return node


def _shared(edge: tuple[Hashable, ...], symbols: tuple[Hashable, ...], at: int) -> int:
    """Count the symbols an edge shares with a prompt from a position on."""
    size = min(len(edge), len(symbols) - at)
    done = 0
    while done < size:
        stop = min(done + BLOCK, size)
        if edge[done:stop] != symbols[at + done : at + stop]:
            while edge[done] == symbols[at + done]:
                done += 1
            return done
        done = stop
    return done


def _split(parent: Node[EntryT], node: Node[EntryT], at: int) -> Node[EntryT]:
    """Put a node into the middle of the edge above a node and give it."""
    upper: Node[EntryT] = Node(node.edge[:at], parent, parent.depth + at)
    parent.children[node.edge[0]] = upper
    node.edge, node.parent = node.edge[at:], upper
    upper.children[node.edge[0]] = node
    upper.reach = node.reach
    return upper


def _merge(parent: Node[EntryT], node: Node[EntryT]) -> None:
    """Join a node without an entry with its only child."""
    [child] = node.children.values()
    child.edge, child.parent = node.edge + child.edge, parent
    parent.children[child.edge[0]] = child
