"""What operations of a template cost: a unit is 32 bytes, and one wide character makes all wide."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.template.budget import Budget, text_bytes
from engine_core.template.environment import BoundedEnvironment, CompiledTemplate

CLOCK = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
ENOUGH = 1_000_000
TEXT = st.text("ab é日\U0001f600", max_size=200)


def size(*texts):
    length = sum(len(text) for text in texts)
    return length * (4 if any(character > "\x7f" for text in texts for character in text) else 1)


@settings(deadline=None, max_examples=200)
@given(TEXT, TEXT, st.integers(0, 20))
def test_reading_texts_costs_their_bytes(text, other, times):
    assert text_bytes(text, other) == size(text, other)
    budget = Budget(ENOUGH)
    budget.spend_text(text, other, times=times)
    assert ENOUGH - budget.remaining == 1 + size(text, other) * times // 32
    budget = Budget(ENOUGH)
    budget.spend_text(text)
    assert ENOUGH - budget.remaining == 1 + size(text) // 32


@settings(deadline=None, max_examples=200)
@given(TEXT, TEXT)
def test_operators_cost_the_bytes_of_their_texts(left, right):
    def cost(run):
        budget = Budget(ENOUGH)
        run(BoundedEnvironment(budget, CLOCK))
        return ENOUGH - budget.remaining

    shorter = min(len(left), len(right))
    assert cost(lambda ops: ops.text(left)) == 1 + size(left) // 32
    assert cost(lambda ops: ops.binary("+", left, right)) == 1 + size(left, right) // 32
    assert cost(lambda ops: ops.compare(left, "eq", right)) == shorter // 32
    assert cost(lambda ops: ops.compare_chain(left, "eq", left, "eq", left)) == len(left) // 32 * 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1 < 2 < 3", "True"),
        ("1 < 3 < 2", "False"),
        ("2 < 1 < 3", "False"),
        ("1 < 2 in [2] != 3", "True"),
        (" < ".join(map(str, range(3000))), "True"),
    ],
    ids=["rising", "falling at the end", "falling at once", "mixed", "long"],
)
def test_comparison_chain_holds_where_every_step_does(source, expected):
    template = CompiledTemplate.compile("{{ " + source + " }}")
    assert template.render({}, units=ENOUGH, clock=CLOCK) == expected
