"""Where a rendered conversation can be continued from, in tokens.

A position decides only how much a later prompt can reuse: state stored at any position is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from engine_core.errors import EngineError
from engine_core.messages import Message, TextPart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    class Render(Protocol):
        """Renders turns with the prompt's own tools, options, shield and clock."""

        def __call__(self, messages: Sequence[Message], *, opens_reply: bool) -> str: ...


__all__ = ["Outline"]

# First user turns that begin differently: what a prompt shares with both is no user's text.
_PROBES = ("0", "x")
_BLOCK_CHARS = 4096


@attrs.frozen(kw_only=True, eq=False)
class Outline:
    """A conversation as it was rendered and encoded.

    Attributes:
        messages: The conversation.
        has_tools: Whether tools were advertised.
        text: The rendered prompt.
        ids: Its tokens.
        encode: Encodes rendered text.
        render: Renders other turns as this prompt was rendered.
    """

    messages: Sequence[Message]
    has_tools: bool
    text: str
    ids: tuple[int, ...]
    encode: Callable[[str], list[int]]
    render: Render

    def transcript(self) -> int:
        """Find the end of the conversation, before what opens the reply.

        The next turn continues there: a template that drops earlier reasoning renders the opened
        reply differently once it is part of the history.

        Returns:
            A length in tokens; 0 when the template does not render such a transcript.
        """
        try:
            shared = _shared(self.text, self.render(self.messages, opens_reply=False))
            tail = self.encode(self.text[shared:]) if 0 < shared < len(self.text) else []
        except EngineError:
            return 0
        start = len(self.ids) - len(tail)
        if tail and self.ids[start:] == tuple(tail):
            return start
        return self._length(shared)

    def opening(self) -> int:
        """Find the end of the system and tools block, which other conversations share.

        Returns:
            A length in tokens; 0 when there is no such block.
        """
        system = [message for message in self.messages if message.role == "system"]
        if not system and not self.has_tools:
            return 0
        turns = [Message(role="user", content=(TextPart(probe),)) for probe in _PROBES]
        try:
            others = [self.render([*system, turn], opens_reply=True) for turn in turns]
        except EngineError:
            return 0
        return self._length(min(_shared(self.text, other) for other in others))

    def _length(self, chars: int) -> int:
        """Count the tokens that the first characters share with the prompt."""
        try:
            head = self.encode(self.text[:chars])
        except EngineError:
            return 0
        same = 0
        for one, other in zip(head, self.ids, strict=False):
            if one != other:
                break
            same += 1
        return same


def _shared(text: str, other: str) -> int:
    """Count the characters two texts begin with."""
    size = min(len(text), len(other))
    done = 0
    while done < size:
        stop = min(done + _BLOCK_CHARS, size)
        if text[done:stop] != other[done:stop]:
            while text[done] == other[done]:
                done += 1
            return done
        done = stop
    return done
