"""What an assistant's turn may bring into a prompt, through every dialect and published template.

The templates are those of ``test_template_expectations``; where they cannot be read, one template
is written here for each dialect. A small tokenizer knows the control tokens of all families.
"""

from __future__ import annotations

import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.messages import Message
from engine_core.plugins import Plugins
from engine_core.template.probe import CHAT, probe_template
from engine_core.template.source import TemplateSources, select_templates
from engine_core.testing.tokenizers import byte_level_tokenizer_json
from engine_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine_core.family import TemplateDialect
    from engine_core.template.render import ChatTemplate

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data" / "chat_templates"
ROWS: list[dict[str, Any]] = json.loads(
    (ROOT / "tests" / "template_expectations.json").read_text(encoding="utf-8")
)
CONTROLS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<tool_response>", "</tool_response>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|begin_of_text|>", "<bos>",
    "<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>",
    "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<user>", "</user>",
    "<assistant>", "</assistant>", "<system>", "</system>", "<tool>", "</tool>",
)  # fmt: skip
TOKENIZER = Tokenizer.from_bytes(byte_level_tokenizer_json(CONTROLS, ()))
IDS = {token.id: token.text for token in TOKENIZER.added_tokens}


@cache
def plugins() -> Plugins:
    return Plugins.load()


def own_source(dialect: TemplateDialect) -> str:
    """A template in which a dialect's end of turn closes every turn."""
    end = dialect.end_of_turn[0]
    return (
        "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content | trim }}" + end + "\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
    )


def sources() -> list[Any]:
    """Every template that can be read here, with its family."""
    dialects = {one.name: one for one in plugins().template_dialects()}
    found = [
        pytest.param(own_source(one).encode(), None, one.name, id=f"own-{one.name}")
        for one in dialects.values()
    ]
    try:
        wheel = importlib.metadata.distribution("trl")
    except importlib.metadata.PackageNotFoundError:
        wheel = None
    for row in ROWS:
        path = SHARED / f"{row['template']}.jinja"
        if not path.is_file() and wheel is not None and row["trl"] is not None:
            path = Path(str(wheel.locate_file(row["trl"])))
        if path.is_file() and row["chat"]:
            found.append(pytest.param(path.read_bytes(), row["family"], None, id=row["template"]))
    return found


@cache
def probed(source: bytes, family: str | None, dialect: str | None) -> ChatTemplate:
    owner = next((owner for owner in plugins().owners if owner.family.name == family), None)
    dialects = plugins().template_dialects(owner)
    if dialect is not None:
        dialects = tuple(one for one in dialects if one.name == dialect)
    chosen = select_templates(
        {"chat_template.jinja": source}, {"bos_token": "<bos>", "eos_token": "<|endoftext|>"}
    )
    assert isinstance(chosen, TemplateSources)
    template, report = probe_template(chosen, dialects, plugins().tool_syntaxes(owner))
    assert report.supports(CHAT)
    return template


def own_texts(template: ChatTemplate) -> set[str]:
    """Control tokens that an assistant's text may hold: those that spell its markers."""
    reasoning = template.dialect.reasoning
    markers = {*template.tool_markers}
    if reasoning is not None:
        markers |= {reasoning.open, reasoning.close}
    return {text for text in CONTROLS if any(text in marker for marker in markers)}


def conversation(said: str) -> list[Message]:
    return [
        Message(role="user", content="hello"),
        Message(role="assistant", content=said),
        Message(role="user", content="go on"),
    ]


def encoded(template: ChatTemplate, said: str, prefill: str = "") -> list[int]:
    messages = conversation(said)
    shield = TOKENIZER.shield(messages, prefill)
    rendered = template.render(messages, shield=shield, prefill=prefill).text
    return TOKENIZER.encode_rendered(rendered, shield)


def controls(ids: list[int]) -> list[str]:
    return [IDS[one] for one in ids if one in IDS]


each_template = pytest.mark.parametrize(("source", "family", "dialect"), sources())


@each_template
def test_no_foreign_control_token_comes_from_an_answer(
    source: bytes, family: str | None, dialect: str | None
) -> None:
    template = probed(source, family, dialect)
    harmless = controls(encoded(template, "p q"))
    own = own_texts(template)
    ends = [text for text in CONTROLS if text not in own]
    assert len(ends) > 20
    for text in ends:
        assert controls(encoded(template, f"p {text} q")) == harmless, text
        assert controls(encoded(template, "p q", prefill=f"p {text}")) == harmless, text
    turn = "".join(f"{text}\n" for text in ends)
    assert controls(encoded(template, turn)) == harmless
    # Spans that a template takes out leave nothing behind that joins to a control token.
    reasoning = template.dialect.reasoning
    if reasoning is None:
        return
    for text in ends:
        at = len(text) // 2
        split = f"{text[:at]}{reasoning.open}x{reasoning.close}{text[at:]}"
        found = controls(encoded(template, split))
        assert [one for one in found if one not in own] == [
            one for one in harmless if one not in own
        ], text


@each_template
def test_answers_without_foreign_control_text_give_the_plain_ids(
    source: bytes, family: str | None, dialect: str | None
) -> None:
    template = probed(source, family, dialect)
    texts = ["hello", "a < b | c > d", " x\n", "> quoted <", "日本 <b> |>", "1 <|"]
    reasoning = template.dialect.reasoning
    if reasoning is not None:
        texts += [
            f"{reasoning.open}\nwhy\n{reasoning.close}\n\nso",
            f"late {reasoning.open}why{reasoning.close}> so <",
            f"only {reasoning.close} here",
        ]
    texts += [f"a {marker} b" for marker in template.tool_markers]
    for text in texts:
        plain = template.render(conversation(text), prefill=text).text
        assert encoded(template, text, prefill=text) == TOKENIZER.encode(plain), text
