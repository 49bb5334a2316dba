"""Where a rendered conversation can be continued, on templates that make it hard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest

from engine_core.builtin_chatml import CHATML
from engine_core.errors import TemplateError
from engine_core.message_parsing import parse_messages
from engine_core.prompt_outline import Outline
from engine_core.template.render import ChatTemplate
from engine_core.template.source import TemplateSources
from engine_core.testing.tokenizers import BUILDERS
from engine_core.text.tokenizer import Tokenizer
from engine_core.tool_parsing import parse_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

BODY = (
    "{% if tools %}{{ '<|im_start|>' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
)
TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "the tool", "parameters": {"type": "object"}},
}
TOOLS = [TOOL, *({**TOOL, "function": {**TOOL["function"], "name": name}} for name in "ab")]
SYSTEM = {"role": "system", "content": "think"}
HELLO = {"role": "user", "content": "hello world"}


def outline(
    source: str, messages: Sequence[Any], tools: Sequence[Any] = (), kind: str = "byte_level"
) -> tuple[Outline, Tokenizer]:
    tokens = ("<|im_start|>", "<|im_end|>")
    tokenizer = Tokenizer.from_bytes(BUILDERS[kind](extra_special=tokens))
    template = ChatTemplate.compile(TemplateSources(default=source), CHATML)
    turns, declared = parse_messages(messages), parse_tools(tools)

    def render(messages: Any, tools: Any, *, opens_reply: bool) -> str:
        return template.render(messages, tools, add_generation_prompt=opens_reply).text

    text = render(turns, declared, opens_reply=True)
    made = Outline(
        messages=turns,
        tools=declared,
        text=text,
        ids=tuple(tokenizer.encode(text)),
        encode=tokenizer.encode,
        render=render,
    )
    return made, tokenizer


def head(made: Outline, tokenizer: Tokenizer, length: int) -> str:
    return tokenizer.decode(made.ids[:length], keep=range(tokenizer.vocab_size))


@pytest.mark.parametrize("kind", BUILDERS)
def test_transcript_ends_before_what_opens_the_reply(kind: str) -> None:
    made, tokenizer = outline(BODY + TAIL, [SYSTEM, HELLO], kind=kind)
    length = made.transcript()
    opened = tokenizer.encode("<|im_start|>assistant\n")
    assert 0 < len(made.ids) - length <= len(opened) + 1
    assert made.ids[length] == tokenizer.token_id("<|im_start|>")


@pytest.mark.parametrize("kind", BUILDERS)
def test_opening_ends_before_the_first_user_text(kind: str) -> None:
    for text in ("hello", "0 and x", "x", "0"):
        made, tokenizer = outline(
            BODY + TAIL, [SYSTEM, {"role": "user", "content": text}], [TOOL], kind=kind
        )
        length = made.opening()
        read = head(made, tokenizer, length)
        assert "look" in read
        assert "think" in read
        assert not read.endswith(text[0])
        other, _ = outline(BODY + TAIL, [SYSTEM, HELLO], [TOOL], kind=kind)
        assert other.opening() == length
        assert other.ids[:length] == made.ids[:length]


def test_opening_without_system_and_tools_is_none() -> None:
    made, _ = outline(BODY + TAIL, [HELLO])
    assert made.opening() == 0


def test_opening_of_tools_alone_is_found() -> None:
    made, tokenizer = outline(BODY + TAIL, [HELLO], [TOOL])
    assert "look" in head(made, tokenizer, made.opening())


TRANSCRIPTS = {
    "template closes the text": (BODY + TAIL + "{% if not add_generation_prompt %}END{% endif %}"),
    "template opens in any case": BODY + "<|im_start|>assistant\n",
    "template opens with a text that joins the last token": BODY.replace("<|im_end|>\\n", " hel")
    + "{% if add_generation_prompt %}lo{% endif %}",
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcript_of_odd_templates_is_a_shared_prefix(name: str) -> None:
    made, tokenizer = outline(TRANSCRIPTS[name], [SYSTEM, HELLO])
    plain = tokenizer.encode(made.render(made.messages, made.tools, opens_reply=False))
    length = made.transcript()
    assert 0 < length <= len(made.ids)
    assert tuple(plain[:length]) == made.ids[:length]


def test_template_that_refuses_a_transcript_or_a_probe_gives_none() -> None:
    refusing = "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
    made, _ = outline(refusing + BODY + TAIL, [SYSTEM, HELLO])
    with pytest.raises(TemplateError):
        made.render(made.messages, made.tools, opens_reply=False)
    assert made.transcript() == 0
    picky = "{% if messages[-1].content | length < 3 %}{{ raise_exception('short') }}{% endif %}"
    made, _ = outline(picky + BODY + TAIL, [SYSTEM, HELLO])
    assert made.opening() == 0
    assert made.transcript() > 0


def call(number: int) -> dict[str, Any]:
    function = {"name": "look", "arguments": {}}
    return {"id": f"c{number}", "type": "function", "function": function}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": f"world {number}"}


LONG: list[dict[str, Any]] = [
    SYSTEM,
    HELLO,
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "the tool"},
    {"role": "assistant", "content": "", "tool_calls": [call(1)]},
    result(1),
    {"role": "assistant", "content": "", "tool_calls": [call(2), call(3)]},
    result(2),
    result(3),
]
# What opens the reply may depend on the last turn, on the number of turns or of tools.
OPENINGS = {
    "plain": TAIL,
    "by role": "{% if add_generation_prompt %}<|im_start|>{{ messages[-1].role }}{% endif %}",
    "by length": "{% if add_generation_prompt %}{{ 'hello ' * (messages | length) }}{% endif %}",
    "by tools": TAIL + "{% if add_generation_prompt %}{{ 'hello ' * (tools | length) }}{% endif %}",
    "closed": TAIL + "{% if not add_generation_prompt %}<|im_start|>END{% endif %}",
}


@pytest.mark.parametrize("count", [2, 4, 6, 9])
@pytest.mark.parametrize("opening", OPENINGS)
def test_transcript_of_a_long_conversation_is_that_of_rendering_all_of_it(
    opening: str, count: int
) -> None:
    made, tokenizer = outline(BODY + OPENINGS[opening], LONG[:count], TOOLS)
    plain = tokenizer.encode(made.render(made.messages, made.tools, opens_reply=False))
    shared = 0
    while shared < min(len(plain), len(made.ids)) and plain[shared] == made.ids[shared]:
        shared += 1
    assert made.transcript() == shared


@pytest.mark.parametrize(
    ("count", "roles"),
    [(4, ["system", "user"]), (9, ["system", "user", "assistant", "tool", "tool"])],
)
def test_transcript_of_a_long_conversation_renders_its_last_turns_only(
    count: int, roles: list[str]
) -> None:
    made, _ = outline(BODY + TAIL, LONG[:count], TOOLS)
    rendered: list[list[str]] = []

    def render(messages: Sequence[Any], tools: Sequence[Any], *, opens_reply: bool) -> str:
        rendered.append([message.role for message in messages])
        assert tools == made.tools[:1]
        return made.render(messages, tools, opens_reply=opens_reply)

    counted = attrs.evolve(made, render=render)
    assert counted.transcript() == made.transcript() > 0
    assert rendered == [roles] * 2
