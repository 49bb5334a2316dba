from __future__ import annotations

import base64
import copy
import json
import pickle
from pathlib import Path

import attrs
import pytest

from engine_core.errors import InvalidRequest
from engine_core.limits import LIMITS
from engine_core.message_parsing import parse_messages
from engine_core.messages import (
    AudioPart,
    FinishReason,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    ToolDecl,
    TranslationPart,
    Usage,
    VideoPart,
)
from engine_core.tool_parsing import check_declared, parse_tools

PNG = b"\x89PNG\r\n"


def refused(messages, field, *words, limits=LIMITS):
    with pytest.raises(InvalidRequest) as caught:
        parse_messages(messages, limits)
    assert caught.value.code == f"request.messages.{field}"
    for word in words:
        assert word in str(caught.value)
    return caught.value


def user(content="hi"):
    return {"role": "user", "content": content}


def call(call_id="a", name="f", arguments="{}"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*items, content=None):
    return {"role": "assistant", "content": content, "tool_calls": list(items)}


def result(call_id="a", content="done", **more):
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


def test_parse_dicts_and_records_give_equal_messages():
    dicts = [
        {"role": "system", "content": "be brief"},
        user([{"type": "text", "text": "look"}, {"type": "image", "data": PNG}]),
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [call(arguments='{"x": [1, {"y": null}], "z": 1.5}')],
        },
        result(),
        {"role": "assistant", "content": "ok"},
    ]
    records = [
        Message(role="system", content="be brief"),
        Message(role="user", content=(TextPart("look"), ImagePart(data=PNG))),
        Message(
            role="assistant",
            reasoning="hm",
            tool_calls=(ToolCall(id="a", name="f", arguments={"x": [1, {"y": None}], "z": 1.5}),),
        ),
        Message(role="tool", tool_call_id="a", content="done", name="f"),
        Message(role="assistant", content="ok"),
    ]
    assert parse_messages(dicts) == parse_messages(records) == tuple(records)
    # Reading what was read changes nothing.
    assert parse_messages(parse_messages(dicts)) == tuple(records)
    assert parse_messages([dicts[0], records[1]])[1] == records[1]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "limit"),
        ({"role": "user", "content": "x"}, "limit"),
        ([], "limit"),
        (None, "limit"),
        ([7], "field"),
        ([{"content": "x"}], "role"),
        ([{"role": ["user"], "content": "x"}], "role"),
        ([{"role": "robot", "content": "x"}], "role"),
        ([{"role": "user"}], "content"),
        ([user(None)], "content"),
        ([user([])], "content"),
        ([user(5)], "content"),
        ([user(b"bytes")], "content"),
        ([user({"type": "text", "text": "x"})], "content"),
        ([user([5])], "content"),
        ([user([{"type": "text"}])], "content"),
        ([user([{"type": "text", "text": 5}])], "content"),
        ([user([{"type": "smell", "text": "x"}])], "content"),
        ([user([{"text": "x"}])], "content"),
        ([user([{"type": "text", "text": "x", "cache_control": {"a": 1}}])], "content"),
        ([user("\ud800")], "content"),
        ([{**user(), "tool_calls": [call()]}], "tool_calls"),
        ([{**user(), "tool_call_id": "a"}], "tool_call_id"),
        ([{**user(), "reasoning": "hm"}], "reasoning"),
        ([{**user(), "reasoning_content": "hm"}], "reasoning"),
        ([{**user(), "name": 5}], "name"),
        ([{**user(), "name": "x" * 65}], "name"),
        ([{**user(), "weight": 1}], "field"),
        ([user(), {"role": "assistant", "content": "x", "function_call": {"a": 1}}], "field"),
        ([user(), {"role": "assistant", "content": "x", "reasoning": 5}], "reasoning"),
        (
            [
                user(),
                {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"},
            ],
            "reasoning",
        ),
        ([user(), {"role": "assistant", "tool_calls": "x"}], "tool_calls"),
        ([user(), calls(5)], "tool_calls"),
        ([user(), calls({"id": "a"})], "tool_calls"),
        ([user(), calls({**call(), "type": "custom"})], "tool_calls.type"),
        ([user(), calls(call(call_id=""))], "tool_calls"),
        ([user(), calls(call(call_id=None))], "tool_calls"),
        ([user(), calls(call(call_id="é" * 129))], "tool_calls"),
        ([user(), calls(call(name="has space"))], "tool_calls"),
        ([user(), calls(call(name="x" * 65))], "tool_calls"),
        ([user(), calls(call(arguments="[]"))], "tool_calls"),
        ([user(), calls(call(arguments=""))], "tool_calls"),
        ([user(), calls(call(arguments=None))], "tool_calls"),
        ([user(), calls(call(arguments='{"a": 1, "a": 2}'))], "tool_calls"),
        ([user(), calls(call(arguments='{"a": NaN}'))], "tool_calls"),
        ([user(), calls(call(arguments='{"a": 1e999}'))], "tool_calls"),
        ([user(), calls(call(arguments='{"a": ' + "9" * 1001 + "}"))], "tool_calls"),
        ([user(), calls(call(arguments={"a": float("nan")}))], "tool_calls"),
        ([user(), calls(call(arguments={"a": 10**1000}))], "tool_calls"),
        ([user(), calls(call(arguments={1: 2}))], "tool_calls"),
        ([user(), calls(call(arguments={"a": {1, 2}}))], "tool_calls"),
        ([user(), calls(call(arguments={"a": "\udfff"}))], "tool_calls"),
        ([user(), calls({**call(), "extra": 1})], "tool_calls"),
    ],
)
def test_parse_invalid_turn_names_its_index_and_field(messages, field):
    error = refused(messages, field)
    if isinstance(messages, list) and messages:
        assert str(error).startswith(f"messages[{len(messages) - 1}]")


