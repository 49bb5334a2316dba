"""The Gemma 4 text tower: shared keys and values, per-layer embeddings, sparse branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from engine_core.nn import (
    Embedding,
    GatedMLP,
    Linear,
    Module,
    RMSNorm,
    attention_mask,
    gated,
    gelu_tanh,
    softcap,
)
from engine_core.step import StepInput, StepOutput
from engine_gemma4.attention import Attention, make_rope
from engine_gemma4.components import component
from engine_gemma4.experts import Experts, Router
from engine_gemma4.weights import HEAD, LAYERS, TEXT

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.cache.kv import KvCache
    from engine_core.nn import AttentionMask, Rope
    from engine_gemma4.attention import KeysValues
    from engine_gemma4.config import Gemma4Config

__all__ = ["Block", "Gemma4Model"]


class Block(Module):
    """One decoder layer.

    Attributes:
        layer_scalar: ``[1]``, factor of the block's output.
    """

    def __init__(
        self, index: int, config: Gemma4Config, rope: Rope, parameters: Collection[str]
    ) -> None:
        """Make the parts that the checkpoint has.

        Args:
            index: Which layer.
            config: Sizes.
            rope: Rotation of this layer's kind.
            parameters: Mapped keys of the checkpoint.
        """
        super().__init__()
        width, eps, layer = config.hidden_size, config.rms_norm_eps, config.layers[index]
        self._path = path = f"{LAYERS}{index}."
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(f"{path}self_attn.", config, layer, rope, parameters)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(
            width,
            layer.mlp_width,
            fused=f"{path}mlp.gate_up_proj.weight" in parameters,
            activation=gelu_tanh,
        )
        self.post_feedforward_layernorm = RMSNorm(width, eps)
        if config.moe is not None:
            self.router = Router(f"{path}router.", config.moe, width, eps, parameters)
            self.experts = Experts(f"{path}experts.", config.moe, width, parameters)
            self.post_feedforward_layernorm_1 = RMSNorm(width, eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(width, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(width, eps)
        inner = config.per_layer_width
        if inner:
            if f"{path}per_layer_input_gate.weight" in parameters:
                self.per_layer_input_gate = Linear(width, inner)
            if f"{path}per_layer_projection.weight" in parameters:
                self.per_layer_projection = Linear(inner, width)
            if f"{path}post_per_layer_input_norm.weight" in parameters:
                self.post_per_layer_input_norm = RMSNorm(width, eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(
        self,
        x: mx.array,
        cache: KvCache,
        mask: AttentionMask,
        positions: int | mx.array,
        donated: KeysValues | None,
        per_layer: mx.array | None,
    ) -> tuple[mx.array, KeysValues]:
        """Apply the layer.

        Args:
            x: ``[B, L, H]``.
            cache: This layer's cache.
            mask: For the keys that are attended to.
            positions: Offset of the first row, or ``[B, L]`` int32.
            donated: Keys and values of the layer that this one shares with.
            per_layer: This layer's own embedding of the rows ``[B, L, P]``.

        Returns:
            ``[B, L, H]``, and the keys and values attended to.

        Raises:
            ModelError: A module that this layer needs is not in the checkpoint.
        """
        attended, fed = self.self_attn(self.input_layernorm(x), cache, mask, positions, donated)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self._feed_forward(x))
        if per_layer is not None:
            x = x + self._per_layer(x, per_layer)
        return x * self["layer_scalar"], fed

    def _feed_forward(self, x: mx.array) -> mx.array:
        """The dense block, and beside it the sparse one, which reads the residual stream."""
        dense = self.mlp(self.pre_feedforward_layernorm(x))
        if "router" not in self:
            return dense
        chosen, weights = self.router(x)
        sparse = self.experts(self.pre_feedforward_layernorm_2(x), chosen, weights)
        return self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(sparse)

    def _per_layer(self, x: mx.array, per_layer: mx.array) -> mx.array:
        gate = component(self, "per_layer_input_gate", self._path)(x)
        projection = component(self, "per_layer_projection", self._path)
        norm = component(self, "post_per_layer_input_norm", self._path)
        out: mx.array = norm(projection(gated(gelu_tanh)(gate, per_layer)))
        return out


class Backbone(Module):
    """Token tables, blocks and final norm: ``language_model.model``."""

    def __init__(
        self, config: Gemma4Config, parameters: Collection[str], compute_dtype: mx.Dtype
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint.
            compute_dtype: Dtype of activations.
        """
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        inner, depth = config.per_layer_width, len(config.layers)
        self._inner = inner
        self._dtype = compute_dtype
        if inner:
            hidden = config.hidden_size
            if f"{TEXT}embed_tokens_per_layer.weight" in parameters:
                self.embed_tokens_per_layer = Embedding(config.per_layer_vocab, depth * inner)
            if f"{TEXT}per_layer_model_projection.weight" in parameters:
                self.per_layer_model_projection = Linear(hidden, depth * inner)
            if f"{TEXT}per_layer_projection_norm.weight" in parameters:
                # The projection's factor H ** -0.5 cancels in the norm, but for its epsilon.
                self.per_layer_projection_norm = RMSNorm(inner, config.rms_norm_eps * hidden)
            self._token_scale = mx.array(inner**0.5, compute_dtype)
            self._mean_scale = mx.array(2**-0.5, mx.float32)
        ropes: dict[tuple[bool, int], Rope] = {}
        self.layers = []
        for index, layer in enumerate(config.layers):
            kind = (layer.sliding, layer.head_dim)
            if kind not in ropes:
                parameters_of = config.sliding_rope if layer.sliding else config.full_rope
                ropes[kind] = make_rope(parameters_of, layer.head_dim)
            self.layers.append(Block(index, config, ropes[kind], parameters))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def per_layer_inputs(self, ids: mx.array, x: mx.array) -> mx.array | None:
        """Make every layer's own embedding of the rows.

        Args:
            ids: ``[B, L]`` int32.
            x: ``[B, L, H]``, scaled embeddings, media rows in place.

        Returns:
            ``[B, L, layers, P]``, ``None`` for models without such embeddings.

        Raises:
            ModelError: One of their modules is not in the checkpoint.
        """
        if not self._inner:
            return None
        shape = (*ids.shape, len(self.layers), self._inner)
        table = component(self, "embed_tokens_per_layer", TEXT)
        projection = component(self, "per_layer_model_projection", TEXT)
        norm = component(self, "per_layer_projection_norm", TEXT)
        token = (table(ids) * self._token_scale).astype(self._dtype).reshape(shape)
        context = norm(projection(x).reshape(shape))
        inputs: mx.array = ((context + token) * self._mean_scale).astype(self._dtype)
        return inputs


