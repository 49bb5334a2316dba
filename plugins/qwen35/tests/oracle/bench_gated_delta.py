"""Time the gated delta rule beside mlx-lm's, in turns on the same inputs.

    python plugins/qwen35/tests/oracle/bench_gated_delta.py [rounds]

Needs mlx-lm. Both sides mix 2,048 rows of 16 key and 32 value heads in float32.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from engine_core import backend

mx = backend.load_mlx()  # a fast BLAS is opened before MLX is first imported
backend.tune_blas()

from mlx_lm.models.gated_delta import gated_delta_ops  # noqa: E402

from engine_core.nn.gated_delta import chunked_delta_rule, normalize_heads  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, KEY_HEADS, VALUE_HEADS = 2048, 16, 32


def seconds(rule: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    """Wall time of one call, evaluated."""
    start = time.perf_counter()
    mx.eval(rule(*inputs))
    return time.perf_counter() - start


def measure(size: int, rounds: int) -> str:
    """Compare both sides on heads of one size."""
    per_head = (1, ROWS, VALUE_HEADS)
    queries, keys = normalize_heads(mx.random.normal((1, ROWS, 2 * KEY_HEADS, size)))
    values = mx.random.normal((*per_head, size))
    log_decay = -mx.random.uniform(0.0, 0.5, per_head)
    beta = mx.random.uniform(0.0, 1.0, per_head)
    state = mx.random.normal((1, VALUE_HEADS, size, size)) * 0.1
    ours = (queries, keys, values, log_decay, beta, state)
    # mlx-lm takes the decay itself, not its logarithm.
    theirs = (queries, keys, values, mx.exp(log_decay), beta, state)
    mx.eval(ours, theirs)
    results = zip(chunked_delta_rule(*ours), gated_delta_ops(*theirs), strict=True)
    error = max(float(mx.abs(first - second).max()) for first, second in results)
    pairs = [
        (seconds(chunked_delta_rule, ours), seconds(gated_delta_ops, theirs)) for _ in range(rounds)
    ]
    ratio = sorted(second / first for first, second in pairs)[rounds // 2]
    best = [min(pair[side] for pair in pairs) * 1e3 for side in (0, 1)]
    return (
        f"head {size}: ours {best[0]:.0f} ms, mlx-lm {best[1]:.0f} ms, "
        f"median ratio {ratio:.2f}, largest difference {error:.1e}"
    )


if __name__ == "__main__":
    print("BLAS:", backend.backend_report().blas)
    for head in (128, 64, 32):
        print(measure(head, int(sys.argv[1]) if len(sys.argv) > 1 else 3))
