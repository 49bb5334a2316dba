"""Normalisation layers."""

from __future__ import annotations

from typing import Final

import mlx.core as mx

from engine_core.nn.activations import computes_on_cpu
from engine_core.nn.module import Derived, Module

__all__ = ["RMSNorm", "normalize_sum"]

# MLX's own norm is a chain of about 14 operations on a processor, some of them costly for few
# elements: 19 us a row of 576 against 13. From some rows on it is the faster one.
FEW_ELEMENTS: Final = 1 << 14


def normalize_sum(x: mx.array, eps: float, scale: mx.array | float) -> mx.array:
    """Compute ``x / sqrt(sum(x ** 2) + eps) * scale`` over the last axis.

    Args:
        x: ``[..., size]`` float32.
        eps: Added to the sum under the root.
        scale: Factor, of a shape that broadcasts to that of ``x``.

    Returns:
        The same shape and dtype.
    """
    squares = mx.sum(mx.square(x), axis=-1, keepdims=True)
    return x * mx.rsqrt(squares + eps) * scale


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
        self._eps_sum, self._root = eps * size, size**0.5
        self._scale = Derived(lambda weight: weight * size**0.5)
        if with_scale:
            self.weight = mx.ones((size,))

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise.

        Args:
            x: ``[..., size]``.

        Returns:
            The same shape and dtype.
        """
        weight = self.get("weight")
        if x.size <= FEW_ELEMENTS and x.dtype == mx.float32 and computes_on_cpu():
            scale = self._root if weight is None else self._scale.of(weight)
            return normalize_sum(x, self._eps_sum, scale)
        return mx.fast.rms_norm(x, weight, self._eps)
