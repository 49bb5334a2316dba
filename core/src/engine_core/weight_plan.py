"""Ordered data rules that turn checkpoint tensors into model parameters.

The rules are data, not code, because core applies the same plan twice: to tensors and to the
paths of quantization overrides. Resolving a plan needs header facts only; no payload is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from engine_core.errors import CheckpointError
from engine_core.weight_nodes import (
    ConcatNode,
    Node,
    PermuteNode,
    ResolvedWeights,
    Source,
    SplitNode,
    StackNode,
    TensorInfo,
    sources,
    stored_info,
)
from engine_core.weight_rules import Concat, Drop, Permute, Rename, Rule, Split, Stack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "Concat",
    "ConcatNode",
    "Drop",
    "Node",
    "Permute",
    "PermuteNode",
    "Rename",
    "ResolvedWeights",
    "Rule",
    "Source",
    "Split",
    "SplitNode",
    "Stack",
    "StackNode",
    "TensorInfo",
    "WeightPlan",
    "sources",
]

WEIGHT: Final = ".weight"


def _rules(values: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(values)


@attrs.frozen
class WeightPlan:
    """Rules that run in order, each over the whole key set.

    Attributes:
        rules: The steps; a later rule sees the keys that the earlier ones made.
    """

    rules: tuple[Rule, ...] = attrs.field(converter=_rules, default=())

    def map_key(self, key: str) -> tuple[str, ...]:
        """Map one key without knowing which others exist.

        Args:
            key: Checkpoint-verbatim key.

        Returns:
            Mapped keys: none when dropped, several after a split.
        """
        keys: tuple[str, ...] = (key,)
        for rule in self.rules:
            keys = tuple(mapped for one in keys for mapped in rule.map_key(one))
        return keys

    def map_path(self, path: str) -> tuple[str, ...]:
        """Map a module path the way its weight is mapped.

        Checkpoints also name fused tensors without a ``.weight`` ending; a path that names such
        a tensor maps to the modules its parts belong to.

        Args:
            path: Module path, e.g. ``"model.layers.0.mlp.up_proj"``.

        Returns:
            Mapped module paths: none when dropped.
        """
        mapped = self.map_key(path)
        if len(mapped) == 1 and not mapped[0].endswith(WEIGHT):
            mapped = self.map_key(path + WEIGHT)
        return tuple(dict.fromkeys(key.removesuffix(WEIGHT) for key in mapped))

    def resolve(self, tensors: Mapping[str, TensorInfo]) -> ResolvedWeights:
        """Apply the rules to a checkpoint's tensors.

        Args:
            tensors: Checkpoint-verbatim key -> header facts.

        Returns:
            One expression a target; every source is used by one rule or stays as it is.

        Raises:
            CheckpointError: Two keys collide, a stack or concat is half present, or shapes do
                not fit a rule.
        """
        nodes: dict[str, Node] = {key: Source(key, info) for key, info in tensors.items()}
        dropped: dict[str, str] = {}
        for rule in self.rules:
            nodes = _apply(rule, nodes, dropped)
        used = {leaf.key for node in nodes.values() for leaf in sources(node)} if dropped else ()
        return ResolvedWeights(
            targets=nodes,
            infos={key: node.info for key, node in nodes.items()},
            stored={key: stored_info(node) for key, node in nodes.items()},
            dropped={key: reason for key, reason in dropped.items() if key not in used},
        )


def _apply(rule: Rule, nodes: dict[str, Node], dropped: dict[str, str]) -> dict[str, Node]:
    match rule:
        case Rename():
            return _rename(rule, nodes)
        case Drop():
            return _drop(rule, nodes, dropped)
        case Permute():
            for key, node in nodes.items():
                if key.endswith(rule.suffix):
                    nodes[key] = _permute(rule, key, node)
            return nodes
        case Stack():
            return _combine(rule, rule.keys, nodes)
        case Split():
            return _split(rule, nodes)
        case Concat():
            return _combine(rule, rule.sources, nodes)


def _rename(rule: Rename, nodes: dict[str, Node]) -> dict[str, Node]:
    result: dict[str, Node] = {}
    for key, node in nodes.items():
        (mapped,) = rule.map_key(key)
        _produce(rule, result, mapped, node)
    return result


def _drop(rule: Drop, nodes: dict[str, Node], dropped: dict[str, str]) -> dict[str, Node]:
    result = {}
    for key, node in nodes.items():
        if rule.map_key(key):
            result[key] = node
        else:
            dropped.update((leaf.key, rule.reason) for leaf in sources(node))
    return result


def _produce(rule: Rule, nodes: dict[str, Node], key: str, node: Node) -> None:
    if key in nodes:
        first, second = (next(sources(one)).key for one in (nodes[key], node))
        raise CheckpointError(
            f"tensor {key!r}: must be produced once, got {first!r} and {second!r} ({rule!r})",
            code="checkpoint.tensor_collision",
            hint="the checkpoint holds two spellings of one tensor",
        )
    nodes[key] = node


def _misfit(key: str, rule: Rule, node: Node) -> CheckpointError:
    return CheckpointError(
        f"tensor {key!r}: shape must fit {rule!r}, got {list(node.info.shape)} {node.info.dtype}",
        code="checkpoint.tensor_shape",
        hint="the tensor does not have the layout that config.json describes",
    )


def _permute(rule: Permute, key: str, node: Node) -> PermuteNode:
    shape = node.info.shape
    if len(shape) != len(rule.axes):
        raise _misfit(key, rule, node)
    info = attrs.evolve(node.info, shape=tuple(shape[axis] for axis in rule.axes))
    return PermuteNode(node, rule.axes, info)


def _axis(rule: Split | Concat, key: str, node: Node) -> int:
    rank = len(node.info.shape)
    if not -rank <= rule.axis < rank:
        raise _misfit(key, rule, node)
    return rule.axis % rank


def _split(rule: Split, nodes: dict[str, Node]) -> dict[str, Node]:
    node = nodes.get(rule.key)
    if node is None:
        return nodes
    axis = _axis(rule, rule.key, node)
    shape = node.info.shape
    if sum(rule.sizes) != shape[axis]:
        raise _misfit(rule.key, rule, node)
    del nodes[rule.key]
    start = 0
    for key, size in zip(rule.into, rule.sizes, strict=True):
        info = attrs.evolve(node.info, shape=(*shape[:axis], size, *shape[axis + 1 :]))
        _produce(rule, nodes, key, SplitNode(node, axis, start, start + size, info))
        start += size
    return nodes


def _combine(
    rule: Stack | Concat, keys: tuple[str, ...], nodes: dict[str, Node]
) -> dict[str, Node]:
    missing = [key for key in keys if key not in nodes]
    if len(missing) == len(keys):
        return nodes
    if missing:
        raise CheckpointError(
            f"tensor {rule.into!r}: needs all {len(keys)} sources, "
            f"got {len(keys) - len(missing)} without {missing[0]!r}",
            code="checkpoint.tensor_missing",
            hint="the checkpoint is incomplete or does not match its config.json",
        )
    children = tuple(nodes[key] for key in keys)
    combined = _stack(rule, children) if isinstance(rule, Stack) else _concat(rule, children)
    for key in keys:
        del nodes[key]
    _produce(rule, nodes, rule.into, combined)
    return nodes


def _stack(rule: Stack, children: tuple[Node, ...]) -> StackNode:
    first = children[0].info
    for key, child in zip(rule.keys, children, strict=True):
        if (child.info.shape, child.info.dtype) != (first.shape, first.dtype):
            raise _misfit(key, rule, child)
    return StackNode(children, attrs.evolve(first, shape=(len(children), *first.shape)))


def _concat(rule: Concat, children: tuple[Node, ...]) -> ConcatNode:
    axis = _axis(rule, rule.sources[0], children[0])
    first = children[0].info

    def frame(info: TensorInfo) -> tuple[object, ...]:
        return (info.dtype, len(info.shape), info.shape[:axis], info.shape[axis + 1 :])

    for key, child in zip(rule.sources, children, strict=True):
        if frame(child.info) != frame(first):
            raise _misfit(key, rule, child)
    total = sum(child.info.shape[axis] for child in children)
    info = attrs.evolve(first, shape=(*first.shape[:axis], total, *first.shape[axis + 1 :]))
    return ConcatNode(children, axis, info)
