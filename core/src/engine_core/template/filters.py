"""The filters and tests that exist for chat templates: an allow-list, nothing else."""

# ruff: noqa: FBT002 - templates pass these flags by position

from __future__ import annotations

from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Undefined
from jinja2.runtime import Macro

from engine_core.template.budget import require_integer_size
from engine_core.template.filters_text import TEXT_FILTERS
from engine_core.template.methods import join_texts, require_key
from engine_core.template.operations import BoundMethod, Function, Operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["FILTERS", "TESTS", "bind"]

_MISSING: Final = object()
_SIZED: Final = (str, list, tuple, dict, range)


def _length(ops: Operations, value: Any) -> int:
    ops.budget.spend(1)
    if not isinstance(value, (*_SIZED, Undefined)):
        msg = f"a {type(value).__name__} has no length"
        raise TypeError(msg)
    return len(value)


def _list(ops: Operations, value: Any) -> list[Any]:
    return ops.listed(value)


def _first(ops: Operations, value: Any) -> Any:
    ops.budget.spend(1)
    return next(iter(ops.iterate(value)), Undefined("no first item, the sequence is empty"))


def _last(ops: Operations, value: Any) -> Any:
    ops.budget.spend(1)
    if not isinstance(value, (*_SIZED, Undefined)):
        msg = f"a {type(value).__name__} has no last item"
        raise TypeError(msg)
    return next(iter(reversed(value)), Undefined("no last item, the sequence is empty"))


def _reverse(ops: Operations, value: Any) -> Any:
    if type(value) is str:
        ops.budget.spend_text(value)
        return value[::-1]
    return ops.listed(value)[::-1]


def _items(ops: Operations, value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Undefined):
        return []
    if type(value) is not dict:
        msg = f"items takes a mapping, got a {type(value).__name__}"
        raise TypeError(msg)
    ops.budget.spend_items(3 * len(value))
    return list(value.items())


def _getter(ops: Operations, attribute: Any, default: Any = _MISSING) -> Callable[[Any], Any]:
    """Make a lookup of a dotted path, digits being positions."""
    parts: list[Any]
    if attribute is None:
        parts = []
    elif type(attribute) is str:
        ops.budget.spend_text(attribute)
        parts = [int(part) if part.isdecimal() else part for part in attribute.split(".")]
    else:
        parts = [attribute]

    def get(value: Any) -> Any:
        for part in parts:
            value = ops.item(value, part)
            if default is not _MISSING and isinstance(value, Undefined):
                value = default
        return value

    return get


def _folded(ops: Operations, value: Any, *, case_sensitive: Any) -> Any:
    """Weigh a sort key and, unless told otherwise, ignore its case."""
    ops.budget.weigh(value)
    if type(value) is str and not case_sensitive:
        ops.budget.spend_text(value, times=3)
        return value.lower()
    return value


def _sorted(ops: Operations, keyed: list[tuple[Any, Any]], *, reverse: Any) -> list[Any]:
    cost = sum(ops.budget.weigh(key).characters >> 5 for key, _ in keyed)
    ops.budget.spend_sort(len(keyed))
    ops.budget.spend_sort(cost)
    return [value for _, value in sorted(keyed, key=lambda pair: pair[0], reverse=bool(reverse))]


def _sort(
    ops: Operations,
    value: Any,
    reverse: Any = False,
    case_sensitive: Any = False,
    attribute: Any = None,
) -> list[Any]:
    paths = attribute.split(",") if type(attribute) is str else [attribute]
    getters = [_getter(ops, path) for path in paths]
    keyed = [
        ([_folded(ops, get(item), case_sensitive=case_sensitive) for get in getters], item)
        for item in ops.listed(value)
    ]
    return _sorted(ops, keyed, reverse=reverse)


def _dictsort(
    ops: Operations,
    value: Any,
    case_sensitive: Any = False,
    by: Any = "key",
    reverse: Any = False,
) -> list[tuple[Any, Any]]:
    if by not in ("key", "value"):
        msg = "dictsort sorts by key or by value"
        raise ValueError(msg)
    if type(value) is not dict:
        if isinstance(value, Undefined):
            ops.attribute(value, "items")
        msg = f"dictsort takes a mapping, got a {type(value).__name__}"
        raise TypeError(msg)
    position = 0 if by == "key" else 1
    keyed = [
        (_folded(ops, pair[position], case_sensitive=case_sensitive), pair)
        for pair in _items(ops, value)
    ]
    return _sorted(ops, keyed, reverse=reverse)


