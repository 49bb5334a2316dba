"""Compare the gated delta rule with mlx-lm's on a CPU in paired runs.

Both sides mix the same 2,048 rows in one process, in turns (A B A B ...), first with MLX's own
BLAS, then with the fast one, each in a process of its own because a BLAS is opened once. The head
counts are those of a real layer (16 key and 32 value heads). A ratio above 1 means that Engine is
faster; the time of the processor is printed beside wall time because other programs do not count
there. The errors are those of output and state against float64, relative to the largest magnitude.

    python tools/bench_gated_delta.py [--pairs 5] [--rows 2048]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_SIZES = (128, 64, 32)
KEY_HEADS, VALUE_HEADS = 16, 32
# The float64 recurrence is slow, so errors are taken on the heads of one key head.
CHECKED_HEADS = VALUE_HEADS // KEY_HEADS


def make_inputs(mx: Any, rows: int, size: int) -> tuple[Any, ...]:
    """Draw what a layer mixes.

    Args:
        mx: ``mlx.core``.
        rows: L.
        size: Head size of keys and values.

    Returns:
        Queries, keys, values, logarithms of the decay, rates and state.
    """
    from engine_core.nn.gated_delta import normalize_heads

    draws = iter(mx.random.split(mx.random.key(size), 5))
    joined = mx.random.normal((1, rows, 2 * KEY_HEADS, size), key=next(draws))
    queries, keys = normalize_heads(joined)
    per_head = (1, rows, VALUE_HEADS)
    inputs = (
        queries,
        keys,
        mx.random.normal((*per_head, size), key=next(draws)),
        -mx.random.uniform(0.0, 0.5, per_head, key=next(draws)),
        mx.random.uniform(0.0, 1.0, per_head, key=next(draws)),
        mx.random.normal((1, VALUE_HEADS, size, size), key=next(draws)) * 0.1,
    )
    mx.eval(inputs)
    return inputs


def exact(inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """Apply the rule row by row in float64 to the first value heads.

    Args:
        inputs: As of :func:`make_inputs`.

    Returns:
        Output ``[L, heads, size]`` and state ``[heads, size, size]``.
    """
    queries, keys, values, log_decay, beta, state = (
        np.array(x)[0].astype(np.float64) for x in inputs
    )
    state, outputs = state[:CHECKED_HEADS], []
    for row in range(len(values)):
        key, query = keys[row, 0], queries[row, 0]
        state = state * np.exp(log_decay[row, :CHECKED_HEADS])[:, None, None]
        error = (values[row, :CHECKED_HEADS] - state @ key) * beta[row, :CHECKED_HEADS, None]
        state = state + error[:, :, None] * key
        outputs.append(state @ query)
    return np.stack(outputs), state


def errors(results: tuple[Any, ...], truth: tuple[Any, ...]) -> str:
    """Show the errors of output and state.

    Args:
        results: What a side gave.
        truth: What :func:`exact` gave.

    Returns:
        Both, for people.
    """
    outputs, state = (np.array(array)[0] for array in results)
    pairs = ((outputs[:, :CHECKED_HEADS], truth[0]), (state[:CHECKED_HEADS], truth[1]))
    return " and ".join(
        f"{np.abs(got - want).max() / np.abs(want).max():.1e}" for got, want in pairs
    )


def seconds(mx: Any, rule: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[float, float]:
    """Time one call.

    Args:
        mx: ``mlx.core``.
        rule: Either side.
        inputs: What it takes.

    Returns:
        Wall time and processor time.
    """
    wall, processor = time.perf_counter(), time.process_time()
    mx.eval(rule(*inputs))
    return time.perf_counter() - wall, time.process_time() - processor


def compare(*, pairs: int, rows: int, blas: str) -> None:
    """Print the ratios for every head size with one BLAS.

    Args:
        pairs: Runs of each side.
        rows: L.
        blas: ``bundled`` or ``fast``.
    """
    if blas == "bundled":
        # The engine opens the fast BLAS only before MLX, so this is how it runs without.
        import mlx.core  # noqa: F401
    from engine_core import backend

    mx = backend.load_mlx()
    backend.tune_blas()
    from mlx_lm.models.gated_delta import gated_delta_ops

    from engine_core.nn.gated_delta_chunks import chunked_delta_rule

    print(f"\ngated delta rule, {rows} rows, BLAS: {backend.backend_report().blas}", flush=True)
    for size in HEAD_SIZES:
        ours = make_inputs(mx, rows, size)
        # mlx-lm takes the decay itself, not its logarithm.
        theirs = (*ours[:3], mx.exp(ours[3]), *ours[4:])
        mx.eval(theirs)
        truth = exact(ours)
        shown = [
            errors(chunked_delta_rule(*ours), truth),
            errors(gated_delta_ops(*theirs), truth),
        ]
        walls, processors, best = [], [], float("inf")
        for _ in range(pairs):
            mine = seconds(mx, chunked_delta_rule, ours)
            other = seconds(mx, gated_delta_ops, theirs)
            walls.append(other[0] / mine[0])
            processors.append(other[1] / mine[1])
            best = min(best, mine[0])
        print(
            f"  head size {size:<4} {statistics.median(walls):6.2f}x  "
            f"(min {min(walls):.2f}, max {max(walls):.2f}; processor time "
            f"{statistics.median(processors):.2f}x, min {min(processors):.2f}, "
            f"max {max(processors):.2f}; Engine {best * 1e3:.0f} ms; "
            f"error {shown[0]}, mlx-lm's {shown[1]})",
            flush=True,
        )


def main() -> None:
    """Compare with one BLAS, or with each in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--blas", choices=("bundled", "fast"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.blas:
        compare(pairs=arguments.pairs, rows=arguments.rows, blas=arguments.blas)
        return
    for blas in ("bundled", "fast"):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--blas", blas], check=True)


if __name__ == "__main__":
    main()
