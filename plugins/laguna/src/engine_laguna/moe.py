"""The sparse feed-forward block: a sigmoid router, routed experts and one shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.nn import GatedMLP, Linear, Module, sigmoid, softcap
from engine_core.nn.moe import GatedExperts

if TYPE_CHECKING:
    from engine_laguna.config import ExpertConfig

__all__ = ["Router", "SparseBlock"]


class Router(Module):
    """Choose experts by ``sigmoid(logits) + bias``, weigh them by ``sigmoid(logits)`` alone.

    The projection is a layer of its own, so that a packed router loads. All of it is float32:
    rounding a score changes which experts run.

    Attributes:
        e_score_correction_bias: ``[E]`` float32.

    Source: transformers ``LagunaTopKRouter``.
    """

    def __init__(self, hidden_size: int, config: ExpertConfig) -> None:
        """Make placeholder parameters.

        Args:
            hidden_size: H.
            config: Sizes and the softcap.
        """
        super().__init__()
        self._chosen = config.chosen
        self._softcap = config.softcap
        self.proj = Linear(hidden_size, config.count)
        self.e_score_correction_bias = mx.zeros((config.count,))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Choose.

        Args:
            x: ``[B, L, H]``.

        Returns:
            Expert numbers ``[B, L, k]`` in no particular order, and their weights, which sum to 1,
            in float32.
        """
        logits = self.proj(x.astype(mx.float32))
        if self._softcap is not None:
            logits = softcap(logits, self._softcap)
        scores = sigmoid(logits)
        ranked = scores + self.e_score_correction_bias
        experts = mx.argpartition(-ranked, self._chosen - 1, axis=-1)[..., : self._chosen]
        weights = mx.take_along_axis(scores, experts, axis=-1)
        return experts, weights / weights.sum(axis=-1, keepdims=True)


class SparseBlock(Module):
    """``scaling * sum_k weight_k * expert_k(x) + shared_expert(x)``."""

    def __init__(self, hidden_size: int, config: ExpertConfig, *, fused_shared: bool) -> None:
        """Make the layers with placeholder parameters.

        Args:
            hidden_size: H.
            config: Sizes.
            fused_shared: Whether gate and up of the shared expert are one matrix.
        """
        super().__init__()
        self._scaling = config.scaling
        self.gate = Router(hidden_size, config)
        self.switch_mlp = GatedExperts(hidden_size, config.intermediate_size, config.count)
        self.shared_expert = GatedMLP(
            hidden_size, config.shared_intermediate_size, fused=fused_shared
        )

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the block.

        Args:
            x: ``[B, L, H]``.

        Returns:
            ``[B, L, H]``.
        """
        experts, weights = self.gate(x)
        routed: mx.array = self.switch_mlp(x, experts, weights)
        return routed * self._scaling + self.shared_expert(x)
