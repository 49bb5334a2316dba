"""The adversarial corpus in the syntaxes that write values without types."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.testing.tool_cases import cases
from engine_core.testing.tool_corpus import Case, Corpus, Literal, Markup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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
