"""The llama decoder: pre-norm blocks of grouped-query attention and SwiGLU."""

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
    split_heads,
)
from engine_core.step import StepInput, StepOutput

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.cache.kv import KvCache
    from engine_core.nn import AttentionMask
    from engine_llama.config import LlamaConfig

__all__ = ["Attention", "Block", "LlamaModel"]


class Attention(Module):
    """Causal self-attention; rotary positions; each key head serves N / K query heads."""

    def __init__(self, config: LlamaConfig, rope: Rope, *, fused: bool) -> None:
        """Make the projections with placeholder parameters.

        Args:
            config: Sizes.
            rope: Rotation shared by all blocks.
            fused: Whether ``qkv_proj`` stands for the three projections.
        """
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self._heads = config.heads
        self._kv_heads = config.kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._rope = rope
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        if fused:
            self.qkv_proj = Linear(hidden, queries + 2 * keys, bias=bias)
        else:
            self.q_proj = Linear(hidden, queries, bias=bias)
            self.k_proj = Linear(hidden, keys, bias=bias)
            self.v_proj = Linear(hidden, keys, bias=bias)
        self.o_proj = Linear(queries, hidden, bias=bias)

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
        queries, keys, values = self._project(x, positions)
        keys, values = cache.append(keys, values)
        out = attend(queries, keys, values, self._scale, mask)
        return self.o_proj(merge_heads(out))

    def _project(
        self, x: mx.array, positions: int | mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Compute rotated queries, rotated keys and values, ``[B, heads, L, D]`` each."""
        dim = self._head_dim
        if "qkv_proj" in self:
            joined = split_heads(self.qkv_proj(x), dim)
            turned, values = mx.split(joined, [self._heads + self._kv_heads], axis=1)
            queries, keys = mx.split(self._rope(turned, positions), [self._heads], axis=1)
            return queries, keys, values
        queries = self._rope(split_heads(self.q_proj(x), dim), positions)
        keys = self._rope(split_heads(self.k_proj(x), dim), positions)
        return queries, keys, split_heads(self.v_proj(x), dim)


class Block(Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``."""

    def __init__(
        self, config: LlamaConfig, rope: Rope, *, fused_attention: bool, fused_mlp: bool
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            rope: Rotation shared by all blocks.
            fused_attention: Whether q, k and v are one matrix.
            fused_mlp: Whether gate and up are one matrix.
        """
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, rope, fused=fused_attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, fused=fused_mlp, bias=config.mlp_bias
        )

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
    """Token table, blocks and final norm: what checkpoints name ``model.``."""

    def __init__(self, config: LlamaConfig, parameters: Collection[str]) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys; they tell which projections are joined.
        """
        super().__init__()
        rope = Rope(config.rope)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [
            Block(
                config,
                rope,
                fused_attention=f"model.layers.{index}.self_attn.qkv_proj.weight" in parameters,
                fused_mlp=f"model.layers.{index}.mlp.gate_up_proj.weight" in parameters,
            )
            for index in range(config.layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class LlamaModel(Module):
    """The model core calls; parameter paths are the mapped keys."""

    def __init__(self, config: LlamaConfig, parameters: Collection[str]) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint.
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
        return self.model.embed_tokens(ids)

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> StepOutput:
        """Run all blocks and append to the caches.

        Args:
            step: Ids, positions and optional embeddings.
            caches: One cache a block.

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
            return self.lm_head(hidden)
        return self.model.embed_tokens.as_linear(hidden)
