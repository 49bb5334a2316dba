"""Published chat templates: what the probe finds against a checked-in table.

The templates belong to their publishers and stay outside the project: they are read in place from
``../shared`` and from the wheel ``trl``, each identified by its digest, where these exist. The
table was derived from the published capability matrix, not from what this engine says; a row that
differs from the matrix says why in ``note``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.message_parsing import parse_messages
from engine_core.plugins import Plugins
from engine_core.prompt_outline import Outline
from engine_core.template.probe import (
    AUDIO,
    CHAT,
    IMAGES,
    REASONING_HISTORY,
    SYSTEM_PROMPT,
    THINKING_TOGGLE,
    TOOLS,
    TRANSLATION,
    ProbeReport,
    probe_template,
)
from engine_core.template.source import select_templates
from engine_core.text.repeating import shared_length
from engine_core.tool_parsing import parse_tools

if TYPE_CHECKING:
    from engine_core.template.render import ChatTemplate

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data" / "chat_templates"
ROWS: list[dict[str, Any]] = json.loads(
    (ROOT / "tests" / "template_expectations.json").read_text(encoding="utf-8")
)
WHEEL = "1.16.0"
CAPABILITIES = {
    "chat": CHAT,
    "translation": TRANSLATION,
    "system_prompt": SYSTEM_PROMPT,
    "reasoning_history": REASONING_HISTORY,
    "thinking_toggle": THINKING_TOGGLE,
}


def wheel_files() -> dict[str, Path]:
    """Templates of the public wheel by their path in it; the package is never imported."""
    try:
        distribution = importlib.metadata.distribution("trl")
    except importlib.metadata.PackageNotFoundError:
        return {}
    if distribution.version != WHEEL:
        return {}
    return {
        str(file): Path(str(distribution.locate_file(file)))
        for file in distribution.files or ()
        if str(file).startswith("trl/chat_templates/")
    }


def sources() -> list[Any]:
    """Every row with each file that carries its template here."""
    wheel = wheel_files()
    found = []
    for row in ROWS:
        shared = SHARED / f"{row['template']}.jinja"
        if shared.is_file():
            found.append(pytest.param(row, shared, id=f"{row['template']}-shared"))
        if row["trl"] in wheel:
            found.append(pytest.param(row, wheel[row["trl"]], id=f"{row['template']}-wheel"))
    return found


@cache
def plugins() -> Plugins:
    return Plugins.load()


@cache
def probed(source: bytes, family: str | None) -> tuple[ChatTemplate, ProbeReport]:
    owner = next((owner for owner in plugins().owners if owner.family.name == family), None)
    assert (owner is None) == (family is None)
    chosen = select_templates(
        {"chat_template.jinja": source}, {"bos_token": "<s>", "eos_token": "</s>"}
    )
    assert chosen is not None
    return probe_template(
        chosen, plugins().template_dialects(owner), plugins().tool_syntaxes(owner)
    )


def verdicts(source: bytes, family: str | None) -> dict[str, Any]:
    _, report = probed(source, family)
    assert report.supports(TOOLS) == (report.tool_syntax is not None)
    found = {name: report.supports(capability) for name, capability in CAPABILITIES.items()}
    return {**found, "tools": report.tool_syntax}


@pytest.mark.parametrize(("row", "path"), sources())
def test_probe_finds_what_the_table_says(row: dict[str, Any], path: Path) -> None:
    source = path.read_bytes()
    assert hashlib.sha256(source).hexdigest() == row["sha256"]
    assert verdicts(source, row["family"]) == {name: row[name] for name in (*CAPABILITIES, "tools")}


# Templates that read content part lists, and those of them that know sounds, as published.
IMAGES_RENDER = ("qwen3.5-", "qwen3.6", "qwen3.8", "gemma3-", "gemma4-", "functiongemma-")
AUDIO_RENDERS = ("gemma4-",)


@pytest.mark.parametrize(("row", "path"), sources())
def test_media_reasons_say_what_the_template_renders(row: dict[str, Any], path: Path) -> None:
    _, report = probed(path.read_bytes(), row["family"])
    for capability, families in ((IMAGES, IMAGES_RENDER), (AUDIO, AUDIO_RENDERS)):
        assert not report.supports(capability)
        renders = report.reason(capability).endswith("render, but are not read")
        assert renders == row["template"].startswith(families), report.reason(capability)


def long_conversation(report: ProbeReport) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Questions, replies and, where the template can, system text and two rounds of tools."""
    tool = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
    messages = (
        [{"role": "system", "content": "Be brief."}] if report.supports(SYSTEM_PROMPT) else []
    )
    for number in range(2):
        messages += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    messages.append({"role": "user", "content": "the last question"})
    if not report.supports(TOOLS):
        return messages, []
    for number in range(2):
        call = {"name": "look", "arguments": {}}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"call{number}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call{number}", "content": f"result {number}"},
        ]
    names = ("look", "find", "read")
    return messages, [{"type": "function", "function": tool | {"name": name}} for name in names]