def test_parse_records_are_checked_as_dicts_are():
    refused([Message(role="robot", content="x")], "role")
    refused([Message(role="user")], "content")
    refused([Message(role="user", content=[{"type": "smell"}])], "content")
    refused([Message(role="user", content=(TextPart(5),))], "content")
    refused([Message(role="user", content="x", reasoning="hm")], "reasoning")
    refused(
        [Message(role="user", content="x", tool_calls=(ToolCall(id="a", name="f"),))], "tool_calls"
    )
    bad = Message(role="assistant", tool_calls=(ToolCall(id="", name="f"),))
    refused([Message(role="user", content="x"), bad], "tool_calls")


def test_parse_fields_without_value_say_nothing():
    turns = [
        {**user(), "name": None, "tool_calls": None, "tool_call_id": None, "reasoning": ""},
        {
            "role": "assistant",
            "content": "x",
            "refusal": None,
            "annotations": [],
            "tool_calls": [],
            "reasoning": None,
            "reasoning_content": "",
        },
    ]
    assert parse_messages(turns) == (
        Message(role="user", content="hi"),
        Message(role="assistant", content="x"),
    )


def test_parse_developer_becomes_system():
    assert parse_messages([{"role": "developer", "content": "x"}, user()])[0].role == "system"


def test_parse_huge_integer_argument_stays_exact():
    digits = "1" + "0" * 998 + "7"
    turns = parse_messages(
        [user(), calls(call(arguments=f'{{"n": {digits}, "m": 9007199254740993}}')), result()]
    )
    assert turns[1].tool_calls[0].arguments == {"n": int(digits), "m": 9007199254740993}


def test_parse_arguments_are_copied_and_frozen():
    given = {"list": [1, 2], "map": {"k": "v"}}
    turns = parse_messages([user(), calls(call(arguments=given)), result()])
    arguments = turns[1].tool_calls[0].arguments
    given["list"].append(3)
    given["map"]["k"] = "changed"
    given["new"] = 1
    assert arguments == {"list": [1, 2], "map": {"k": "v"}}
    for change in (
        lambda: arguments.update(a=1),
        lambda: arguments.__setitem__("a", 1),
        lambda: arguments["list"].append(3),
        lambda: arguments["list"].sort(),
        lambda: arguments["map"].pop("k"),
    ):
        with pytest.raises(TypeError):
            change()
    with pytest.raises(TypeError):
        arguments["list"] += [1]
    assert json.loads(json.dumps(arguments)) == {"list": [1, 2], "map": {"k": "v"}}


def test_record_arguments_are_frozen_at_construction():
    given = {"a": [1]}
    record = ToolCall(id="x", name="f", arguments=given)
    given["a"].append(2)
    assert record.arguments == {"a": [1]}
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record  # noqa: S301
    assert hash(record) == hash(copy.deepcopy(record))
    with pytest.raises(InvalidRequest):
        ToolCall(id="x", name="f", arguments=[1])
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        record.name = "g"


def test_parse_shared_references_cannot_unfold_without_bound():
    value = ["x"]
    for _ in range(60):
        value = [value, value]
    refused([user(), calls(call(arguments={"a": value}))], "tool_calls", "must fit")


def test_parse_deep_and_cyclic_arguments_are_refused():
    cycle: list = []
    cycle.append(cycle)
    refused([user(), calls(call(arguments={"a": cycle}))], "tool_calls", "nest")
    text = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    refused([user(), calls(call(arguments=text))], "tool_calls")


