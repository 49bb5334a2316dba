"""A live tool loop on the trained miniature: call, result, answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_qwen35_mini import CASES, MINI, with_call_ids

from engine_core import Client, Completed, FinishReason, Segment, TokenKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_core import GenerateReply

# What the user of each recorded conversation asks for, read by a person.
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tool-two-calls/3001": [
        ("clean_badge", {"stoodoogek": "00959"}),
        ("clean_badge", {"stoodoogek": "Yusuf"}),
    ],
    "tool-bool-int/3006": [
        ("create-dabum", {"level": ["lakzichind"], "tags": -1, "mode_ad": False})
    ],
    "tool-newlines/3056": [
        (
            "write_file",
            {
                "path": "/tmp/whenthing_heclamea.log",  # noqa: S108 - a text of the recording
                "content": "heavy:\n  stop: 32\n  ink: heavy",
            },
        )
    ],
    "tool-quotes-thinking/3020": [("set_label", {"key": "dek", "val": '{"thaistainak": 75}'})],
}
RESULTS = ({"size": "heavy", "status": 931}, {"total": "MMC-9164"})


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client.load(MINI, compute_dtype="float32") as loaded:
        yield loaded


def ask(client: Client, messages: list[Any], *, streamed: bool, **options: Any) -> GenerateReply:
    """Run one turn; a stream must say the same as its reply."""
    if not streamed:
        return client.generate(messages, max_tokens=200, **options)
    events = list(client.stream(messages, max_tokens=200, **options))
    segments = [event for event in events if isinstance(event, Segment)]
    assert isinstance(events[-1], Completed)
    reply = events[-1].reply
    for kind, text in ((TokenKind.TEXT, reply.text), (TokenKind.REASONING, reply.reasoning or "")):
        assert "".join(one.text for one in segments if one.kind is kind) == text
    assert any(one.kind is TokenKind.TOOL_CALL for one in segments) == bool(reply.tool_calls)
    return reply


def test_cases_are_all_tool_cases_of_the_recording() -> None:
    assert set(CALLS) == {name for name in CASES if name.startswith("tool")}
    assert Path(MINI).is_dir()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("name", CALLS)
def test_call_result_answer(client: Client, name: str, thinking: bool, streamed: bool) -> None:
    case = CASES[name]
    options: dict[str, Any] = {
        "tools": case["tools"],
        "thinking": thinking,
        "streamed": streamed,
    }
    history: list[Any] = with_call_ids(case["messages"])
    reply = ask(client, history, **options)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == CALLS[name]
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert reply.text.strip() == ""
    assert bool(reply.reasoning) is thinking
    history.append(
        {
            "role": "assistant",
            "content": reply.text,
            "reasoning_content": reply.reasoning,
            "tool_calls": reply.tool_calls,
        }
    )
    results = list(zip(reply.tool_calls, RESULTS, strict=False))
    # In the other order than the calls: they are matched by id.
    for call, result in reversed(results):
        content = json.dumps(result)
        history.append({"role": "tool", "tool_call_id": call.id, "content": content})
    answer = ask(client, history, **options)
    assert answer.tool_calls == ()
    assert answer.finish_reason is FinishReason.STOP
    said = [f"The {key} is {value}." for _, result in results for key, value in result.items()]
    places = [answer.text.find(sentence) for sentence in said]
    assert -1 not in places
    assert places == sorted(places)
    assert bool(answer.reasoning) is thinking


def test_reply_without_advertised_tools_stays_text(client: Client) -> None:
    case = CASES["tool-newlines/3056"]
    reply = client.complete(case["prompt_ids"], max_tokens=120)
    assert reply.tool_calls == ()
    assert reply.text == case["text"].removesuffix("<|im_end|>")


def test_reasoning_budget_closes_the_span_and_the_call_still_comes(client: Client) -> None:
    case = CASES["tool-quotes-thinking/3020"]
    reply = ask(
        client,
        with_call_ids(case["messages"]),
        streamed=True,
        tools=case["tools"],
        thinking=True,
        reasoning_budget=4,
    )
    full = case["text"].partition("</think>")[0]
    assert reply.reasoning
    assert full.startswith(reply.reasoning)
    assert len(reply.reasoning) < len(full)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == CALLS[
        "tool-quotes-thinking/3020"
    ]
