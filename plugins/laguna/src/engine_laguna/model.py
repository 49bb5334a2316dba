"""The Laguna decoder: gated attention of varying width, dense and sparse feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from engine_core.nn import (
    Embedding,
    GatedMLP,
    Linear,
    Module,
    RMSNorm,
    Rope,
    attend,
    attention_masks,
    merge_heads,
    project_heads,
)
from engine_core.step import StepInput, StepOutput
from engine_laguna.moe import SparseBlock

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.cache.kv import KvCache
    from engine_core.nn import AttentionMask
    from engine_laguna.config import LagunaConfig, LayerConfig

__all__ = ["Attention", "Block", "LagunaModel"]


class Attention(Module):
    """Grouped-query attention with normalised queries and keys and a gate on its output.

    The gate is ``softplus`` of a projection of the block's own input, one value a head or one a
    channel, computed in float32.

    Source: transformers ``LagunaAttention``.
    """

    def __init__(
        self, config: LagunaConfig, layer: LayerConfig, rope: Rope, *, fused: bool
    ) -> None:
        """Make the projections with placeholder parameters.

        Args:
            config: Sizes of all layers.
            layer: What is this layer's own.
            rope: Rotation of this layer's kind.
            fused: Whether ``qkv_proj`` stands for the three projections.
        """
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, config.attention_bias
        self._heads = layer.heads
        self._kv_heads = config.kv_heads
        self._head_dim = size
        self._scale = size**-0.5
        self._rope = rope
        queries, keys = layer.heads * size, config.kv_heads * size
        if fused:
            self.qkv_proj = Linear(hidden, queries + 2 * keys, bias=bias)
        else:
            self.q_proj = Linear(hidden, queries, bias=bias)
            self.k_proj = Linear(hidden, keys, bias=bias)
            self.v_proj = Linear(hidden, keys, bias=bias)
        self.g_proj = Linear(hidden, queries if layer.gates_elements else layer.heads)
        self.o_proj = Linear(queries, hidden, bias=bias)
        self.q_norm = RMSNorm(size, config.norm_eps)
        self.k_norm = RMSNorm(size, config.norm_eps)

    def __call__(
        self, x: mx.array, cache: KvCache, mask: AttentionMask, positions: int | mx.array
    ) -> mx.array:
        """Attend.

        Args:
            x: ``[B, L, H]``.
            cache: This layer's cache; grows by L rows.
            mask: For the keys that the cache will return.
            positions: Offset of the first row, or ``[B, L]`` int32.

        Returns:
            ``[B, L, H]``.
        """
        queries, keys, values = project_heads(self, x, self._heads, self._kv_heads, self._head_dim)
        queries = self._rope(self.q_norm(queries), positions)
        keys = self._rope(self.k_norm(keys), positions)
        keys, values = cache.append(keys, values)
        out = merge_heads(attend(queries, keys, values, self._scale, mask))
        # softplus, without overflow
        gate = mx.logaddexp(self.g_proj(x).astype(mx.float32), 0.0).astype(out.dtype)
        # A gate a channel lies as the merged heads do; a gate a head serves all its channels.
        if gate.shape != out.shape:
            heads = out.reshape(*gate.shape, self._head_dim) * gate[..., None]
            return self.o_proj(heads.reshape(out.shape))
        return self.o_proj(out * gate)


class Block(Module):
    """``x += attention(norm(x)); x += feed_forward(norm(x))``."""

    def __init__(
        self,
        config: LagunaConfig,
        layer: LayerConfig,
        rope: Rope,
        path: str,
        parameters: Collection[str],
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes of all layers.
            layer: What is this layer's own.
            rope: Rotation of this layer's kind.
            path: Path of this block with its dot.
            parameters: Mapped keys; they tell which projections are joined.
        """
        super().__init__()

        def joined(name: str) -> bool:
            return f"{path}{name}.weight" in parameters

        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(hidden, config.norm_eps)
        self.self_attn = Attention(config, layer, rope, fused=joined("self_attn.qkv_proj"))
        self.post_attention_layernorm = RMSNorm(hidden, config.norm_eps)
        self.mlp: GatedMLP | SparseBlock
        if layer.sparse and config.experts is not None:
            self.mlp = SparseBlock(
                hidden,
                config.experts,
                fused_shared=joined("mlp.shared_expert.gate_up_proj"),
            )
        else:
            self.mlp = GatedMLP(hidden, config.intermediate_size, fused=joined("mlp.gate_up_proj"))

    def __call__(
        self, x: mx.array, cache: KvCache, mask: AttentionMask, positions: int | mx.array
    ) -> mx.array:
        """Apply the block.

        Args:
            x: ``[B, L, H]``.
            cache: This layer's cache.
            mask: For the keys that the cache will return.
            positions: Offset of the first row, or ``[B, L]`` int32.

        Returns:
            ``[B, L, H]``.
        """
        x = x + self.self_attn(self.input_layernorm(x), cache, mask, positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(Module):
    """Token table, blocks and final norm: ``model``."""

    def __init__(self, config: LagunaConfig, parameters: Collection[str]) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint.
        """
        super().__init__()
        # Two rotations serve all layers.
        full, sliding = Rope(config.full_rope), Rope(config.sliding_rope)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [
            Block(
                config,
                layer,
                sliding if layer.slides else full,
                f"model.layers.{index}.",
                parameters,
            )
            for index, layer in enumerate(config.layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class LagunaModel(Module):
    """The model core calls; parameter paths are the mapped keys."""

    def __init__(self, config: LagunaConfig, parameters: Collection[str]) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint; a separate head is among them or not.
        """
        super().__init__()
        self.model = Backbone(config, parameters)
        if not config.is_tied(parameters):
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def embed(self, ids: mx.array) -> mx.array:
        """Look token rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]`` in compute dtype.
        """
        rows: mx.array = self.model.embed_tokens(ids)
        return rows

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> StepOutput:
        """Run all blocks and append to the caches.

        Args:
            step: Ids, positions and optional embeddings.
            caches: One attention cache a block.

        Returns:
            Hidden states after the final norm.

        Raises:
            ModelError: The positions cannot be honoured.
        """
        x = self.embed(step.ids) if step.embeddings is None else step.embeddings
        # Architecture.layers asks for attention caches only.
        attention_caches = cast("Sequence[KvCache]", caches)
        masks = attention_masks(attention_caches, x.shape[1], step.spans)
        for block, cache, mask in zip(self.model.layers, attention_caches, masks, strict=True):
            x = block(x, cache, mask, step.positions)
        return StepOutput(hidden=self.model.norm(x))

    def head(self, hidden: mx.array) -> mx.array:
        """Project hidden rows to the vocabulary.

        Args:
            hidden: ``[B, N, H]``.

        Returns:
            ``[B, N, V]``.
        """
        if "lm_head" in self:
            logits: mx.array = self.lm_head(hidden)
            return logits
        return self.model.embed_tokens.as_linear(hidden)
