"""Sparse feed-forward blocks: every token runs through a few of many experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mlx.core as mx

from engine_core.nn.activations import computes_on_cpu, gated, silu
from engine_core.nn.module import Module

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.quantization import QuantizationSpec

__all__ = ["ExpertLinear", "GatedExperts", "QuantizedExpertLinear", "softmax_top_k"]

# Assignments from which ordering them by expert pays: rows of one expert find its weight in cache.
ORDER_FROM: Final = 64


def softmax_top_k(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Choose experts by probability, and weigh them so that the weights sum to 1.

    Args:
        logits: ``[..., E]``, any floating dtype.
        count: Experts a token.

    Returns:
        Expert numbers ``[..., count]`` in no particular order, and their weights in float32.

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", with weights renormalised
    over the chosen experts.
    """
    logits = logits.astype(mx.float32)
    experts = mx.argpartition(-logits, count - 1, axis=-1)[..., :count]
    # The softmax over all experts, renormalised over some, is the softmax over those.
    chosen = mx.take_along_axis(logits, experts, axis=-1)
    return experts, mx.softmax(chosen, axis=-1)


class ExpertLinear(Module):
    """One projection an expert.

    Attributes:
        weight: ``[E, out, in]``.
    """

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        """Make placeholder parameters.

        Args:
            experts: E.
            in_features: Size of the last axis of the input.
            out_features: Size of the last axis of the output.
        """
        super().__init__()
        self.weight = mx.zeros((experts, out_features, in_features))

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Project each row by its expert.

        Args:
            x: ``[rows, 1, in]``.
            experts: Expert of each row ``[rows]``.
            ordered: Whether the experts ascend.

        Returns:
            ``[rows, 1, out]``.
        """
        weight: mx.array = self["weight"].swapaxes(-1, -2)
        if x.dtype == mx.float32 or not computes_on_cpu():
            return mx.gather_mm(x, weight, rhs_indices=experts, sorted_indices=ordered)
        # MLX multiplies gathered matrices on the CPU in float32 only.
        out = mx.gather_mm(
            x.astype(mx.float32),
            weight.astype(mx.float32),
            rhs_indices=experts,
            sorted_indices=ordered,
        )
        return out.astype(x.dtype)

    def to_quantized(self, spec: QuantizationSpec) -> QuantizedExpertLinear:
        """Make the packed layer that takes this one's place.

        Args:
            spec: How the weight is packed.

        Returns:
            A layer with placeholder parameters of the same sizes.
        """
        experts, out_features, in_features = self.weight.shape
        return QuantizedExpertLinear(experts, in_features, out_features, spec)


class QuantizedExpertLinear(Module):
    """One packed projection an expert.

    Attributes:
        weight: ``[E, out, words]`` uint32.
        scales: ``[E, out, groups]``.
        biases: ``[E, out, groups]``, affine packing only.
    """

    def __init__(
        self, experts: int, in_features: int, out_features: int, spec: QuantizationSpec
    ) -> None:
        """Make placeholder parameters.

        Args:
            experts: E.
            in_features: Size of the last axis of the input.
            out_features: Size of the last axis of the output.
            spec: How the weight is packed.
        """
        super().__init__()
        self._spec = spec
        groups = (experts, out_features, in_features // spec.group_size)
        self.weight = mx.zeros((experts, out_features, spec.words(in_features)), dtype=mx.uint32)
        self.scales = mx.zeros(groups, dtype=mx.float32 if spec.affine else mx.uint8)
        if spec.affine:
            self.biases = mx.zeros(groups)

    @property
    def spec(self) -> QuantizationSpec:
        """How the weight is packed."""
        return self._spec

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Project each row by its expert.

        Args:
            x: ``[rows, 1, in]``.
            experts: Expert of each row ``[rows]``.
            ordered: Whether the experts ascend.

        Returns:
            ``[rows, 1, out]``.
        """
        spec = self._spec
        # Packed products of half precision take a CPU 8 times as long and more.
        on_cpu = computes_on_cpu()
        out = mx.gather_qmm(
            x.astype(mx.float32) if on_cpu else x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            rhs_indices=experts,
            transpose=True,
            group_size=spec.group_size,
            bits=spec.bits,
            mode=spec.mode,
            sorted_indices=ordered,
        )
        return out.astype(x.dtype)


class GatedExperts(Module):
    """``sum_k weight_k * down_k(activation(gate_k(x)) * up_k(x))`` over a token's experts.

    Gate and up stay two stacks: joined, each expert's matrix outgrows a processor's cache, and 4
    rows through experts of 1024 x 512 took 45 ms instead of 23.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        *,
        activation: Callable[[mx.array], mx.array] = silu,
    ) -> None:
        """Make the projections with placeholder parameters.

        Args:
            hidden_size: H.
            intermediate_size: Size of the gated row.
            experts: E.
            activation: Elementwise function of the gate.
        """
        super().__init__()
        self._gated = gated(activation)
        self.gate_proj = ExpertLinear(experts, hidden_size, intermediate_size)
        self.up_proj = ExpertLinear(experts, hidden_size, intermediate_size)
        self.down_proj = ExpertLinear(experts, intermediate_size, hidden_size)

    def __call__(self, x: mx.array, experts: mx.array, weights: mx.array) -> mx.array:
        """Apply the chosen experts.

        Args:
            x: ``[B, L, H]``.
            experts: Expert numbers ``[B, L, k]``.
            weights: ``[B, L, k]``, any floating dtype.

        Returns:
            ``[B, L, H]``.
        """
        # The axis of one row is there before rows are gathered: added afterwards, its stride makes
        # a CPU multiply as if the row were transposed, which takes three times as long.
        tokens = x.reshape(-1, 1, x.shape[-1])
        chosen, count = experts.reshape(-1), experts.shape[-1]
        ordered = chosen.size >= ORDER_FROM
        if ordered:
            order = mx.argsort(chosen)
            chosen, rows = chosen[order], tokens[order // count]
        else:
            rows = mx.repeat(tokens, count, axis=0)
        gate = self.gate_proj(rows, chosen, ordered=ordered)
        up = self.up_proj(rows, chosen, ordered=ordered)
        out = self.down_proj(self._gated(gate, up), chosen, ordered=ordered)
        if ordered:
            out = out[mx.argsort(order)]
        out = out.reshape(*experts.shape, -1)
        return (out * weights.astype(out.dtype)[..., None]).sum(axis=-2)
