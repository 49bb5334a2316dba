"""Sparse feed-forward blocks: every token runs through a few of many experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import mlx.core as mx

from engine_core.nn.mlp import silu
from engine_core.nn.module import Module

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.quantization import QuantizationSpec

__all__ = ["ExpertLinear", "GatedExperts", "QuantizedExpertLinear", "softmax_top_k"]

# Assignments from which grouping them by expert pays for the sorting.
GROUP_FROM: Final = 64
# Rows of one matrix product on a CPU, where a product of one row is bound by reading the weight.
BLOCK_ROWS: Final = 16


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


@attrs.frozen(kw_only=True, eq=False)
class _Grouping:
    """Assignments ordered by expert, as blocks of rows that share one.

    Attributes:
        rows: Which token each row is of ``[blocks, size]``.
        experts: Expert of each block ``[blocks]``, ascending.
        places: Where each assignment's row is among all rows ``[tokens * count]``.
    """

    rows: mx.array
    experts: mx.array
    places: mx.array


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
        """Project blocks of rows, each by its expert.

        Args:
            x: ``[blocks, rows, in]``.
            experts: Expert of each block ``[blocks]``.
            ordered: Whether the experts ascend.

        Returns:
            ``[blocks, rows, out]``.
        """
        weight: mx.array = self["weight"].swapaxes(-1, -2)
        if x.dtype == mx.float32 or mx.default_device().type != mx.DeviceType.cpu:
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
        """Project blocks of rows, each by its expert.

        Args:
            x: ``[blocks, rows, in]``.
            experts: Expert of each block ``[blocks]``.
            ordered: Whether the experts ascend.

        Returns:
            ``[blocks, rows, out]``.
        """
        spec = self._spec
        return mx.gather_qmm(
            x,
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


class GatedExperts(Module):
    """``sum_k weight_k * down_k(activation(gate_k(x)) * up_k(x))`` over a token's experts.

    Gate and up are one projection when the checkpoint stores them alike, gate rows first.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        *,
        fused: bool,
        activation: Callable[[mx.array], mx.array] = silu,
    ) -> None:
        """Make the projections with placeholder parameters.

        Args:
            hidden_size: H.
            intermediate_size: Size of the gated row.
            experts: E.
            fused: Whether ``gate_up_proj`` stands for ``gate_proj`` and ``up_proj``.
            activation: Elementwise function of the gate.
        """
        super().__init__()
        self._activation = activation
        self._experts = experts
        if fused:
            self.gate_up_proj = ExpertLinear(experts, hidden_size, 2 * intermediate_size)
        else:
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
        tokens = x.reshape(-1, x.shape[-1])
        count = experts.shape[-1]
        if experts.size < GROUP_FROM:
            rows = mx.repeat(tokens, count, axis=0)[:, None]
            out = self._apply(rows, experts.reshape(-1), ordered=False)
        else:
            grouping = self._group(experts)
            rows = tokens[grouping.rows]
            out = self._apply(rows, grouping.experts, ordered=True)
            out = out.reshape(-1, out.shape[-1])[grouping.places]
        out = out.reshape(*experts.shape, -1)
        return (out * weights.astype(out.dtype)[..., None]).sum(axis=-2)

    def _apply(self, rows: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Run blocks of rows ``[blocks, rows, H]`` through the expert of each block."""
        if "gate_up_proj" in self:
            gate, up = mx.split(self.gate_up_proj(rows, experts, ordered=ordered), 2, axis=-1)
        else:
            gate = self.gate_proj(rows, experts, ordered=ordered)
            up = self.up_proj(rows, experts, ordered=ordered)
        out: mx.array = self.down_proj(self._activation(gate) * up, experts, ordered=ordered)
        return out

    def _group(self, experts: mx.array) -> _Grouping:
        """Order assignments by expert; on a CPU in whole blocks, the last of each padded.

        The number of blocks has to be known before the assignment is, so it is the largest that
        can be needed; blocks that nothing falls into repeat the first token and are never read.
        """
        count = experts.shape[-1]
        chosen = experts.reshape(-1)
        order = mx.argsort(chosen)
        ordered = chosen[order]
        if mx.default_device().type != mx.DeviceType.cpu:
            return _Grouping(
                rows=(order // count)[:, None], experts=ordered, places=mx.argsort(order)
            )
        total = chosen.size
        numbers = mx.arange(self._experts)
        sizes = mx.zeros((self._experts,), mx.int32).at[chosen].add(1)
        first = mx.cumsum(sizes) - sizes
        needed = (sizes + BLOCK_ROWS - 1) // BLOCK_ROWS
        first_block = mx.cumsum(needed) - needed
        blocks = min(total, total // BLOCK_ROWS + self._experts)
        slots = first_block[ordered] * BLOCK_ROWS + mx.arange(total) - first[ordered]
        source = mx.zeros((blocks * BLOCK_ROWS,), mx.int32)
        source[slots] = (order // count).astype(mx.int32)
        block = mx.arange(blocks)[:, None]
        # The expert of a block is the last one whose blocks begin at or before it.
        started = (first_block[None] <= block) & (needed[None] > 0)
        owners = mx.where(started, numbers[None], 0).max(axis=-1)
        places = mx.zeros((total,), mx.int32)
        places[order] = slots.astype(mx.int32)
        return _Grouping(rows=source.reshape(blocks, BLOCK_ROWS), experts=owners, places=places)
