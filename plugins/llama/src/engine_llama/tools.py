"""The tool syntax of Llama 3: the whole reply is one JSON object.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}

There are no markers, so a reply is a call only when nothing stands beside the object. The templates
of this family render one call a turn, which is all that this syntax reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from engine_core.limits import LIMITS
from engine_core.tools.markup import json_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.family import Proposal
    from engine_core.messages import ToolDecl

__all__ = ["LLAMA_JSON", "LlamaJsonSyntax"]


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
        call = json_call(body, (0, len(text)), arguments_key="parameters")
        return () if call is None else (call,)


LLAMA_JSON = LlamaJsonSyntax()
