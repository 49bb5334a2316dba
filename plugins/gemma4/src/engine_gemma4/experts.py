"""The sparse branch: a router over normalised rows, and experts of one gated block each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn

from engine_core.nn import Linear, Module
from engine_gemma4.components import component

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine_core.quantization import QuantizationSpec
    from engine_gemma4.config import MoeConfig

__all__ = ["Experts", "Router"]

# From this many chosen rows on, sorting them by expert reads every expert's weight once.
SORT_ROWS = 64


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
            x: ``[B, L, H]``, the residual stream.

        Returns:
            Expert indices ``[B, L, k]`` and their weights ``[B, L, k]`` float32.
        """
        proj = component(self, "proj", self._path)
        rows = mx.fast.rms_norm(x, self["scale"] * self._root, self._eps)
        scores = proj(rows).astype(mx.float32)
        chosen = mx.argpartition(scores, kth=-self._top_k, axis=-1)[..., -self._top_k :]
        # The softmax over all experts, renormalised over the chosen ones, is a softmax over these.
        weights = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1)
        return chosen, weights * self["per_expert_scale"][chosen].astype(mx.float32)


class ExpertLinear(Module):
    """One projection an expert.

    Attributes:
        weight: ``[E, out, in]``.
    """

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        """Make a placeholder weight.

        Args:
            experts: E.
            in_features: Size of the last axis of the input.
            out_features: Size of the last axis of the output.
        """
        super().__init__()
        self.weight = mx.zeros((experts, out_features, in_features))

    def __call__(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """Project each row by its expert.

        Args:
            x: ``[..., 1, in]``.
            experts: Index of the expert of each row.
            is_sorted: Whether the indices ascend.

        Returns:
            ``[..., 1, out]``.
        """
        weight: mx.array = self["weight"]
        dtype = x.dtype
        if dtype != mx.float32 and mx.default_device().type == mx.DeviceType.cpu:
            # MLX gathers matrices on a CPU in float32 only.
            x, weight = x.astype(mx.float32), weight.astype(mx.float32)
        out = mx.gather_mm(
            x, weight.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=is_sorted
        )
        return out.astype(dtype)

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

    def __call__(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """Project each row by its expert.

        Args:
            x: ``[..., 1, in]``.
            experts: Index of the expert of each row.
            is_sorted: Whether the indices ascend.

        Returns:
            ``[..., 1, out]``.
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
            sorted_indices=is_sorted,
        )


class Experts(Module):
    """Gated blocks, one an expert; gate and up are one projection when they are stored alike."""

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
        super().__init__()
        self._path = path
        sizes = {
            "gate_up_proj": (hidden, 2 * config.width),
            "gate_proj": (hidden, config.width),
            "up_proj": (hidden, config.width),
            "down_proj": (config.width, hidden),
        }
        for name, (columns, rows) in sizes.items():
            if f"{path}{name}.weight" in parameters:
                setattr(self, name, ExpertLinear(config.experts, columns, rows))

    def __call__(self, x: mx.array, experts: mx.array, weights: mx.array) -> mx.array:
        """Sum the chosen experts' outputs.

        Args:
            x: ``[B, L, H]``.
            experts: ``[B, L, k]``.
            weights: ``[B, L, k]``.

        Returns:
            ``[B, L, H]``.
        """
        is_sorted = experts.size >= SORT_ROWS
        if is_sorted:
            flat = experts.reshape(-1)
            order = mx.argsort(flat)
            rows = x.reshape(-1, 1, x.shape[-1])[order // experts.shape[-1]]
            sorted_out = self._blocks(rows, flat[order], is_sorted=True)
            out = sorted_out[mx.argsort(order)].reshape(*experts.shape, -1)
        else:
            rows = mx.expand_dims(x, (-2, -3))
            out = self._blocks(rows, experts, is_sorted=False).squeeze(-2)
        return (out * weights[..., None]).sum(axis=-2).astype(x.dtype)

    def _blocks(self, rows: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        if "gate_up_proj" in self:
            joined = self.gate_up_proj(rows, experts, is_sorted=is_sorted)
            gate, up = mx.split(joined, 2, axis=-1)
        else:
            gate, up = (
                component(self, name, self._path)(rows, experts, is_sorted=is_sorted)
                for name in ("gate_proj", "up_proj")
            )
        down = component(self, "down_proj", self._path)
        out: mx.array = down(mlx.nn.gelu_approx(gate) * up, experts, is_sorted=is_sorted)
        return out
