"""The real SmolLM2-135M-Instruct, 4-bit, from the directory to a streamed reply.

The expected ids were computed by transformers in float32 on the same weights dequantized
(``plugins/llama/tests/goldens/smollm2_chat.json`` has its provenance).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine_core import Client, EngineError, TokenKind
from engine_core.events import Completed, Segment

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = json.loads(
    (ROOT / "plugins/llama/tests/goldens/smollm2_chat.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def client(demo_model: Path) -> Iterator[Client]:
    with Client.load(demo_model) as loaded:
        yield loaded


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: case["name"])
def test_greedy_ids_equal_transformers(client: Client, case: dict[str, Any]) -> None:
    reply = client.generate(case["messages"], max_tokens=len(case["greedy_ids"]))
    assert list(reply.token_ids) == case["greedy_ids"]
    assert reply.usage.prompt_tokens == len(case["prompt_ids"])


@pytest.mark.parametrize("lookahead", [True, False])
def test_streamed_text_equals_final_text(client: Client, lookahead: bool) -> None:
    events = list(
        client.stream(
            [{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=48,
            lookahead=lookahead,
        )
    )
    assert isinstance(events[-1], Completed)
    streamed = "".join(
        event.text
        for event in events
        if isinstance(event, Segment) and event.kind is TokenKind.TEXT
    )
    assert streamed == events[-1].reply.text
    assert "Paris" in streamed
    assert events[-1].reply.finish_reason.value == "stop"


def test_async_stream_equals_generate(client: Client) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]

    async def collect() -> str:
        pieces = [
            event.text
            async for event in client.astream(messages, max_tokens=24)
            if isinstance(event, Segment)
        ]
        return "".join(pieces)

    assert asyncio.run(collect()) == client.generate(messages, max_tokens=24).text


def test_cancel_from_another_thread_leaves_client_usable(client: Client) -> None:
    messages = [{"role": "user", "content": "Write a long story about a river."}]
    stream = client.stream(messages, max_tokens=400)
    next(stream)
    timer = threading.Timer(0.3, stream.close)
    timer.start()
    for _ in stream:
        pass
    timer.join()
    again = client.generate([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in again.text


def test_error_is_typed_and_client_stays_usable(client: Client) -> None:
    with pytest.raises(EngineError) as caught:
        client.generate([{"role": "user", "content": "Hi"}], max_tokens=10**9)
    assert caught.value.code
    assert client.generate([{"role": "user", "content": "Hi"}], max_tokens=4).text


def test_command_line_streams_an_answer(demo_model: Path) -> None:
    result = subprocess.run(
        [
            sys.executable, "-m", "engine_core.cli", "generate", "--model", str(demo_model),
            "--prompt", "What is the capital of France?", "--max-tokens", "32",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "tokens/s" in result.stderr


def test_command_line_reports_a_missing_checkpoint(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "engine_core.cli", "inspect", str(tmp_path / "nothing"), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["type"] == "error"
    assert record["code"].startswith("checkpoint.")
