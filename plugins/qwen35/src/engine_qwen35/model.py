"""The Qwen3.5 text tower: gated delta layers and gated attention, dense or sparse feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engine_core.nn import Embedding, GatedMLP, Linear, Module, RMSNorm, attention_mask, sigmoid
from engine_core.nn.gated_delta import GatedDeltaRule
from engine_core.nn.moe import GatedExperts, softmax_top_k
from engine_core.step import StepInput, StepOutput
from engine_qwen35.mixers import GatedAttention, GatedDeltaNet
from engine_qwen35.rope import StreamRope

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import mlx.core as mx

    from engine_core.cache.base import LayerCache
    from engine_core.cache.kv import KvCache
    from engine_core.cache.recurrent import RecurrentCache
    from engine_core.kernels import KernelRegistry
    from engine_core.nn import AttentionMask
    from engine_qwen35.config import ExpertsConfig, Qwen35Config
    from engine_qwen35.rope import Rotation

__all__ = ["Block", "Qwen35Model", "SparseMLP"]


class SparseMLP(Module):
    """A few of many experts for each token, and one gated expert that serves all tokens."""

    def __init__(
        self, hidden_size: int, config: ExpertsConfig, path: str, parameters: Collection[str]
    ) -> None:
        """Make the projections with placeholder parameters.

        Args:
            hidden_size: H.
            config: Sizes.
            path: Path of this module with its dot.
            parameters: Mapped keys; they tell which projections are joined.
        """
        super().__init__()
        self._per_token = config.per_token
        self.gate = Linear(hidden_size, config.count)
        self.switch_mlp = GatedExperts(hidden_size, config.intermediate_size, config.count)
        self.shared_expert = GatedMLP(
            hidden_size,
            config.shared_intermediate_size,
            fused=f"{path}shared_expert.gate_up_proj.weight" in parameters,
        )
        self.shared_expert_gate = Linear(hidden_size, 1)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the block.

        Args:
            x: ``[B, L, H]``.

        Returns:
            ``[B, L, H]``.
        """
        experts, weights = softmax_top_k(self.gate(x), self._per_token)
        # The weights are rounded to the activations' dtype, as in training.
        routed = self.switch_mlp(x, experts, weights.astype(x.dtype))
        shared = sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return routed + shared


class Block(Module):
    """``x += mixer(norm(x)); x += mlp(norm(x))``."""

    def __init__(
        self,
        config: Qwen35Config,
        mixer: StreamRope | GatedDeltaRule,
        path: str,
        parameters: Collection[str],
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            mixer: The rotation of a full-attention layer, or the rule of a delta layer.
            path: Path of this module with its dot.
            parameters: Mapped keys; they tell which projections are joined.
        """
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        if isinstance(mixer, StreamRope):
            fused = f"{path}self_attn.qkv_proj.weight" in parameters
            self.self_attn = GatedAttention(config, mixer, fused=fused)
        else:
            fused = f"{path}linear_attn.in_proj.weight" in parameters
            self.linear_attn = GatedDeltaNet(config, mixer, fused=fused)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        if config.experts is None:
            fused = f"{path}mlp.gate_up_proj.weight" in parameters
            self.mlp: Module = GatedMLP(hidden, config.intermediate_size, fused=fused)
        else:
            self.mlp = SparseMLP(hidden, config.experts, f"{path}mlp.", parameters)

    def __call__(
        self,
        x: mx.array,
        cache: LayerCache,
        mask: AttentionMask,
        rotation: Rotation,
        lengths: mx.array | None,
    ) -> mx.array:
        """Apply the block.

        Args:
            x: ``[B, L, H]``.
            cache: This layer's cache, of the kind the architecture names.
            mask: For the keys that an attention cache will return.
            rotation: Of this call's rows.
            lengths: Valid rows of each sequence, ``None`` when all are.

        Returns:
            ``[B, L, H]``.
        """
        normal = self.input_layernorm(x)
        if "self_attn" in self:
            x = x + self.self_attn(normal, cast("KvCache", cache), mask, rotation)
        else:
            x = x + self.linear_attn(normal, cast("RecurrentCache", cache), lengths)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(Module):
    """Token table, blocks and final norm: ``language_model.model``."""

    def __init__(
        self,
        config: Qwen35Config,
        path: str,
        parameters: Collection[str],
        kernels: KernelRegistry,
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            path: Path of this module with its dot.
            parameters: Mapped keys; they tell which projections are joined.
            kernels: Registry of custom kernels.
        """
        super().__init__()
        linear = config.linear
        self._rope = StreamRope(config.rope, config.mrope_section)
        rule = GatedDeltaRule(
            kernels,
            key_heads=linear.key_heads,
            value_heads=linear.value_heads,
            key_dim=linear.key_dim,
            value_dim=linear.value_dim,
        )
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [
            Block(config, self._rope if full else rule, f"{path}layers.{index}.", parameters)
            for index, full in enumerate(config.full)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def rope(self) -> StreamRope:
        """The rotation that all full-attention layers share."""
        return self._rope


class LanguageModel(Module):
    """The text tower and, unless tied, its head: ``language_model``."""

    def __init__(
        self, config: Qwen35Config, parameters: Collection[str], kernels: KernelRegistry
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint.
            kernels: Registry of custom kernels.
        """
        super().__init__()
        self.model = Backbone(config, "language_model.model.", parameters, kernels)
        if not config.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)


class Qwen35Model(Module):
    """The model core calls; parameter paths are the mapped keys."""

    def __init__(
        self, config: Qwen35Config, parameters: Collection[str], kernels: KernelRegistry
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint.
            kernels: Registry of custom kernels.
        """
        super().__init__()
        self.language_model = LanguageModel(config, parameters, kernels)

    def embed(self, ids: mx.array) -> mx.array:
        """Look token rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]`` in compute dtype.
        """
        rows: mx.array = self.language_model.model.embed_tokens(ids)
        return rows

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
        tower = self.language_model.model
        x = self.embed(step.ids) if step.embeddings is None else step.embeddings
        rotation = tower.rope.prepare(step.positions)
        mask: AttentionMask = None
        full = next(
            (c for b, c in zip(tower.layers, caches, strict=True) if "self_attn" in b), None
        )
        if full is not None:
            mask = attention_mask(cast("KvCache", full), x.shape[1], step.spans)
        for block, cache in zip(tower.layers, caches, strict=True):
            x = block(x, cache, mask, rotation, step.lengths)
        return StepOutput(hidden=tower.norm(x))

    def head(self, hidden: mx.array) -> mx.array:
        """Project hidden rows to the vocabulary.

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
        return logits
