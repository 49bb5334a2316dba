"""FunctionGemma's calls: the grammar, the corpus through a client, the dialect."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.family import Typed
from engine_core.limits import LIMITS
from engine_core.messages import Message, ToolCall, TranslationPart
from engine_core.testing.tool_cases import cases
from engine_core.testing.tool_corpus import Case, Corpus, Literal, Markup
from engine_gemma3.template import GEMMA3_DIALECT
from engine_gemma3.tools import CLOSE, DELIMITER, FUNCTION_GEMMA, OPEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def spell(value: Any) -> str:
    if isinstance(value, Literal):
        return value.text
    if isinstance(value, str):
        return f"{DELIMITER}{value}{DELIMITER}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spell(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spell, value)) + "]"
    return json.dumps(value)


def write(name: str, pairs: Iterable[tuple[str, Any]]) -> str:
    body = ",".join(f"{key}:{spell(value)}" for key, value in pairs)
    return f"{OPEN}call:{name}{{{body}}}{CLOSE}"


MARKUP = Markup(
    syntax="function_gemma",
    write=write,
    render=f"{OPEN}call:{{{{ call.function.name }}}}{{{{ '{{' }}}}"
    "{% for key, value in call.function.arguments.items() %}{% if not loop.first %},{% endif %}"
    f"{{{{ key }}}}:{DELIMITER}{{{{ value }}}}{DELIMITER}{{% endfor %}}{{{{ '}}' }}}}{CLOSE}",
    markers=(OPEN, CLOSE),
    tokens=(DELIMITER,),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    with Corpus.load(tmp_path_factory.mktemp("corpus"), MARKUP) as loaded:
        yield loaded


@pytest.mark.parametrize("case", cases(MARKUP), ids=lambda case: case.name)
def test_reply_gives_exactly_the_certain_calls_and_loses_no_text(
    corpus: Corpus, case: Case
) -> None:
    corpus.check(case)


def test_assistant_text_brings_in_its_own_markers_and_no_others(corpus: Corpus) -> None:
    corpus.check_assistant_text()


def test_reply_sent_back_as_history_is_found_in_the_cache(corpus: Corpus) -> None:
    corpus.check_continuation()


def test_tokens_that_a_tokenizer_hides_stay_part_of_a_call(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    text = MARKUP.call("get_weather", city="Oslo", note="x", days=2)
    calls = [("get_weather", {"city": "Oslo", "note": "x", "days": 2})]
    path = tmp_path_factory.mktemp("special")
    with Corpus.load(path, MARKUP, are_special=True) as corpus:
        corpus.check(Case(name="hidden", reply=f"a{text}b", calls=calls, text="ab"))
        corpus.check(Case(name="refused", reply=f"a{text[:-1]}b"))
        # Without tools the markup means nothing, and special tokens are hidden as always.
        corpus.check(Case(name="off", reply=f"{OPEN}x{CLOSE}", text="x", options={"tools": []}))


def read(text: str) -> list[tuple[str, Any]]:
    return [(one.name, *one.readings) for one in FUNCTION_GEMMA.parse(text, ())]


def test_call_is_read_with_what_the_markup_says() -> None:
    text = (
        f"ok {OPEN}call:f{{a:<escape>1<escape>, b : 2 ,c:null,d:[<escape>x<escape>,2,true],"
        f"<escape>e<escape>:{{k:{{}},l:[]}}}}{CLOSE}!"
    )
    (proposal,) = FUNCTION_GEMMA.parse(text, ())
    assert text[slice(*proposal.span)] == text[3:-1]
    assert proposal.readings == (
        {
            "a": Typed("1"),
            "b": "2",
            "c": "null",
            "d": Typed(["x", 2, True]),
            "e": Typed({"k": {}, "l": []}),
        },
    )


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "f{}",
        "call:{}",
        "call:f",
        "call:f{",
        "call:f g{}",
        "call:f{a}",
        "call:f{a:}",
        "call:f{:1}",
        "call:f{a:1,}",
        "call:f{,a:1}",
        "call:f{a:1 b:2}",
        "call:f{a:1,a:1}",
        "call:f{a:1,<escape>a<escape>:1}",
        "call:f{a:{b:1,b:1}}",
        "call:f{a:[1,]}",
        "call:f{a:[x]}",
        'call:f{a:["x"]}',
        "call:f{a:{b:x}}",
        "call:f{a:[1}",
        "call:f{a:<escape>x}",
        "call:f{a:<escape>x<escape>y}",
        "call:f{a:<escape>x<escape><escape>y<escape>}",
        "call:f{<escape><escape>:1}",
        "call:f{a<b:1}",
        "call:f{a:[NaN]}",
        "call:f{a:1}}",
        "call:f{a:1} now",
        "call:f{a:" + "[" * 80 + "]" * 80 + "}",
        "call:f{" + "k" * 129 + ":1}",
        "call:f{" + ",".join(f"k{i}:1" for i in range(257)) + "}",
    ],
    ids=lambda text: text[:40],
)
def test_broken_call_is_none(inside: str) -> None:
    assert read(f"{OPEN}{inside}{CLOSE}") == []


def test_call_quoted_in_an_unfinished_text_is_no_call() -> None:
    inner = f"{OPEN}call:g{{}}{CLOSE}"
    assert read(f"{OPEN}call:f{{a:<escape>{inner}") == []
    assert read(f"{OPEN}call:f{{a:<escape>{inner}<escape>") == []
    assert read(f"{OPEN}call:f{{a:<escape>{inner}<escape>}}{CLOSE}") == [("f", {"a": Typed(inner)})]
    assert read(f"{OPEN}call:f{{a:1 {inner}") == [("g", {})]


def test_calls_and_openers_are_bounded() -> None:
    call = f"{OPEN}call:f{{}}{CLOSE}"
    assert len(read(call * 100)) == LIMITS.reply_calls
    assert read(OPEN * 256 + call) == []
    assert read(OPEN * 255 + call) == [("f", {})]


def test_hostile_text_ends_without_a_call() -> None:
    for text in (
        f"{OPEN}call:f{{a:<escape>" * 20_000,
        f"{OPEN}call:f{{a:" + "[" * 200_000,
        f"{OPEN}call:f{{" + "a:1," * 100_000,
        f"{OPEN}" + " " * 300_000,
    ):
        assert read(text) == []


PIECES = st.sampled_from([*"{}[]:,a1 \n", OPEN, CLOSE, DELIMITER, "call:f{", "null"])


@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_text_is_read_without_failing(text: str) -> None:
    for proposal in FUNCTION_GEMMA.parse(text, ()):
        begin, end = proposal.span
        assert text[begin:end].startswith(OPEN)
        assert text[begin:end].endswith(CLOSE)


def test_dialect_names_results_by_their_call() -> None:
    call = ToolCall(id="c1", name="f", arguments={})
    messages = [
        Message(role="user", content="x"),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content="r", tool_call_id="c1"),
    ]
    prepared = GEMMA3_DIALECT.prepare(messages, (), {})
    assert prepared.messages[-1] == {
        "role": "tool",
        "content": "r",
        "tool_call_id": "c1",
        "name": "f",
    }
    assert prepared.messages[1]["content"] == ""
    assert prepared.tools is None


def test_dialect_keeps_a_translation_as_one_mapping() -> None:
    part = TranslationPart(source_lang="en", target_lang="de", text="hi")
    prepared = GEMMA3_DIALECT.prepare([Message(role="user", content=[part])], (), {})
    assert prepared.messages[0]["content"] == [
        {"type": "text", "source_lang_code": "en", "target_lang_code": "de", "text": "hi"}
    ]
    assert GEMMA3_DIALECT.reasoning is None
