"""Typing of argument values that the markup writes as bare text.

``12345`` between two tags may be a number or a text; the declared schema decides. Choosing by
what would be valid instead would let a value pick its type, so only the types that the schema
allows are looked at here, and validity is checked afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import EngineError
from engine_core.family import Typed
from engine_core.limits import LIMITS, Limits
from engine_core.tools.schema import JSON_TYPES, NEVER, VISIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine_core.tools.schema import CompiledSchema, Node

__all__ = ["CoercionError", "allowed_types", "coerce_reading", "property_types", "type_text"]

_ALL = frozenset(JSON_TYPES)
_NULL_TEXT = "null"
NO_LITERALS: Final[Mapping[str, Any]] = MappingProxyType({})


class CoercionError(EngineError):
    """A bare text is no value of the types that its schema allows."""

    default_code: ClassVar[str] = "tools.coercion"


def coerce_reading(
    reading: Mapping[str, Any],
    schema: CompiledSchema,
    literals: Mapping[str, Any] = NO_LITERALS,
    limits: Limits = LIMITS,
) -> dict[str, Any]:
    """Type the arguments of one reading.

    Args:
        reading: Parameter -> raw text, or a ``Typed`` JSON value, which stays as it is.
        schema: The tool's parameters.
        literals: Further spellings of JSON literals, of the syntax.
        limits: Bounds on nesting and digits.

    Returns:
        Parameter -> JSON value, in the order of the reading.

    Raises:
        CoercionError: A text is no value of an allowed type.
    """
    return {
        name: value.value
        if isinstance(value, Typed)
        else type_text(value, property_types(schema.root, name), literals, limits)
        for name, value in reading.items()
    }


def type_text(
    text: str,
    types: frozenset[str],
    literals: Mapping[str, Any] = NO_LITERALS,
    limits: Limits = LIMITS,
) -> Any:
    """Type one bare text.

    Args:
        text: The text exactly as written.
        types: Type names that the schema allows for it.
        literals: Further spellings of JSON literals; they count where no string is allowed.
        limits: Bounds on nesting and digits.

    Returns:
        ``None`` for ``null`` where null is allowed, else the text itself where a string is
        allowed, else the JSON value that the text spells.

    Raises:
        CoercionError: The text is no strict JSON and no string is allowed.
    """
    if text == _NULL_TEXT and "null" in types:
        return None
    if "string" in types:
        return text
    if text in literals:
        return literals[text]
    try:
        return parse_json(text.encode(), "argument", limits)
    except (EngineError, UnicodeEncodeError) as exc:
        raise CoercionError(
            f"argument: must be JSON of type {', '.join(sorted(types)) or 'none'}, got other text"
        ) from exc


def property_types(node: Node, name: str) -> frozenset[str]:
    """Say which types an object's property may have.

    Args:
        node: Schema of the object.
        name: The property.

    Returns:
        Type names; more than the truth where a schema rules some out by other means.
    """
    declared = node.get("properties", {}).get(name, node.get("additionalProperties"))
    own = _ALL if declared is None else allowed_types(declared)
    return own & _combined(node, lambda part: property_types(part, name))


def allowed_types(node: Node) -> frozenset[str]:
    """Say which types a schema allows.

    Args:
        node: The schema.

    Returns:
        Type names; more than the truth where a schema rules some out by other means. Where
        ``number`` is a member, ``integer`` is too.
    """
    if NEVER in node:
        return frozenset()
    types = _ALL
    if "type" in node:
        named = frozenset(node["type"])
        types &= named | {"integer"} if "number" in named else named
    if "enum" in node:
        types &= _union(map(_types_of, node["enum"]))
    if "const" in node:
        types &= _types_of(node["const"])
    excluded = node.get("not", {})
    if excluded.keys() == {VISIT, "type"}:
        types -= frozenset(excluded["type"])
    return types & _combined(node, allowed_types)


def _combined(node: Node, of: Callable[[Node], frozenset[str]]) -> frozenset[str]:
    """Combine what the applicators of a node allow."""
    types = _ALL
    for part in node.get("allOf", ()):
        types &= of(part)
    for keyword in ("anyOf", "oneOf"):
        if keyword in node:
            types &= _union(map(of, node[keyword]))
    if "if" in node:
        branches = (node.get(keyword) for keyword in ("then", "else"))
        types &= _union(_ALL if branch is None else of(branch) for branch in branches)
    return types


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return reduce(frozenset.union, sets, frozenset())


def _types_of(value: Any) -> frozenset[str]:
    """Name the types of a JSON value; a number may be written either way."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, (int, float)):
        return frozenset({"number", "integer"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"object" if isinstance(value, Mapping) else "array"})
