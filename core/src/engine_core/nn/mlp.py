"""Gated feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.nn.activations import gated, silu
from engine_core.nn.linear import Linear
from engine_core.nn.module import Module

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GatedMLP"]


class GatedMLP(Module):
    """``down(activation(gate(x)) * up(x))``; SwiGLU with the default activation.

    Gate and up are one projection when the checkpoint stores them alike, gate rows first.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        fused: bool,
        bias: bool = False,
        activation: Callable[[mx.array], mx.array] = silu,
    ) -> None:
        """Make the projections with placeholder parameters.

        Args:
            hidden_size: H.
            intermediate_size: Size of the gated row.
            fused: Whether ``gate_up_proj`` stands for ``gate_proj`` and ``up_proj``.
            bias: Whether each projection has a bias.
            activation: Elementwise function of the gate.
        """
        super().__init__()
        self._gated = gated(activation)
        if fused:
            self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        else:
            self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
            self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the block.

        Args:
            x: ``[B, L, H]``.

        Returns:
            ``[B, L, H]``.
        """
        if "gate_up_proj" in self:
            gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        out: mx.array = self.down_proj(self._gated(gate, up))
        return out
