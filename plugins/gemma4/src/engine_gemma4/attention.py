"""Attention of one layer: its own keys and values, raw keys as values, or another layer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.nn import Linear, Module, RMSNorm, Rope, attend, merge_heads, split_heads
from engine_core.rope_spec import LinearScaling, RopeSpec
from engine_gemma4.components import component

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine_core.cache.kv import KvCache
    from engine_core.nn import AttentionMask
    from engine_gemma4.config import Gemma4Config, RopeParameters
    from engine_gemma4.layers import LayerConfig

__all__ = ["Attention", "KeysValues", "make_rope"]

KeysValues = tuple[mx.array, mx.array]
"""Keys and values ``[B, K, S, D]`` that a layer attended to in this call."""


def make_rope(parameters: RopeParameters, head_dim: int) -> Rope:
    """Build the rotation of one kind of layer.

    Args:
        parameters: Rotary parameters.
        head_dim: D.

    Returns:
        The rotation.
    """
    scaling = None if parameters.factor == 1.0 else LinearScaling(factor=parameters.factor)
    return Rope(
        RopeSpec(
            head_dim=head_dim,
            theta=parameters.theta,
            partial_rotary_factor=parameters.rotary_share,
            proportional=parameters.proportional,
            scaling=scaling,
        )
    )


class Attention(Module):
    """Grouped-query attention with softmax scale 1.

    Queries and keys are normalised per head before rotation, values without a scale. A layer
    without keys of its own reads what another layer attended to in the same call.
    """

    def __init__(
        self,
        path: str,
        config: Gemma4Config,
        layer: LayerConfig,
        rope: Rope,
        parameters: Collection[str],
    ) -> None:
        """Make the projections that the checkpoint has.

        Args:
            path: This module's path, with a dot at its end.
            config: Sizes.
            layer: What is special about this layer.
            rope: Rotation of this layer's kind.
            parameters: Mapped keys of the checkpoint.
        """
        super().__init__()
        hidden, eps, dim = config.hidden_size, config.rms_norm_eps, layer.head_dim
        self._path = path
        self._rope = rope
        self._head_dim = dim
        self._key_is_value = layer.key_is_value
        queries, keys = config.heads * dim, layer.kv_heads * dim
        # Where the joined rows of queries, keys and values end, counted in heads.
        self._borders = [config.heads, config.heads + layer.kv_heads]

        def stored(name: str) -> bool:
            return f"{path}{name}.weight" in parameters

        if stored("qkv_proj"):
            self.qkv_proj = Linear(hidden, queries + 2 * keys)
        elif stored("qk_proj"):
            self.qk_proj = Linear(hidden, queries + keys)
        else:
            self.q_proj = Linear(hidden, queries)
            if stored("k_proj"):
                self.k_proj = Linear(hidden, keys)
            if stored("v_proj"):
                self.v_proj = Linear(hidden, keys)
        self.o_proj = Linear(queries, hidden)
        self.q_norm = RMSNorm(dim, eps)
        if layer.donor is None:
            if stored("k_norm"):
                self.k_norm = RMSNorm(dim, eps)
            self.v_norm = RMSNorm(dim, eps, with_scale=False)

    def __call__(
        self,
        x: mx.array,
        cache: KvCache,
        mask: AttentionMask,
        positions: int | mx.array,
        donated: KeysValues | None,
    ) -> tuple[mx.array, KeysValues]:
        """Attend.

        Args:
            x: ``[B, L, H]``.
            cache: This layer's cache; grows by L rows unless keys and values are donated.
            mask: For the keys that are attended to.
            positions: Offset of the first row, or ``[B, L]`` int32.
            donated: Keys and values of the layer that this one shares with.

        Returns:
            ``[B, L, H]``, and the keys and values attended to.

        Raises:
            ModelError: A projection that this layer needs is not in the checkpoint.
        """
        queries, keys, values = self._project(x, shares=donated is not None)
        queries = self._rope(self.q_norm(queries), positions)
        if donated is None:
            norm = component(self, "k_norm", self._path)
            keys = self._rope(norm(keys), positions)
            donated = cache.append(keys, self.v_norm(values))
        out = attend(queries, *donated, 1.0, mask)
        return self.o_proj(merge_heads(out)), donated

    def _project(self, x: mx.array, *, shares: bool) -> tuple[mx.array, mx.array, mx.array]:
        """Compute queries, keys and values ``[B, heads, L, D]``; a sharing layer needs none."""
        if "qkv_proj" in self:
            joined = self._heads(self.qkv_proj(x))
            queries, keys, values = mx.split(joined, self._borders, axis=1)
            return queries, keys, values
        if "qk_proj" in self:
            queries, keys = mx.split(self._heads(self.qk_proj(x)), self._borders[:1], axis=1)
            return queries, keys, keys
        queries = self._heads(self.q_proj(x))
        if shares:
            return queries, queries, queries
        keys = self._heads(component(self, "k_proj", self._path)(x))
        if self._key_is_value:
            return queries, keys, keys
        return queries, keys, self._heads(component(self, "v_proj", self._path)(x))

    def _heads(self, rows: mx.array) -> mx.array:
        return split_heads(rows, self._head_dim)