class LanguageModel(Module):
    """Backbone and, for untied models, the head."""

    def __init__(
        self, config: Gemma4Config, parameters: Collection[str], compute_dtype: mx.Dtype
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint.
            compute_dtype: Dtype of activations.
        """
        super().__init__()
        self.model = Backbone(config, parameters, compute_dtype)
        if HEAD in parameters or not config.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)


class Gemma4Model(Module):
    """The whole text tower, addressed by canonical keys."""

    def __init__(
        self, config: Gemma4Config, parameters: Collection[str], compute_dtype: mx.Dtype
    ) -> None:
        """Make the layers with placeholder parameters.

        Args:
            config: Sizes.
            parameters: Mapped keys of the checkpoint.
            compute_dtype: Dtype of activations; constants are rounded to it.
        """
        super().__init__()
        self._config = config
        self.language_model = LanguageModel(config, parameters, compute_dtype)
        self._dtype = compute_dtype
        # transformers rounds this factor to the activations' dtype, and so do the trained weights.
        self._embed_scale = mx.array(config.hidden_size**0.5, compute_dtype)
        self._donors = frozenset(layer.donor for layer in config.layers)

    def embed(self, ids: mx.array) -> mx.array:
        """Look token rows up and scale them by sqrt(H).

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]`` in compute dtype.
        """
        rows: mx.array = self.language_model.model.embed_tokens(ids)
        return (rows * self._embed_scale).astype(self._dtype)

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> StepOutput:
        """Run all blocks and append to the caches.

        Args:
            step: Ids, positions, optional embeddings and spans of media rows.
            caches: One attention cache a block; a sharing block's is its donor's.

        Returns:
            Hidden states after the final norm.

        Raises:
            ModelError: The positions cannot be honoured, or a module is not in the checkpoint.
        """
        tower = self.language_model.model
        x = self.embed(step.ids) if step.embeddings is None else step.embeddings
        ids = step.ids if step.embeddings is None else self._without_media(step.ids)
        per_layer = tower.per_layer_inputs(ids, x)
        masks: dict[int | None, AttentionMask] = {}
        fed: dict[int, KeysValues] = {}
        # Architecture.layers asks for attention caches only.
        attention_caches = cast("Sequence[KvCache]", caches)
        for index, (block, cache) in enumerate(zip(tower.layers, attention_caches, strict=True)):
            # A donor comes first, so no mask is asked for after its cache has grown.
            if cache.window not in masks:
                masks[cache.window] = self._mask(cache, x.shape[1], step.spans)
            donor = self._config.layers[index].donor
            x, keys_values = block(
                x,
                cache,
                masks[cache.window],
                step.positions,
                None if donor is None else fed[donor],
                None if per_layer is None else per_layer[:, :, index],
            )
            if index in self._donors:
                fed[index] = keys_values
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
        cap = self._config.final_softcap
        return logits if cap is None else softcap(logits, cap)

    def _mask(self, cache: KvCache, rows: int, spans: Sequence[tuple[int, int]]) -> AttentionMask:
        rule = self._config.spans
        if rule == "none" or (rule == "sliding" and cache.window is None):
            spans = ()
        return attention_mask(cache, rows, spans, window_bounds_spans=rule == "sliding")

    def _without_media(self, ids: mx.array) -> mx.array:
        """Media rows have no per-layer embedding of their own; they take the padding token's."""
        for placeholder in self._config.placeholders:
            ids = mx.where(ids == placeholder, self._config.pad_token, ids)
        return ids
