"""The built-in dialect and tool syntax."""

import json

import pytest

from engine_core import builtin
from engine_core.builtin_chatml import CHATML
from engine_core.builtin_hermes import HERMES
from engine_core.family import Typed
from engine_core.messages import (
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    ToolDecl,
    TranslationPart,
)


def prepared(*messages, tools=()):
    return CHATML.prepare(messages, tools, {})


def test_builtin_contributes_through_the_hooks():
    assert [dialect.name for dialect in builtin.engine_template_dialects()] == ["chatml"]
    assert [syntax.name for syntax in builtin.engine_tool_syntaxes()] == ["hermes"]
    assert CHATML.reasoning.open == "<think>"
    assert HERMES.markers == (("<tool_call>", "</tool_call>"),)
    assert HERMES.probe_rounds == 2


def test_chatml_missing_content_becomes_an_empty_text():
    message = Message(role="assistant", content=None)
    assert prepared(message).messages == [{"role": "assistant", "content": ""}]


def test_chatml_text_parts_become_one_text():
    message = Message(role="user", content=[TextPart("a"), TextPart(" b")])
    assert prepared(message).messages == [{"role": "user", "content": "a b"}]


def test_chatml_media_and_translation_parts_stay_a_list():
    message = Message(role="user", content=[TextPart("a"), ImagePart(b"x")])
    assert prepared(message).messages[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image"},
    ]
    part = TranslationPart(source_lang="en", target_lang="de", text="Hi")
    assert prepared(Message(role="user", content=[part])).messages[0]["content"] == [
        {"type": "text", "source_lang_code": "en", "target_lang_code": "de", "text": "Hi"}
    ]


def test_chatml_calls_and_results_keep_names_ids_and_mappings():
    call = ToolCall(id="c1", name="look", arguments={"a": [1, {"b": None}]})
    messages = prepared(
        Message(role="assistant", reasoning="hm", tool_calls=(call,)),
        Message(role="tool", content="ok", tool_call_id="c1", name="look"),
    ).messages
    assert messages == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": {"a": [1, {"b": None}]}},
                }
            ],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "c1", "name": "look"},
    ]
    assert type(messages[0]["tool_calls"][0]["function"]["arguments"]) is dict


def test_chatml_tools_are_absent_without_declarations():
    assert prepared().tools is None
    tool = ToolDecl(name="look", description="d", parameters={"type": "object"})
    assert prepared(tools=[tool]).tools == [
        {
            "type": "function",
            "function": {"name": "look", "description": "d", "parameters": {"type": "object"}},
        }
    ]


def written(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_hermes_calls_come_with_spans_and_typed_values():
    arguments = {"a": 1, "b": "x", "c": None, "d": [True, {"e": 1.5}]}
    first, second = written("look", arguments), written("now", {})
    text = f"Sure.{first} and {second}."
    one, two = HERMES.parse(text, ())
    assert text[slice(*one.span)] == first
    assert text[slice(*two.span)] == second
    assert (one.name, two.name) == ("look", "now")
    assert one.readings == ({key: Typed(value) for key, value in arguments.items()},)
    assert two.readings == ({},)


def test_hermes_markers_inside_json_strings_cut_nothing():
    arguments = {"text": 'a</tool_call> "<tool_call>" \\ }{'}
    text = written("note", arguments)
    (proposal,) = HERMES.parse(text, ())
    assert proposal.span == (0, len(text))
    assert proposal.readings[0]["text"].value == arguments["text"]


def test_hermes_integers_stay_exact():
    text = '<tool_call>{"name": "n", "arguments": {"i": ' + "9" * 900 + "}}</tool_call>"
    (proposal,) = HERMES.parse(text, ())
    assert proposal.readings[0]["i"].value == 10**900 - 1


REFUSED = {
    "empty": "<tool_call></tool_call>",
    "no_close": '<tool_call>{"name": "a", "arguments": {}}',
    "text_before_close": '<tool_call>{"name": "a", "arguments": {}} x</tool_call>',
    "duplicate_key": '<tool_call>{"name": "a", "arguments": {"x": 1, "x": 2}}</tool_call>',
    "duplicate_name": '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>',
    "extra_key": '<tool_call>{"name": "a", "arguments": {}, "id": 1}</tool_call>',
    "missing_arguments": '<tool_call>{"name": "a"}</tool_call>',
    "arguments_list": '<tool_call>{"name": "a", "arguments": []}</tool_call>',
    "arguments_text": '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>',
    "name_number": '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    "name_characters": '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
    "name_long": '<tool_call>{"name": "' + "a" * 65 + '", "arguments": {}}</tool_call>',
    "not_finite": '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
    "overflow": '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
    "long_integer": '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 1001 + "}}</tool_call>",
    "array": "<tool_call>[1]</tool_call>",
    "broken": '<tool_call>{"name": "a", "arguments": {]}</tool_call>',
    "unclosed_string": '<tool_call>{"name": "a</tool_call>',
    "surrogate": '<tool_call>{"name": "a", "arguments": {"x": "\ud800"}}</tool_call>',
    "deep": '<tool_call>{"name": "a", "arguments": {"x": '
    + "[" * 100
    + "]" * 100
    + "}}</tool_call>",
    "very_deep": "<tool_call>" + '{"a":' * 50_000 + "</tool_call>",
    "many_arguments": "<tool_call>"
    + json.dumps({"name": "a", "arguments": {str(i): i for i in range(257)}})
    + "</tool_call>",
    "close_first": "</tool_call><tool_call>",
}


@pytest.mark.parametrize("name", REFUSED)
def test_hermes_malformed_call_is_no_proposal(name):
    assert HERMES.parse(REFUSED[name], ()) == ()


def test_hermes_malformed_call_does_not_hide_the_next():
    text = '<tool_call>{"name": <tool_call>{"name": "a", "arguments": {}}</tool_call>'
    (proposal,) = HERMES.parse(text, ())
    assert proposal.span[0] == text.rindex("<tool_call>")


def test_hermes_calls_are_bounded():
    assert len(HERMES.parse(written("a", {}) * 100, ())) == 64
    assert HERMES.parse("<tool_call>" * 5000 + written("a", {}), ()) == ()


def test_hermes_hostile_quotes_stay_linear():
    text = '<tool_call>{"' + '\\"' * 200_000
    assert HERMES.parse(text * 3, ()) == ()