@pytest.mark.parametrize("record", [ImagePart, AudioPart, VideoPart])
def test_media_part_takes_exactly_one_local_source(record, tmp_path):
    assert record(data=bytearray(b"x")).data == b"x"
    assert record(path=tmp_path / "a.bin").path == tmp_path / "a.bin"
    assert record(path="pics/a:1.bin").path.name == "a:1.bin"
    for bad in (
        {},
        {"data": b"x", "path": "a"},
        {"data": "text"},
        {"data": 10},
        {"path": 5},
        {"path": ""},
        {"path": "a\0b"},
        {"path": b"bytes"},
        {"path": "http://host/a.png"},
        {"path": Path("http://host/a.png")},
        {"path": "HTTPS://host/a.png"},
        {"path": "file:///etc/passwd"},
    ):
        with pytest.raises(InvalidRequest) as caught:
            record(**bad)
        assert caught.value.code == "request.messages.content"


def test_media_part_repr_hides_the_payload():
    assert repr(ImagePart(data=b"secret")) == "ImagePart(data=<6 bytes>, path=None)"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image", "data": PNG}, ImagePart(data=PNG)),
        ({"type": "image", "data": base64.b64encode(PNG).decode()}, ImagePart(data=PNG)),
        ({"type": "image", "path": "a.png"}, ImagePart(path="a.png")),
        ({"type": "audio", "path": "a.wav"}, AudioPart(path="a.wav")),
        ({"type": "video", "path": "a.mp4"}, VideoPart(path="a.mp4")),
        (
            {
                "type": "image_url",
                "image_url": {
                    "url": "data:image/png;base64," + base64.b64encode(PNG).decode(),
                    "detail": "auto",
                },
            },
            ImagePart(data=PNG),
        ),
        (
            {"type": "image_url", "image_url": "data:IMAGE/png;x=y;base64,QQ=="},
            ImagePart(data=b"A"),
        ),
        (
            {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,QQ=="}},
            AudioPart(data=b"A"),
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}},
            AudioPart(data=b"A"),
        ),
        (
            {"type": "translation", "source_lang": "en", "target_lang": "de", "text": "x"},
            TranslationPart(source_lang="en", target_lang="de", text="x"),
        ),
        (
            {"type": "text", "source_lang_code": "en", "target_lang_code": "de", "text": "x"},
            TranslationPart(source_lang="en", target_lang="de", text="x"),
        ),
    ],
)
def test_parse_part_dict_gives_its_record(part, expected):
    (message,) = parse_messages([user([part])])
    assert message.content == (expected,)
    assert parse_messages([user([expected])]) == (message,)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "data": PNG, "path": "a"},
        {"type": "image", "data": "not base64!"},
        {"type": "image", "path": "https://host/a.png"},
        {"type": "image_url"},
        {"type": "image_url", "image_url": "https://host/a.png"},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "/etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "data:image/png,raw"}},
        {"type": "image_url", "image_url": {"url": "data:audio/wav;base64,QQ=="}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ==", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": 5}},
        {"type": "input_audio", "input_audio": "QQ=="},
        {"type": "translation", "source_lang": "en", "target_lang": " ", "text": "x"},
        {"type": "translation", "source_lang": "en", "text": "x"},
        {"type": "text", "source_lang_code": "en", "text": "x"},
    ],
)
def test_parse_bad_media_or_translation_part_is_refused(part):
    refused([user([part])], "content", "messages[0].content[0]")


def test_parse_media_and_translation_stand_on_user_turns_only():
    image = ImagePart(data=PNG)
    translation = TranslationPart(source_lang="en", target_lang="de", text="x")
    refused([{"role": "system", "content": [image]}], "content")
    refused([user(), {"role": "assistant", "content": [image]}], "content")
    refused([user(), calls(call()), result(content=[image])], "content")
    refused([{"role": "system", "content": [translation]}], "content")
    refused([user([translation, TextPart("y")])], "content")
    refused([user([translation, translation])], "content")


def test_parse_limits_are_enforced_each():
    def small(**bounds):
        return attrs.evolve(LIMITS, **bounds)

    image = ImagePart(data=b"12345")
    assistant = {"role": "assistant", "content": "x", "reasoning": "12345"}
    two = [user(), calls(call("a", arguments={"k": "v"})), result("a")]
    refused([user(), user()], "limit", limits=small(messages=1))
    refused([user([TextPart("a")] * 3)], "limit", limits=small(parts_per_message=2))
    refused([user([TextPart("a")] * 2)] * 2, "limit", limits=small(parts_total=3))
    refused([user([image] * 3)], "limit", limits=small(media_parts=2))
    refused([user("12345")], "limit", limits=small(content_bytes_per_message=4))
    refused([user("éé")], "limit", limits=small(content_bytes_per_message=3))
    refused([user([image])], "limit", limits=small(content_bytes_per_message=4))
    refused([user("123")] * 2, "limit", limits=small(content_bytes_total=5))
    refused([assistant], "limit", limits=small(reasoning_bytes_per_message=4))
    refused([assistant] * 2, "limit", limits=small(reasoning_bytes_total=9))
    refused([user(), calls(call("a"), call("b"))], "limit", limits=small(tool_calls=1))
    refused(two, "tool_calls", limits=small(arguments_bytes=5))
    refused(
        [*two, calls(call("b", arguments={"k": "v"})), result("b")],
        "limit",
        limits=small(arguments_total_bytes=15),
    )
    refused(two, "tool_calls", limits=small(tool_call_id_bytes=0))
    refused(
        [user([{"type": "image", "data": "QUFB" * 5}])],
        "content",
        limits=small(content_bytes_per_message=4),
    )
    # Exactly at a bound is fine.
    parse_messages([user("12345")], small(content_bytes_per_message=5, content_bytes_total=5))


