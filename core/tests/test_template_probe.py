"""The capability probe looks at prompts, not at template source."""

import re
from pathlib import Path

import attrs
import pytest

from engine_core.builtin_chatml import CHATML
from engine_core.builtin_hermes import HERMES
from engine_core.errors import TemplateError
from engine_core.family import Proposal, ReasoningMarkers
from engine_core.template.probe import CAPABILITIES, probe_template
from engine_core.template.source import TemplateSources

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"

TURNS = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- ARGUMENTS }}{{ '}</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}
""".strip()
DECLARE = "{% if tools %}{{ tools | tojson }}{% endif %}"
FULL = DECLARE + TURNS.replace("ARGUMENTS", "c.function.arguments | tojson")
ALL = {"chat", "system_prompt", "tools", "reasoning_history", "thinking_toggle"}


def probe(source, dialects=(CHATML,), syntaxes=(HERMES,)):
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}
    sources = TemplateSources(default=source, special_tokens=tokens)
    return probe_template(sources, dialects, syntaxes)


def supported(report):
    return {one.capability.split(":")[1] for one in report.verdicts if one.supported}


def test_probe_full_template_supports_everything_but_translation():
    template, report = probe(FULL)
    assert supported(report) == ALL
    assert (report.tool_syntax, report.arguments_form, report.dialect) == (
        "hermes",
        "mapping",
        "chatml",
    )
    assert report.end_of_turn == ("<|im_end|>",)
    assert template.arguments_form == "mapping"
    assert [one.capability for one in report.verdicts] == list(CAPABILITIES)
    assert all(one.reason for one in report.verdicts)


def test_probe_arguments_as_text_are_found():
    template, report = probe(DECLARE + TURNS.replace("ARGUMENTS", "c.function.arguments"))
    assert report.arguments_form == template.arguments_form == "json"
    assert "tools" in supported(report)


LIMITED = {
    "nothing declared": (FULL.replace(DECLARE, ""), ALL - {"tools"}),
    "keywords in a comment": (
        "{# tools | tojson <tool_call> #}" + FULL.replace(DECLARE, ""),
        ALL - {"tools"},
    ),
    "keywords in a dead branch": (
        "{% if false %}{{ tools | tojson }}<tool_call>{% endif %}" + FULL.replace(DECLARE, ""),
        ALL - {"tools"},
    ),
    "only the first tool": (FULL.replace("tools | tojson", "tools[0] | tojson"), ALL - {"tools"}),
    "fixed declarations": (FULL.replace("tools | tojson", "'a tool'"), ALL - {"tools"}),
    "call tags without names": (
        FULL.replace("c.function.name", "'fixed'"),
        ALL - {"tools"},
    ),
    "results dropped": (
        FULL.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'tool' %}"),
        ALL - {"tools"},
    ),
    "results as user turns": (
        FULL.replace(
            "'<|im_start|>' + m.role", "'<|im_start|>' + m.role | replace('tool', 'user')"
        ),
        ALL - {"tools"},
    ),
    "user text lost with tools": ("{% if not tools %}" + FULL + "{% endif %}x", ALL - {"tools"}),
    "calls in reverse": (
        FULL.replace("in m.tool_calls", "in (m.tool_calls or []) | reverse"),
        ALL - {"tools"},
    ),
    "system as user": (
        FULL.replace(
            "'<|im_start|>' + m.role", "'<|im_start|>' + m.role | replace('system', 'user')"
        ),
        ALL - {"system_prompt"},
    ),
    "system lost with tools": (
        FULL.replace(
            "{%- for m in messages %}",
            "{%- for m in messages if not (tools and m.role == 'system') %}",
        ),
        ALL - {"system_prompt"},
    ),
    "reasoning without markers": (
        FULL.replace("'<think>' + m.reasoning_content + '</think>'", "m.reasoning_content"),
        ALL - {"reasoning_history"},
    ),
    "reasoning lost with tools": (
        FULL.replace(
            "{%- if m.reasoning_content %}", "{%- if m.reasoning_content and not tools %}"
        ),
        ALL - {"reasoning_history"},
    ),
    "no toggle with tools": (
        FULL.replace(
            "enable_thinking is defined and", "enable_thinking is defined and not tools and"
        ),
        ALL - {"thinking_toggle"},
    ),
}


@pytest.mark.parametrize("name", LIMITED)
def test_probe_missing_capability_is_not_claimed(name):
    source, expected = LIMITED[name]
    _, report = probe(source)
    assert supported(report) == expected


TRANSLATE = """
{%- set part = messages[0].content[0] -%}
{%- if messages[0].content is string %}{{ raise_exception('a translation is needed') }}{% endif -%}
From {{ part.source_lang_code }} to {{ part.target_lang_code }}: {{ part.text }}
"""


def test_probe_translation_template_needs_no_chat():
    template, report = probe(TRANSLATE)
    assert supported(report) == {"translation"}
    assert "a translation is needed" in report.reason("task:chat")
    assert template.dialect is CHATML


def test_probe_translation_that_ignores_the_target_is_none():
    plain = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}"
    _, report = probe(plain + "{% endfor %}")
    assert "translation" not in supported(report)
    _, report = probe("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "translation" not in supported(report)
    assert "leak" in report.reason("task:translation")


UNUSABLE = {
    "nothing": "",
    "constant": "hello",
    "refuses": "{{ raise_exception('no') }}",
    "bomb": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_probe_template_for_nothing_is_a_typed_error(name):
    with pytest.raises(TemplateError) as caught:
        probe(UNUSABLE[name])
    assert caught.value.code == "template.unusable"
    assert caught.value.hint


def test_probe_dialect_that_serves_more_wins_and_ties_keep_the_preference():
    other = attrs.evolve(
        CHATML, name="other", reasoning=ReasoningMarkers(open="[R]", close="[/R]"), end_of_turn=()
    )
    same = attrs.evolve(CHATML, name="same")
    assert probe(FULL, (other, CHATML))[1].dialect == "chatml"
    assert probe(FULL, (same, CHATML))[1].dialect == "same"
    swapped = FULL.replace("<think>", "[R]").replace("</think>", "[/R]")
    assert probe(swapped, (CHATML, other))[1].dialect == "other"


@attrs.frozen
class Bare:
    """A syntax of one call without markers: the whole reply is the object."""

    name = "bare"
    markers = ()
    probe_rounds = 1

    def parse(self, text, tools):
        match = re.fullmatch(r'\s*\{"fn": "(\w+)", "args": \{"(\w+)": "(\w+)"\}\}\s*', text)
        if match is None:
            return ()
        return (Proposal(span=(0, len(text)), name=match[1], readings=({match[2]: match[3]},)),)


def test_probe_syntax_without_markers_is_read_from_the_prompt():
    source = FULL.replace("<tool_call>", "").replace("</tool_call>", "")
    source = source.replace('{"name": "', '{"fn": "').replace('"arguments": ', '"args": ')
    _, report = probe(source, syntaxes=(HERMES, Bare()))
    assert report.tool_syntax == "bare"
    assert supported(report) == ALL


def test_probe_two_syntaxes_that_read_the_same_calls_are_ambiguous():
    @attrs.frozen
    class Twin:
        name = "twin"
        markers = HERMES.markers
        probe_rounds = 2

        def parse(self, text, tools):
            return HERMES.parse(text, tools)

    _, report = probe(FULL, syntaxes=(HERMES, Twin()))
    assert report.tool_syntax is None
    assert "hermes, twin" in report.reason("interaction:tools")
    assert "chat" in supported(report)


def index_rows():
    """Name -> cells of the published capability matrix."""
    path = SHARED / "INDEX.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    section = text.partition("## 2.")[2].partition("## 3.")[0]
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in section.splitlines()
        if line.startswith("| ")
    ]
    return {row[0]: row for row in rows if not row[0].startswith("template")}


def test_probe_published_templates_agree_with_the_matrix():
    for name, row in index_rows().items():
        source = (SHARED / f"{name}.jinja").read_text(encoding="utf-8")
        _, report = probe(source)
        found = supported(report)
        assert ("chat" in found) == (row[1] == "yes"), name
        assert ("translation" in found) == (name == "translategemma"), name
        assert ("system_prompt" in found) == (row[2] == "yes"), name
        toggles = row[8] not in {"none", "ERR"}
        assert ("thinking_toggle" in found) == toggles, name
        if report.tool_syntax is not None:
            assert row[4] == "yes", name
            assert ("reasoning_history" in found) == (row[9] != "none"), name


def test_probe_published_templates_of_the_built_in_syntax_support_tools():
    known = ("qwen2.5", "qwen3.jinja", "qwen3.rev2", "qwen3-instruct", "qwen3-next", "hermes-2")
    for path in sorted(SHARED.glob("*.jinja")) if SHARED.is_dir() else ():
        _, report = probe(path.read_text(encoding="utf-8"))
        expected = "hermes" if path.name.startswith(known) else None
        assert report.tool_syntax == expected, path.name


WITH_IMAGES = (
    "{% for m in messages %}[{{ m.role }}|{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' if p.type == 'image' }}"
    "{% endfor %}{% endif %}]{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (WITH_IMAGES, "images render, but are not read"),
        (WITH_IMAGES.replace("'<image>'", "''"), "images change nothing in the prompt"),
        (WITH_IMAGES.replace("{% for p", "{{ '<image>' }}{% for p").replace("'<image>' if p.type "
         "== 'image'", "''"), "images change nothing in the prompt"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}",
         "the keys of images leak into the prompt"),
        ("{% for m in messages %}{{ m.content if m.content is string else 'no' }}{% endfor %}",
         "the text beside images is lost"),
        ("{% for m in messages %}{{ m.content + '' }}{% endfor %}",
         "a turn with images does not render"),
    ],
)  # fmt: skip
def test_media_verdict_says_what_rendering_showed(source, reason):
    _, report = probe_template(TemplateSources(default=source), [CHATML], [])
    assert report.reason("media:images") == reason
    assert not report.supports("media:images")
    assert not report.supports("media:audio")


def test_media_must_survive_the_path_with_tools():
    keeps = FULL.replace("m.content", "(m.content if m.content is string else 'TEXT<image>')")
    sentinel = "zqprobe user 5c1e"
    counted = keeps.replace(
        "'TEXT<image>'", f"'{sentinel}' ~ '<image>' * ((m.content | length) - 1)"
    )
    for source, reason in (
        (counted, "images render, but are not read"),
        (counted.replace("'<image>' *", "('' if tools else '<image>') *"),
         "images change nothing in the prompt with tools"),
    ):  # fmt: skip
        _, report = probe_template(TemplateSources(default=source), [CHATML], [HERMES])
        assert report.supports("interaction:tools")
        assert report.reason("media:images") == reason
