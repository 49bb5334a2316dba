"""Typing of bare text, and which proposals become calls."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.builtin_hermes import HERMES
from engine_core.errors import InvalidRequest, PluginError
from engine_core.family import Proposal, Typed
from engine_core.messages import ToolDecl
from engine_core.tools.accept import Toolset, accept_calls, new_call_id
from engine_core.tools.coerce import CoercionError, property_types, type_text
from engine_core.tools.schema import JSON_TYPES, compile_schema

ALL = frozenset(JSON_TYPES)


def types(schema, name="a"):
    return property_types(compile_schema(schema, "schema").root, name)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, ALL),
        ({"properties": {"a": {"type": "string"}}}, {"string"}),
        ({"properties": {"a": {"type": "number"}}}, {"number", "integer"}),
        ({"properties": {"a": {"type": ["integer", "null"]}}}, {"integer", "null"}),
        ({"properties": {"b": {}}, "additionalProperties": {"type": "null"}}, {"null"}),
        ({"properties": {"b": {}}, "additionalProperties": False}, set()),
        ({"properties": {"a": {"enum": ["x", None]}}}, {"string", "null"}),
        ({"properties": {"a": {"const": 3}}}, {"number", "integer"}),
        ({"properties": {"a": {"const": [1]}}}, {"array"}),
        (
            {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
            {"string", "null"},
        ),
        (
            {"properties": {"a": {"oneOf": [{"type": "object"}, {"const": True}]}}},
            {"object", "boolean"},
        ),
        (
            {"properties": {"a": {"allOf": [{"type": ["string", "null"]}, {"enum": ["x"]}]}}},
            {"string"},
        ),
        ({"properties": {"a": {"not": {"type": "string"}}}}, ALL - {"string"}),
        ({"properties": {"a": {"not": {"type": "string", "minLength": 3}}}}, ALL),
        (
            {"properties": {"a": {"if": {}, "then": {"type": "null"}, "else": {"type": "string"}}}},
            {"null", "string"},
        ),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "null"}}}}}, {"null"}),
        (
            {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "array"}}},
            {"array"},
        ),
    ],
    # One name whatever the order of a set is in this process.
    ids=lambda value: str(sorted(value) if isinstance(value, (set, frozenset)) else value),
)
def test_property_types_follow_the_schema(schema, expected):
    assert types(schema) == expected


@pytest.mark.parametrize(
    ("text", "allowed", "expected"),
    [
        ("12345", {"string"}, "12345"),
        ("null", {"string"}, "null"),
        ("null", {"string", "null"}, None),
        (" null", {"string", "null"}, " null"),
        ("true", {"string"}, "true"),
        ("  indented\n", {"string"}, "  indented\n"),
        ("5", {"string", "integer"}, "5"),
        ("5", {"integer", "number"}, 5),
        ("9007199254740993", {"integer"}, 9007199254740993),
        ("1" + "0" * 999, {"integer"}, 10**999),
        ("1.5", {"number"}, 1.5),
        ("true", {"boolean"}, True),
        (" [1, 2]\n", {"array"}, [1, 2]),
        ('{"a": null}', {"object"}, {"a": None}),
        ("null", {"null"}, None),
        ("5", {"object"}, 5),
    ],
)
def test_type_text_decides_by_allowed_types(text, allowed, expected):
    value = type_text(text, frozenset(allowed))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    "text",
    ["yes", "True", "None", "", "NaN", "Infinity", "1e999", "01", "0x10", "1" * 1001, "'a'",
     '{"a": 1, "a": 2}', "[1,]", "5 6", '"\ud800"', "[" * 65 + "]" * 65, "[" * 5000],
    ids=lambda text: text[:20].encode("ascii", "backslashreplace").decode(),
)  # fmt: skip
def test_type_text_refuses_what_is_no_strict_json(text):
    with pytest.raises(CoercionError):
        type_text(text, ALL - {"string"})


WEATHER = ToolDecl(
    name="weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
TOOLS = Toolset.compile([WEATHER, ToolDecl(name="stop")])


def test_literals_of_a_syntax_count_where_no_string_is_allowed():
    literals = {"True": True, "None": None}
    assert type_text("True", frozenset({"boolean"}), literals) is True
    assert type_text("None", frozenset({"null", "integer"}), literals) is None
    assert type_text("True", frozenset({"boolean", "string"}), literals) == "True"
    assert type_text("None", frozenset({"null", "string"}), literals) == "None"
    with pytest.raises(CoercionError):
        type_text("False", frozenset({"boolean"}), literals)


@attrs.frozen
class Fixed:
    """A syntax that proposes what the test says."""

    proposals: tuple
    name: str = "fixed"
    markers: tuple = ()
    probe_rounds: int = 1

    def parse(self, text, tools):
        return self.proposals


def propose(*readings, name="weather", span=(0, 4)):
    return Proposal(span=span, name=name, readings=readings)


def accept(*proposals, text="CALL and more", **options):
    return accept_calls(text, Fixed(proposals), TOOLS, **options)


def test_one_valid_reading_becomes_a_call():
    result = accept(propose({"city": "Oslo", "days": "3"}))
    assert result.text == " and more"
    (call,) = result.calls
    assert (call.name, call.arguments) == ("weather", {"city": "Oslo", "days": 3})
    assert not result.refusals


@pytest.mark.parametrize(
    "proposal",
    [
        propose({"city": "Oslo"}, name="Weather"),
        propose({"city": "Oslo"}, name="weather "),
        propose({"days": "3"}),
        propose({"city": "Oslo", "days": "many"}),
        propose({"city": "Oslo", "days": "3.5"}),
        propose({"city": Typed(5)}),
        propose({"city": Typed(None)}),
        propose({"city": "Oslo", "days": Typed("3")}),
        propose({"city": "Oslo", "extra": "1"}),
        propose({"city": Typed("Oslo"), "days": Typed(True)}),
        propose(),
        propose({"city": "a"}, {"city": "b"}),
        propose({"city": Typed("x" * (1 << 21))}),
        propose({"city": "Oslo"}, span=(2, 2)),
        propose({"city": "Oslo"}, span=(3, 99)),
        propose({"city": "Oslo"}, span=(-1, 3)),
    ],
)
def test_uncertain_proposal_stays_text(proposal):
    result = accept(proposal)
    assert result.text == "CALL and more"
    assert result.calls == ()
    assert len(result.refusals) == 1


def test_one_valid_of_two_readings_is_certain():
    result = accept(propose({"city": "a", "days": "x"}, {"city": "b"}))
    assert result.calls[0].arguments == {"city": "b"}


def test_exhausted_budget_refuses_even_beside_a_valid_reading():
    heavy = {
        "additionalProperties": {"items": {"items": {"anyOf": [{"type": "string"}] * 300 + [True]}}}
    }
    tools = Toolset.compile([ToolDecl(name="f", parameters=heavy)])
    value = Typed([[0] * 40] * 40)
    proposal = propose({"x": Typed(1)}, {"x": value}, name="f")
    result = accept_calls("CALL", Fixed((proposal,)), tools)
    assert result.calls == ()
    assert "budget" in result.refusals[0]


def test_overlapping_and_early_proposals_stay_text():
    first, second = propose({"city": "a"}, span=(2, 6)), propose({"city": "b"}, span=(4, 8))
    result = accept(second, first, text="0123456789")
    assert (result.text, len(result.calls)) == ("016789", 1)
    assert accept(first, text="0123456789", start=3).calls == ()


def test_calls_are_bounded_and_the_rest_stays():
    proposals = [propose({"city": "a"}, span=(i, i + 1)) for i in range(70)]
    result = accept(*proposals, text="x" * 70)
    assert (len(result.calls), result.text) == (64, "x" * 6)


def test_ids_are_unique_and_random():
    drawn = {new_call_id() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(one.startswith("call_") and len(one) == 29 for one in drawn)


def test_without_tools_nothing_is_parsed():
    class Explodes(Fixed):
        def parse(self, text, tools):
            raise RuntimeError

    assert accept_calls("CALL", Explodes(()), Toolset()).text == "CALL"
    with pytest.raises(PluginError) as caught:
        accept_calls("CALL", Explodes(()), TOOLS)
    assert caught.value.code == "plugin.tool_syntax"


def test_named_tool_alone_is_advertised():
    only = TOOLS.advertising(["stop"])
    assert [tool.name for tool in only.tools] == ["stop"]
    assert accept_calls("CALL", Fixed((propose({"city": "a"}),)), only).calls == ()


def test_toolset_refuses_a_schema_that_allows_no_object():
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.parameters: must allow an object"):
        Toolset.compile([WEATHER, ToolDecl(name="f", parameters={"type": "string"})])
    with pytest.raises(InvalidRequest, match="pattern"):
        Toolset.compile([ToolDecl(name="f", parameters={"pattern": "x"})])


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=4) | st.integers(), max_size=3))
def test_hermes_call_of_an_open_tool_comes_back_whole(arguments):
    tools = Toolset.compile([ToolDecl(name="f", parameters={"type": "object"})])
    body = json.dumps({"name": "f", "arguments": arguments})
    result = accept_calls(f"a <tool_call>{body}</tool_call> b", HERMES, tools)
    assert result.text == "a  b"
    assert result.calls[0].arguments == arguments


@given(st.text(alphabet='{}[]":,\\ nametrgus<>/_cl', max_size=80))
def test_any_text_is_kept_or_becomes_calls(text):
    result = accept_calls(f"<tool_call>{text}", HERMES, TOOLS)
    assert result.calls or result.text == f"<tool_call>{text}"
