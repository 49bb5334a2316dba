"""The conformance kit on a config that uses every layer kind of the family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reference_laguna import forward
from tiny_laguna import config_of, tensors_of

from engine_core.testing.conformance import FamilyConformance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np


class TestLaguna(FamilyConformance):
    family = "laguna"
    tolerance = 5e-5

    def tiny_config(self) -> dict[str, Any]:
        return config_of("xs21")

    def tiny_tensors(self) -> Mapping[str, np.ndarray]:
        return tensors_of(self.tiny_config())

    def reference_logits(self, ids: Sequence[int]) -> np.ndarray:
        return forward(self.tiny_config(), self.tiny_tensors(), ids)
