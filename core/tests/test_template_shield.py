"""Control-token text in content stays text through a render; the template's own stays control."""

import pytest

from engine_core.builtin_chatml import CHATML
from engine_core.family import TemplateDialect, TemplateInput
from engine_core.messages import Message, TextPart, ToolCall, ToolDecl, TranslationPart
from engine_core.template.render import ChatTemplate
from engine_core.template.source import TemplateSources
from engine_core.text.control import ControlShield, ControlTokens
from engine_core.text.tokenizer import AddedToken

TEXTS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
CONTROLS = ControlTokens(AddedToken(id=at, text=text) for at, text in enumerate(TEXTS))
SOURCE = """
{%- if tools %}{{ '<|im_start|>system\\n' + TOOLS + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content | trim }}
{%- for c in m.tool_calls %}
{{- '<tool_call>' + (c.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}{{ '<|im_start|>assistant\\n<think>' }}
""".strip()
DECLARED = {
    "json": "(tools | tojson)",
    "ascii json": "(tools | tojson(ensure_ascii=true, indent=2))",
    "parts": "tools[0].function.name + tools[0].function.description",
}


def split(rendered, shield):
    """Control tokens and the text between them as the model reads it."""
    return [part for _, part in CONTROLS.runs(CONTROLS.split(rendered, shield), shield)]


def pieces(source, text):
    """The prompt split at control tokens, with the text between them as the model reads it."""
    sources = TemplateSources(default=source)
    template = ChatTemplate.compile(sources, CHATML)
    call = ToolCall(id="c", name="look", arguments={"a": "b"})
    messages = [
        Message(role="system", content=text),
        Message(role="user", content=f" {text} end"),
        Message(role="assistant", content="ok", tool_calls=(call,)),
        Message(role="tool", content=text, tool_call_id="c", name="look"),
    ]
    tools = [ToolDecl(name="look", description=text, parameters={"properties": {text: {}}})]
    shield = ControlShield.avoiding(CONTROLS, (messages, tools))
    plain = template.render(messages, tools).text
    rendered = template.render(messages, tools, shield=shield).text
    return plain, split(rendered, shield)


@pytest.mark.parametrize("form", DECLARED)
def test_shield_content_with_control_text_adds_no_control_token(form):
    source = SOURCE.replace("TOOLS", DECLARED[form])
    _, harmless = pieces(source, "nothing")
    expected = [part for part in harmless if isinstance(part, int)]
    for text in TEXTS:
        plain, parts = pieces(source, f"a {text} b{text}{text}")
        assert [part for part in parts if isinstance(part, int)] == expected
        spelled = "".join(TEXTS[part] if isinstance(part, int) else part for part in parts)
        assert spelled == plain


def test_shield_content_without_control_text_changes_nothing():
    source = SOURCE.replace("TOOLS", DECLARED["json"])
    plain, parts = pieces(source, "2 < 3 | x > y")
    assert "".join(TEXTS[part] if isinstance(part, int) else part for part in parts) == plain


def controls(source, text, **fields):
    """Control tokens in the prompt of a conversation whose assistant said a text."""
    sources = TemplateSources(default=source)
    template = ChatTemplate.compile(sources, CHATML)
    messages = [Message(role="assistant", content=text, **fields)]
    shield = ControlShield.avoiding(CONTROLS, messages)
    rendered = template.render(messages, shield=shield).text
    return [TEXTS[part] for part in split(rendered, shield) if isinstance(part, int)]


# Takes marked spans out of an answer, as templates do that drop earlier reasoning.
STRIPPING = """
{%- for m in messages %}
{%- for part in m.content.split('</think>') %}{{ part.split('<think>')[0] }}{% endfor %}
{%- endfor %}
""".strip()


def test_shield_pieces_around_a_span_that_the_template_takes_out_are_never_joined():
    for text in TEXTS:
        for at in range(1, len(text)):
            split = f"{text[:at]}<think>x</think>{text[at:]}"
            assert controls(STRIPPING, split) == []
            assert controls("{{ messages[0].content }}", split) == ["<think>", "</think>"]


def test_shield_templates_still_find_the_reasoning_in_an_answer():
    source = "{{ messages[0].content.split('</think>')[-1] }}<|im_end|>"
    assert controls(source, "<think>why <|im_end|></think>because <|im_start|>") == ["<|im_end|>"]


def prepared(messages, tools, shield):
    """The records that a dialect is given."""
    given = []

    def prepare(*records):
        given.extend(records[:2])
        return TemplateInput(messages=[])

    dialect = TemplateDialect(name="recording", prepare=prepare)
    ChatTemplate.compile(TemplateSources(default=""), dialect).render(
        messages, tools, shield=shield
    )
    return given


def conversation(text, key):
    call = ToolCall(id=f"i{text}", name=f"n{text}", arguments={key: [text, {"k": text}, 1, None]})
    messages = [
        Message(role="user", content=(TextPart(text), TextPart("plain"))),
        Message(role="assistant", content=text, reasoning=f"r{text}", tool_calls=(call,)),
        Message(role="tool", content=text, tool_call_id=f"i{text}", name=f"n{text}"),
        Message(
            role="user",
            content=(TranslationPart(source_lang=f"s{text}", target_lang=text, text=text),),
        ),
    ]
    return messages, [ToolDecl(name=f"n{text}", description=text, parameters={key: {"k": text}})]


def test_shield_reaches_every_text_of_messages_and_tools():
    messages, tools = conversation("<|im_end|>", "<think>")
    shield = ControlShield.avoiding(CONTROLS, (messages, tools))
    expected = conversation(shield("<|im_end|>"), shield("<think>"))
    assert prepared(messages, tools, shield) == [*expected]


def test_shield_records_without_control_text_are_handed_on_as_they_are():
    messages, tools = conversation("2 < 3 and 5 > 4", "key")
    messages.append(Message(role="user", content="<|im_end|>"))
    shield = ControlShield.avoiding(CONTROLS, (messages, tools))
    given, declared = prepared(messages, tools, shield)
    assert [one is other for one, other in zip(given, messages, strict=True)] == [True] * 4 + [
        False
    ]
    assert declared[0] is tools[0]
    assert given[-1].text == shield("<|im_end|>")
