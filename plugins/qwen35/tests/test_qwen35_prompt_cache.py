"""Tool loops on the trained miniature: recurrent layers, a thinking template, the prompt cache."""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from test_qwen35_mini import CASES, MINI, with_call_ids

from engine_core.session import Session
from engine_core.testing.conversations import RequestCheck

if TYPE_CHECKING:
    from collections.abc import Iterator

# ``nox -s soak`` runs 50 conversations; each takes seconds.
CONVERSATIONS = int(os.environ.get("ENGINE_SOAK_CONVERSATIONS", "4"))
NAMES = sorted(name for name, case in CASES.items() if case["tools"])
WORDS = ("heavy", "931", "MMC-9164", "lakzichind", "ink: 32", "")


@pytest.fixture(scope="module")
def check() -> Iterator[RequestCheck]:
    with Session.load(MINI, compute_dtype="float32") as session:
        yield RequestCheck(session, max_tokens=8)


def turn(reply: Any, tools: list[Any], rng: random.Random, number: int) -> list[dict[str, Any]]:
    """The reply as history, with a call and its result when it has none of its own."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    function = rng.choice(tools)["function"]
    arguments = {name: rng.choice(WORDS) for name in function["parameters"].get("properties", {})}
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    result = json.dumps({rng.choice(WORDS): rng.choice(WORDS)})
    return [
        {**message, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


@pytest.mark.parametrize("number", range(CONVERSATIONS))
def test_tool_loop_equals_cold_runs_and_is_served_as_promised(
    check: RequestCheck, number: int
) -> None:
    rng = random.Random(number)
    case = CASES[rng.choice(NAMES)]
    options = {"tools": case["tools"], "thinking": number % 2 == 0}
    messages = [one for one in with_call_ids(case["messages"]) if one["role"] in ("system", "user")]
    messages = messages[: 1 + [one["role"] for one in messages].index("user")]
    served = []
    for step in range(rng.randrange(2, 5)):
        reply = check.chat(messages, **options)
        served.append(reply.usage.cached_tokens)
        messages += turn(reply, case["tools"], rng, step)
    # In a loop the history is never rendered anew, so each turn starts where the last one ended.
    assert served[1:] == sorted(set(served[1:]))
    messages += [{"role": "assistant", "content": "done"}, {"role": "user", "content": "go on"}]
    check.chat(messages, **options)


def test_long_tool_loop_feeds_only_its_new_turns(check: RequestCheck) -> None:
    case = CASES[NAMES[0]]
    session, rng = check.session, random.Random(0)
    messages = [one for one in case["messages"] if one["role"] in ("system", "user")][:2]
    fed = []
    for step in range(16):
        reply = session.generate(messages, tools=case["tools"], thinking=True, max_tokens=1)
        fed.append(reply.usage.prompt_tokens - reply.usage.cached_tokens)
        messages += turn(reply, case["tools"][:1], rng, step)
    assert max(fed[1:]) < 200
    assert reply.usage.prompt_tokens > 800
    cold = session.generate(
        messages, tools=case["tools"], thinking=True, max_tokens=4, prompt_cache=False
    )
    warm = session.generate(messages, tools=case["tools"], thinking=True, max_tokens=4)
    assert warm.token_ids == cold.token_ids
