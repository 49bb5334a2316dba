"""JSON values that cannot change, and how an error shows a value or another error."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from engine_core.errors import EngineError, InvalidRequest

__all__ = [
    "FrozenDict",
    "FrozenList",
    "freeze_json",
    "is_empty",
    "reason_of",
    "shown",
    "text_size",
    "thaw_json",
]

_SHOWN_CHARS = 60
_REASON_CHARS = 400


def shown(value: object) -> str:
    """Render a value for an error message, never a whole payload.

    Args:
        value: Anything.

    Returns:
        The start of its ``repr`` for a plain scalar, else the name of its type.
    """
    if isinstance(value, str):
        text = repr(value[:_SHOWN_CHARS])
        return text if len(value) <= _SHOWN_CHARS else f"{text}... ({len(value)} characters)"
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return (
            repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
        )
    return f"{type(value).__name__}"


def reason_of(error: BaseException) -> str:
    """Put an exception into one short line, also when its own text cannot be made.

    Args:
        error: Any exception.

    Returns:
        Its type and message on one line.
    """
    if isinstance(error, EngineError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception_only(error))
    line = " ".join(text.split())
    return line if len(line) <= _REASON_CHARS else f"{line[:_REASON_CHARS]}..."


def _refuse(*_: object, **__: object) -> NoReturn:
    msg = "frozen JSON value: cannot be changed, copy it first"
    raise TypeError(msg)


class FrozenDict(dict[str, Any]):
    """A JSON object that cannot be changed; equal to a plain ``dict`` and printable as JSON."""

    __slots__ = ()

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        """Hash by content, so that records holding it can be set members."""
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        """Copy and unpickle through the constructor, which fills without ``__setitem__``."""
        return (type(self), (dict(self),))


class FrozenList(list[Any]):
    """A JSON array that cannot be changed; equal to a plain ``list`` and printable as JSON."""

    __slots__ = ()

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        """Hash by content, so that records holding it can be set members."""
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[FrozenList], tuple[list[Any]]]:
        """Copy and unpickle through the constructor, which fills without ``append``."""
        return (type(self), (list(self),))


def text_size(text: str, subject: str, code: str) -> int:
    """Count a text's UTF-8 bytes.

    Args:
        text: The text.
        subject: What the text is, for the error.
        code: Error code.

    Returns:
        Its length in bytes.

    Raises:
        InvalidRequest: The text holds a lone surrogate, which no tokenizer can encode.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as exc:
        raise InvalidRequest(
            f"{subject}: text must be valid Unicode, got a lone surrogate at {exc.start}", code=code
        ) from exc


def freeze_json(
    value: object, subject: str, *, max_bytes: int, max_depth: int, max_digits: int, code: str
) -> tuple[Any, int]:
    """Copy a JSON value into one that nobody can change.

    The size is bounded while copying, so that a value whose parts are shared many times over
    cannot unfold into more than ``max_bytes``.

    Args:
        value: ``None``, bool, int, finite float, str, list or tuple, mapping with string keys.
        subject: What the value is, for the error, e.g. ``"tools[0].parameters"``.
        max_bytes: Bound on its size: UTF-8 bytes of its texts, digits, brackets and quotes.
        max_depth: Bound on nested containers.
        max_digits: Bound on the decimal digits of an integer.
        code: Error code.

    Returns:
        The copy (scalars, :class:`FrozenList`, :class:`FrozenDict`) and its size in bytes.

    Raises:
        InvalidRequest: The value is no JSON value or exceeds a bound.
    """
    size = 0

    def fail(rule: str, got: str) -> NoReturn:
        raise InvalidRequest(f"{subject}: {rule}, got {got}", code=code)

    def charge(count: int) -> None:
        nonlocal size
        size += count
        if size > max_bytes:
            fail(f"must fit {max_bytes} bytes", "more")

    def copy(item: object, depth: int) -> Any:
        if isinstance(item, str):
            charge(text_size(item, subject, code) + 2)
            return str(item)
        if item is None or isinstance(item, bool):
            charge(4)
            return item
        if isinstance(item, int):
            # The power is worth its time for a long integer only: it has over 3 bits a digit.
            if item.bit_length() > 3 * max_digits and abs(item) >= 10**max_digits:
                fail(f"integers must have at most {max_digits} digits", shown(item))
            number = int(item)
            charge(max(1, number.bit_length() * 30103 // 100000))
            return number
        if isinstance(item, float):
            if not math.isfinite(item):
                fail("numbers must be finite", shown(item))
            charge(3)
            return float(item)
        if depth >= max_depth:
            fail(f"must nest at most {max_depth} levels", "more")
        if isinstance(item, (dict, Mapping)):
            charge(2)
            pairs: dict[str, Any] = {}
            for key, entry in item.items():
                if not isinstance(key, str):
                    fail("object keys must be strings", shown(key))
                charge(text_size(key, subject, code) + 4)
                pairs[str(key)] = copy(entry, depth + 1)
            return FrozenDict(pairs)
        if isinstance(item, (list, tuple)):
            charge(2 + len(item))
            return FrozenList([copy(entry, depth + 1) for entry in item])
        return fail("must hold JSON values only", shown(item))

    return copy(value, 0), size


def thaw_json(value: Any) -> Any:
    """Copy a frozen JSON value into plain dicts and lists that the receiver may change.

    Args:
        value: A JSON value, frozen or not.

    Returns:
        An independent copy.
    """
    if isinstance(value, (dict, Mapping)):
        return {key: thaw_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw_json(entry) for entry in value]
    return value


def is_empty(value: object) -> bool:
    """Tell whether a field that nobody reads may be dropped without losing anything.

    Args:
        value: A field's value.

    Returns:
        True for ``None`` and for an empty string, list, tuple or mapping.
    """
    return value is None or (isinstance(value, (str, list, tuple, Mapping)) and not value)
