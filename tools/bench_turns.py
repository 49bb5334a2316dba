"""Time the first token of follow-up turns in a long tool loop against its new tokens alone.

One conversation with a thinking template grows by a call and its result a turn. Every turn is
answered through the prompt cache, rendering and looking up included, and its new tokens are also
fed by themselves to caches that hold all before them. Several sessions do so with every turn, the
two in turn first, and the ratio of their medians is taken: 1 means that a follow-up turn costs its
new tokens only.

    python tools/bench_turns.py [--model DIR] [--messages 200] [--conversations 1] [--sessions 3]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from engine_core import Session
from engine_core.cache.layers import fork_caches, reset_caches
from engine_core.generation import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MINI = Path(__file__).parents[1] / "plugins/qwen35/tests/fixtures/qwen35-mini"
CONTEXT = 65_536
BUCKET = 50
BOUND = 1.15
WORDS = ("heavy", "931", "MMC-9164", "lakzichind", "ink: 32", "nothing", "the ledger of today")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look a {thing} up.",
            "parameters": {"type": "object", "properties": {thing: {"type": "string"}}},
        },
    }
    for name, thing in (("find_page", "title"), ("read_log", "day"), ("price_of", "item"))
]
OPTIONS: dict[str, Any] = {"tools": TOOLS, "thinking": True}
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@attrs.frozen
class Turn:
    """What one turn took.

    Attributes:
        messages: Messages of its conversation.
        tokens: Tokens of its prompt.
        fed: Tokens that were not served.
        prompting: Seconds until the prompt was built and looked up.
        first: Seconds until the first token.
        alone: Seconds to the first token of feeding the new tokens only.
    """

    messages: int
    tokens: int
    fed: int
    prompting: float
    first: float
    alone: float


def with_longer_context(model: Path, folder: Path) -> Path:
    """Copy a checkpoint and raise its context; no weight depends on it.

    Args:
        model: Checkpoint directory.
        folder: Where the copy goes.

    Returns:
        The copy.
    """
    copied = shutil.copytree(model, folder / "model")
    file = copied / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.get("text_config", config)["max_position_embeddings"] = CONTEXT
    file.write_text(json.dumps(config), encoding="utf-8")
    return copied


def next_messages(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """Make a call and its result.

    Args:
        rng: Draws both.
        number: Tells calls apart.

    Returns:
        An assistant and a tool message.
    """
    function = rng.choice(TOOLS)["function"]
    arguments = {
        name: " ".join(rng.choices(WORDS, k=3)) for name in function["parameters"]["properties"]
    }
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    return [
        {
            "role": "assistant",
            "content": "I look it up.",
            "reasoning_content": "The answer needs one more look.",
            "tool_calls": [call],
        },
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": json.dumps({"result": " ".join(rng.choices(WORDS, k=8))}),
        },
    ]


class Runner:
    """One session in which the conversation grows, and caches that hold all before a turn.

    The caches are its own, so that neither run of a turn finds the other's rows in its way.
    """

    def __init__(self, session: Session, clock: Callable[[], float]) -> None:
        """Start with nothing fed.

        Args:
            session: A session with a pool.
            clock: Seconds.
        """
        self._session = session
        self._clock = clock
        self._loaded = session._ready()  # noqa: SLF001 - times what the session would start from
        self._held = session.new_caches()
        self._fed = 0

    def run_whole(self, messages: list[dict[str, Any]]) -> dict[str, float]:
        """Answer a conversation through the prompt cache.

        Args:
            messages: The conversation.

        Returns:
            Seconds until each phase began.
        """
        return self._timed(partial(self._session.generate, messages, **OPTIONS))

    def run_alone(self, ids: Sequence[int]) -> dict[str, float]:
        """Feed what is new by itself, and take it back.

        Args:
            ids: The tokens.

        Returns:
            Seconds until each phase began.
        """
        fork = fork_caches(self._held)
        times = self._timed(partial(self._session.complete, ids, caches=fork))
        reset_caches(fork)
        return times

    def catch_up(self, messages: list[dict[str, Any]]) -> tuple[tuple[int, ...], int]:
        """Hold all tokens that the prompt cache would serve.

        Args:
            messages: The conversation.

        Returns:
            Its tokens, and how many of them are served.
        """
        loaded, pool = self._loaded, self._loaded.pool
        key = loaded.prompter.prompt(Request.chat(messages, OPTIONS)).key
        found = None if pool is None else pool.peek(loaded.spec.fingerprint, key)
        if found is None:
            raise SystemExit("nothing of the conversation is stored")
        reset_caches(found[1].caches)
        served = len(found[0].ids)
        self._session.complete(key.ids[self._fed : served], caches=self._held, max_tokens=1)
        self._fed = served
        return key.ids, served

    def _timed(self, run: Callable[..., Any]) -> dict[str, float]:
        times: dict[str, float] = {}
        begin = self._clock()

        def note(event: Any) -> None:
            times.setdefault(event.phase, self._clock() - begin)

        run(max_tokens=1, on_progress=note)
        return times


def run_turns(runners: Sequence[Runner], seed: int, most: int) -> Iterator[Turn]:
    """Let a conversation grow in every runner and time every turn but the first.

    Args:
        runners: Each times the turn once, both ways; what a turn took is their median.
        seed: Chooses the conversation.
        most: Messages at the end.

    Yields:
        The turns.
    """
    rng = random.Random(seed)  # noqa: S311 - draws words
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are assistant number {seed}."},
        {"role": "user", "content": "Find everything out about it."},
    ]
    for runner in runners:
        runner.run_whole(messages)
    while len(messages) < most:
        messages.extend(next_messages(rng, len(messages)))
        wholes, alones = [], []
        for at, runner in enumerate(runners):
            ids, served = runner.catch_up(messages)
            if (at + len(messages) // 2) % 2:
                alones.append(runner.run_alone(ids[served:]))
                wholes.append(runner.run_whole(messages))
            else:
                wholes.append(runner.run_whole(messages))
                alones.append(runner.run_alone(ids[served:]))
        yield Turn(
            messages=len(messages),
            tokens=len(ids),
            fed=len(ids) - served,
            prompting=statistics.median(times["prefill"] for times in wholes),
            first=statistics.median(times["decode"] for times in wholes),
            alone=statistics.median(times["decode"] for times in alones),
        )


def show(turns: list[Turn], name: str) -> None:
    """Print one line.

    Args:
        turns: Its turns.
        name: What they have in common.
    """
    ratios = sorted(turn.first / turn.alone for turn in turns)

    def middle(field: str) -> float:
        return float(statistics.median(getattr(turn, field) for turn in turns))

    print(
        f"  {name:<16} {statistics.median(ratios):5.2f}x  "
        f"(p90 {ratios[len(ratios) * 9 // 10]:.2f}, max {ratios[-1]:.2f}; "
        f"{sum(ratio <= BOUND for ratio in ratios)} of {len(ratios)} within {BOUND}; "
        f"{middle('tokens'):.0f} tokens, {middle('fed'):.0f} new; "
        f"first token {1e3 * middle('first'):.0f} ms, of it prompt "
        f"{1e3 * middle('prompting'):.0f} ms)",
        flush=True,
    )


def main() -> None:
    """Read the command line, time the conversations, print the ratios by length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=MINI)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--conversations", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    arguments = parser.parse_args()
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = with_longer_context(arguments.model, Path(folder))
        sessions = [
            stack.enter_context(Session.load(model)) for _ in range(max(arguments.sessions, 1))
        ]
        for seed in range(arguments.conversations):
            runners = [Runner(session, CLOCKS[arguments.clock]) for session in sessions]
            turns += run_turns(runners, seed, arguments.messages)
    print(f"\nfirst token of a follow-up turn over feeding its new tokens ({arguments.clock} time)")
    for start in range(0, arguments.messages, BUCKET):
        bucket = [turn for turn in turns if start < turn.messages <= start + BUCKET]
        if bucket:
            show(bucket, f"to {start + BUCKET} messages")
    show(turns, "all")


if __name__ == "__main__":
    main()