def _unique(
    ops: Operations,
    value: Any,
    case_sensitive: Any = False,
    attribute: Any = None,
) -> list[Any]:
    get = _getter(ops, attribute)
    found: dict[Any, Any] = {}
    for item in ops.listed(value):
        key = require_key(_folded(ops, get(item), case_sensitive=case_sensitive))
        ops.budget.spend(4)
        found.setdefault(key, item)
    return list(found.values())


def _extreme(chooser: Callable[..., Any]) -> Callable[..., Any]:
    def choose(
        ops: Operations,
        value: Any,
        case_sensitive: Any = False,
        attribute: Any = None,
    ) -> Any:
        get = _getter(ops, attribute)
        keyed = [
            (_folded(ops, get(item), case_sensitive=case_sensitive), item)
            for item in ops.listed(value)
        ]
        if not keyed:
            return Undefined("no aggregated item, the sequence is empty")
        return chooser(keyed, key=lambda pair: pair[0])[1]

    return choose


def _sum(ops: Operations, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    get = _getter(ops, attribute)
    for item in ops.listed(value):
        start = ops.binary("+", start, get(item))
    require_integer_size(start)
    return start


def _join(ops: Operations, value: Any, d: Any = "", attribute: Any = None) -> str:
    get = _getter(ops, attribute)
    pieces = [ops.text(get(item)) for item in ops.listed(value)]
    return join_texts(ops.budget, ops.text(d), pieces)


def _batch(ops: Operations, value: Any, linecount: Any, fill_with: Any = None) -> list[Any]:
    items = ops.listed(value)
    if type(linecount) is not int or linecount < 1:
        msg = "batch needs a positive count"
        raise ValueError(msg)
    ops.budget.spend_items(8 * len(items))
    rows = [items[at : at + linecount] for at in range(0, len(items), linecount)]
    if rows and fill_with is not None:
        missing = linecount - len(rows[-1])
        ops.budget.spend_items(missing)
        rows[-1].extend([fill_with] * missing)
    return rows


def _slice(ops: Operations, value: Any, slices: Any, fill_with: Any = None) -> list[Any]:
    items = ops.listed(value)
    if type(slices) is not int or slices < 1:
        msg = "slice needs a positive count"
        raise ValueError(msg)
    ops.budget.spend_items(8 * slices + len(items))
    size, longer = divmod(len(items), slices)
    columns, at = [], 0
    for number in range(slices):
        count = size + (number < longer)
        column = items[at : at + count]
        at += count
        if fill_with is not None and number >= longer:
            column.append(fill_with)
        columns.append(column)
    return columns


def _map(ops: Operations, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
    if not value:
        return []
    if not args and "attribute" in kwargs:
        get = _getter(ops, kwargs.pop("attribute"), kwargs.pop("default", _MISSING))
        if kwargs:
            msg = f"map does not know the argument {next(iter(kwargs))!r}"
            raise TypeError(msg)
        return [get(item) for item in ops.listed(value)]
    if not args:
        msg = "map needs the name of a filter or an attribute"
        raise TypeError(msg)
    function = _named(FILTERS, "filter", args[0])
    results = []
    for item in ops.listed(value):
        ops.budget.spend(4)
        results.append(function(ops, item, *args[1:], **kwargs))
    return results


def _named(table: Mapping[str, Callable[..., Any]], what: str, name: Any) -> Callable[..., Any]:
    function = table.get(name) if type(name) is str else None
    if function is None:
        msg = f"there is no {what} of that name"
        raise LookupError(msg)
    return function


def _selecting(*, wanted: bool, by_attribute: bool) -> Callable[..., Any]:
    def select(ops: Operations, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if not value:
            return []
        rest = list(args)
        if by_attribute and not rest:
            msg = "the name of an attribute is needed"
            raise TypeError(msg)
        get = _getter(ops, rest.pop(0) if by_attribute else None)
        test = _named(TESTS, "test", rest.pop(0)) if rest else _truth
        return list(
            _matching(ops, ops.listed(value), partial(test, ops), get, rest, kwargs, wanted=wanted)
        )

    return select


def _matching(
    ops: Operations,
    items: list[Any],
    test: Callable[..., Any],
    get: Callable[[Any], Any],
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    wanted: bool,
) -> Iterator[Any]:
    for item in items:
        ops.budget.spend(4)
        if bool(test(get(item), *args, **kwargs)) is wanted:
            yield item


def _truth(_: Operations, value: Any) -> bool:
    return bool(value)


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    **TEXT_FILTERS,
    "batch": _batch,
    "count": _length,
    "dictsort": _dictsort,
    "first": _first,
    "items": _items,
    "join": _join,
    "last": _last,
    "length": _length,
    "list": _list,
    "map": _map,
    "max": _extreme(max),
    "min": _extreme(min),
    "reject": _selecting(wanted=False, by_attribute=False),
    "rejectattr": _selecting(wanted=False, by_attribute=True),
    "reverse": _reverse,
    "select": _selecting(wanted=True, by_attribute=False),
    "selectattr": _selecting(wanted=True, by_attribute=True),
    "slice": _slice,
    "sort": _sort,
    "sum": _sum,
    "unique": _unique,
}
"""Filter name -> ``f(operations, value, ...)``."""


def _is(check: Callable[[Any], bool]) -> Callable[..., bool]:
    def test(ops: Operations, value: Any) -> bool:
        ops.budget.spend(1)
        return check(value)

    return test


def _compares(name: str) -> Callable[..., bool]:
    def test(ops: Operations, value: Any, other: Any) -> bool:
        return ops.compare(value, name, other)

    return test


def _remainder(ops: Operations, value: Any, number: Any) -> Any:
    return ops.binary("%", value, number)


def _cased(method: str) -> Callable[..., bool]:
    def test(ops: Operations, value: Any) -> bool:
        return bool(getattr(ops.text(value), method)())

    return test


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (*_SIZED, Undefined))


TESTS: Final[Mapping[str, Callable[..., Any]]] = {
    "boolean": _is(lambda value: value is True or value is False),
    "callable": _is(lambda value: isinstance(value, (BoundMethod, Function, Macro))),
    "defined": _is(lambda value: not isinstance(value, Undefined)),
    "divisibleby": lambda ops, value, num: _remainder(ops, value, num) == 0,
    "even": lambda ops, value: _remainder(ops, value, 2) == 0,
    "false": _is(lambda value: value is False),
    "filter": _is(lambda value: type(value) is str and value in FILTERS),
    "float": _is(lambda value: isinstance(value, float)),
    "integer": _is(lambda value: type(value) is int),
    "iterable": _is(lambda value: isinstance(value, (*_SIZED, GeneratorType, Undefined))),
    "lower": _cased("islower"),
    "mapping": _is(lambda value: isinstance(value, dict)),
    "none": _is(lambda value: value is None),
    "number": _is(lambda value: isinstance(value, (int, float))),
    "odd": lambda ops, value: _remainder(ops, value, 2) == 1,
    "sameas": lambda ops, value, other: _is(lambda item: item is other)(ops, value),
    "sequence": _is(_is_sequence),
    "string": _is(lambda value: isinstance(value, str)),
    "test": _is(lambda value: type(value) is str and value in TESTS),
    "true": _is(lambda value: value is True),
    "undefined": _is(lambda value: isinstance(value, Undefined)),
    "upper": _cased("isupper"),
    **dict.fromkeys(("in",), _compares("in")),
    **dict.fromkeys(("==", "eq", "equalto"), _compares("eq")),
    **dict.fromkeys(("!=", "ne"), _compares("ne")),
    **dict.fromkeys((">", "gt", "greaterthan"), _compares("gt")),
    **dict.fromkeys((">=", "ge"), _compares("gteq")),
    **dict.fromkeys(("<", "lt", "lessthan"), _compares("lt")),
    **dict.fromkeys(("<=", "le"), _compares("lteq")),
}
"""Test name -> ``f(operations, value, ...)``."""


def bind(
    table: Mapping[str, Callable[..., Any]], operations: Operations
) -> dict[str, Callable[..., Any]]:
    """Bind filters or tests to one render.

    Args:
        table: ``FILTERS`` or ``TESTS``.
        operations: The render's operations.

    Returns:
        Name -> callable as generated code calls it.
    """
    return {name: partial(function, operations) for name, function in table.items()}
