"""The order of a conversation's turns; tool results are put where their calls are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import attrs

from engine_core.errors import InvalidRequest
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.messages import Message, ToolCall

__all__ = ["order_turns"]


def _fail(where: str, rule: str, got: str, hint: str = "") -> NoReturn:
    raise InvalidRequest(f"{where}: {rule}, got {got}", code="request.messages.order", hint=hint)


@attrs.define
class _Round:
    """The calls of the latest assistant turn and the results seen so far."""

    where: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: dict[str, Message] = attrs.field(factory=dict)

    def answer(self, result: Message, where: str) -> None:
        """Match one tool turn to the one open call it names."""
        call = next((call for call in self.calls if call.id == result.tool_call_id), None)
        if call is None:
            _fail(
                f"{where}.tool_call_id",
                "must name a call of the assistant turn before it",
                shown(result.tool_call_id),
            )
        if call.id in self.results:
            _fail(f"{where}.tool_call_id", "a call takes one result", shown(call.id))
        if result.name is not None and result.name != call.name:
            _fail(f"{where}.name", f"must be the called function {call.name!r}", shown(result.name))
        self.results[call.id] = attrs.evolve(result, name=call.name)

    def close(self) -> list[Message]:
        """Give the results in call order.

        Raises:
            InvalidRequest: A call has none.
        """
        for index, call in enumerate(self.calls):
            if call.id not in self.results:
                _fail(
                    f"{self.where}.tool_calls[{index}]",
                    "must be answered before the next turn and the end",
                    f"no result for {shown(call.id)}",
                    "add a tool turn with this tool_call_id",
                )
        return [self.results[call.id] for call in self.calls]


def order_turns(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Check the order of turns and sort tool results into call order.

    System turns come first. The tool turns after an assistant turn answer exactly its calls, in
    whatever order they arrived; a result takes over its call's function name. Call ids are unique
    over the conversation.

    Args:
        turns: Turns whose fields have been checked one by one.

    Returns:
        The turns as a template wants them.

    Raises:
        InvalidRequest: The order breaks a rule; the message names the turn.
    """
    ordered: list[Message] = []
    seen: set[str] = set()
    system = True
    current = _Round()
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if turn.role == "tool":
            current.answer(turn, where)
            continue
        ordered += current.close()
        if turn.role == "system" and not system:
            _fail(where, "system turns must come first", "one after another turn")
        system = system and turn.role == "system"
        for position, call in enumerate(turn.tool_calls):
            if call.id in seen:
                _fail(
                    f"{where}.tool_calls[{position}].id",
                    "must be unique in the conversation",
                    shown(call.id),
                )
            seen.add(call.id)
        current = _Round(where, turn.tool_calls)
        ordered.append(turn)
    ordered += current.close()
    return tuple(ordered)
