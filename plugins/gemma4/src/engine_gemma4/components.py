"""Modules that a checkpoint may lack: their absence is an error where they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.errors import ModelError

if TYPE_CHECKING:
    from engine_core.nn import Module

__all__ = ["component"]


def component(owner: Module, name: str, path: str) -> Any:
    """Give a module's part, which may not be in the checkpoint.

    Args:
        owner: The module.
        name: The part's attribute.
        path: The owner's path, for the error.

    Returns:
        The part.

    Raises:
        ModelError: The checkpoint lacks it.
    """
    part = owner.get(name)
    if part is None:
        raise ModelError(
            f"model: needs {path}{name!s}, got a checkpoint without it",
            code="model.missing_component",
            hint="the checkpoint is incomplete; load a complete one",
        )
    return part
