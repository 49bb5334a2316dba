"""The conformance kit run by a family outside the repository."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.testing.conformance import FamilyConformance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VOCABULARY, HIDDEN, EPS = 48, 32, 1e-5


def draw(name: str, *shape: int, scale: float) -> np.ndarray:
    """Draw weights that depend on the name alone."""
    seed = int.from_bytes(name.encode()[:8], "little")
    generator = np.random.Generator(np.random.PCG64(seed))
    return (generator.standard_normal(shape) * scale).astype(np.float32)


class TestBigram(FamilyConformance):
    family = "bigram"

    def tiny_config(self) -> dict[str, Any]:
        return {
            "model_type": "bigram",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "rms_norm_eps": EPS,
        }

    def tiny_tensors(self) -> Mapping[str, np.ndarray]:
        return {
            "bigram.embedding.weight": draw("embedding", VOCABULARY, HIDDEN, scale=1.0),
            "bigram.norm.weight": draw("norm", HIDDEN, scale=0.3),
            "bigram.output.weight": draw("output", VOCABULARY, HIDDEN, scale=0.5),
        }

    def reference_logits(self, ids: Sequence[int]) -> np.ndarray:
        tensors = {key: value.astype(np.float64) for key, value in self.tiny_tensors().items()}
        rows = tensors["bigram.embedding.weight"][list(ids)]
        rows = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + EPS)
        rows = rows * (1.0 + tensors["bigram.norm.weight"])
        return rows @ tensors["bigram.output.weight"].T
