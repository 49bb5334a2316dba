"""The conformance kit, on a dense config and on a sparse one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reference_qwen35 import forward
from tiny_qwen35 import tensors_of, text_config, whole_config

from engine_core.testing.conformance import FamilyConformance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np


class TestDense(FamilyConformance):
    family = "qwen35"
    tolerance = 1e-4

    def tiny_config(self) -> dict[str, Any]:
        return whole_config(text_config("dense_tied"))

    def tiny_tensors(self) -> Mapping[str, np.ndarray]:
        return tensors_of(text_config("dense_tied"))

    def reference_logits(self, ids: Sequence[int]) -> np.ndarray:
        return forward(text_config("dense_tied"), self.tiny_tensors(), ids)


class TestSparse(FamilyConformance):
    family = "qwen35"
    tolerance = 1e-4

    def tiny_config(self) -> dict[str, Any]:
        return whole_config(text_config("moe_untied"))

    def tiny_tensors(self) -> Mapping[str, np.ndarray]:
        return tensors_of(text_config("moe_untied"))

    def reference_logits(self, ids: Sequence[int]) -> np.ndarray:
        return forward(text_config("moe_untied"), self.tiny_tensors(), ids)