def test_parse_error_never_shows_a_whole_payload():
    secret = "s3cret" * 10_000
    error = refused([{"role": secret, "content": "x"}], "role")
    assert len(str(error)) < 300
    error = refused([user(), calls(call(arguments={"a": object(), "token": secret}))], "tool_calls")
    assert "s3cret" not in str(error)


def test_message_text_joins_text_parts():
    message = Message(role="user", content=[TextPart("a"), ImagePart(data=PNG), TextPart("b")])
    assert message.text == "ab"


def test_usage_total_and_finish_reason_values():
    assert Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3).total_tokens == 8
    assert [str(reason) for reason in FinishReason] == ["tool_calls", "stop", "aborted", "length"]


def tool(name="f", **more):
    return {"type": "function", "function": {"name": name, **more}}


def test_parse_tools_dicts_and_records_give_equal_declarations():
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    expected = (
        ToolDecl(name="f", description="does", parameters=schema),
        ToolDecl(name="ns.g-1"),
    )
    wrapped = [tool(description="does", parameters=schema, strict=True), tool("ns.g-1")]
    flat = [
        {"type": "function", "name": "f", "description": "does", "parameters": schema},
        {"name": "ns.g-1", "description": None, "parameters": None, "strict": None},
    ]
    assert parse_tools(wrapped) == parse_tools(flat) == parse_tools(expected) == expected
    assert parse_tools(None) == parse_tools([]) == ()
    schema["properties"]["x"]["type"] = "integer"
    assert expected[0].parameters["properties"]["x"] == {"type": "string"}


@pytest.mark.parametrize(
    ("tools", "code"),
    [
        ("f", "request.tools"),
        (5, "request.tools"),
        ([5], "request.tools"),
        ([{"type": "web_search"}], "request.tools.type"),
        ([{"type": "custom", "function": {"name": "f"}}], "request.tools.type"),
        ([{"type": "function", "function": 5}], "request.tools"),
        ([tool(name=None)], "request.tools.name"),
        ([tool(name="a b")], "request.tools.name"),
        ([tool(name="")], "request.tools.name"),
        ([tool(name="x" * 65)], "request.tools.name"),
        ([tool(), tool()], "request.tools.name"),
        ([tool(description=5)], "request.tools.description"),
        ([tool(description="  ")], "request.tools.description"),
        ([tool(description="x" * 16_385)], "request.tools.description"),
        ([tool(parameters=[])], "request.tools.parameters"),
        ([tool(parameters={"a": float("inf")})], "request.tools.parameters"),
        ([tool(parameters={"a": "x" * 1_048_577})], "request.tools.parameters"),
        ([tool(strict="yes")], "request.tools.strict"),
        ([tool(returns={"a": 1})], "request.tools"),
        ([tool(f"f{i}") for i in range(257)], "request.tools"),
        ([tool(f"f{i}", description="x" * 16_384) for i in range(65)], "request.tools.description"),
        ([ToolDecl(name="a b")], "request.tools.name"),
    ],
)
def test_parse_tools_invalid_declaration_is_refused(tools, code):
    with pytest.raises(InvalidRequest) as caught:
        parse_tools(tools)
    assert caught.value.code == code
    assert str(caught.value).startswith("tools")


def test_parse_tools_total_schema_size_is_bounded():
    limits = attrs.evolve(LIMITS, tool_schemas_total_bytes=100)
    tools = [tool(f"f{i}", parameters={"a": "x" * 60}) for i in range(2)]
    parse_tools(tools[:1], limits)
    with pytest.raises(InvalidRequest) as caught:
        parse_tools(tools, limits)
    assert caught.value.code == "request.tools.parameters"


def test_check_declared_refuses_a_call_of_an_undeclared_tool():
    turns = parse_messages([user(), calls(call(name="f")), result()])
    check_declared(turns, parse_tools([tool("f")]))
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.tool_calls\[0\]"):
        check_declared(turns, parse_tools([tool("g")]))
