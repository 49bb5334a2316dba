"""The sparse branch: a router over normalised rows, and experts of one gated block each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mlx.core as mx

from engine_core.nn import Linear, Module, gelu_tanh
from engine_core.nn.moe import GatedExperts, softmax_top_k
from engine_gemma4.components import component

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine_gemma4.config import MoeConfig

__all__ = ["Experts", "Router"]

PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")


class Router(Module):
    """Choose experts for a row and weigh them.

    Attributes:
        scale: ``[H]``, scale of the normalised row.
        per_expert_scale: ``[E]``, factor of each expert's weight.
    """

    def __init__(
        self, path: str, config: MoeConfig, hidden: int, eps: float, parameters: Collection[str]
    ) -> None:
        """Make the parts that the checkpoint has.

        Args:
            path: This module's path, with a dot at its end.
            config: Sizes.
            hidden: H.
            eps: Of the norm.
            parameters: Mapped keys of the checkpoint.
        """
        super().__init__()
        self._path = path
        self._eps = eps
        self._top_k = config.top_k
        self._root = hidden**-0.5
        if f"{path}proj.weight" in parameters:
            self.proj = Linear(hidden, config.experts)
        self.scale = mx.ones((hidden,))
        self.per_expert_scale = mx.ones((config.experts,))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Choose.

        Args:
            x: ``[B * L, H]``, the residual stream.

        Returns:
            Expert numbers ``[B * L, k]`` and their weights ``[B * L, k]`` float32.

        Raises:
            ModelError: The checkpoint lacks the projection.
        """
        proj = component(self, "proj", self._path)
        rows = mx.fast.rms_norm(x, self["scale"] * self._root, self._eps)
        experts, weights = softmax_top_k(proj(rows), self._top_k)
        return experts, weights * self["per_expert_scale"][experts].astype(mx.float32)


class Experts(GatedExperts):
    """Gated blocks, one an expert, of which the checkpoint may lack projections."""

    def __init__(
        self, path: str, config: MoeConfig, hidden: int, parameters: Collection[str]
    ) -> None:
        """Make the projections that the checkpoint has.

        Args:
            path: This module's path, with a dot at its end.
            config: Sizes.
            hidden: H.
            parameters: Mapped keys of the checkpoint.
        """
        super().__init__(hidden, config.width, config.experts, activation=gelu_tanh)
        self._path = path
        for name in PROJECTIONS:
            if f"{path}{name}.weight" not in parameters:
                del self[name]

    def __call__(self, x: mx.array, experts: mx.array, weights: mx.array) -> mx.array:
        """Apply the chosen experts.

        Args:
            x: ``[B * L, H]``.
            experts: Expert numbers ``[B * L, k]``.
            weights: ``[B * L, k]``.

        Returns:
            ``[B * L, H]``.

        Raises:
            ModelError: The checkpoint lacks a projection.
        """
        for name in PROJECTIONS:
            component(self, name, self._path)
        return super().__call__(x, experts, weights)
