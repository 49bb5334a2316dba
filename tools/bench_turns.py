"""Time the first token of follow-up turns in a long tool loop against its new tokens alone.

One conversation with a thinking template grows by a call and its result a turn. Every turn is
answered through the prompt cache, rendering and looking up included, and its new tokens are also
fed by themselves to caches that hold all before them. The two follow each other, in turn first,
and the ratio of each pair is taken: 1 means that a follow-up turn costs its new tokens only.

    python tools/bench_turns.py [--model DIR] [--messages 200] [--conversations 3] [--clock cpu]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from engine_core import Session
from engine_core.cache.layers import fork_caches, reset_caches
from engine_core.generation import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def run_turns(session: Session, seed: int, most: int, clock: Callable[[], float]) -> Iterator[Turn]:
    """Let a conversation grow and time every turn but the first.

    Args:
        session: A session with a pool.
        seed: Chooses the conversation.
        most: Messages at the end.
        clock: Seconds.

    Yields:
        The turns.
    """
    rng = random.Random(seed)  # noqa: S311 - draws words
    loaded = session._ready()  # noqa: SLF001 - times what the session itself would start from
    pool = loaded.pool
    if pool is None:
        raise SystemExit("the checkpoint has no state to store")
    options: dict[str, Any] = {"tools": TOOLS, "thinking": True}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are assistant number {seed}."},
        {"role": "user", "content": "Find everything out about it."},
    ]

    def timed(run: Callable[..., Any]) -> dict[str, float]:
        times: dict[str, float] = {}
        begin = clock()

        def note(event: Any) -> None:
            times.setdefault(event.phase, clock() - begin)

        run(max_tokens=1, on_progress=note)
        return times

    def whole() -> dict[str, float]:
        return timed(lambda **more: session.generate(messages, **options, **more))

    held = session.new_caches()
    fed = 0
    whole()
    while len(messages) < most:
        messages.extend(next_messages(rng, len(messages)))
        key = loaded.prompter.prompt(Request.chat(messages, options)).key
        found = pool.peek(loaded.spec.fingerprint, key)
        if found is None:
            raise SystemExit("nothing of the conversation is stored")
        reset_caches(found[1].caches)
        served = len(found[0].ids)
        # Caches of its own, so that neither run finds the other's rows in its way.
        session.complete(key.ids[fed:served], caches=held, max_tokens=1)
        fed = served
        fork = fork_caches(held)

        def alone(ids: Any = key.ids[served:], fork: Any = fork) -> dict[str, float]:
            return timed(lambda **more: session.complete(ids, caches=fork, **more))

        if len(messages) % 4:
            by_itself, first = alone(), whole()
        else:
            first, by_itself = whole(), alone()
        reset_caches(fork)
        yield Turn(
            messages=len(messages),
            tokens=len(key.ids),
            fed=len(key.ids) - served,
            prompting=first["prefill"],
            first=first["decode"],
            alone=by_itself["decode"],
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
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    arguments = parser.parse_args()
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as folder:
        model = with_longer_context(arguments.model, Path(folder))
        with Session.load(model) as session:
            for seed in range(arguments.conversations):
                turns += run_turns(session, seed, arguments.messages, CLOCKS[arguments.clock])
    print(f"\nfirst token of a follow-up turn over feeding its new tokens ({arguments.clock} time)")
    for start in range(0, arguments.messages, BUCKET):
        bucket = [turn for turn in turns if start < turn.messages <= start + BUCKET]
        if bucket:
            show(bucket, f"to {start + BUCKET} messages")
    show(turns, "all")


if __name__ == "__main__":
    main()
