"""What the grammars of tool syntaxes share: where calls are looked for, what names an argument."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError
from engine_core.family import Proposal, Typed
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["find_calls", "is_argument_key", "json_call", "text_arguments"]

_NAME: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{LIMITS.tool_name_chars}}}")
_KEY: Final = re.compile(r"[^\x00-\x1f\x7f<>{}\[\]\ud800-\udfff]+")


def find_calls(
    text: str, opener: str, read: Callable[[str, int], tuple[int, Proposal | None]]
) -> tuple[Proposal, ...]:
    """Read the calls of a reply one after the other.

    What stands inside a refused or unfinished call is its text, not another call: the next opener
    is looked for where reading stopped.

    Args:
        text: The answer part of a finished reply.
        opener: Marker that every call begins with.
        read: Takes the text and an opener's place; gives where reading stopped, and the call when
            it is one.

    Returns:
        At most ``LIMITS.reply_calls`` proposals in order.
    """
    found: list[Proposal] = []
    at = 0
    for _ in range(LIMITS.call_openers):
        start = text.find(opener, at)
        if start < 0 or len(found) == LIMITS.reply_calls or at > LIMITS.arguments_total_bytes:
            break
        at, proposal = read(text, start)
        if proposal is not None:
            found.append(proposal)
    return tuple(found)


def is_argument_key(key: str) -> bool:
    """Tell whether a text can name an argument.

    Args:
        key: The text between the markup of a key.

    Returns:
        False for markup, control characters, lone surrogates, an empty and an overlong text.
    """
    return _KEY.fullmatch(key) is not None and len(key.encode()) <= LIMITS.argument_key_bytes


def text_arguments(pairs: Sequence[tuple[str, str]]) -> dict[str, str] | None:
    """Make the arguments of a call whose values are bare texts.

    A repeated or impossible key is refused; reading it as text would make a wrong call of it.

    Args:
        pairs: Keys and values as they are written.

    Returns:
        The arguments, ``None`` when they are none.
    """
    arguments = dict(pairs)
    if len(arguments) != len(pairs) or len(pairs) > LIMITS.checked_entries:
        return None
    return arguments if all(map(is_argument_key, arguments)) else None


def json_call(source: str, span: tuple[int, int], *, arguments_key: str) -> Proposal | None:
    """Read a call that is one JSON object of a name and arguments; anything unusual is no call.

    Args:
        source: The object's text.
        span: Where the call with its markup stands in the reply.
        arguments_key: Key of the arguments.

    Returns:
        The call, its arguments with the types that the JSON states; ``None`` when it is none.
    """
    try:
        value = parse_json(source.encode(), "tool call", LIMITS)
    except (EngineError, UnicodeEncodeError):
        return None
    if not isinstance(value, dict) or value.keys() != {"name", arguments_key}:
        return None
    name, arguments = value["name"], value[arguments_key]
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return None
    if not isinstance(arguments, dict) or len(arguments) > LIMITS.checked_entries:
        return None
    reading = {key: Typed(argument) for key, argument in arguments.items()}
    return Proposal(span=span, name=name, readings=(reading,))
