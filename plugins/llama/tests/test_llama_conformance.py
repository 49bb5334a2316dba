"""The conformance kit on a config that uses every layer kind of the family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reference_llama import forward
from tiny_llama import BASE, YARN, tensors_of

from engine_core.testing.conformance import FamilyConformance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np


class TestLlama(FamilyConformance):
    family = "llama"
    tolerance = 5e-5

    def tiny_config(self) -> dict[str, Any]:
        return BASE | {
            "attention_bias": True,
            "mlp_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 8,
            "rope_parameters": YARN,
        }

    def tiny_tensors(self) -> Mapping[str, np.ndarray]:
        return tensors_of(self.tiny_config())

    def reference_logits(self, ids: Sequence[int]) -> np.ndarray:
        return forward(self.tiny_config(), self.tiny_tensors(), ids)
