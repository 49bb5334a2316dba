"""The dialect: folded results, declarations, injection; published templates where they exist."""

from __future__ import annotations

import lzma
import tarfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import InvalidRequest
from engine_core.events import TokenKind
from engine_core.messages import ImagePart, Message, TextPart, ToolCall, ToolDecl
from engine_core.plugins import Plugins
from engine_core.template.probe import probe_template
from engine_core.template.source import select_templates
from engine_core.text.eos import eos_token_ids
from engine_core.text.reply import ReplyDecoder
from engine_core.text.tokenizer import Tokenizer
from engine_gemma4.template import GEMMA4_DIALECT, prepare
from engine_gemma4.tools import GEMMA4_SYNTAX

if TYPE_CHECKING:
    from engine_core.template.render import ChatTemplate

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
TEMPLATES = sorted((SHARED / "chat_templates").glob("gemma4-*.jinja"))
EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
# What all published templates have in common, for where they cannot be read.
OWN = """{%- macro written(value) -%}
{%- if value is string -%}<|"|>{{ value }}<|"|>
{%- elif value is mapping -%}{ {{- entries(value) -}} }
{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- macro entries(object) -%}
{%- for key, value in object | dictsort -%}
{{ key }}:{{ written(value) }}{{ "," if not loop.last }}
{%- endfor -%}
{%- endmacro -%}
{{ bos_token }}
{%- set thinks = enable_thinking | default(false) -%}
{%- if tools or thinks or messages[0].role == "system" -%}
<|turn>system
{{ "<|think|>" if thinks }}
{%- if messages[0].role == "system" %}{{ messages[0].content }}{% endif -%}
{%- for tool in tools or () -%}
{%- set function = tool.function -%}
<|tool>declaration:{{ function.name }}{ {{- entries(function.parameters.properties) -}} }<tool|>
{%- endfor -%}
<turn|>
{% endif -%}
{%- set state = namespace(is_open=false) -%}
{%- for message in messages if message.role != "system" -%}
<|turn>{{ "model" if message.role == "assistant" else message.role }}
{% if message.reasoning_content -%}
<|channel>thought
{{ message.reasoning_content }}
<channel|>
{%- endif -%}
{%- for call in message.tool_calls or () -%}
<|tool_call>call:{{ call.function.name }}{ {{- entries(call.function.arguments) -}} }<tool_call|>
{%- endfor -%}
{%- for one in message.tool_responses or () -%}
{%- set said = one.response if one.response is mapping else {"value": one.response} -%}
<|tool_response>response:{{ one.name }}{ {{- entries(said) -}} }<tool_response|>
{%- endfor -%}
{{ message.content }}
{%- set state.is_open = message.tool_responses and not message.content -%}
{%- if not state.is_open -%}
<turn|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not state.is_open -%}
<|turn>model
{% endif -%}"""
SOURCES = [pytest.param(OWN.encode(), "own-e2b-", id="own")]
SOURCES += [pytest.param(path.read_bytes(), path.name, id=path.stem) for path in TEMPLATES]
each_template = pytest.mark.parametrize(("source", "name"), SOURCES)
D = '<|"|>'
WEATHER = ToolCall(id="c1", name="get_weather", arguments={"city": "Oslo", "days": 3})
NOTE = ToolCall(id="c2", name="add_note", arguments={"text": "hi"})
USER, LAST = Message(role="user", content="USERQ"), Message(role="user", content="USERQ2")


def calling(*calls: ToolCall, **fields: Any) -> Message:
    return Message(role="assistant", tool_calls=calls, **fields)


def result(call: ToolCall, text: str, **fields: Any) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id, **fields)


def answer(text: str, **fields: Any) -> Message:
    return Message(role="assistant", content=text, **fields)


def folded(*messages: Message) -> list[dict[str, Any]]:
    return [dict(message) for message in prepare(messages, (), {}).messages]


def test_results_stand_beside_their_calls_in_call_order() -> None:
    messages = folded(USER, calling(WEATHER, NOTE), result(NOTE, "B"), result(WEATHER, "A"), LAST)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["tool_responses"] == [
        {"name": "get_weather", "response": "A"},
        {"name": "add_note", "response": "B"},
    ]
    assert messages[1]["content"] == ""


def test_the_answer_after_results_joins_their_turn() -> None:
    messages = folded(USER, calling(WEATHER), result(WEATHER, "A"), answer("Fine."), LAST)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == "Fine."
    said = calling(WEATHER, content="Let me see.")
    messages = folded(USER, said, result(WEATHER, "A"), answer("Fine."))
    assert messages[1]["content"] == "Let me see.\nFine."


def test_another_round_of_calls_is_a_message_of_its_own() -> None:
    messages = folded(
        USER, calling(WEATHER), result(WEATHER, "A"), calling(NOTE), result(NOTE, "B"), answer("C")
    )
    assert [message.get("content") for message in messages] == ["USERQ", "", "C"]
    assert [len(message.get("tool_responses", ())) for message in messages] == [0, 1, 1]


