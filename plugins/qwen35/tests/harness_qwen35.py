"""Feed a loaded session in chosen chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from engine_core.step import StepInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.session import Session


def feed(session: Session, caches: Sequence[Any], start: int, ids: Sequence[int]) -> np.ndarray:
    """Logits ``[L, V]`` of further ids on these caches."""
    step = StepInput(ids=mx.array([list(ids)], mx.int32), positions=start)
    hidden = session.model.forward(step, caches).hidden
    logits: np.ndarray = np.array(session.model.head(hidden).astype(mx.float32))[0]
    return logits


def logits(session: Session, ids: Sequence[int], chunks: Sequence[int] = ()) -> np.ndarray:
    """Logits ``[L, V]`` on fresh caches, fed in the given chunks."""
    caches = session.new_caches()
    rows, start = [], 0
    for size in chunks or [len(ids)]:
        rows.append(feed(session, caches, start, ids[start : start + size]))
        start += size
    assert start == len(ids)
    return np.concatenate(rows)


def sizes(length: int, chunk: int) -> list[int]:
    """Chunks of one size over a length, the last one shorter."""
    return [min(chunk, length - start) for start in range(0, length, chunk)]


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Largest absolute difference."""
    assert first.shape == second.shape
    return float(np.abs(first - second).max())
