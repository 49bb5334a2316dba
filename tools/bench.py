"""Compare Engine with mlx-lm on one checkpoint in paired runs.

Every figure comes from its own process, the two engines in turn (A B A B ...), with the same
token ids, so that a drifting machine moves both. The ratio of each pair is taken, and the median,
smallest and largest ratio are printed. A ratio above 1 means that Engine is faster.

    python tools/bench.py --model DIR [--pairs 5] [--prompt-tokens 512] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# What each case gives the two sides. "blas" opens the fast BLAS before MLX, for mlx-lm as well
# when the case wants equal conditions. "slow" cases run mlx-lm's packed float16 kernels (less than
# one token a second on a CPU) and are kept short.
CASES: dict[str, dict[str, Any]] = {
    "defaults with the fast-cpu extra": {
        "ours": {"blas": True},
        "theirs": {"blas": False},
        "slow": True,
    },
    "defaults without the extra": {
        "ours": {"blas": False},
        "theirs": {"blas": False},
        "slow": True,
    },
    "same dtype (checkpoint's), weights packed, no extra": {
        "ours": {"blas": False, "compute_dtype": "checkpoint", "quantized_weights": "keep"},
        "theirs": {"blas": False},
        "slow": True,
    },
    "same dtype (float32), weights packed, no extra": {
        "ours": {"blas": False, "compute_dtype": "float32", "quantized_weights": "keep"},
        "theirs": {"blas": False, "float32": True},
    },
    "same dtype (float32), weights dense, fast BLAS for both": {
        "ours": {"blas": True, "compute_dtype": "float32", "quantized_weights": "dequantize"},
        "theirs": {"blas": True, "float32": True, "dequantize": True},
    },
    "first token of two turns, each with its own prompt cache (float32, fast BLAS)": {
        "ours": {
            "turns": True,
            "blas": True,
            "compute_dtype": "float32",
            "quantized_weights": "dequantize",
        },
        "theirs": {"turns": True, "blas": True, "float32": True, "dequantize": True},
    },
}
# A second turn brings this many new tokens.
TURN_TOKENS = 64
SLOW_PAIRS, SLOW_PROMPT_TOKENS, SLOW_MAX_TOKENS = 3, 32, 4


def prompt_ids(count: int, vocabulary: int) -> list[int]:
    """Make a fixed sequence of ordinary token ids.

    Args:
        count: Tokens wanted.
        vocabulary: V; ids stay between V/16 and V/2, away from control tokens.

    Returns:
        The ids.
    """
    low, span = vocabulary // 16, vocabulary // 2 - vocabulary // 16
    return [low + (7919 * index + 31) % span for index in range(count)]


def open_blas() -> None:
    """Open the optimised BLAS before MLX, as the engine does for itself."""
    import ctypes

    import engine_openblas

    ctypes.CDLL(str(engine_openblas.library_path()), mode=ctypes.RTLD_GLOBAL)


def run_ours(settings: dict[str, Any], model: str, prompt: int, output: int) -> dict[str, float]:
    """Time Engine.

    Args:
        settings: One side of a case.
        model: Checkpoint directory.
        prompt: Prompt length (tokens).
        output: Generated length (tokens).

    Returns:
        Prefill and decode speed (tokens/s).
    """
    if not settings["blas"]:
        # The engine opens the fast BLAS only before MLX, so this is how it runs without.
        import mlx.core  # noqa: F401
    from engine_core import Client

    dtype = settings.get("compute_dtype", "auto")
    if dtype == "checkpoint":
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    with Client.load(
        model,
        template=False,
        compute_dtype=dtype,
        quantized_weights=settings.get("quantized_weights", "auto"),
    ) as client:
        ids = prompt_ids(prompt, client.info.vocab_size)
        never = dict.fromkeys(client.info.eos_token_ids, -100.0)
        if settings.get("turns"):

            def answer(turn: list[int]) -> tuple[float, list[int]]:
                times: list[float] = []
                begin = time.perf_counter()
                reply = client.complete(
                    turn,
                    max_tokens=output,
                    logit_bias=never,
                    on_progress=lambda event: times.extend(
                        [time.perf_counter()] if event.phase == "decode" else []
                    ),
                )
                return times[0] - begin, list(reply.token_ids)

            return run_turns(answer, ids)
        for length in (1, prompt):  # the first, short run warms up
            reply = client.complete(
                ids[:length], max_tokens=output, logit_bias=never, prompt_cache=False
            )
        return {
            "prefill": reply.timings.prompt_tokens_per_second(reply.usage),
            "decode": reply.timings.decode_tokens_per_second(reply.usage),
        }


def run_theirs(settings: dict[str, Any], model: str, prompt: int, output: int) -> dict[str, float]:
    """Time mlx-lm's own generation loop.

    Args:
        settings: One side of a case.
        model: Checkpoint directory.
        prompt: Prompt length (tokens).
        output: Generated length (tokens).

    Returns:
        Prefill and decode speed (tokens/s).
    """
    if settings["blas"]:
        open_blas()
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    network, config = load_model(Path(model))
    if settings.get("dequantize"):
        from mlx_lm.utils import dequantize_model

        network = dequantize_model(network)
    if settings.get("float32"):
        network.set_dtype(mx.float32)
        mx.eval(network.parameters())
    ids = prompt_ids(prompt, config.get("text_config", config)["vocab_size"])
    if settings.get("turns"):
        from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

        stored = LRUPromptCache()

        def answer(turn: list[int]) -> tuple[float, list[int]]:
            begin = time.perf_counter()
            cache, rest = stored.fetch_nearest_cache("model", turn)
            if cache is None:
                cache, rest = make_prompt_cache(network), turn
            times, tokens = [], []
            for token, _ in generate_step(
                mx.array(rest), network, max_tokens=output, prompt_cache=cache
            ):
                times.append(time.perf_counter())
                tokens.append(int(token))
            stored.insert_cache("model", [*turn, *tokens], cache)
            return times[0] - begin, tokens

        return run_turns(answer, ids)
    for length in (1, prompt):  # the first, short run warms up
        begin = time.perf_counter()
        first = None
        count = 0
        for _ in generate_step(mx.array(ids[:length]), network, max_tokens=output):
            count += 1
            if first is None:
                first = time.perf_counter()
        end = time.perf_counter()
    if first is None:
        sys.exit("mlx-lm generated nothing")
    return {"prefill": prompt / (first - begin), "decode": (count - 1) / (end - first)}


def run_turns(
    answer: Callable[[list[int]], tuple[float, list[int]]], ids: list[int]
) -> dict[str, float]:
    """Time the first token of a first turn and of one that continues it.

    Args:
        answer: Answers a prompt; gives the seconds to the first token, and all tokens.
        ids: The first turn.

    Returns:
        Speed from the request to the first token over the turn's new tokens (tokens/s).
    """
    answer(ids[:1])  # warms up
    cold, tokens = answer([*ids[1:], ids[0]])
    warm, _ = answer([*ids[1:], ids[0], *tokens, *ids[:TURN_TOKENS]])
    return {"cold": len(ids) / cold, "warm": TURN_TOKENS / warm}


def measure(side: str, case: dict[str, Any], arguments: argparse.Namespace) -> dict[str, float]:
    """Run one side in a process of its own.

    Args:
        side: ``ours`` or ``theirs``.
        case: Settings of both sides.
        arguments: Parsed command line.

    Returns:
        Its figures.
    """
    command = [
        sys.executable,
        __file__,
        "--model",
        arguments.model,
        "--prompt-tokens",
        str(SLOW_PROMPT_TOKENS if case.get("slow") else arguments.prompt_tokens),
        "--max-tokens",
        str(SLOW_MAX_TOKENS if case.get("slow") else arguments.max_tokens),
        "--side",
        side,
        "--settings",
        json.dumps(case[side]),
    ]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{side} failed:\n{result.stderr}")
    figures: dict[str, float] = json.loads(result.stdout.strip().splitlines()[-1])
    return figures


def compare(name: str, case: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Run one case in pairs and print its ratios.

    Args:
        name: What the case is.
        case: Settings of both sides.
        arguments: Parsed command line.
    """
    print(f"\n{name}", flush=True)
    ratios: dict[str, list[float]] = {}
    speeds: dict[str, list[float]] = {}
    for _ in range(SLOW_PAIRS if case.get("slow") else arguments.pairs):
        ours = measure("ours", case, arguments)
        theirs = measure("theirs", case, arguments)
        for figure in ours:
            ratios.setdefault(figure, []).append(ours[figure] / theirs[figure])
            speeds.setdefault(figure, []).append(ours[figure])
    for figure, collected in ratios.items():
        print(
            f"  {figure:<8} {statistics.median(collected):6.2f}x  "
            f"(min {min(collected):.2f}, max {max(collected):.2f}; "
            f"Engine {statistics.median(speeds[figure]):.1f} tokens/s)",
            flush=True,
        )


def main() -> None:
    """Read the command line, then compare all cases or time one side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run = run_ours if arguments.side == "ours" else run_theirs
        figures = run(
            arguments.settings, arguments.model, arguments.prompt_tokens, arguments.max_tokens
        )
        print(json.dumps(figures))
        return
    for name in arguments.case or CASES:
        compare(name, CASES[name], arguments)


if __name__ == "__main__":
    main()