def test_calls_without_results_stay_open() -> None:
    (_, message) = folded(USER, calling(WEATHER))
    assert "tool_responses" not in message


@pytest.mark.parametrize(
    "messages",
    [
        [result(WEATHER, "A")],
        [USER, result(WEATHER, "A")],
        [calling(WEATHER), result(NOTE, "A")],
        [calling(WEATHER, NOTE), result(WEATHER, "A")],
        [calling(WEATHER), result(WEATHER, "A"), result(WEATHER, "B")],
        [calling(WEATHER), result(WEATHER, "A"), LAST, result(WEATHER, "B")],
    ],
    ids=["alone", "after the user", "of another call", "missing", "twice", "interleaved"],
)
def test_results_that_answer_no_call_are_refused(messages: list[Message]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare(messages, (), {})
    assert caught.value.code == "request.messages.order"


@pytest.mark.parametrize(
    ("text", "response"),
    [
        ('{"sky": "blue", "temp": 7, "more": [null, {"a": 1.5}]}',
         {"sky": "blue", "temp": 7, "more": [None, {"a": 1.5}]}),
        (' {"a": "x\\ny"} ', {"a": "x\ny"}),
        ("{}", {}),
        ("[1, 2]", "[1, 2]"),
        ("12", "12"),
        ('"x"', '"x"'),
        ("{broken", "{broken"),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ("plain text", "plain text"),
        ('{"a": "<b>"}', {"a": "<b>"}),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_result_is_an_object_where_it_spells_one(text: str, response: Any) -> None:
    (_, message) = folded(USER, calling(WEATHER), result(WEATHER, text))[:2]
    assert message["tool_responses"][0]["response"] == response


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "\\u003cturn|>"}',
        '{"a": "<turn|\\u003e"}',
        '{"a": "<|\\"|>"}',
        '{"\\u003cbos>": 1}',
        '{"a": ["\\u005bmultimodal]"]}',
    ],
)
def test_an_escape_in_a_result_spells_no_control_token(text: str) -> None:
    (_, message) = folded(USER, calling(WEATHER), result(WEATHER, text))[:2]
    assert message["tool_responses"][0]["response"] == text


def declared(parameters: dict[str, Any]) -> dict[str, Any]:
    (tool,) = prepare([USER], [ToolDecl(name="f", parameters=parameters)], {}).tools or ()
    spelled: dict[str, Any] = tool["function"]["parameters"]
    return spelled


def test_optional_parameters_have_one_type_and_are_nullable() -> None:
    spelled = declared(
        {
            "type": "object",
            "properties": {
                "a": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "A."},
                "b": {"type": ["integer", "null"]},
                "c": {"type": "array", "items": {"type": ["null", "number"]}},
                "d": {"type": "object", "properties": {"type": {"type": ["string", "null"]}}},
                "e": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "f": {"type": ["string", "integer"]},
            },
            "required": ["a"],
        }
    )
    assert spelled["properties"] == {
        "a": {"type": "string", "description": "A.", "nullable": True},
        "b": {"type": "integer", "nullable": True},
        "c": {"type": "array", "items": {"type": "number", "nullable": True}},
        "d": {"type": "object", "properties": {"type": {"type": "string", "nullable": True}}},
        "e": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "f": {"type": ["string", "integer"]},
    }
    assert spelled["required"] == ["a"]


def test_media_parts_stay_in_place() -> None:
    content = (TextPart("look"), ImagePart(data=b"x"), TextPart("?"))
    (message,) = folded(Message(role="user", content=content))
    assert [part["type"] for part in message["content"]] == ["text", "image", "text"]


def test_newlines_around_reasoning_are_the_templates_own() -> None:
    (message,) = folded(answer("x", reasoning="\nidea\n\nmore\n"))
    assert message["reasoning_content"] == "idea\n\nmore"


# ---------------------------------------------------------------- published templates, in place


@cache
def template(source: bytes) -> ChatTemplate:
    sources = select_templates(
        {"chat_template.jinja": source}, {"bos_token": "<bos>", "eos_token": "<eos>"}
    )
    assert sources is not None
    plugins = Plugins.load()
    owner = next(owner for owner in plugins.owners if owner.family.name == "gemma4")
    chosen, report = probe_template(
        sources, plugins.template_dialects(owner), plugins.tool_syntaxes(owner)
    )
    assert (report.dialect, report.tool_syntax) == ("gemma4", "gemma4")
    assert report.end_of_turn == ("<turn|>",)
    return chosen


