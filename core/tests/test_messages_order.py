from __future__ import annotations

import itertools

import pytest

from engine_core.errors import InvalidRequest
from engine_core.message_parsing import parse_messages

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}


def calls(*ids):
    functions = [
        {"id": one, "type": "function", "function": {"name": f"f_{one}", "arguments": {}}}
        for one in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": functions}


def result(one, **more):
    return {"role": "tool", "tool_call_id": one, "content": f"result {one}", **more}


@pytest.mark.parametrize("arrived", list(itertools.permutations("abc")))
def test_results_in_any_order_come_out_in_call_order(arrived):
    turns = parse_messages([USER, calls("a", "b", "c"), *map(result, arrived), ASSISTANT])
    assert [turn.tool_call_id for turn in turns] == [None, None, "a", "b", "c", None]
    assert [turn.text for turn in turns[2:5]] == ["result a", "result b", "result c"]
    assert [turn.name for turn in turns[2:5]] == ["f_a", "f_b", "f_c"]


def test_results_stay_in_their_own_round():
    turns = parse_messages(
        [USER, calls("a", "b"), result("b"), result("a"), calls("d", "c"), result("c"), result("d")]
    )
    assert [turn.tool_call_id for turn in turns if turn.role == "tool"] == ["a", "b", "d", "c"]


@pytest.mark.parametrize(
    ("turns", "place"),
    [
        ([USER, SYSTEM], "messages[1]"),
        ([SYSTEM, USER, ASSISTANT, SYSTEM], "messages[3]"),
        ([USER, calls("a")], "messages[1].tool_calls[0]"),
        ([USER, calls("a"), USER], "messages[1].tool_calls[0]"),
        ([USER, calls("a"), ASSISTANT], "messages[1].tool_calls[0]"),
        ([USER, calls("a", "b"), result("a")], "messages[1].tool_calls[1]"),
        ([USER, calls("a", "b"), result("a"), USER, result("b")], "messages[1].tool_calls[1]"),
        ([USER, result("a")], "messages[1].tool_call_id"),
        ([result("a"), USER], "messages[0].tool_call_id"),
        ([USER, calls("a"), result("b")], "messages[2].tool_call_id"),
        ([USER, calls("a"), result("a"), result("a")], "messages[3].tool_call_id"),
        ([USER, calls("a"), result("a"), ASSISTANT, result("a")], "messages[4].tool_call_id"),
        ([USER, calls("a", "a"), result("a")], "messages[1].tool_calls[1].id"),
        ([USER, calls("a"), result("a"), calls("a"), result("a")], "messages[3].tool_calls[0].id"),
        ([USER, calls("a"), result("a", name="other")], "messages[2].name"),
    ],
)
def test_turn_out_of_order_is_refused_and_named(turns, place):
    with pytest.raises(InvalidRequest) as caught:
        parse_messages(turns)
    assert caught.value.code == "request.messages.order"
    assert str(caught.value).startswith(f"{place}:")


def test_several_system_turns_may_open_a_conversation():
    turns = parse_messages([SYSTEM, SYSTEM, USER, calls("a"), result("a", name="f_a"), USER])
    assert [turn.role for turn in turns] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]
