"""Load a checkpoint below the session and run the model on its caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np

from engine_core.cache.build import build_caches
from engine_core.checkpoint.load import load_model
from engine_core.checkpoint.reader import read_checkpoint
from engine_core.kernels import KernelRegistry
from engine_core.plugins import Plugins
from engine_core.spec import resolve_spec_answers
from engine_core.step import StepInput

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine_core.family import Architecture


@attrs.frozen(eq=False)
class Tiny:
    """A loaded model and its architecture."""

    architecture: Architecture
    model: Any

    def logits(self, ids: Sequence[int], chunks: Sequence[int] | None = None) -> np.ndarray:
        """Logits ``[L, V]``, fed in the given chunks."""
        caches = build_caches(self.architecture.layers, mx.float32)
        rows, start = [], 0
        for size in chunks or [len(ids)]:
            part = mx.array([list(ids[start : start + size])], dtype=mx.int32)
            out = self.model.forward(StepInput(ids=part, positions=start), caches)
            rows.append(np.array(self.model.head(out.hidden))[0])
            start += size
        assert start == len(ids)
        return np.concatenate(rows)


def load(path: Path, **options: Any) -> Tiny:
    """Load a checkpoint in float32."""
    plugins = Plugins.load()
    with read_checkpoint(path) as checkpoint:
        owner = plugins.resolve_owner(checkpoint.config.string("model_type"), (), None)
        answers = resolve_spec_answers(
            plugins, owner, checkpoint.config, checkpoint.tensors, checkpoint.processor_config
        )
        loaded = load_model(
            checkpoint, answers, kernels=KernelRegistry(), compute_dtype=mx.float32, **options
        )
    return Tiny(answers.architecture, loaded.model)
