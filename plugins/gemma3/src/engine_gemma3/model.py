"""The Gemma 3 text tower: norms on both sides of each block, mixed full and sliding attention."""

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
    gelu_tanh,
    merge_heads,
    project_heads,
    softcap,
)
from engine_core.rope_spec import LinearScaling, RopeSpec
from engine_core.step import StepInput, StepOutput

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.cache.kv import KvCache
    from engine_core.nn import AttentionMask
    from engine_gemma3.config import Gemma3Config, RopeParameters

__all__ = ["Attention", "Block", "Gemma3Model"]


def _rope(parameters: RopeParameters, head_dim: int) -> Rope:
    scaling = None if parameters.factor == 1.0 else LinearScaling(factor=parameters.factor)
    return Rope(RopeSpec(head_dim=head_dim, theta=parameters.theta, scaling=scaling))


class Attention(Module):
    """Grouped-query attention whose queries and keys are normalised per head before rotation."""

    def __init__(self, config: Gemma3Config, rope: Rope, *, fused: bool) -> None:
        """Make the projections with placeholder parameters.

        Args:
            config: Sizes.
            rope: Rotation of this layer's kind.
            fused: Whether ``qkv_proj`` stands for the three projections.
        """
        super().__init__()
        hidden = config.hidden_size
        self._heads = config.heads
        self._kv_heads = config.kv_heads
        self._head_dim = config.head_dim
        self._scale = config.query_scalar**-0.5
        self._rope = rope
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        if fused:
            self.qkv_proj = Linear(hidden, queries + 2 * keys)
        else:
            self.q_proj = Linear(hidden, queries)
            self.k_proj = Linear(hidden, keys)
            self.v_proj = Linear(hidden, keys)
        self.o_proj = Linear(queries, hidden)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

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
        out = attend(queries, keys, values, self._scale, mask)
        return self.o_proj(merge_heads(out))


class Block(Module):
    """``x += norm(attention(norm(x))); x += norm(mlp(norm(x)))``."""

    def __init__(
        self, config: Gemma3Config, rope: Rope, *, fused_attention: bool, fused_mlp: bool
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            rope: Rotation of this layer's kind.
            fused_attention: Whether q, k and v are one matrix.
            fused_mlp: Whether gate and up are one matrix.
        """
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config, rope, fused=fused_attention)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(
            width,
            config.intermediate_size,
            fused=fused_mlp,
            activation=gelu_tanh,
        )
        self.post_feedforward_layernorm = RMSNorm(width, eps)

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
        attended = self.self_attn(self.input_layernorm(x), cache, mask, positions)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Backbone(Module):
    """Token table, blocks and final norm: ``language_model.model``."""

    def __init__(self, config: Gemma3Config, prefix: str, parameters: Collection[str]) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            prefix: Path of this module with its dot.
            parameters: Mapped keys; they tell which projections are joined.
        """
        super().__init__()
        # Two rotations serve all layers.
        full = _rope(config.full_rope, config.head_dim)
        sliding = _rope(config.sliding_rope, config.head_dim)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [
            Block(
                config,
                sliding if slides else full,
                fused_attention=f"{prefix}layers.{index}.self_attn.qkv_proj.weight" in parameters,
                fused_mlp=f"{prefix}layers.{index}.mlp.gate_up_proj.weight" in parameters,
            )
            for index, slides in enumerate(config.sliding)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LanguageModel(Module):
    """The text tower with its head when the checkpoint has one: ``language_model``."""

    def __init__(self, config: Gemma3Config, parameters: Collection[str]) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint.
        """
        super().__init__()
        self.model = Backbone(config, "language_model.model.", parameters)
        if "language_model.lm_head.weight" in parameters:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)


class Gemma3Model(Module):
    """The model core calls; parameter paths are the mapped keys."""

    def __init__(
        self, config: Gemma3Config, parameters: Collection[str], compute_dtype: mx.Dtype
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint.
            compute_dtype: Dtype of activations; the embedding's factor is rounded to it.
        """
        super().__init__()
        self.language_model = LanguageModel(config, parameters)
        # transformers rounds this factor to the activations' dtype, and so do the trained weights.
        self._embed_scale = mx.array(config.hidden_size**0.5, compute_dtype)
        self._softcap = config.final_softcap

    def embed(self, ids: mx.array) -> mx.array:
        """Look token rows up and scale them by sqrt(H).

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]`` in compute dtype.
        """
        rows: mx.array = self.language_model.model.embed_tokens(ids)
        return rows * self._embed_scale

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
        tower = self.language_model.model
        x = self.embed(step.ids) if step.embeddings is None else step.embeddings
        # Architecture.layers asks for attention caches only.
        attention_caches = cast("Sequence[KvCache]", caches)
        masks = attention_masks(attention_caches, x.shape[1], step.spans)
        for block, cache, mask in zip(tower.layers, attention_caches, masks, strict=True):
            x = block(x, cache, mask, step.positions)
        return StepOutput(hidden=tower.norm(x))

    def head(self, hidden: mx.array) -> mx.array:
        """Project hidden rows to the vocabulary, softcap included.

        Args:
            hidden: ``[B, N, H]``.

        Returns:
            ``[B, N, V]``.
        """
        tower = self.language_model
        if "lm_head" in tower:
            logits: mx.array = tower.lm_head(hidden)
        else:
            logits = tower.model.embed_tokens.as_linear(hidden)
        return logits if self._softcap is None else softcap(logits, self._softcap)
