"""Feed a loaded session in chosen chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from engine_core.step import StepInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.session import Session


def logits(session: Session, ids: Sequence[int], chunks: Sequence[int] = ()) -> np.ndarray:
    """Logits ``[L, V]`` on fresh caches, fed in the given chunks."""
    caches = session.new_caches()
    rows, start = [], 0
    for size in chunks or [len(ids)]:
        part = mx.array([list(ids[start : start + size])], dtype=mx.int32)
        out = session.model.forward(StepInput(ids=part, positions=start), caches)
        rows.append(np.array(session.model.head(out.hidden).astype(mx.float32))[0])
        start += size
    assert start == len(ids)
    return np.concatenate(rows)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Largest absolute difference."""
    assert first.shape == second.shape
    return float(np.abs(first - second).max())