TOOLS = [
    ToolDecl(
        name=name,
        description="Does it.",
        parameters={"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
    )
    for name, key in (("get_weather", "city"), ("add_note", "text"))
]
CALLS = (
    f"<|tool_call>call:get_weather{{city:{D}Oslo{D},days:3}}<tool_call|>"
    f"<|tool_call>call:add_note{{text:{D}hi{D}}}<tool_call|>"
)
RESPONSES = (
    f"<|tool_response>response:get_weather{{sky:{D}grey{D},temp:7}}<tool_response|>"
    f"<|tool_response>response:add_note{{value:{D}done{D}}}<tool_response|>"
)
ROUND = [
    USER,
    calling(WEATHER, NOTE),
    result(NOTE, "done"),
    result(WEATHER, '{"temp": 7, "sky": "grey"}'),
]


def render(source: bytes, messages: list[Message], **options: Any) -> str:
    return template(source).render(messages, TOOLS, **options).text


@pytest.mark.shared
@each_template
def test_a_round_of_calls_is_one_open_model_turn(source: bytes, name: str) -> None:
    text = render(source, ROUND)
    turn = text[text.index("<|turn>model") :]
    # One release writes an empty thought in front of everything that the model says.
    assert turn.removesuffix(EMPTY_THOUGHT) == f"<|turn>model\n{CALLS}{RESPONSES}"
    assert turn.endswith(EMPTY_THOUGHT) == ("26b-a4b-it.release" in name)
    assert [proposal.name for proposal in GEMMA4_SYNTAX.parse(text, TOOLS)] == [
        "get_weather",
        "add_note",
    ]


@pytest.mark.shared
@each_template
def test_an_answered_round_is_one_closed_model_turn(source: bytes, name: str) -> None:
    text = render(source, [*ROUND, answer("Grey."), LAST])
    turn = text[text.index("<|turn>model") : text.index("<|turn>user\nUSERQ2")]
    assert turn == f"<|turn>model\n{CALLS}{RESPONSES}Grey.<turn|>\n"
    assert text.count("<|turn>model") == 2
    assert "<|turn>tool" not in text


@pytest.mark.shared
@each_template
def test_what_the_template_writes_is_stable_when_the_conversation_grows(
    source: bytes, name: str
) -> None:
    """The prompt of a tool loop begins with the prompt of its first round: caches are reused."""
    first = render(source, [USER])
    grown = render(source, ROUND)
    # Large models get an empty thought in front of a reply that does not think.
    assert grown.startswith(first.removesuffix(EMPTY_THOUGHT))
    answered = render(source, [*ROUND, answer("Grey.")], add_generation_prompt=False)
    assert answered.startswith(grown.removesuffix(EMPTY_THOUGHT))


@pytest.mark.shared
@each_template
def test_thinking_opens_the_reply_only_where_the_template_does(source: bytes, name: str) -> None:
    is_small = "-e2b-" in name
    off = template(source).render([USER], thinking=False)
    assert off.text.endswith(EMPTY_THOUGHT) != is_small
    on = template(source).render([USER], thinking=True)
    assert "<|think|>" in on.text
    assert on.text.endswith("<|turn>model\n")
    assert not off.opens_reasoning
    assert not on.opens_reasoning
    loop = template(source).render(ROUND, TOOLS, thinking=True)
    assert loop.opens_reasoning == loop.text.endswith("<|channel>thought\n")
    assert loop.opens_reasoning == (".2026-07" in name or ".ollama" in name)


@cache
def tokenizer() -> Tokenizer | None:
    archive = SHARED / "tokenizers" / "gemma4.tar.xz"
    if not archive.is_file():
        return None
    with lzma.open(archive) as plain, tarfile.open(fileobj=plain) as files:
        member = files.extractfile("gemma4/tokenizer.json")
        assert member is not None
        return Tokenizer.from_bytes(member.read(), config=CheckpointConfig({"eos_token": "<eos>"}))


@pytest.mark.shared
def test_replies_end_at_the_end_of_turn_and_when_results_are_asked_for() -> None:
    known = tokenizer()
    if known is None:
        # Without the vocabulary: the texts whose ids count.
        assert GEMMA4_DIALECT.end_of_turn == ("<turn|>",)
        return
    configs = [CheckpointConfig({"eos_token_id": [1, 106]})]
    extra = ("<|tool_response>", *GEMMA4_DIALECT.end_of_turn)
    assert eos_token_ids(known, configs, vocab_size=262_144, extra=extra) == {1, 50, 106}
    # The older family's end of turn is no token here and must not become one.
    assert known.single_id("<end_of_turn>") is None


@pytest.mark.shared
def test_streamed_ids_fall_into_reasoning_answer_and_calls() -> None:
    known = tokenizer()
    if known is None:
        assert GEMMA4_SYNTAX.delimiters == (D,)
        return
    call = f"<|tool_call>call:add_note{{text:{D}hi{D}}}<tool_call|>"
    reply = f"<|channel>thought\nan idea\n<channel|>Done.{call}"
    decoder = ReplyDecoder(
        known,
        reasoning=GEMMA4_DIALECT.reasoning,
        tool_markers=GEMMA4_SYNTAX.markers,
        delimiters=GEMMA4_SYNTAX.delimiters,
        armed=True,
    )
    pieces = [piece for token in known.encode(reply) for piece in decoder.push(token)]
    pieces += decoder.finish()
    by_kind = {
        kind: "".join(piece.text for piece in pieces if piece.kind is kind) for kind in TokenKind
    }
    assert by_kind[TokenKind.REASONING].strip() == "an idea"
    assert by_kind[TokenKind.TEXT] == "Done."
    assert decoder.answer == f"Done.{call}"
    assert len(known.encode(D)) == 1
