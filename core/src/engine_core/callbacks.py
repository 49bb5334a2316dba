"""How the engine calls code of its caller: whatever goes wrong there is one typed error."""

from __future__ import annotations

import inspect
import numbers
import threading
from typing import TYPE_CHECKING, Any

from engine_core.errors import CallbackError
from engine_core.values import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_back", "says_no"]


def call_back(callback: Callable[..., Any], name: str, *arguments: object) -> Any:
    """Call the caller's code.

    An interrupt or an exit raised on the main thread passes, for it is meant for the program.
    On any other thread, a client's worker above all, it is an error like every other: it must
    not end the thread that serves everybody else.

    Args:
        callback: The caller's callable.
        name: What the caller knows it as, e.g. ``"on_token"``; the code is ``callback.<name>``.
        *arguments: What it takes.

    Returns:
        What it returned.

    Raises:
        CallbackError: It raised, or returned something to await, which nobody would.
    """
    code = f"callback.{name}"
    try:
        result = callback(*arguments)
    except BaseException as exc:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not isinstance(exc, Exception):
            raise
        raise CallbackError(
            f"{name}: must not raise, got {reason_of(exc)}",
            code=code,
            hint="the callback's own error is the cause",
        ) from exc
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()  # or Python warns that it was never awaited
        raise CallbackError(
            f"{name}: must be a plain function, got one that returns {type(result).__name__}",
            code=code,
            hint="callbacks run on the worker thread, without an event loop; "
            "use loop.call_soon_threadsafe, or iterate over astream()",
        )
    return result


def says_no(callback: Callable[..., Any], name: str, *arguments: object) -> bool:
    """Call the caller's code and tell whether it wants no more.

    It does by ``False``, or by whatever equals that and is no number, such as ``numpy.False_``.
    A number is no answer: ``sys.stdout.write`` gives 0 for an empty text.

    Args:
        callback: The caller's callable.
        name: What the caller knows it as.
        *arguments: What it takes.

    Returns:
        Whether it said no; ``None`` and everything else mean to go on.

    Raises:
        CallbackError: As for ``call_back``, or it returned something without a truth value.
    """
    result = call_back(callback, name, *arguments)
    if result is None or isinstance(result, bool):
        return result is False
    if isinstance(result, numbers.Number):
        return False
    try:
        return bool(result == False)  # noqa: E712 - a foreign boolean equals it and is not it
    except Exception as exc:
        raise CallbackError(
            f"{name}: must return None, True or False, got {type(result).__name__}",
            code=f"callback.{name}",
            hint="return one truth value, for example bool(array.any())",
        ) from exc
