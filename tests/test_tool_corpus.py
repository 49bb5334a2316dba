"""The adversarial corpus in the syntaxes that write values without types."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from engine_core.plugins import Plugins
from engine_core.testing.tool_cases import cases
from engine_core.testing.tool_corpus import TOOLS, Case, Corpus, Literal, Markup
from engine_core.tool_parsing import parse_tools
from engine_core.tools.accept import Toolset, accept_calls

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from engine_core.family import ToolSyntax


def spell(value: Any) -> str:
    if isinstance(value, Literal):
        return value.text
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_qwen(name: str, pairs: Iterable[tuple[str, Any]]) -> str:
    inner = "".join(f"<parameter={key}>\n{spell(value)}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def write_laguna(name: str, pairs: Iterable[tuple[str, Any]]) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{spell(value)}</arg_value>\n" for key, value in pairs
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


MARKERS = ("<tool_call>", "</tool_call>")
MARKUPS = (
    Markup(
        syntax="qwen_xml",
        write=write_qwen,
        render="<tool_call>\n<function={{ call.function.name }}>\n"
        "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
        "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        markers=MARKERS,
        literals={"True": True, "False": False},
    ),
    Markup(
        syntax="laguna",
        write=write_laguna,
        render="<tool_call>{{ call.function.name }}\n"
        "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
        "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>",
        markers=MARKERS,
    ),
)


@pytest.fixture(scope="module", params=MARKUPS, ids=lambda markup: markup.syntax)
def corpus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Corpus]:
    with Corpus.load(tmp_path_factory.mktemp("corpus"), request.param) as loaded:
        yield loaded


@pytest.mark.parametrize("name", [case.name for case in cases(MARKUPS[0])])
def test_reply_gives_exactly_the_certain_calls_and_loses_no_text(corpus: Corpus, name: str) -> None:
    case: Case = next(case for case in cases(corpus.markup) if case.name == name)
    corpus.check(case)


def test_assistant_text_brings_in_its_own_markers_and_no_others(corpus: Corpus) -> None:
    corpus.check_assistant_text()


def test_reply_sent_back_as_history_is_found_in_the_cache(corpus: Corpus) -> None:
    corpus.check_continuation()


def test_two_functions_in_one_span_are_not_taken_for_one(corpus: Corpus) -> None:
    """A peer returns the last one alone."""
    inner = corpus.markup.call("ping").removeprefix(MARKERS[0]).removesuffix(MARKERS[1])
    text = f"{MARKERS[0]}{inner}{inner}{MARKERS[1]}"
    corpus.check(Case(name="two in one", reply=text))


# Any text at all, in every installed syntax.

DECLARED = parse_tools(TOOLS)
TOOLSET = Toolset.compile(DECLARED)
SCHEMAS = {tool.name: Draft202012Validator(dict(tool.parameters)) for tool in DECLARED}
SYNTAXES = Plugins.load().tool_syntaxes()
FRAGMENTS = (
    *"{}[]<>:,\"'/= \n",
    "get_weather", "run_code", "set_flag", "ping", "city", "days", "code", "Oslo", "3", "null",
    "True", "1e999", '"name":', '"arguments":', '"parameters":', "call:", "<function=",
    "</function>", "<parameter=", "</parameter>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<escape>", '<|"|>', "<think>", "é", "🦙", "\x00",
)  # fmt: skip


def is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(character in rest for character in part)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
@given(data=st.data())
def test_any_text_gives_valid_calls_or_stays(syntax: ToolSyntax, data: st.DataObject) -> None:
    written = [
        markup.call(name, **arguments)
        for markup in MARKUPS
        if markup.syntax == syntax.name
        for name, arguments in (("ping", {}), ("get_weather", {"city": "a", "days": 2}))
    ]
    markers = [marker for pair in syntax.markers for marker in pair]
    piece = st.sampled_from([*FRAGMENTS, *markers * 3, *written * 3])
    text = "".join(data.draw(st.lists(piece, max_size=25)))
    found = accept_calls(text, syntax, TOOLSET)
    removed = len(text) - len(found.text)
    spans = [stop - start for start, stop in (one.span for one in syntax.parse(text, DECLARED))]
    # What is missing from the text is exactly the accepted spans.
    sizes = {sum(chosen) for chosen in combinations(spans, len(found.calls))}
    assert removed in sizes
    assert is_subsequence(found.text, text)
    assert (removed > 0) == bool(found.calls)
    for call in found.calls:
        # The library itself, on the declared schema, not on what this engine made of it.
        SCHEMAS[call.name].validate(json.loads(json.dumps(call.arguments)))


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
def test_hostile_texts_end_and_stay(syntax: ToolSyntax) -> None:
    """Quadratic work on any of these would take minutes."""
    openers = [pair[0] for pair in syntax.markers] or [""]
    for opener in openers:
        for junk in ("{", "[", '"', "\\", " ", "<", "<function=", "<arg_key>", "call:f{", "é"):
            for text in (opener + junk * 100_000, (opener + junk) * 20_000):
                assert accept_calls(text, syntax, TOOLSET).text == text
