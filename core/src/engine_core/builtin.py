"""The built-in plugin: what core itself brings, through the hooks that every plugin uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.builtin_chatml import CHATML
from engine_core.builtin_hermes import HERMES
from engine_core.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_core.family import TemplateDialect, ToolSyntax

__all__ = ["engine_template_dialects", "engine_tool_syntaxes"]


@hookimpl
def engine_template_dialects() -> Iterable[TemplateDialect]:
    """Contribute the dialect of plain OpenAI-style messages.

    Returns:
        One dialect.
    """
    return (CHATML,)


@hookimpl
def engine_tool_syntaxes() -> Iterable[ToolSyntax]:
    """Contribute the JSON-between-tags tool syntax.

    Returns:
        One syntax.
    """
    return (HERMES,)
