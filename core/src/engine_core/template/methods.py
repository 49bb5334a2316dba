"""The methods a template may call, each with its cost known before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from jinja2 import Undefined

from engine_core.errors import TemplateError
from engine_core.template.budget import (
    POINTER_BYTES,
    SCALARS,
    Budget,
    text_bytes,
)
from engine_core.template.formatting import brace_format

__all__ = ["METHODS", "Method", "join_texts", "require_key", "spend_search", "split_cost"]

MAX_PAD: Final = 2**31
STRING_OBJECT_BYTES: Final = 64
LINE_BREAKS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_GROWTH: Final = 3  # one character can become three when its case changes


def require_key(key: Any) -> Any:
    """Refuse a mapping key whose hash could be costly.

    Args:
        key: A key.

    Returns:
        The same key.

    Raises:
        TemplateError: The key is no scalar.
    """
    if type(key) not in SCALARS and not isinstance(key, Undefined):
        raise TemplateError(
            f"chat template: a mapping key must be a scalar, got a {type(key).__name__}",
            code="template.forbidden",
        )
    return key


def _text(value: Any) -> str:
    if not isinstance(value, str):
        msg = f"a string is needed, got a {type(value).__name__}"
        raise TypeError(msg)
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        msg = f"an integer is needed, got a {type(value).__name__}"
        raise TypeError(msg)
    if not -MAX_PAD < value < MAX_PAD:
        msg = "an integer is out of range"
        raise OverflowError(msg)
    return int(value)


def spend_search(budget: Budget, text: str, needle: str) -> None:
    """Pay for a substring search, whose worst case grows with a short needle's length.

    Args:
        budget: Pays.
        text: What is searched.
        needle: What is looked for.
    """
    budget.spend_text(text, times=1 + min(len(needle), 128) // 8)


def split_cost(budget: Budget, text: str, separator: str | None, limit: int) -> None:
    """Pay for the pieces that splitting a text will make.

    Args:
        budget: Pays.
        text: What is split.
        separator: Where it is split; ``None`` for runs of white space.
        limit: Most splits, negative for no bound.
    """
    if separator is None:
        count = len(text) // 2 + 1
        budget.spend_text(text)
    else:
        spend_search(budget, text, separator)
        count = text.count(separator) + 1 if separator else 1
    if limit >= 0:
        count = min(count, limit + 1)
    budget.spend_text(text)
    budget.spend_bytes(count * (STRING_OBJECT_BYTES + POINTER_BYTES))


def join_texts(budget: Budget, separator: str, texts: list[str]) -> str:
    """Join texts, paid for first.

    Args:
        budget: Pays.
        separator: Stands between the texts.
        texts: The pieces.

    Returns:
        The joined text.
    """
    gaps = max(0, len(texts) - 1)
    wide = not (separator.isascii() and all(map(str.isascii, texts)))
    total = sum(map(len, texts)) + len(separator) * gaps
    budget.spend_items(len(texts))
    budget.spend_bytes(total * (4 if wide else 1))
    return separator.join(texts)


def _scan(function: Callable[..., Any]) -> Method:
    def method(budget: Budget, text: str, *args: Any) -> Any:
        for arg in args:
            budget.weigh(arg)
            if type(arg) is str:
                spend_search(budget, text, arg)
        budget.spend_text(text)
        return function(text, *args)

    return method


def _affix(function: Callable[..., Any]) -> Method:
    def method(budget: Budget, text: str, affix: Any, *bounds: Any) -> Any:
        budget.weigh(affix)
        return function(text, affix, *map(_integer, bounds))

    return method


def _strip(function: Callable[..., str]) -> Method:
    def method(budget: Budget, text: str, characters: Any = None) -> str:
        cost = 1 if characters is None else 1 + len(_text(characters)) // 16
        budget.spend_text(text, times=cost)
        return function(text, characters)

    return method


def _recase(function: Callable[[str], str]) -> Method:
    def method(budget: Budget, text: str) -> str:
        budget.spend_text(text, times=2 if text.isascii() else 2 * _GROWTH)
        return function(text)

    return method


def _pad(function: Callable[..., str]) -> Method:
    def method(budget: Budget, text: str, width: Any, *fill: Any) -> str:
        size = max(len(text), _integer(width))
        wide = not all(item.isascii() for item in (text, *map(_text, fill)))
        budget.spend_bytes(size * (4 if wide else 1))
        return function(text, int(width), *fill)

    return method


def _split(function: Callable[..., list[str]]) -> Method:
    def method(budget: Budget, text: str, sep: Any = None, maxsplit: Any = -1) -> list[str]:
        separator = None if sep is None else _text(sep)
        split_cost(budget, text, separator, _integer(maxsplit))
        return function(text, separator, int(maxsplit))

    return method


def _splitlines(budget: Budget, text: str, keepends: Any = None) -> list[str]:
    budget.spend_text(text, times=len(LINE_BREAKS))
    count = 1 + sum(map(text.count, LINE_BREAKS))
    budget.spend_bytes(count * (STRING_OBJECT_BYTES + POINTER_BYTES))
    return text.splitlines(bool(keepends))


def _replace(budget: Budget, text: str, old: Any, new: Any, count: Any = -1) -> str:
    old, new, limit = _text(old), _text(new), _integer(count)
    spend_search(budget, text, old)
    found = text.count(old)
    if limit >= 0:
        found = min(found, limit)
    size = len(text) + found * max(0, len(new) - len(old))
    budget.spend_bytes(size * (1 if text.isascii() and new.isascii() else 4))
    return text.replace(old, new, limit)


def _expandtabs(budget: Budget, text: str, tabsize: Any = 8) -> str:
    size = _integer(tabsize)
    budget.spend_bytes(text_bytes(text) + 4 * max(0, size) * text.count("\t"))
    return text.expandtabs(size)


def _join(budget: Budget, text: str, items: Any) -> str:
    if type(items) is str:
        budget.spend_items(3 * len(items))
    elif type(items) not in (list, tuple, dict):
        msg = f"can only join a list, got a {type(items).__name__}"
        raise TypeError(msg)
    return join_texts(budget, text, [_text(item) for item in items])


def _format(budget: Budget, text: str, *args: Any, **kwargs: Any) -> str:
    return brace_format(budget, text, args, kwargs)


def _get(budget: Budget, mapping: dict[Any, Any], key: Any, default: Any = None) -> Any:
    budget.spend(1)
    return mapping.get(require_key(key), default)


def _items(budget: Budget, mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    budget.spend_items(3 * len(mapping))
    return list(mapping.items())


def _keys(budget: Budget, mapping: dict[Any, Any]) -> list[Any]:
    budget.spend_items(len(mapping))
    return list(mapping)


def _values(budget: Budget, mapping: dict[Any, Any]) -> list[Any]:
    budget.spend_items(len(mapping))
    return list(mapping.values())


def _copy(budget: Budget, value: Any) -> Any:
    budget.spend_items(8 * len(value))
    return value.copy()


def _sequence(name: str) -> Method:
    def method(budget: Budget, value: Any, item: Any) -> Any:
        weight = budget.weigh(value)
        budget.spend(len(value))
        budget.weigh(item)
        budget.spend(weight.nodes)
        return getattr(value, name)(item)

    return method


Method = Callable[..., Any]

_SCANNING: Final = (
    *("find", "rfind", "index", "rindex", "count", "partition", "rpartition"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
    *("isnumeric", "isprintable", "isspace", "istitle", "isupper"),
    *("removeprefix", "removesuffix"),
)
_STRING: Final[Mapping[str, Method]] = {
    **{name: _scan(getattr(str, name)) for name in _SCANNING},
    **{name: _affix(getattr(str, name)) for name in ("startswith", "endswith")},
    **{name: _strip(getattr(str, name)) for name in ("strip", "lstrip", "rstrip")},
    **{
        name: _recase(getattr(str, name))
        for name in ("upper", "lower", "title", "capitalize", "swapcase", "casefold")
    },
    **{name: _pad(getattr(str, name)) for name in ("center", "ljust", "rjust", "zfill")},
    **{name: _split(getattr(str, name)) for name in ("split", "rsplit")},
    "splitlines": _splitlines,
    "replace": _replace,
    "expandtabs": _expandtabs,
    "join": _join,
    "format": _format,
}
_SEQUENCE: Final[Mapping[str, Method]] = {name: _sequence(name) for name in ("index", "count")}

METHODS: Final[Mapping[type, Mapping[str, Method]]] = {
    str: _STRING,
    dict: {"get": _get, "items": _items, "keys": _keys, "values": _values, "copy": _copy},
    list: {**_SEQUENCE, "copy": _copy},
    tuple: _SEQUENCE,
}
"""Type -> method name -> ``f(budget, owner, *args, **kwargs)``; anything else is refused."""
