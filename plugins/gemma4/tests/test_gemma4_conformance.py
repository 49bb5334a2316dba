"""The conformance kit on the two structures of the family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reference_gemma4 import forward
from tiny_gemma4 import DENSE, MOE, tensors_of

from engine_core.testing.conformance import FamilyConformance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np


class TestDense(FamilyConformance):
    """Per-layer embeddings, shared keys and values, wide shared blocks."""

    family = "gemma4"
    tolerance = 2e-5

    def tiny_config(self) -> dict[str, Any]:
        return DENSE | {"hidden_size": 64, "intermediate_size": 32}

    def tiny_tensors(self) -> Mapping[str, np.ndarray]:
        return tensors_of(self.tiny_config())

    def reference_logits(self, ids: Sequence[int]) -> np.ndarray:
        return forward(self.tiny_config(), self.tiny_tensors(), ids)


class TestMoe(FamilyConformance):
    """Experts beside every dense block, raw keys as values of full layers."""

    family = "gemma4"
    tolerance = 2e-5

    def tiny_config(self) -> dict[str, Any]:
        return MOE | {"hidden_size": 64}

    def tiny_tensors(self) -> Mapping[str, np.ndarray]:
        return tensors_of(self.tiny_config())

    def reference_logits(self, ids: Sequence[int]) -> np.ndarray:
        return forward(self.tiny_config(), self.tiny_tensors(), ids)
