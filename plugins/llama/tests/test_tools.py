"""Calls as whole replies: the grammar, and the corpus through a client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.family import Typed
from engine_core.testing.tool_cases import cases
from engine_core.testing.tool_corpus import Case, Corpus, Literal, Markup
from engine_llama.tools import LLAMA_JSON

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def write(name: str, pairs: Iterable[tuple[str, Any]]) -> str:
    def spell(value: Any) -> str:
        return value.text if isinstance(value, Literal) else json.dumps(value, ensure_ascii=False)

    body = ", ".join(f"{json.dumps(key)}: {spell(value)}" for key, value in pairs)
    return f'{{"name": {json.dumps(name)}, "parameters": {{{body}}}}}'


MARKUP = Markup(
    syntax="llama_json",
    write=write,
    render='{"name": {{ call.function.name | tojson }}, "parameters": '
    "{{ call.function.arguments | tojson }}}",
    is_typed=True,
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


def test_call_is_read_with_its_types() -> None:
    text = ' {"name": "f", "parameters": {"a": "1", "b": 1, "c": null, "d": [true]}}\n'
    (proposal,) = LLAMA_JSON.parse(text, ())
    assert (proposal.name, proposal.span) == ("f", (0, len(text)))
    assert proposal.readings == (
        {"a": Typed("1"), "b": Typed(1), "c": Typed(None), "d": Typed([True])},
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "{",
        "}{",
        '{"name": "f"}',
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "parameters": {}, "type": "function"}',
        '{"name": "f", "parameters": []}',
        '{"name": "f", "parameters": null}',
        '{"name": "f", "parameters": "{}"}',
        '{"name": 3, "parameters": {}}',
        '{"name": "", "parameters": {}}',
        '{"name": "f g", "parameters": {}}',
        '{"name": "f", "name": "g", "parameters": {}}',
        '{"name": "f", "parameters": {"a": 1, "a": 2}}',
        '{"name": "f", "parameters": {"a": NaN}}',
        '{"name": "f", "parameters": {"a": "\\ud800"}}',
        '{"name": "f", "parameters": {"a": "\ud800"}}',
        "{'name': 'f', 'parameters': {}}",
        '{"name": "f", "parameters": {},}',
        '{"name": "f", "parameters": {}} {}',
        '<|python_tag|>{"name": "f", "parameters": {}}',
        '{"name": "f", "parameters": ' + '{"a":' * 70 + "1" + "}" * 71,
        "{" * 100_000 + "}" * 100_000,
    ],
    ids=lambda text: text[:40].encode("ascii", "backslashreplace").decode(),
)
def test_other_text_is_no_call(text: str) -> None:
    assert LLAMA_JSON.parse(text, ()) == ()
