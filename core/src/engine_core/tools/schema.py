"""The JSON Schema vocabulary that this engine executes, checked before a request starts.

A keyword that were ignored would let through what it forbids, so a schema may use only the
keywords below; anything else is refused by name. Annotations forbid nothing and are dropped.
``$schema`` and ``format`` look like rules, so treating them as annotations is the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

import attrs

from engine_core.errors import InvalidRequest
from engine_core.limits import LIMITS, Limits
from engine_core.values import shown

__all__ = [
    "JSON_TYPES",
    "NEVER",
    "OPTIONAL_ANNOTATIONS",
    "VISIT",
    "CompiledSchema",
    "Node",
    "compile_schema",
    "identity",
    "shown_place",
]

JSON_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
"""Names that ``type`` may use."""

OPTIONAL_ANNOTATIONS: Final = ("$schema", "format")
"""Keywords that count as annotations only when the caller says so."""

VISIT: Final = "engine:visit"
"""First keyword of every compiled node: counts the visit."""

NEVER: Final = "engine:never"
"""Keyword of the compiled ``false``: no value is valid."""

Node = Mapping[str, Any]
"""A compiled subschema: executable keywords only, references inlined, ``true`` and ``false`` as
nodes."""

_DEFINITIONS: Final = "#/$defs/"
_SHOWN_CHARS: Final = 160

_NODES: Final = frozenset(
    {"not", "if", "then", "else", "additionalProperties", "propertyNames", "items", "contains"}
)
_NODE_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NODE_MAPS: Final = frozenset({"properties", "dependentSchemas"})
_COUNTS: Final = (
    ("minProperties", "maxProperties"),
    ("minItems", "maxItems"),
    ("minContains", "maxContains"),
    ("minLength", "maxLength"),
)
_RANGES: Final = (*_COUNTS, ("minimum", "maximum"))
_ANNOTATIONS: Final[Mapping[str, type]] = {
    "title": str,
    "description": str,
    "$comment": str,
    "default": object,
    "examples": list,
    "deprecated": bool,
    "readOnly": bool,
    "writeOnly": bool,
}


@attrs.frozen(kw_only=True)
class CompiledSchema:
    """A schema that was found executable.

    Attributes:
        root: The schema itself.
    """

    root: Node


def compile_schema(
    schema: Mapping[str, Any] | bool,  # noqa: FBT001 - both are schemas
    subject: str,
    *,
    annotations: Sequence[str] = (),
    code: str = "request.schema",
    limits: Limits = LIMITS,
) -> CompiledSchema:
    """Check a schema and bring it into the form that values are checked against.

    Args:
        schema: A JSON Schema.
        subject: What it belongs to, for errors, e.g. ``"tools[0].parameters"``.
        annotations: Members of ``OPTIONAL_ANNOTATIONS`` to accept and ignore.
        code: Error code.
        limits: Bounds on nodes, nesting and choices.

    Returns:
        The executable schema.

    Raises:
        InvalidRequest: A keyword is unknown or misused, a reference is no ``#/$defs/NAME`` or
            refers to itself, or a bound is exceeded; the message names the place and keyword.
    """
    compiler = _Compiler(
        subject=subject,
        annotations=frozenset(annotations) & frozenset(OPTIONAL_ANNOTATIONS),
        code=code,
        limits=limits,
        definitions=schema.get("$defs", {}) if isinstance(schema, Mapping) else {},
    )
    return CompiledSchema(root=compiler.compile(schema))


def identity(value: Any) -> Any:
    """Reduce a JSON value to a hashable key; two keys are equal iff the values are equal in JSON.

    Numbers are compared exactly, whether written as integer or fraction, and never equal a
    boolean.

    Args:
        value: A JSON value.

    Returns:
        The key.
    """
    if isinstance(value, bool) or value is None:
        return ("literal", value)
    if isinstance(value, Mapping):
        return ("object", frozenset((key, identity(entry)) for key, entry in value.items()))
    if isinstance(value, (list, tuple)):
        return ("array", tuple(identity(entry) for entry in value))
    return ("text" if isinstance(value, str) else "number", value)


def shown_place(parts: Iterable[object]) -> str:
    """Write a place inside a schema or a value for an error.

    Args:
        parts: Keys and indices from the root on.

    Returns:
        For example ``"/items/0"``; its start when it is very long.
    """
    place = "".join(f"/{part}" for part in parts)
    return place if len(place) <= _SHOWN_CHARS else f"{place[:_SHOWN_CHARS]}..."


@attrs.define(kw_only=True)
class _Compiler:
    """One compilation: counts nodes over all inlined references."""

    subject: str
    annotations: frozenset[str]
    code: str
    limits: Limits
    definitions: Any
    _nodes: int = attrs.field(default=0, init=False)
    _path: list[str] = attrs.field(factory=list, init=False)
    _open: list[str] = attrs.field(factory=list, init=False)
    _used: set[str] = attrs.field(factory=set, init=False)

    def compile(self, schema: object) -> Node:
        """Compile the root, and the definitions it does not use, so that all is checked."""
        root = self._node(schema, 1, is_root=True)
        if isinstance(schema, Mapping) and "$defs" in schema:
            self._path.append("$defs")
            definitions = _as_mapping(self.definitions, self.fail)
            for name in definitions.keys() - self._used:
                self._definition(name, 1)
            del self._path[-1]
        return root

    def fail(self, rule: str, got: str, hint: str = "") -> NoReturn:
        """Refuse the schema at the current place."""
        place = shown_place(self._path)
        raise InvalidRequest(
            f"{self.subject}{f' at {place!r}' if place else ''}: {rule}, got {got}",
            code=self.code,
            hint=hint,
        )

    def _node(self, schema: object, depth: int, *, is_root: bool = False) -> Node:
        self._nodes += 1
        if self._nodes > self.limits.schema_nodes:
            self.fail(f"must have at most {self.limits.schema_nodes} subschemas", "more")
        if depth > self.limits.schema_depth:
            self.fail(f"subschemas must nest at most {self.limits.schema_depth} deep", "more")
        if isinstance(schema, bool):
            return {VISIT: True} if schema else {VISIT: True, NEVER: True}
        if not isinstance(schema, Mapping):
            self.fail("a schema must be an object or a boolean", shown(schema))
        node: dict[str, Any] = {VISIT: True}
        for keyword, value in schema.items():
            if keyword not in _KNOWN:
                hint = f"known: {', '.join(_KNOWN)}"
                self.fail("keywords must be executable ones", shown(keyword), hint)
            self._path.append(keyword)
            self._keyword(node, keyword, value, depth, is_root=is_root)
            del self._path[-1]
        for low, high in _RANGES:
            if low in node and high in node and node[low] > node[high]:
                self.fail(f"{low!r} must be at most {high!r}", shown(node[low]))
        return node

    def _keyword(
        self, node: dict[str, Any], keyword: str, value: object, depth: int, *, is_root: bool
    ) -> None:
        if keyword in _NODES:
            node[keyword] = self._node(value, depth + 1)
        elif keyword in _NODE_LISTS:
            found = self._each(enumerate(_as_list(value, self.fail, least=1)), depth)
            # References join ``allOf``, whichever of the two comes first.
            node[keyword] = [*node.get(keyword, ()), *found.values()]
        elif keyword in _NODE_MAPS:
            node[keyword] = self._each(_as_mapping(value, self.fail).items(), depth)
        elif keyword in _VALUES:
            node[keyword] = _VALUES[keyword](value, self.fail, self.limits)
        elif keyword == "$ref":
            node["allOf"] = [*node.get("allOf", ()), self._reference(value, depth)]
        elif keyword == "$defs":
            if not is_root:
                self.fail("definitions must stand at the root", "nested ones")
        elif keyword in OPTIONAL_ANNOTATIONS and keyword not in self.annotations:
            self.fail(
                "must be allowed as an annotation",
                shown(keyword),
                f"pass schema_annotations=[{keyword!r}] to accept it as a remark that checks "
                "nothing, or leave it out",
            )
        elif not isinstance(value, _ANNOTATIONS.get(keyword, str)):
            kind = _ANNOTATIONS.get(keyword, str).__name__
            self.fail(f"must be of type {kind}", shown(value))

    def _each(self, schemas: Iterable[tuple[object, object]], depth: int) -> dict[str, Node]:
        nodes = {}
        for name, schema in schemas:
            self._path.append(str(name))
            nodes[str(name)] = self._node(schema, depth + 1)
            del self._path[-1]
        return nodes

    def _reference(self, value: object, depth: int) -> Node:
        if not isinstance(value, str) or not value.startswith(_DEFINITIONS):
            self.fail(f"references must have the form {_DEFINITIONS}NAME", shown(value))
        name = value.removeprefix(_DEFINITIONS)
        if "/" in name:
            self.fail(f"references must have the form {_DEFINITIONS}NAME", shown(value))
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(self.definitions, Mapping) or name not in self.definitions:
            self.fail("references must name a definition", shown(value))
        if name in self._open:
            self.fail("definitions must not refer to themselves", shown(value))
        return self._definition(name, depth)

    def _definition(self, name: str, depth: int) -> Node:
        self._used.add(name)
        self._open.append(name)
        self._path.append(name)
        node = self._node(self.definitions[name], depth + 1)
        del self._path[-1]
        del self._open[-1]
        return node


_Fail = Callable[[str, str], NoReturn]


def _as_mapping(value: object, fail: _Fail) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        fail("must be an object", shown(value))
    return value


def _as_list(value: object, fail: _Fail, *, least: int = 0) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) < least:
        fail("must be a list" if least == 0 else "must be a non-empty list", shown(value))
    return list(value)


def _types(value: object, fail: _Fail, limits: Limits) -> list[str]:
    del limits
    names = [value] if isinstance(value, str) else _as_list(value, fail, least=1)
    for name in names:
        if name not in JSON_TYPES:
            fail(f"must be one of {', '.join(JSON_TYPES)}", shown(name))
    if len(set(names)) != len(names):
        fail("types must be unique", "one twice")
    return names


def _choices(value: object, fail: _Fail, limits: Limits) -> list[Any]:
    choices = _as_list(value, fail, least=1)
    if len(choices) > limits.schema_choices:
        fail(f"must have at most {limits.schema_choices} entries", str(len(choices)))
    if len({identity(choice) for choice in choices}) != len(choices):
        fail("entries must be unique", "one twice")
    return choices


def _constant(value: object, fail: _Fail, limits: Limits) -> Any:
    del fail, limits
    return value


def _names(value: object, fail: _Fail, limits: Limits) -> list[str]:
    del limits
    names = _as_list(value, fail)
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        fail("must be a list of unique names", shown(value))
    return names


def _name_lists(value: object, fail: _Fail, limits: Limits) -> dict[str, list[str]]:
    return {name: _names(names, fail, limits) for name, names in _as_mapping(value, fail).items()}


def _count(value: object, fail: _Fail, limits: Limits) -> int:
    del limits
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        fail("must be a whole number from 0 up", shown(value))
    return value


def _number(value: object, fail: _Fail, limits: Limits) -> int | float:
    del limits
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        fail("must be a finite number", shown(value))
    return value


def _flag(value: object, fail: _Fail, limits: Limits) -> bool:
    del limits
    if not isinstance(value, bool):
        fail("must be of type bool", shown(value))
    return value


_VALUES: Final[Mapping[str, Callable[[object, _Fail, Limits], Any]]] = {
    "type": _types,
    "enum": _choices,
    "const": _constant,
    "required": _names,
    "dependentRequired": _name_lists,
    "uniqueItems": _flag,
    "minimum": _number,
    "maximum": _number,
    "exclusiveMinimum": _number,
    "exclusiveMaximum": _number,
    **{name: _count for pair in _COUNTS for name in pair},
}
_KNOWN: Final = (
    *_VALUES,
    *sorted(_NODES | _NODE_LISTS | _NODE_MAPS),
    "$ref",
    "$defs",
    *_ANNOTATIONS,
    *OPTIONAL_ANNOTATIONS,
)
