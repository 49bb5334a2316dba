"""Text and number filters of chat templates, each paid for before it runs."""

# ruff: noqa: FBT002 - templates pass these flags by position

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Undefined

from engine_core.errors import TemplateError
from engine_core.template.budget import require_integer_size, text_bytes
from engine_core.template.formatting import percent_format
from engine_core.template.methods import LINE_BREAKS, METHODS, join_texts

if TYPE_CHECKING:
    from engine_core.template.operations import Operations

__all__ = ["TEXT_FILTERS"]

MAX_JSON_INDENT: Final = 16
MAX_JSON_SEPARATOR_BYTES: Final = 16
MAX_PRECISION: Final = 308
_JSON_PYTHON_ENCODER_UNITS: Final = 6  # an indented dump runs in Python, not in C
_WORD = re.compile(r"\w+")
_WORD_START = re.compile(r"([-\s({\[<]+)")
_STRING = METHODS[str]


def to_json(
    ops: Operations,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> str:
    """Write JSON as transformers' filter does: nothing is escaped for HTML.

    Args:
        ops: The render's operations.
        value: Plain data.
        ensure_ascii: Escape everything beyond ASCII.
        indent: Spaces per level, or a text of at most 16 characters.
        separators: Item and key separator.
        sort_keys: Sort object keys.

    Returns:
        The JSON text.

    Raises:
        TemplateError: An option is out of bounds or the budget is exceeded.
        TypeError: The value is no JSON value.
    """
    width = _json_indent(indent)
    if separators is not None:
        separators = _json_separators(separators)
    weight = ops.budget.weigh(value, plain=True)
    extra = 0
    if indent is not None:
        ops.budget.spend(weight.nodes * _JSON_PYTHON_ENCODER_UNITS)
        extra += weight.nodes * (1 + width * weight.depth)
    if separators is not None:
        extra += weight.nodes * MAX_JSON_SEPARATOR_BYTES
    if sort_keys:
        ops.budget.spend_sort(weight.nodes)
    ops.budget.spend_bytes(weight.characters + extra)
    return json.dumps(
        value,
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=separators,
        sort_keys=bool(sort_keys),
    )


def _json_indent(indent: Any) -> int:
    if indent is None:
        return 0
    width = len(indent) if type(indent) is str else indent
    if type(width) is not int or not 0 <= width <= MAX_JSON_INDENT:
        raise TemplateError(
            f"chat template: tojson indent must be at most {MAX_JSON_INDENT}, "
            f"got a {type(indent).__name__} out of range",
            code="template.forbidden",
        )
    return width


def _json_separators(separators: Any) -> tuple[str, str]:
    if (
        type(separators) not in (list, tuple)
        or len(separators) != 2
        or any(
            type(text) is not str or len(text) > MAX_JSON_SEPARATOR_BYTES or not text.isascii()
            for text in separators
        )
    ):
        raise TemplateError(
            "chat template: tojson separators must be two ASCII texts of at most "
            f"{MAX_JSON_SEPARATOR_BYTES} bytes, got something else",
            code="template.forbidden",
        )
    return (separators[0], separators[1])


def _string(ops: Operations, value: Any) -> str:
    return value if type(value) is str else ops.text(value)


def _text(value: Any) -> str:
    if isinstance(value, Undefined):
        return str(value.any_attribute)  # raises the value's own error
    if type(value) is not str:
        msg = f"a text is needed, got a {type(value).__name__}"
        raise TypeError(msg)
    return value


def _safe(ops: Operations, value: Any) -> str:
    # Nothing is escaped for HTML, so there is nothing to be exempt from.
    return _string(ops, value)


def _escape(ops: Operations, value: Any) -> str:
    text = _string(ops, value)
    ops.budget.spend_text(text, times=6)
    return html.escape(text).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")


def _through(name: str) -> Any:
    method = _STRING[name]

    def apply(ops: Operations, value: Any, *args: Any, **kwargs: Any) -> Any:
        return method(ops.budget, _string(ops, value), *args, **kwargs)

    return apply


def _trim(ops: Operations, value: Any, chars: Any = None) -> str:
    text: str = _STRING["strip"](ops.budget, _string(ops, value), chars)
    return text


def _center(ops: Operations, value: Any, width: Any = 80) -> str:
    text: str = _STRING["center"](ops.budget, _string(ops, value), width)
    return text


def _replace(ops: Operations, value: Any, old: Any, new: Any, count: Any = None) -> str:
    limit = -1 if count is None else count
    text: str = _STRING["replace"](
        ops.budget, _string(ops, value), _string(ops, old), _string(ops, new), limit
    )
    return text


def _title(ops: Operations, value: Any) -> str:
    text = _string(ops, value)
    ops.budget.spend(1 + 2 * len(text))
    return "".join(
        piece[0].upper() + piece[1:].lower() for piece in _WORD_START.split(text) if piece
    )


def _format(ops: Operations, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        msg = "format takes positional or named values, not both"
        raise TypeError(msg)
    return percent_format(ops.budget, _string(ops, value), kwargs or args)


def _indent(
    ops: Operations,
    value: Any,
    width: Any = 4,
    first: Any = False,
    blank: Any = False,
) -> str:
    text = _text(value)
    if type(width) is not str:
        width = ops.binary("*", " ", width)
    ops.budget.spend_text(text, times=len(LINE_BREAKS))
    lines = 2 + sum(map(text.count, LINE_BREAKS))
    ops.budget.spend_bytes(text_bytes(text, width) + 4 * lines * len(width) + 128 * lines)
    pieces = (text + "\n").splitlines()
    head, *rest = pieces
    result = "\n".join([head, *(width + line if line or blank else line for line in rest)])
    return width + result if first else result


def _truncate(
    ops: Operations,
    value: Any,
    length: Any = 255,
    killwords: Any = False,
    end: Any = "...",
    leeway: Any = 5,
) -> str:
    text, ending = _text(value), _string(ops, end)
    if type(length) is not int or length < len(ending) or (type(leeway) is not int or leeway < 0):
        msg = "truncate needs a length that holds the ending, and a leeway of at least 0"
        raise ValueError(msg)
    ops.budget.spend_text(text, ending)
    if len(text) <= length + leeway:
        return text
    cut = text[: length - len(ending)]
    return (cut if killwords else cut.rsplit(" ", 1)[0]) + ending


def _wordwrap(
    ops: Operations,
    value: Any,
    width: Any = 79,
    break_long_words: Any = True,
    wrapstring: Any = "\n",
    break_on_hyphens: Any = True,
) -> str:
    text, wrapstring = _text(value), _string(ops, wrapstring)
    if type(width) is not int or width < 1:
        msg = "wordwrap needs a positive width"
        raise ValueError(msg)
    # The wrapper is Python code that looks at every character several times.
    ops.budget.spend(16 + 8 * len(text))
    lines = len(text) // width + text.count("\n") + 1
    ops.budget.spend_bytes(4 * len(wrapstring) * (lines + len(text)))
    wrapped = [
        line
        for paragraph in text.splitlines()
        for line in (
            textwrap.wrap(
                paragraph,
                width=width,
                expand_tabs=False,
                replace_whitespace=False,
                break_long_words=bool(break_long_words),
                break_on_hyphens=bool(break_on_hyphens),
            )
            or [""]
        )
    ]
    return join_texts(ops.budget, wrapstring, wrapped)


def _wordcount(ops: Operations, value: Any) -> int:
    text = _string(ops, value)
    ops.budget.spend(1 + len(text))
    return sum(1 for _ in _WORD.finditer(text))


def _int(ops: Operations, value: Any, default: Any = 0, base: Any = 10) -> Any:
    if type(value) is str:
        ops.budget.spend_text(value)
    if type(value) not in (str, int, float, bool):
        return int(value) if isinstance(value, Undefined) else default
    try:
        result = int(value, base) if type(value) is str else int(value)
    except (TypeError, ValueError):
        try:
            result = int(float(value))
        except (TypeError, ValueError, OverflowError):
            return default
    require_integer_size(result)
    return result


def _float(ops: Operations, value: Any, default: Any = 0.0) -> Any:
    if type(value) is str:
        ops.budget.spend_text(value)
    if type(value) not in (str, int, float, bool):
        return float(value) if isinstance(value, Undefined) else default
    try:
        return float(value)
    except ValueError:
        return default


def _number(value: Any) -> Any:
    if type(value) not in (int, float, bool):
        msg = f"a number is needed, got a {type(value).__name__}"
        raise TypeError(msg)
    return value


def _abs(ops: Operations, value: Any) -> Any:
    ops.budget.spend(1)
    return abs(_number(value))


def _round(ops: Operations, value: Any, precision: Any = 0, method: Any = "common") -> Any:
    ops.budget.spend(1)
    require_integer_size(_number(value))
    if type(precision) is not int or abs(precision) > MAX_PRECISION:
        msg = f"round needs a precision of at most {MAX_PRECISION}"
        raise ValueError(msg)
    if method == "common":
        return round(value, precision)
    if method not in ("ceil", "floor"):
        msg = "round knows the methods common, ceil and floor"
        raise ValueError(msg)
    chosen = math.ceil if method == "ceil" else math.floor
    return chosen(value * (10**precision)) / (10**precision)


def _default(
    ops: Operations,
    value: Any,
    default_value: Any = "",
    boolean: Any = False,
) -> Any:
    ops.budget.spend(1)
    return default_value if isinstance(value, Undefined) or (boolean and not value) else value


TEXT_FILTERS: Final = {
    "abs": _abs,
    "capitalize": _through("capitalize"),
    "center": _center,
    "d": _default,
    "default": _default,
    "e": _escape,
    "escape": _escape,
    "float": _float,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "lower": _through("lower"),
    "replace": _replace,
    "round": _round,
    "safe": _safe,
    "string": _string,
    "title": _title,
    "tojson": to_json,
    "trim": _trim,
    "truncate": _truncate,
    "upper": _through("upper"),
    "wordcount": _wordcount,
    "wordwrap": _wordwrap,
}
"""Filter name -> ``f(operations, value, ...)``."""
