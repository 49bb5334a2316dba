"""Where a rendered conversation can be continued from, in tokens.

A position decides only how much a later prompt can reuse: state stored at any position is right.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import attrs

from engine_core.errors import EngineError
from engine_core.messages import Message, TextPart
from engine_core.text.repeating import shared_length

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.messages import ToolDecl

    class Render(Protocol):
        """Renders turns and tools with the prompt's own options, shield and clock."""

        def __call__(
            self, messages: Sequence[Message], tools: Sequence[ToolDecl], *, opens_reply: bool
        ) -> str: ...


__all__ = ["Outline"]

# First user turns that begin differently: what a prompt shares with both is no user's text.
_PROBES = ("0", "x")
# How much of the last turn must stand before what opens the reply.
_CONTEXT_CHARS = 16


@attrs.frozen(kw_only=True, eq=False)
class Outline:
    """A conversation as it was rendered and encoded.

    Attributes:
        messages: The conversation.
        tools: Advertised tools.
        text: The rendered prompt.
        ids: Its tokens.
        encode: Encodes rendered text.
        render: Renders other turns as this prompt was rendered.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolDecl]
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
            shared = self._before_reply()
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
        if not system and not self.tools:
            return 0
        turns = [Message(role="user", content=(TextPart(probe),)) for probe in _PROBES]
        try:
            others = [self.render([*system, turn], self.tools, opens_reply=True) for turn in turns]
        except EngineError:
            return 0
        return self._length(min(shared_length(self.text, other) for other in others))

    def _before_reply(self) -> int:
        """Find where what opens the reply begins, in characters.

        What opens it is read off the last turns alone, with one tool for all, where the whole
        conversation ends with it, so that a long one is not rendered twice.
        """
        turns, tools = _last_turns(self.messages), self.tools[:1]
        if len(turns) < len(self.messages) or len(tools) < len(self.tools):
            with suppress(EngineError):
                opened = self.render(turns, tools, opens_reply=True)
                closed = self.render(turns, tools, opens_reply=False)
                at = shared_length(opened, closed)
                if at and self.text.endswith(opened[max(at - _CONTEXT_CHARS, 0) :]):
                    return len(self.text) - (len(opened) - at)
        return shared_length(self.text, self.render(self.messages, self.tools, opens_reply=False))

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


def _last_turns(messages: Sequence[Message]) -> list[Message]:
    """Cut a conversation to its system turns, its last question and, if one follows, its last turn.

    Questions and replies still alternate, as some templates demand.
    """
    roles = [message.role for message in messages]
    last = max((at for at, role in enumerate(roles) if role != "tool"), default=0)
    asked = max((at for at, role in enumerate(roles[: last + 1]) if role == "user"), default=last)
    wanted = {asked, *range(last, len(messages))}
    return [
        message
        for at, message in enumerate(messages)
        if at in wanted or (message.role == "system" and at < asked)
    ]
