"""The typed base of all layers, and how a layer is found and replaced by its path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import mlx.nn as nn

from engine_core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

__all__ = ["Derived", "Module", "module_at", "replace_module"]

ValueT = TypeVar("ValueT")


class Module(nn.Module):
    """Base of every layer: parameters are attributes, paths are attribute names.

    A list attribute contributes its indices to the path, so that ``layers.0.mlp.up_proj`` names a
    layer and ``layers.0.mlp.up_proj.weight`` its parameter. Attributes that begin with an
    underscore are no parameters. A layer's parameters are placeholders until a loader fills them.
    """

    def __init__(self) -> None:
        """Start without parameters."""
        super().__init__()  # type: ignore[no-untyped-call]


class Derived(Generic[ValueT]):
    """What is computed from a parameter once, because parameters stay after the load."""

    __slots__ = ("_compute", "_source", "_value")

    def __init__(self, compute: Callable[[mx.array], ValueT]) -> None:
        """Start without a value.

        Args:
            compute: Gives the value of a parameter: an array, or several.
        """
        self._compute = compute
        self._source: mx.array | None = None
        self._value: ValueT

    def of(self, parameter: mx.array) -> ValueT:
        """Give the value, computed again only when the parameter is another object.

        Args:
            parameter: The parameter as it is now.

        Returns:
            The value, perhaps not evaluated yet.
        """
        if self._source is not parameter:
            self._source, self._value = parameter, self._compute(parameter)
        return self._value


def _child(parent: Any, name: str) -> Any:
    if isinstance(parent, list):
        index = int(name) if name.isascii() and name.isdecimal() else len(parent)
        return parent[index] if index < len(parent) else None
    return parent.get(name) if isinstance(parent, dict) else None


def module_at(root: Module, path: str) -> Any:
    """Find a layer.

    Args:
        root: The model.
        path: Dotted path, e.g. ``"model.layers.0.mlp"``; a number indexes a list.

    Returns:
        The layer.

    Raises:
        ModelError: The model has no layer of that path.
    """
    found: Any = root
    for name in path.split("."):
        found = _child(found, name)
    if not isinstance(found, nn.Module):
        raise ModelError(
            f"model: must have a layer {path!r}, got none",
            code="model.no_layer",
            hint="the path must be a mapped one, without '.weight'",
        )
    return found


def replace_module(root: Module, path: str, layer: nn.Module) -> None:
    """Put another layer in a layer's place.

    Args:
        root: The model.
        path: Dotted path of an existing layer.
        layer: What stands there from now on.

    Raises:
        ModelError: The model has no layer of that path.
    """
    module_at(root, path)
    parent_path, _, name = path.rpartition(".")
    parent: Any = root
    for step in parent_path.split(".") if parent_path else ():
        parent = _child(parent, step)
    if isinstance(parent, list):
        parent[int(name)] = layer
    else:
        setattr(parent, name, layer)
