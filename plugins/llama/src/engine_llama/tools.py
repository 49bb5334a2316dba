"""The tool syntax of Llama 3: the whole reply is one JSON object.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}

There are no markers, so a reply is a call only when nothing stands beside the object. The templates
of this family render one call a turn, which is all that this syntax reads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs

from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError
from engine_core.family import Proposal, Typed
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.messages import ToolDecl

__all__ = ["LLAMA_JSON", "LlamaJsonSyntax"]

MAX_ARGUMENTS: Final = 256
_KEYS: Final = frozenset({"name", "parameters"})
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LIMITS.tool_name_chars}}}")


@attrs.frozen
class LlamaJsonSyntax:
    """Reads ``{"name": ..., "parameters": {...}}`` as a whole reply."""

    name: ClassVar[str] = "llama_json"
    markers: ClassVar[tuple[tuple[str, str], ...]] = ()
    probe_rounds: ClassVar[int] = 1

    def parse(self, text: str, tools: Sequence[ToolDecl]) -> tuple[Proposal, ...]:  # noqa: ARG002 - the JSON states all types
        """Read a completed reply.

        Args:
            text: The answer part of a finished reply.
            tools: Advertised tools; the JSON states all types itself.

        Returns:
            One proposal over the whole text, or none.
        """
        body = text.strip()
        if not (body.startswith("{") and body.endswith("}")) or len(body) > LIMITS.arguments_bytes:
            return ()
        try:
            value = parse_json(body.encode(), "tool call", LIMITS)
        except (EngineError, UnicodeEncodeError):
            return ()
        return () if not _is_call(value) else (_proposal(value, len(text)),)


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != _KEYS:
        return False
    name, arguments = value["name"], value["parameters"]
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return False
    return isinstance(arguments, dict) and len(arguments) <= MAX_ARGUMENTS


def _proposal(call: dict[str, Any], length: int) -> Proposal:
    arguments = {key: Typed(value) for key, value in call["parameters"].items()}
    return Proposal(span=(0, length), name=call["name"], readings=(arguments,))


LLAMA_JSON = LlamaJsonSyntax()