@pytest.mark.parametrize(("row", "path"), sources())
def test_transcript_is_that_of_rendering_the_whole_conversation(
    row: dict[str, Any], path: Path
) -> None:
    template, report = probed(path.read_bytes(), row["family"])
    if not report.supports(CHAT):
        pytest.skip("translates only")
    messages, tools = long_conversation(report)
    declared = parse_tools(tools)
    counted: list[int] = []

    def render(turns: Any, tools: Any, *, opens_reply: bool) -> str:
        counted.append(len(turns))
        return template.render(turns, tools, add_generation_prompt=opens_reply).text

    for stop in range(1, len(messages) + 1):
        if messages[stop - 1]["role"] not in ("user", "tool"):
            continue
        turns = parse_messages(messages[:stop])
        text, closed = (render(turns, declared, opens_reply=opens) for opens in (True, False))
        counted.clear()
        outline = Outline(
            messages=turns,
            tools=declared,
            text=text,
            ids=tuple(map(ord, text)),
            encode=lambda part: list(map(ord, part)),
            render=render,
        )
        assert outline.transcript() == shared_length(text, closed) > 0
        # System text, a question, a call and its result at most.
        assert max(counted) <= 4


def test_table_covers_every_template_once() -> None:
    names = [row["template"] for row in ROWS]
    assert len(set(names)) == len(names) == 35
    if SHARED.is_dir():
        assert set(names) == {path.stem for path in SHARED.glob("*.jinja")}
    syntaxes = {syntax.name for syntax in plugins().tool_syntaxes()}
    assert {row["tools"] for row in ROWS} - {None} <= syntaxes
    # What one wheel carries is enough to show every kind of verdict.
    carried = [row for row in ROWS if row["trl"]]
    for name in (*CAPABILITIES, "tools"):
        values = {bool(row[name]) for row in carried}
        assert values == {True, False} or name in ("chat", "translation")


def test_wheel_carries_what_the_table_says() -> None:
    wheel = wheel_files()
    named = {row["trl"] for row in ROWS} - {None}
    assert len(named) == 16
    assert not wheel or named <= set(wheel)


def matrix() -> dict[str, dict[str, str]]:
    """The published matrix: template -> column -> cell."""
    text = (SHARED / "INDEX.md").read_text(encoding="utf-8")
    part = text[text.index("## 2.") : text.index("## 3.")]
    lines = [line.strip().strip("|").split("|") for line in part.splitlines() if "|" in line]
    table = [[cell.strip() for cell in line] for line in lines]
    head = next(line for line in table if line[0].startswith("template "))
    rows = table[table.index(head) + 2 :]
    return {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in rows}


def published(cells: dict[str, str], syntax: str | None) -> dict[str, bool]:
    """Derive verdicts from a row of the matrix.

    ``pt`` counts only with its own flag, which a plain request does not pass. One call is all that
    the syntax of whole replies can carry.
    """
    calls = cells["two calls"] == "yes" or syntax == "llama_json"
    carries = [cells["tools declared"], cells["call dict/str args"].split("/")[0], cells["result"]]
    return {
        "chat": cells["plain"] == "yes",
        "system_prompt": cells["system"] == "yes",
        "tools": carries == ["yes"] * 3 and calls,
        "reasoning_history": "kept" in re.split(r"[/;:\s]+", cells["reasoning history"]),
        "thinking_toggle": cells["thinking toggle"] not in ("none", "ERR"),
    }


def test_table_agrees_with_the_published_matrix() -> None:
    cells = matrix() if SHARED.is_dir() else {}
    for row in ROWS:
        if row["template"] not in cells or row["note"]:
            continue
        expected = published(cells[row["template"]], row["tools"])
        assert {name: bool(row[name]) for name in expected} == expected, row["template"]
    assert sum(row["translation"] for row in ROWS) == 1
