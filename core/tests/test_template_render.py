"""From records to a prompt: options, tools, prefill, reasoning, shielding."""

import attrs
import pytest

from engine_core.builtin_chatml import CHATML
from engine_core.errors import InvalidRequest, TemplateError
from engine_core.messages import Message, TextPart, ToolCall, ToolDecl
from engine_core.template.render import ChatTemplate
from engine_core.template.source import TemplateSources

PLAIN = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}"
    "{% for c in m.tool_calls %}|{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}>{% if enable_thinking is defined and enable_thinking %}"
    "<think>\n{% endif %}{% endif %}"
)
USER = Message(role="user", content="Hi")
TOOL = ToolDecl(name="look", description="See <tag>", parameters={"type": "object"})


def template(source=PLAIN, **fields):
    sources = TemplateSources(default=source, special_tokens={"bos_token": "<s>"}, **fields)
    return ChatTemplate.compile(sources, CHATML)


def test_render_plain_conversation_gives_the_prompt():
    assert template().render([USER]).text == "<s>[user|Hi]>"
    assert template().render([USER], add_generation_prompt=False).text == "<s>[user|Hi]"


def test_render_tools_are_passed_only_when_there_are_some():
    assert template("{{ tools is defined }}").render([USER]).text == "False"
    assert '"name": "look"' in template().render([USER], [TOOL]).text


def test_render_tool_template_serves_requests_with_tools_only():
    both = template("plain", tool_use="with tools")
    assert both.render([USER]).text == "plain"
    assert both.render([USER], [TOOL]).text == "with tools"


def test_render_thinking_unset_passes_nothing():
    source = template("{{ enable_thinking is defined }}{{ enable_thinking }}")
    assert source.render([USER]).text == "False"
    assert source.render([USER], thinking=False).text == "TrueFalse"
    options = {"enable_thinking": True}
    assert source.render([USER], template_options=options).text == "TrueTrue"


def test_render_template_options_reach_the_template():
    source = template("{{ mode.kind }}")
    assert source.render([USER], template_options={"mode": {"kind": 3}}).text == "3"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_render_option_with_an_engine_name_is_refused(name):
    with pytest.raises(InvalidRequest) as caught:
        template().render([USER], template_options={name: 1})
    assert caught.value.code == "request.template_options"


def test_render_option_that_is_no_data_is_refused():
    with pytest.raises(TemplateError) as caught:
        template().render([USER], template_options={"f": object()})
    assert caught.value.code == "template.input"


def test_render_prefill_continues_the_generation_prompt():
    assert template().render([USER], prefill="Sure").text == "<s>[user|Hi]>Sure"
    with pytest.raises(InvalidRequest) as caught:
        template().render([USER], prefill="Sure", add_generation_prompt=False)
    assert caught.value.code == "request.prefill"


@pytest.mark.parametrize(
    ("thinking", "prefill", "opens"),
    [
        (None, "", False),
        (True, "", True),
        (True, "so far", True),
        (True, "done</think>answer", False),
        (False, "<think>hm", True),
        (False, "a <think>", False),
        (False, "<think>hm</think>x", False),
    ],
)
def test_render_open_reasoning_span_is_reported(thinking, prefill, opens):
    rendered = template().render([USER], thinking=thinking, prefill=prefill)
    assert rendered.opens_reasoning is opens


def test_render_arguments_reach_the_template_in_its_form():
    call = ToolCall(id="c", name="look", arguments={"a": "é"})
    messages = [USER, Message(role="assistant", tool_calls=(call,))]
    assert template().render(messages).text == '<s>[user|Hi][assistant||{"a": "é"}]>'
    as_text = attrs.evolve(template(), arguments_form="json")
    assert as_text.render(messages).text == '<s>[user|Hi][assistant||"{\\"a\\": \\"é\\"}"]>'


def test_render_shield_sees_every_text():
    seen = []

    def shield(text):
        seen.append(text)
        return text.replace("<tag>", "#")

    call = ToolCall(id="i <tag>", name="look", arguments={"<tag>": ["<tag>", {"b": "<tag>"}]})
    messages = [
        Message(role="system", content="s <tag>"),
        Message(role="user", content=[TextPart("u <tag>")], name="n <tag>"),
        Message(role="assistant", content="a <tag>", reasoning="r <tag>", tool_calls=(call,)),
        Message(role="tool", content="t <tag>", tool_call_id="i <tag>"),
    ]
    tool = attrs.evolve(TOOL, parameters={"properties": {"<tag>": {"enum": ["<tag>", 1]}}})
    whole = template(
        "{% for m in messages %}{{ m.reasoning_content }}{{ m.name }}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls %}{{ c.id }}{% endfor %}{% endfor %}" + PLAIN
    )
    text = whole.render(messages, [tool], shield=shield, prefill="p <tag>").text
    assert "<tag>" not in text
    assert text == whole.render(messages, [tool], prefill="p <tag>").text.replace("<tag>", "#")
    assert {"s <tag>", "u <tag>", "t <tag>", "See <tag>", "look", "p <tag>"} <= set(seen)


def test_render_shield_spares_the_assistants_own_markers():
    source = attrs.evolve(template(), tool_markers=("<call>", "<call>>"))
    text = "a<think>b<call>>c</think><call>d"
    call = ToolCall(id="c", name="look", arguments={"a": text})
    messages = [
        Message(role="user", content=text),
        Message(role="assistant", content=text, tool_calls=(call,)),
        Message(role="tool", content=text, tool_call_id="c"),
    ]
    rendered = source.render(messages, shield=lambda one: f"({one})", prefill="<think>so").text
    own = "(a)<think>(b)<call>>(c)</think>()<call>(d)"
    assert rendered == (
        f'<s>[user|({text})][assistant|{own}|{{"(a)": "({text})"}}][tool|({text})]>()<think>(so)'
    )


def test_render_shield_that_changes_nothing_keeps_the_prompt():
    messages = [Message(role="system", content="s"), USER]
    plain = template().render(messages, [TOOL])
    assert template().render(messages, [TOOL], shield=lambda text: text) == plain


def test_render_budget_grows_with_the_square_of_the_messages():
    source = template("{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}")
    small = attrs.evolve(source.limits, template_work_units=1000)
    limited = attrs.evolve(source, limits=small)
    with pytest.raises(TemplateError) as caught:
        attrs.evolve(
            limited, default=template("{% for a in range(2000) %}{% endfor %}").default
        ).render([USER])
    assert caught.value.code == "template.budget"
    assert limited.render([USER] * 100).text == ""
