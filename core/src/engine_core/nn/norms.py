"""Normalisation layers."""

from __future__ import annotations

import mlx.core as mx

from engine_core.nn.module import Module

__all__ = ["RMSNorm"]


class RMSNorm(Module):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis, accumulated in float32.

    A family whose checkpoints store ``weight - 1`` declares a norm fold, so that no layer adds a
    constant at run time.

    Attributes:
        weight: ``[size]``, absent in the form without scale.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """

    def __init__(self, size: int, eps: float, *, with_scale: bool = True) -> None:
        """Make a placeholder scale.

        Args:
            size: Size of the last axis.
            eps: Added to the mean square under the root.
            with_scale: Whether a learned scale is applied.
        """
        super().__init__()
        self._eps = eps
        if with_scale:
            self.weight = mx.ones((size,))

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise.

        Args:
            x: ``[..., size]``.

        Returns:
            The same shape and dtype.
        """
        return mx.fast.rms_norm(x, self.get("weight"), self._eps)
