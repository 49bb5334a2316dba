"""The built-in dialect serves this family's templates, and its calls are read back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.builtin_chatml import CHATML
from engine_core.builtin_hermes import HERMES
from engine_core.messages import Message, TextPart, ToolCall, ToolDecl
from engine_core.plugins import Plugins
from engine_core.template.probe import probe_template
from engine_core.template.source import TemplateSources
from engine_qwen35.tools import QWEN_XML

if TYPE_CHECKING:
    from engine_core.template.render import ChatTemplate

MINI = Path(__file__).resolve().parent / "fixtures" / "qwen35-mini" / "chat_template.jinja"
PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data" / "chat_templates"
CAPABILITIES = {"chat", "system_prompt", "tools", "reasoning_history", "thinking_toggle"}
# Whether a template lets the model think when nobody asked: the two smallest models do not.
THINKS = {
    "qwen3.5-2b-and-below": False,
    "qwen3.5-4b-and-up": True,
    "qwen3.6": True,
    "qwen3.8": True,
}
published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="published templates are not here")
WRITE = ToolDecl(
    name="write_file",
    description="Write a file.",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    },
)


def probe(source: str) -> tuple[ChatTemplate, Any]:
    return probe_template(TemplateSources(default=source), [CHATML], [QWEN_XML, HERMES])


def read(name: str) -> str:
    return (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")


def supported(report: Any) -> set[str]:
    return {one.capability.split(":")[1] for one in report.verdicts if one.supported}


def user(text: str = "USERQ") -> Message:
    return Message(role="user", content=(TextPart(text),))


def check_thinking(template: ChatTemplate, *, by_default: bool) -> None:
    for thinking, opens in ((None, by_default), (True, True), (False, False)):
        assert template.render([user()], thinking=thinking).opens_reasoning is opens


def check_round_trip(template: ChatTemplate) -> None:
    """What the template writes for a call is read back to its letters."""
    content = 'x = "</parameter>"\n\n  if x:\n\tprint("<tool_call>")'
    call = ToolCall(id="call_1", name="write_file", arguments={"path": " a.py", "content": content})
    history = [
        user(),
        Message(role="assistant", content=(), tool_calls=(call, call)),
    ]
    text = template.render(history, [WRITE], add_generation_prompt=False).text
    before = template.render([user()], [WRITE], add_generation_prompt=False).text
    found = QWEN_XML.parse(text[len(before) :], [WRITE])
    assert [one.name for one in found] == ["write_file"] * 2
    assert [dict(one.readings[0]) for one in found] == [dict(call.arguments)] * 2


def test_plugin_contributes_its_syntax() -> None:
    assert QWEN_XML in Plugins.load().tool_syntaxes()


def test_template_of_the_miniature_is_served() -> None:
    template, report = probe(MINI.read_text(encoding="utf-8"))
    assert supported(report) == CAPABILITIES
    assert (report.dialect, report.tool_syntax) == ("chatml", "qwen_xml")
    assert report.arguments_form == "mapping"
    assert report.end_of_turn == ("<|im_end|>",)
    check_thinking(template, by_default=True)
    check_round_trip(template)


@pytest.mark.shared
@published
@pytest.mark.parametrize("name", THINKS)
def test_published_templates_are_served(name: str) -> None:
    template, report = probe(read(name))
    assert supported(report) == CAPABILITIES
    assert (report.dialect, report.tool_syntax) == ("chatml", "qwen_xml")
    assert report.arguments_form == "mapping"
    assert report.end_of_turn == ("<|im_end|>",)
    check_thinking(template, by_default=THINKS[name])
    check_round_trip(template)


@pytest.mark.shared
@published
@pytest.mark.parametrize("name", ["qwen3", "qwen3.rev2", "qwen3-next-80b-thinking"])
def test_json_between_the_same_tags_is_told_apart_by_rendering(name: str) -> None:
    assert probe(read(name))[1].tool_syntax == "hermes"
