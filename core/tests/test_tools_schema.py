"""The schema vocabulary: what is executed, what is refused, and what a budget does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import EngineError, InvalidRequest
from engine_core.limits import LIMITS
from engine_core.tools.schema import compile_schema, identity
from engine_core.tools.validation import ValidationBudgetError, violation


def check(schema, value):
    return violation(compile_schema(schema, "schema"), value)


def refuse(schema, **options):
    with pytest.raises(InvalidRequest) as caught:
        compile_schema(schema, "tools[0].parameters", **options)
    return str(caught.value)


# One row a rule: schema, values that satisfy it, values that do not (RFC draft 2020-12).
RULES = [
    ({"type": "integer"}, [0, -3, 1.0, 10**999], [1.5, True, "1", None]),
    ({"type": "number"}, [0, 1.5, 10**40], [True, "1"]),
    ({"type": ["string", "null"]}, ["", None], [0, []]),
    ({"type": "boolean"}, [True, False], [0, 1, "true"]),
    ({"enum": [1, "a", None, [1, {"b": 2}]]}, [1, 1.0, "a", None, [1.0, {"b": 2}]], [True, "A"]),
    ({"enum": [True]}, [True], [1, 1.0]),
    ({"const": {"a": [0]}}, [{"a": [0.0]}], [{"a": [False]}, {}]),
    ({"const": 9007199254740993}, [9007199254740993], [9007199254740992.0, 9007199254740992]),
    ({"minimum": 3, "maximum": 5}, [3, 5.0, "x"], [2.999, 6]),
    ({"exclusiveMinimum": 3, "exclusiveMaximum": 5}, [3.5, 4], [3, 5]),
    ({"minimum": 9007199254740993}, [9007199254740993], [9007199254740992.0]),
    ({"minLength": 2, "maxLength": 3}, ["ab", "\U0001f999\U0001f999"], ["a", "abcd"]),
    ({"minItems": 1, "maxItems": 2}, [[0], [0, 1]], [[], [0, 1, 2]]),
    ({"uniqueItems": True}, [[1, True, "1"], [[1], [True]]], [[1, 1.0], [[1], [True], [1]]]),
    ({"uniqueItems": False}, [[1, 1]], []),
    ({"items": {"type": "integer"}}, [[], [1, 2], "x"], [[1, "2"]]),
    (
        {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}},
        [["a", 1], []],
        [[1], ["a", "b"]],
    ),
    ({"items": False}, [[]], [[1]]),
    ({"contains": {"const": 1}}, [[0, 1]], [[], [0]]),
    ({"contains": {"const": 1}, "minContains": 0, "maxContains": 1}, [[], [1]], [[1, 1]]),
    ({"contains": {"const": 1}, "minContains": 2}, [[1, 1.0]], [[1]]),
    ({"properties": {"a": {"type": "string"}}}, [{"a": ""}, {"b": 1}, 3], [{"a": 1}]),
    ({"required": ["a"]}, [{"a": None}, 3], [{}]),
    (
        {"properties": {"a": True}, "additionalProperties": False},
        [{"a": 1}, {}],
        [{"a": 1, "b": 2}],
    ),
    ({"additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "1"}]),
    ({"propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    ({"minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
    ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, [2], [1, "2"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["1"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, [1, 5.5], [6, 1.5]),
    ({"not": {"type": "string"}}, [1], ["a"]),
    (
        {"if": {"const": 1}, "then": {"type": "integer"}, "else": {"type": "string"}},
        [1, "a"],
        [2],
    ),
    ({"then": {"type": "string"}}, [1], []),
    (True, [1, None], []),
    (False, [], [1, None]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), RULES, ids=[str(row[0]) for row in RULES])
def test_schema_rule_decides_as_the_standard_says(schema, valid, invalid):
    assert [check(schema, value) for value in valid] == [None] * len(valid)
    assert all(check(schema, value) for value in invalid)


def test_violation_names_place_and_keyword_never_the_value():
    schema = {"properties": {"a": {"items": {"maxLength": 3}}}}
    assert check(schema, {"a": ["ok", "a secret"]}) == "'/a/1' breaks 'maxLength'"
    assert check({"additionalProperties": False}, {"b": 1}) == "'/b' breaks 'false'"


@pytest.mark.parametrize(
    "keyword",
    [
        "pattern",
        "patternProperties",
        "multipleOf",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$id",
        "$anchor",
        "$dynamicRef",
        "definitions",
        "dependencies",
        "additionalItems",
        "contentEncoding",
        "nullable",
        "Type",
        "",
    ],
)
def test_compile_with_unknown_keyword_names_it(keyword):
    message = refuse({"type": "object", "properties": {"a": {keyword: {}}}})
    assert "tools[0].parameters at '/properties/a'" in message
    assert repr(keyword) in message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"type": []},
        {"type": ["string", "string"]},
        {"type": 1},
        {"enum": []},
        {"enum": [1, 1.0]},
        {"enum": list(range(257))},
        {"enum": "ab"},
        {"allOf": []},
        {"anyOf": {}},
        {"oneOf": [1]},
        {"not": 3},
        {"properties": []},
        {"properties": {"a": None}},
        {"required": "a"},
        {"required": ["a", "a"]},
        {"required": [1]},
        {"dependentRequired": {"a": "b"}},
        {"minLength": -1},
        {"minLength": 1.0},
        {"minLength": True},
        {"minLength": 3, "maxLength": 2},
        {"minContains": 3, "maxContains": 2},
        {"minimum": "3"},
        {"minimum": True},
        {"maximum": float("inf")},
        {"minimum": 3, "maximum": 2},
        {"uniqueItems": 1},
        {"items": [{"type": "string"}]},
        {"prefixItems": []},
        {"title": 3},
        {"description": None},
        {"examples": "x"},
        {"deprecated": "no"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"properties": {"a": {"format": "date"}}},
        {"$ref": "#/properties/a"},
        {"$ref": "https://example.com/x"},
        {"$ref": "#/$defs/A"},
        {"$ref": "#/$defs/A/properties/b", "$defs": {"A": {}}},
        {"$ref": 3},
        {"$defs": []},
        {"properties": {"a": {"$defs": {}}}},
        {"$defs": {"A": {"pattern": "x"}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"$defs": {"A": {"not": {"$ref": "#/$defs/B"}}, "B": {"items": {"$ref": "#/$defs/A"}}}},
        [],
        None,
        "object",
    ],
    ids=str,
)
def test_compile_with_misused_keyword_is_refused(schema):
    assert refuse(schema).startswith("tools[0].parameters")


def test_compile_with_optional_annotations_needs_the_callers_word():
    schema = {"$schema": "x", "properties": {"a": {"type": "string", "format": "date"}}}
    assert "'$schema'" in refuse(schema)
    assert "'format'" in refuse(schema, annotations=["$schema"])
    compiled = compile_schema(schema, "schema", annotations=["$schema", "format"])
    assert violation(compiled, {"a": "no date at all"}) is None


def test_compile_annotations_never_allow_a_rule():
    assert "'pattern'" in refuse({"pattern": "x"}, annotations=["pattern", "format"])


def test_reference_is_inlined_beside_its_siblings():
    schema = {
        "properties": {"a": {"$ref": "#/$defs/A", "description": "x", "maximum": 9}},
        "$defs": {"A": {"type": "integer", "minimum": 3}, "B/C": {"type": "null"}},
        "additionalProperties": {"$ref": "#/$defs/B~1C"},
    }
    assert check(schema, {"a": 3, "z": None}) is None
    for value in ({"a": 2}, {"a": 10}, {"a": "3"}, {"z": 0}):
        assert check(schema, value)


def test_reference_beside_all_of_keeps_both():
    for keys in (("$ref", "allOf"), ("allOf", "$ref")):
        parts = {"$ref": "#/$defs/A", "allOf": [{"maximum": 5}]}
        schema = {**{key: parts[key] for key in keys}, "$defs": {"A": {"minimum": 3}}}
        assert [bool(check(schema, value)) for value in (2, 4, 6)] == [True, False, True]


def test_references_that_multiply_are_refused_before_they_unfold():
    definitions = {f"D{i}": {"allOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2} for i in range(60)}
    message = refuse({"$ref": "#/$defs/D0", "$defs": {**definitions, "D60": {}}})
    assert "4096 subschemas" in message or "64 deep" in message


def test_compile_bounds_nodes_and_nesting():
    deep: dict = {}
    for _ in range(64):
        deep = {"not": deep}
    assert "64 deep" in refuse(deep)
    compile_schema(deep["not"], "schema")
    wide = {"anyOf": [{} for _ in range(LIMITS.schema_nodes)]}
    assert "4096 subschemas" in refuse(wide)


def test_exhausted_budget_raises_also_where_a_false_would_mean_true():
    # The refusal stands inside a ``not``; a check that gave up with "invalid" would accept.
    forbidden = {"type": "array", "contains": {"const": 1}}
    schema = {
        "allOf": [
            {
                "properties": {
                    "a": {"items": {"items": {"contains": {"const": 0}, "minContains": 0}}}
                }
            }
        ],
        "not": {"properties": {"b": forbidden}, "required": ["b"]},
    }
    big = {"a": [[[2] * 40] * 50] * 2, "b": [1]}
    assert check(schema, {"a": [], "b": [1]}) == "'/' breaks 'not'"
    with pytest.raises(ValidationBudgetError):
        check(schema, {"a": [[[2] * 200] * 30] * 2, "b": [1]})
    with pytest.raises(ValidationBudgetError):
        check({"items": {"anyOf": [{"items": {"const": 1}}] * 100 + [True]}}, [[0] * 30] * 200)
    assert check(schema, big) == "'/' breaks 'not'"


@pytest.mark.parametrize("keyword", ["not", "if", "oneOf", "contains"])
def test_budget_error_passes_every_applicator(keyword):
    heavy = {"items": {"items": {"items": {"anyOf": [{"type": "string"}] * 200 + [True]}}}}
    schema = {keyword: [heavy, {"type": "null"}] if keyword == "oneOf" else heavy}
    value = [[[0] * 3] * 3] * 10
    value = [value] if keyword == "contains" else value
    with pytest.raises(ValidationBudgetError):
        check(schema, value)


def test_large_texts_in_failing_branches_exhaust_the_budget():
    schema = {"anyOf": [{"type": "integer"}] * 2000}
    with pytest.raises(ValidationBudgetError):
        check(schema, "x" * 1_000_000)


@pytest.mark.parametrize(
    "value",
    [[0] * 257, {str(i): 0 for i in range(257)}, [[0] * 100] * 100],
    ids=["items", "members", "nodes"],
)
def test_value_beyond_its_bounds_raises(value):
    with pytest.raises(ValidationBudgetError):
        check(True, value)


def test_deep_value_raises():
    value: list = []
    for _ in range(64):
        value = [value]
    with pytest.raises(ValidationBudgetError):
        check(True, value)
    assert check(True, value[0]) is None


def test_compiled_schema_serves_repeated_checks_with_a_full_budget():
    compiled = compile_schema({"items": {"type": "integer"}}, "schema")
    for _ in range(60):
        assert violation(compiled, list(range(200))) is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYWORDS = st.sampled_from(
    [
        "type",
        "enum",
        "const",
        "not",
        "items",
        "properties",
        "anyOf",
        "$ref",
        "$defs",
        "required",
        "minimum",
        "maxLength",
        "pattern",
        "title",
        "format",
        "if",
        "then",
    ]
)
SCHEMAS = st.recursive(
    st.booleans() | JSON | st.dictionaries(KEYWORDS, JSON, max_size=3),
    lambda inner: st.dictionaries(KEYWORDS, inner | st.lists(inner, max_size=3), max_size=4),
    max_leaves=10,
)


@given(SCHEMAS, JSON)
def test_any_schema_and_value_give_an_answer_or_a_typed_error(schema, value):
    try:
        found = check(schema, value)
    except EngineError:
        return
    assert found is None or isinstance(found, str)


@given(JSON, JSON)
def test_identity_agrees_with_json_equality(one, two):
    def same(a, b):
        if isinstance(a, bool) or isinstance(b, bool) or a is None or b is None:
            return type(a) is type(b) and a == b
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            return a == b
        if type(a) is not type(b):
            return False
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        return a == b

    assert (identity(one) == identity(two)) == same(one, two)
    assert identity(one) == identity(one)
