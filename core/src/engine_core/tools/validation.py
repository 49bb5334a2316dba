"""Checking of values against compiled schemas, by jsonschema, within a budget.

Running out of budget raises: were it a plain "invalid", a ``not`` or ``oneOf`` around the place
would turn it into "valid". Equality of array items is exact here (``1`` and ``true`` differ at any
depth), which the library's own ``uniqueItems`` is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs

from engine_core.errors import EngineError
from engine_core.limits import LIMITS, Limits
from engine_core.tools.schema import NEVER, VISIT, identity, shown_place

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

    from engine_core.tools.schema import CompiledSchema, Node

__all__ = ["ValidationBudgetError", "violation"]

_EXECUTED: Final = (
    "type",
    "enum",
    "const",
    "required",
    "dependentRequired",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minProperties",
    "maxProperties",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "properties",
    "additionalProperties",
    "propertyNames",
    "dependentSchemas",
    "prefixItems",
    "items",
    "contains",
)
_SCALAR_SIZE: Final = 8


class ValidationBudgetError(EngineError):
    """A value, or checking it, exceeds a bound; nothing is known about its validity."""

    default_code: ClassVar[str] = "schema.budget"


def violation(schema: CompiledSchema, value: Any, limits: Limits = LIMITS) -> str | None:
    """Check a value.

    Args:
        schema: What it must satisfy.
        value: A JSON value.
        limits: Bounds on the value and on the work.

    Returns:
        The place and the broken keyword, never the value; ``None`` when the value is valid.

    Raises:
        ValidationBudgetError: A bound was exceeded, so the answer is unknown.
    """
    sizes: dict[int, int] = {}
    _measure(value, 1, sizes, [limits.checked_nodes], limits)
    meter = _Meter(visits=limits.checked_nodes, bytes=limits.checked_bytes, sizes=sizes)
    token = _METER.set(meter)
    try:
        error = next(_validator_class()(dict(schema.root)).iter_errors(value), None)
    finally:
        _METER.reset(token)
    return None if error is None else _describe(error)


@attrs.define(kw_only=True)
class _Meter:
    """What one check may still do."""

    visits: int
    bytes: int
    sizes: Mapping[int, int]

    def charge(self, instance: Any) -> None:
        self.visits -= 1
        # Texts of failed checks inside ``anyOf`` and the like grow with the value they are about.
        self.bytes -= (
            len(instance) if isinstance(instance, str) else self.sizes.get(id(instance), 8)
        )
        if self.visits < 0 or self.bytes < 0:
            raise ValidationBudgetError(
                "schema: a check must stay within its budget, got more work",
                hint="use a simpler schema or smaller values",
            )


_METER: ContextVar[_Meter] = ContextVar("engine_core.tools.meter")


def _measure(value: Any, depth: int, sizes: dict[int, int], left: list[int], limits: Limits) -> int:
    """Bound a value's shape and note how large each container is (characters, about)."""
    left[0] -= 1
    if left[0] < 0:
        _refuse_shape(f"at most {limits.checked_nodes} values")
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (Mapping, list, tuple)):
        return _SCALAR_SIZE
    if depth > limits.json_depth:
        _refuse_shape(f"at most {limits.json_depth} levels")
    if len(value) > limits.checked_entries:
        _refuse_shape(f"at most {limits.checked_entries} entries in a container")
    size = _SCALAR_SIZE * (1 + len(value))
    if isinstance(value, Mapping):
        size += sum(map(len, value))
        entries = list(value.values())
    else:
        entries = list(value)
    size += sum(_measure(entry, depth + 1, sizes, left, limits) for entry in entries)
    sizes[id(value)] = size
    return size


def _refuse_shape(rule: str) -> None:
    raise ValidationBudgetError(f"checked value: must have {rule}, got more")


def _describe(error: ValidationError) -> str:
    place = shown_place(error.absolute_path) or "/"
    keyword = "false" if error.validator == NEVER else error.validator
    return f"{place!r} breaks {keyword!r}"


@cache
def _validator_class() -> type[Validator]:
    """Make the validator of this vocabulary; imported late, because it takes a while."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import create

    def visit(
        _: Validator,
        __: bool,  # noqa: FBT001 - the library calls it by position
        instance: Any,
        ___: Node,
    ) -> Iterator[ValidationError]:
        _METER.get().charge(instance)
        yield from ()

    def never(*_: Any) -> Iterator[ValidationError]:
        yield ValidationError("no value is valid here")

    def unique_items(
        validator: Validator,
        wanted: bool,  # noqa: FBT001 - the library calls it by position
        instance: Any,
        _: Node,
    ) -> Iterator[ValidationError]:
        if not wanted or not validator.is_type(instance, "array"):
            return
        if len({identity(item) for item in instance}) != len(instance):
            yield ValidationError("two items are equal")

    known = Draft202012Validator.VALIDATORS
    return create(
        meta_schema={},
        validators={
            VISIT: visit,
            NEVER: never,
            "uniqueItems": unique_items,
            **{name: known[name] for name in _EXECUTED},
        },
        type_checker=Draft202012Validator.TYPE_CHECKER,
    )
