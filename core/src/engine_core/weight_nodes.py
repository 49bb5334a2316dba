"""Expressions over checkpoint tensors: how each model parameter is made, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "ConcatNode",
    "Node",
    "PermuteNode",
    "ResolvedWeights",
    "Source",
    "SplitNode",
    "StackNode",
    "TensorInfo",
    "sources",
    "stored_info",
]


def _sizes(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen
class TensorInfo:
    """Header facts of one tensor.

    Attributes:
        shape: Sizes, outermost first.
        dtype: As safetensors spells it, e.g. ``"F32"``, ``"BF16"``, ``"U32"``.
        shard: Index of the file that holds it (of the first one for a combined tensor).
    """

    shape: tuple[int, ...] = attrs.field(converter=_sizes)
    dtype: str
    shard: int = 0


@attrs.frozen
class Source:
    """A tensor as it lies in the checkpoint.

    Attributes:
        key: Checkpoint-verbatim key.
        info: Header facts.
    """

    key: str
    info: TensorInfo


@attrs.frozen
class PermuteNode:
    """A child with reordered axes; ``info`` holds the facts afterwards."""

    child: Node
    axes: tuple[int, ...]
    info: TensorInfo


@attrs.frozen
class StackNode:
    """Children stacked along a new first axis; ``info`` holds the facts afterwards."""

    children: tuple[Node, ...]
    info: TensorInfo


@attrs.frozen
class SplitNode:
    """Rows ``start`` to ``stop`` of a child along ``axis``; ``info`` holds the facts afterwards."""

    child: Node
    axis: int
    start: int
    stop: int
    info: TensorInfo


@attrs.frozen
class ConcatNode:
    """Children joined along ``axis``; ``info`` holds the facts afterwards."""

    children: tuple[Node, ...]
    axis: int
    info: TensorInfo


Node = Source | PermuteNode | StackNode | SplitNode | ConcatNode
"""How one parameter is made from checkpoint tensors."""


def sources(node: Node) -> Iterator[Source]:
    """Walk the checkpoint tensors under an expression, in order, repeats included.

    Args:
        node: Any expression.

    Yields:
        Its leaves.
    """
    match node:
        case Source():
            yield node
        case PermuteNode() | SplitNode():
            yield from sources(node.child)
        case StackNode() | ConcatNode():
            for child in node.children:
                yield from sources(child)


def stored_info(node: Node) -> TensorInfo:
    """Give the facts of an expression before any permutation on its outside.

    Args:
        node: Any expression.

    Returns:
        Header facts; the shape is the one in the file when the tensor was only permuted.
    """
    while isinstance(node, PermuteNode):
        node = node.child
    return node.info


@attrs.frozen(kw_only=True)
class ResolvedWeights:
    """A plan applied to the tensors of one checkpoint.

    Attributes:
        targets: Mapped key -> how it is made.
        infos: Mapped key -> facts as mapped.
        stored: Mapped key -> facts as stored, that is before permutation.
        dropped: Checkpoint key -> why it stays unread.
    """

    targets: Mapping[str, Node]
    infos: Mapping[str, TensorInfo]
    stored: Mapping[str, TensorInfo]
    dropped: Mapping[str, str]
