"""The dialect: what it hands to a template, and the published templates where they are at hand."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_laguna import config_of, tensors_of

from engine_core.builtin_chatml import CHATML
from engine_core.builtin_hermes import HERMES
from engine_core.errors import TemplateError
from engine_core.messages import ImagePart, Message, TextPart, ToolCall, ToolDecl
from engine_core.plugins import Plugins
from engine_core.session import Session
from engine_core.template.probe import probe_template
from engine_core.template.source import TemplateSources
from engine_core.testing.checkpoints import write_checkpoint
from engine_core.testing.tokenizers import byte_level_tokenizer_json
from engine_core.text.tokenizer import Tokenizer
from engine_laguna.template import LAGUNA_DIALECT
from engine_laguna.tools import LAGUNA_SYNTAX

if TYPE_CHECKING:
    from engine_core.template.render import ChatTemplate

PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data" / "chat_templates"
CLOCK = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
WEATHER = ToolDecl(
    name="get_weather",
    description="Look up weather.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
)
# A template of the same shape as the published ones, in this project's own words.
OWN = """
{{- '〈|EOS|〉' }}
{%- set thinks = enable_thinking | default(false) %}
{%- if tools %}{{ '<system>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '</system>' }}{% endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}{% generation %}{{ '<assistant>' }}
{%- if message.reasoning is string %}{{ '<think>' + message.reasoning + '</think>' }}
{%- else %}{{ '</think>' }}{% endif %}{{ content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' ~ key ~ '</arg_key><arg_value>' }}
{{- value if value is string else value | tojson(ensure_ascii=False) }}{{ '</arg_value>' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}{{ '</assistant>\\n' }}{% endgeneration %}
{%- elif message.role == 'tool' %}{{ '<tool_response>' + content + '</tool_response>\\n' }}
{%- else %}{{ '<' + message.role + '>' + content + '</' + message.role + '>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{{ '<think>' if thinks else '</think>' }}
{%- endif %}
""".strip()


def probe(source: str) -> tuple[ChatTemplate, Any]:
    return probe_template(
        TemplateSources(default=source), (LAGUNA_DIALECT, CHATML), (HERMES, LAGUNA_SYNTAX)
    )


def user(text: str = "USERQ") -> Message:
    return Message(role="user", content=(TextPart(text),))


def conversation(arguments: dict[str, Any], reasoning: str | None = None) -> list[Message]:
    call = ToolCall(id="c1", name="get_weather", arguments=arguments)
    return [
        user(),
        Message(role="assistant", content=(), tool_calls=(call,), reasoning=reasoning),
        Message(role="tool", content=(TextPart("RESULTA"),), tool_call_id="c1"),
    ]


def supported(report: Any) -> set[str]:
    return {one.capability.split(":")[1] for one in report.verdicts if one.supported}


def test_plugin_contributes_dialect_and_syntax() -> None:
    plugins = Plugins.load()
    assert LAGUNA_DIALECT in plugins.template_dialects()
    assert LAGUNA_SYNTAX in plugins.tool_syntaxes()


def test_prepared_messages_have_the_shape_that_templates_read() -> None:
    history = conversation({"city": "Oslo", "days": 3}, reasoning="RSN")
    prepared = LAGUNA_DIALECT.prepare(history, [WEATHER], {})
    assert [message["content"] for message in prepared.messages] == ["USERQ", "", "RESULTA"]
    answer = prepared.messages[1]
    assert answer["reasoning"] == "RSN"
    assert "reasoning_content" not in answer
    assert answer["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo", "days": 3}
    assert prepared.tools is not None
    assert LAGUNA_DIALECT.prepare(history, [], {}).tools is None


def test_content_that_is_no_text_is_refused_instead_of_being_lost() -> None:
    message = Message(role="user", content=(TextPart("look"), ImagePart(data=b"x")))
    with pytest.raises(TemplateError) as caught:
        LAGUNA_DIALECT.prepare([message], [], {})
    assert caught.value.code == "template.input"


def test_several_text_parts_become_one_string() -> None:
    message = Message(role="user", content=(TextPart("one "), TextPart("two")))
    assert LAGUNA_DIALECT.prepare([message], [], {}).messages[0]["content"] == "one two"


def test_template_of_the_family_is_served() -> None:
    template, report = probe(OWN)
    assert supported(report) == {
        "chat", "system_prompt", "tools", "reasoning_history", "thinking_toggle",
    }  # fmt: skip
    assert (report.dialect, report.tool_syntax) == ("laguna", "laguna")
    assert report.arguments_form == "mapping"
    assert report.end_of_turn == ("</assistant>",)
    assert not template.render([user()], clock=CLOCK).opens_reasoning
    assert template.render([user()], thinking=True, clock=CLOCK).opens_reasoning


def test_chat_with_a_checkpoint_of_the_family_ends_its_turns(tmp_path: Path) -> None:
    tokens = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<assistant>", "</assistant>")
    tokenizer = byte_level_tokenizer_json(("〈|EOS|〉",), tokens)
    known = Tokenizer.from_bytes(tokenizer)
    config = config_of("xs21") | {"vocab_size": known.vocab_size, "eos_token_id": None}
    path = write_checkpoint(
        tmp_path, config, tensors_of(config), tokenizer=tokenizer, chat_template=OWN
    )
    with Session.load(path, compute_dtype="float32") as session:
        assert session.info.eos_token_ids == (known.token_id("</assistant>"),)
        reply = session.generate([{"role": "user", "content": "hello"}], max_tokens=6)
        assert reply.usage.completion_tokens == len(reply.token_ids) > 0
        asked = session.generate(
            [{"role": "user", "content": "hello"}], thinking=True, max_tokens=6, prompt_cache=False
        )
        # The prompt opened the reasoning, so the reply starts inside it.
        assert known.token_id("</think>") in asked.token_ids or not asked.text


# ------------------------------------------------------------------ published templates

DEFAULT = (
    "You are a helpful, conversationally-fluent assistant made by Poolside. "
    "You are here to be helpful to users through natural language conversations."
)
NEWLINES = {"laguna-xs.2": True, "laguna-xs-2.1": True, "laguna-s-2.1": False}
published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="published templates are not here")


def read(name: str) -> str:
    return (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.shared
@published
@pytest.mark.parametrize("name", NEWLINES)
def test_published_template_has_the_capabilities_of_the_index(name: str) -> None:
    _, report = probe(read(name))
    assert supported(report) == {
        "chat", "system_prompt", "tools", "reasoning_history", "thinking_toggle",
    }  # fmt: skip
    assert (report.dialect, report.tool_syntax) == ("laguna", "laguna")
    assert report.arguments_form == "mapping"
    assert report.end_of_turn == ("</assistant>",)
    assert "older turn" in report.reason("interaction:reasoning_history")
    assert "tool loop" in report.reason("interaction:reasoning_history")


@pytest.mark.shared
@published
@pytest.mark.parametrize("name", NEWLINES)
def test_published_template_renders_as_the_index_shows(name: str) -> None:
    template, _ = probe(read(name))
    n = "\n" if NEWLINES[name] else ""

    def text(messages: list[Message], **options: Any) -> str:
        return template.render(messages, clock=CLOCK, **options).text

    head = {
        "laguna-xs.2": f"〈|EOS|〉<system>\n\n{DEFAULT}\n</system>\n",
        "laguna-xs-2.1": "〈|EOS|〉",
        "laguna-s-2.1": f"〈|EOS|〉<system>{DEFAULT}</system>\n",
    }[name]
    silent = "<think>" if name == "laguna-s-2.1" else "</think>"
    question = f"<user>{n}USERQ{n}</user>\n"
    assert text([user()]) == f"{head}{question}<assistant>{n}{silent}"
    for thinking, marker in ((True, "<think>"), (False, "</think>")):
        rendered = template.render([user()], thinking=thinking, clock=CLOCK)
        assert rendered.text.endswith(f"<assistant>{n}{marker}")
        assert rendered.opens_reasoning == thinking
    call = (
        f"<tool_call>get_weather{n}<arg_key>city</arg_key>{n}<arg_value>Oslo</arg_value>{n}"
        f"<arg_key>days</arg_key>{n}<arg_value>3</arg_value>{n}</tool_call>{n}"
    )
    opened = "<think></think>" if name == "laguna-s-2.1" else "</think>"
    assert text(conversation({"city": "Oslo", "days": 3})) == (
        f"{head}{question}<assistant>{n}{opened}{n}{call}</assistant>\n"
        f"<tool_response>{n}RESULTA{n}</tool_response>\n<assistant>{n}{silent}"
    )
    thought = text(conversation({"city": "Oslo", "days": 3}, reasoning="RSN"))
    assert f"<assistant>{n}<think>{n}RSN{n}</think>{n}<tool_call>get_weather" in thought


@pytest.mark.shared
@published
@pytest.mark.parametrize("name", NEWLINES)
@pytest.mark.parametrize(
    "value", ["Oslo", "  two  ", "line\n", "</arg_value> x", "日本", "<arg_key>k</arg_key>", ""]
)
def test_call_written_by_a_template_is_read_back(name: str, value: str) -> None:
    template, _ = probe(read(name))
    history = conversation({"city": value, "days": 3, "deep": {"a": [True, None, 1.5]}})
    before = template.render([user()], [WEATHER], clock=CLOCK).text
    after = template.render(history, [WEATHER], clock=CLOCK).text
    *examples, written = LAGUNA_SYNTAX.parse(after, [WEATHER])
    assert examples == list(LAGUNA_SYNTAX.parse(before, [WEATHER]))
    assert written.name == "get_weather"
    assert written.readings == ({"city": value, "days": "3", "deep": '{"a": [true, null, 1.5]}'},)


@pytest.mark.shared
@published
@pytest.mark.parametrize("name", NEWLINES)
def test_other_system_text_replaces_the_default_one(name: str) -> None:
    template, _ = probe(read(name))
    system = Message(role="system", content=(TextPart("SYSMSG"),))
    text = template.render([system, user()], clock=CLOCK).text
    assert "SYSMSG" in text
    assert DEFAULT not in text


@pytest.mark.shared
@published
def test_options_reach_the_template() -> None:
    template, _ = probe(read("laguna-s-2.1"))
    history = [*conversation({"city": "Oslo"}, reasoning="RSN"), user("MORE")]
    kept = template.render(
        history, thinking=False, template_options={"preserve_thinking": True}, clock=CLOCK
    )
    dropped = template.render(history, thinking=False, clock=CLOCK)
    assert "RSN" in kept.text
    assert "RSN" not in dropped.text
    assert dropped.text.endswith("<assistant></think>")
