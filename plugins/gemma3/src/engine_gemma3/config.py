"""Gemma 3 configuration: every published spelling parsed into one record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from engine_core.checkpoint.config import CheckpointConfig

__all__ = ["Gemma3Config", "RopeParameters"]

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
ACTIVATIONS: Final = ("gelu_pytorch_tanh", "gelu_tanh")

# Values that sparse published configurations leave out (transformers' defaults).
DEFAULT_VOCAB_SIZE: Final = 262_208
DEFAULT_PATTERN: Final = 6
DEFAULT_FULL_THETA: Final = 1_000_000.0
DEFAULT_SLIDING_THETA: Final = 10_000.0


@attrs.frozen(kw_only=True)
class RopeParameters:
    """Rotary embedding of one layer type.

    Attributes:
        theta: Base of the frequencies.
        factor: Positions are divided by it (linear scaling); 1 for none.
    """

    theta: float
    factor: float = 1.0


@attrs.frozen(kw_only=True)
class Gemma3Config:
    """What the text tower needs.

    Attributes:
        hidden_size: H.
        layers: Number of decoder layers.
        intermediate_size: Width of the feed-forward block.
        heads: N, query heads.
        kv_heads: K, key and value heads.
        head_dim: D.
        vocab_size: V.
        rms_norm_eps: Added to the mean square under the root.
        query_scalar: Attention scale is its inverse square root.
        sliding_window: Positions a sliding layer sees, itself included (tokens).
        sliding: For each layer whether it is a sliding one.
        full_rope: Rotary parameters of full layers.
        sliding_rope: Rotary parameters of sliding layers.
        final_softcap: ``c`` of ``c * tanh(logits / c)``, ``None`` for none.
        context_length: ``max_position_embeddings`` (tokens).
        multimodal: Whether the checkpoint belongs to the conditional-generation class.
    """

    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    query_scalar: float
    sliding_window: int
    sliding: tuple[bool, ...]
    full_rope: RopeParameters
    sliding_rope: RopeParameters
    final_softcap: float | None
    context_length: int
    multimodal: bool

    @classmethod
    def parse(cls, config: CheckpointConfig) -> Gemma3Config:
        """Read ``config.json``.

        Args:
            config: The whole file; text fields stand under ``text_config`` or at the root.

        Returns:
            The record.

        Raises:
            ConfigError: A field is missing, malformed, or asks for something unsupported.
        """
        nested = "text_config" in config
        text = config.section("text_config") if nested else config
        for flag in ("use_bidirectional_attention", "attention_bias"):
            if text.boolean(flag, default=False):
                raise text.error(flag, "must be false for this family", text.get(flag))
        if text.number("attn_logit_softcapping", default=None) is not None:
            raise text.error(
                "attn_logit_softcapping", "is not supported", text.get("attn_logit_softcapping")
            )
        text.string("hidden_activation", default=ACTIVATIONS[0], choices=ACTIVATIONS)
        layers = text.integer("num_hidden_layers", minimum=1, maximum=1024)
        heads = text.integer("num_attention_heads", default=8, minimum=1)
        kv_heads = text.integer("num_key_value_heads", default=4, minimum=1)
        if heads % kv_heads:
            raise text.error(
                "num_attention_heads",
                f"must be a multiple of num_key_value_heads ({kv_heads})",
                heads,
            )
        head_dim = text.integer("head_dim", default=256, minimum=2)
        if head_dim % 2:
            raise text.error("head_dim", "must be even", head_dim)
        vocab_size = text.integer("vocab_size", default=None, minimum=1)
        if vocab_size is None:
            vocab_size = config.integer("vocab_size", default=DEFAULT_VOCAB_SIZE, minimum=1)
        return cls(
            hidden_size=text.integer("hidden_size", minimum=1),
            layers=layers,
            intermediate_size=text.integer("intermediate_size", minimum=1),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            rms_norm_eps=text.number("rms_norm_eps", default=1e-6),
            query_scalar=text.number("query_pre_attn_scalar", default=256.0, above=0),
            sliding_window=text.integer("sliding_window", default=4096, minimum=1),
            sliding=_layer_mix(text, layers),
            full_rope=_full_rope(text),
            sliding_rope=_sliding_rope(text),
            final_softcap=text.number("final_logit_softcapping", default=None, above=0),
            context_length=text.integer("max_position_embeddings", default=131_072, minimum=1),
            multimodal=nested,
        )


def _layer_mix(text: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    """Say for each layer whether it slides: ``layer_types``, else a pattern, else 6."""
    names = text.sequence("layer_types", default=None, length=layers, choices=(FULL, SLIDING))
    if names is not None:
        return tuple(name == SLIDING for name in names)
    period = text.integer("sliding_window_pattern", default=None, minimum=1)
    if period is None:
        period = text.integer("_sliding_window_pattern", default=DEFAULT_PATTERN, minimum=1)
    return tuple((index + 1) % period != 0 for index in range(layers))


def _rope_kind(section: CheckpointConfig) -> str | None:
    """Read ``rope_type`` or its older name ``type``."""
    field = "rope_type" if "rope_type" in section else "type"
    return section.string(field, default=None, choices=("default", "linear"))


def _linear_factor(section: CheckpointConfig) -> float:
    is_linear = _rope_kind(section) == "linear"
    return section.number("factor", default=1.0, above=0) if is_linear else 1.0


def _full_rope(text: CheckpointConfig) -> RopeParameters:
    """Resolve a full layer's rope: nested entry, then flat fields, field by field."""
    parameters = text.section("rope_parameters")
    flat_parameters = "rope_theta" in parameters or "rope_type" in parameters
    nested = parameters if flat_parameters else parameters.section(FULL)
    theta = nested.number("rope_theta", default=None, above=1)
    if theta is None:
        theta = text.number("rope_theta", default=DEFAULT_FULL_THETA, above=1)
    # The flat scaling counts only when the nested entry says nothing about scaling itself.
    silent = _rope_kind(nested) is None and "factor" not in nested
    scaling = text.section("rope_scaling") if silent else nested
    return RopeParameters(theta=theta, factor=_linear_factor(scaling))


def _sliding_rope(text: CheckpointConfig) -> RopeParameters:
    """Resolve a sliding layer's rope; it never inherits ``rope_scaling``."""
    nested = text.section("rope_parameters").section(SLIDING)
    theta = nested.number("rope_theta", default=None, above=1)
    if theta is None:
        theta = text.number("rope_local_base_freq", default=DEFAULT_SLIDING_THETA, above=1)
    return RopeParameters(theta=theta, factor=_linear_factor(nested))
