"""Tool loops on the trained miniature: recurrent layers, a thinking template, the prompt cache."""

from __future__ import annotations

import json
import os
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from test_qwen35_mini import CASES, MINI, with_call_ids

from engine_core.session import Session
from engine_core.testing.conversations import RequestCheck

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


def with_longer_context(folder: Path) -> Path:
    """The miniature with a context that 200 messages fit; nothing else depends on its size."""
    copied = shutil.copytree(MINI, folder / "model", ignore=shutil.ignore_patterns("parity"))
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["max_position_embeddings"] = 32_768
    (copied / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copied


def test_tool_loop_of_200_messages_is_served_more_on_every_turn(tmp_path: Path) -> None:
    case = CASES[NAMES[0]]
    options = {"tools": case["tools"], "thinking": True}
    messages = [one for one in case["messages"] if one["role"] in ("system", "user")][:2]
    rng = random.Random(0)
    with Session.load(with_longer_context(tmp_path), compute_dtype="float32") as session:
        check = RequestCheck(session, max_tokens=1, cold_every=100)
        served, fed = [], []
        # The last of these requests is compared with a cold run.
        while len(messages) <= 200:
            reply = check.chat(messages, **options)
            usage = reply.usage
            served.append(usage.cached_tokens)
            fed.append(usage.prompt_tokens - usage.cached_tokens)
            messages += turn(reply, case["tools"][:1], rng, len(messages))
    assert check.requests == 100
    assert served == sorted(set(served))
    assert usage.prompt_tokens > 4096
    # A turn feeds itself and what opens the reply, however long the conversation is.
    assert max(fed[1:]) < 120
