"""``%`` and ``str.format`` with every width and repetition checked before anything is formatted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, Final

from jinja2 import Undefined

from engine_core.errors import TemplateError
from engine_core.template.budget import SCALARS, Budget, text_bytes

__all__ = ["brace_format", "percent_format"]

MAX_FIELD_WIDTH: Final = 4096
MAX_FIELDS: Final = 1024

_PERCENT = re.compile(
    r"%(?:\([^()]*\))?[#0\- +]*(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+)?)?[hlL]?.?", re.DOTALL
)
_BRACE_SPEC = re.compile(
    r"(?:.?[<>=^])?[-+ ]?z?#?0?(?P<width>\d*)[,_]?(?:\.(?P<precision>\d+))?[a-zA-Z%]?", re.DOTALL
)
_DIGITS_MAX = 9


def _require_width(digits: str | None) -> int:
    if not digits:
        return 0
    if digits == "*" or len(digits) > _DIGITS_MAX or int(digits) > MAX_FIELD_WIDTH:
        raise TemplateError(
            f"chat template: a format width must be at most {MAX_FIELD_WIDTH}, "
            f"got {digits[:_DIGITS_MAX]!r}",
            code="template.budget",
        )
    return int(digits)


def _require_fields(count: int) -> None:
    if count > MAX_FIELDS:
        raise TemplateError(
            f"chat template: a format string must have at most {MAX_FIELDS} fields, got {count}",
            code="template.budget",
        )


def percent_format(budget: Budget, template: str, values: Any) -> str:
    """Apply the ``%`` operator.

    Args:
        budget: Pays for reading the operands and, before it is made, for the longest result.
        template: Format string.
        values: One value, a tuple of values, or a mapping.

    Returns:
        The formatted text.

    Raises:
        TemplateError: A width is too large, or the budget is exceeded.
        TypeError: Format string and values do not fit, as Python says.
    """
    budget.spend_text(template, times=4)
    weight = budget.weigh(values, plain=True)
    widths = fields = 0
    for match in _PERCENT.finditer(template):
        widths += _require_width(match["width"]) + _require_width(match["precision"])
        fields += 1
        _require_fields(fields)
    # A mapping's value can be named by every field; a tuple's is used once.
    uses = fields if isinstance(values, Mapping) else 1
    budget.spend_bytes(4 * (len(template) + widths + weight.characters * uses))
    result: str = template % values
    return result


def brace_format(
    budget: Budget, template: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Apply ``str.format`` with plain fields only.

    Args:
        budget: Pays for reading the operands and for the result.
        template: Format string; a field is a position or a name, without attributes or items.
        args: Positional values.
        kwargs: Named values.

    Returns:
        The formatted text.

    Raises:
        TemplateError: A field reaches into an object, a width is too large, or the budget is
            exceeded.
        IndexError: A position is missing.
        KeyError: A name is missing.
        ValueError: The format string is malformed.
    """
    budget.spend_text(template, times=4)
    pieces: list[str] = []
    automatic = 0
    for literal, field, spec, conversion in Formatter().parse(template):
        pieces.append(literal)
        if field is None:
            continue
        _require_fields(len(pieces))
        if field == "":
            value, automatic = args[automatic], automatic + 1
        elif field.isdecimal():
            value = args[int(field)]
        elif field.isidentifier():
            value = kwargs[field]
        else:
            raise TemplateError(
                f"chat template: a format field must be a name or a position, got {field[:60]!r}",
                code="template.forbidden",
            )
        pieces.append(_format_field(budget, value, spec or "", conversion))
    budget.spend_bytes(text_bytes(*pieces))
    return "".join(pieces)


def _format_field(budget: Budget, value: Any, spec: str, conversion: str | None) -> str:
    match = _BRACE_SPEC.fullmatch(spec)
    if match is None:
        raise TemplateError(
            f"chat template: a format specification must be a plain one, got {spec[:60]!r}",
            code="template.forbidden",
        )
    width = _require_width(match["width"]) + _require_width(match["precision"])
    weight = budget.weigh(value, plain=True)
    budget.spend_bytes(4 * (width + weight.characters))
    if conversion in ("r", "a"):
        value = ascii(value) if conversion == "a" else repr(value)
    elif conversion == "s" or (type(value) not in SCALARS and isinstance(value, Undefined)):
        value = str(value)
    elif type(value) is str:
        budget.spend_bytes(text_bytes(value))
    return format(value, spec)
