"""The adversarial corpus in the built-in syntax, and what surrounds a call."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core import CapabilityUnavailable, FinishReason, InvalidRequest, Segment, TokenKind
from engine_core.testing.tool_cases import cases
from engine_core.testing.tool_corpus import TOOLS, Corpus, Literal, Markup, joined

if TYPE_CHECKING:
    from collections.abc import Iterator


def write(name, pairs):
    def spell(value):
        return value.text if isinstance(value, Literal) else json.dumps(value, ensure_ascii=False)

    body = ", ".join(f"{json.dumps(key)}: {spell(value)}" for key, value in pairs)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {{{body}}}}}\n</tool_call>'


HERMES = Markup(
    syntax="hermes",
    write=write,
    render='<tool_call>\n{"name": {{ call.function.name | tojson }}, "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
    is_typed=True,
)
CASES = cases(HERMES)
GO = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Iterator[Corpus]:
    with Corpus.load(tmp_path_factory.mktemp("corpus"), HERMES) as loaded:
        yield loaded


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reply_gives_exactly_the_certain_calls_and_loses_no_text(corpus, case):
    corpus.check(case)
