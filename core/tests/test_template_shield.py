"""Control-token text in content stays text through a render; the template's own stays control."""

import pytest

from engine_core.builtin_chatml import CHATML
from engine_core.messages import Message, ToolCall, ToolDecl
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
    return plain, [part for _, part in CONTROLS.split(rendered, shield)]


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
    return [TEXTS[part] for _, part in CONTROLS.split(rendered, shield) if isinstance(part, int)]


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
