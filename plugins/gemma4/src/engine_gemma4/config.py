"""Gemma 4 configuration: every published spelling parsed into one record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import attrs

from engine_core.errors import ConfigError
from engine_gemma4.layers import FULL, SLIDING, LayerConfig, resolve_layers

if TYPE_CHECKING:
    from engine_core.checkpoint.config import CheckpointConfig

__all__ = ["DRAFTERS", "Gemma4Config", "MoeConfig", "RopeParameters", "SpanRule"]

TEXT_TYPES: Final = ("gemma4_text", "gemma4_unified_text")
DRAFTERS: Final = frozenset({"gemma4_assistant", "gemma4_unified_assistant"})

ACTIVATIONS: Final = ("gelu_pytorch_tanh", "gelu_tanh")

# Values that published configurations leave out (transformers' defaults).
DEFAULT_VOCAB_SIZE: Final = 262_144
DEFAULT_PER_LAYER_WIDTH: Final = 256
DEFAULT_WINDOW: Final = 512
DEFAULT_UNIFIED_WINDOW: Final = 1024
DEFAULT_CONTEXT: Final = 131_072
DEFAULT_UNIFIED_CONTEXT: Final = 262_144
DEFAULT_FULL_THETA: Final = 1_000_000.0
DEFAULT_SLIDING_THETA: Final = 10_000.0
DEFAULT_ROTARY_SHARE: Final = 0.25
PLACEHOLDERS: Final = {
    "image_token_id": 258_880,
    "audio_token_id": 258_881,
    "video_token_id": 258_884,
}

SpanRule = Literal["none", "sliding", "all"]
"""Which layers let the rows of a media span see one another: none; the sliding ones, within their
window; or all of them, whatever the window."""


@attrs.frozen(kw_only=True)
class RopeParameters:
    """Rotary embedding of one layer type.

    Attributes:
        theta: Base of the frequencies.
        factor: Frequencies are divided by it; 1 for none.
        rotary_share: Share of the pairs that turn.
        proportional: Whether pairs and exponents are those of the whole head.
    """

    theta: float
    factor: float = 1.0
    rotary_share: float = 1.0
    proportional: bool = False


@attrs.frozen(kw_only=True)
class MoeConfig:
    """The sparse branch that stands beside every dense block.

    Attributes:
        experts: Number of experts.
        top_k: Experts a token.
        width: Width of one expert's gated row.
    """

    experts: int
    top_k: int
    width: int


@attrs.frozen(kw_only=True)
class Gemma4Config:
    """What the text tower needs.

    Attributes:
        hidden_size: H.
        heads: N, query heads of every layer.
        vocab_size: V.
        rms_norm_eps: Added to the mean square under the root.
        sliding_window: Positions a sliding layer sees, itself included (tokens).
        layers: What differs from layer to layer.
        full_rope: Rotary parameters of full layers.
        sliding_rope: Rotary parameters of sliding layers.
        final_softcap: ``c`` of ``c * tanh(logits / c)``, ``None`` for none.
        context_length: ``max_position_embeddings`` (tokens).
        per_layer_width: P, size of a layer's own token embedding, 0 for none.
        per_layer_vocab: Rows of the table of those embeddings.
        moe: Sparse branch, ``None`` for dense models.
        tied: Whether the head may be the token table.
        unified: Whether media enter without towers.
        multimodal: Whether the checkpoint belongs to a conditional-generation class.
        spans: How media spans are attended.
        placeholders: Ids that stand for media rows.
        pad_token: Id whose per-layer embedding media rows take.
    """

    hidden_size: int
    heads: int
    vocab_size: int
    rms_norm_eps: float
    sliding_window: int
    layers: tuple[LayerConfig, ...]
    full_rope: RopeParameters
    sliding_rope: RopeParameters
    final_softcap: float | None
    context_length: int
    per_layer_width: int
    per_layer_vocab: int
    moe: MoeConfig | None
    tied: bool
    unified: bool
    multimodal: bool
    spans: SpanRule
    placeholders: tuple[int, ...]
    pad_token: int

    @classmethod
    def parse(cls, config: CheckpointConfig) -> Gemma4Config:
        """Read ``config.json``.

        Args:
            config: The whole file; text fields stand under ``text_config`` or at the root.

        Returns:
            The record.

        Raises:
            ConfigError: A field is missing, malformed, or asks for something unsupported.
        """
        _refuse_foreign(config)
        nested = "text_config" in config
        text = config.section("text_config") if nested else config
        _refuse_unsupported(text)
        unified = _is_unified(config, text)
        vocab_size = text.integer("vocab_size", default=None, minimum=1)
        if vocab_size is None:
            vocab_size = config.integer("vocab_size", default=DEFAULT_VOCAB_SIZE, minimum=1)
        heads = text.integer("num_attention_heads", default=8, minimum=1)
        width = text.integer(
            "hidden_size_per_layer_input",
            default=0 if unified else DEFAULT_PER_LAYER_WIDTH,
            minimum=0,
        )
        return cls(
            hidden_size=text.integer("hidden_size", minimum=1),
            heads=heads,
            vocab_size=vocab_size,
            rms_norm_eps=text.number("rms_norm_eps", default=1e-6),
            sliding_window=text.integer(
                "sliding_window",
                default=DEFAULT_UNIFIED_WINDOW if unified else DEFAULT_WINDOW,
                minimum=1,
            ),
            layers=resolve_layers(text, heads),
            full_rope=_rope(text, FULL),
            sliding_rope=_rope(text, SLIDING),
            final_softcap=text.number("final_logit_softcapping", default=None, above=0),
            context_length=text.integer(
                "max_position_embeddings",
                default=DEFAULT_UNIFIED_CONTEXT if unified else DEFAULT_CONTEXT,
                minimum=1,
            ),
            per_layer_width=width,
            # Every id is looked up there too, and a device checks no index.
            per_layer_vocab=text.integer(
                "vocab_size_per_layer_input",
                default=DEFAULT_VOCAB_SIZE,
                minimum=vocab_size if width else 1,
            ),
            moe=_moe(text),
            tied=text.boolean(
                "tie_word_embeddings", default=config.boolean("tie_word_embeddings", default=True)
            ),
            unified=unified,
            multimodal=nested,
            spans=_span_rule(text, unified=unified),
            placeholders=_placeholders(config) if nested else (),
            pad_token=text.integer(
                "pad_token_id",
                default=config.integer("pad_token_id", default=0),
                minimum=0,
                maximum=vocab_size - 1,
            ),
        )


def _refuse_foreign(config: CheckpointConfig) -> None:
    """Refuse checkpoints that only look like this family's."""
    kind = config.string("model_type", default=None)
    names = config.sequence("architectures", default=())
    if kind in DRAFTERS or (kind is None and any("Assistant" in str(name) for name in names)):
        raise ConfigError(
            "config.json: model_type must be a standalone model, "
            f"got the drafter {kind or names[0]!r}",
            code="config.drafter",
            hint="load the model that it drafts for; a drafter reads that model's keys and values",
        )
    for holder in (config, config.section("text_config")):
        method = holder.section("quantization_config").get("quant_method")
        if method == "gemma":
            raise ConfigError(
                "config.json: quantization_config.quant_method must be absent (MLX packing), "
                f"got {method!r} (packed integers with rounded activations)",
                code="config.quant_method",
                hint="load the unquantized checkpoint, or one in MLX's own quantization",
            )


def _is_unified(config: CheckpointConfig, text: CheckpointConfig) -> bool:
    kind = text.string("model_type", default=None)
    if text is not config and kind is not None and kind not in TEXT_TYPES:
        raise text.error("model_type", f"must be one of {sorted(TEXT_TYPES)}", kind)
    names = config.sequence("architectures", default=())
    return "unified" in (kind or config.string("model_type", default=None) or str(names).lower())


def _refuse_unsupported(text: CheckpointConfig) -> None:
    if text.boolean("attention_bias", default=False):
        raise text.error(
            "attention_bias", "must be false for this family", text.get("attention_bias")
        )
    if text.number("attn_logit_softcapping", default=None) is not None:
        raise text.error(
            "attn_logit_softcapping", "is not supported", text.get("attn_logit_softcapping")
        )
    text.string("hidden_activation", default=ACTIVATIONS[0], choices=ACTIVATIONS)


def _span_rule(text: CheckpointConfig, *, unified: bool) -> SpanRule:
    rule = text.get("use_bidirectional_attention")
    if rule is None or rule is False:
        # The unified class alone defaults to spans that see both ways; an explicit null reads the
        # same as an absent field, and its only published checkpoint says "vision".
        return "all" if unified and rule is None else "none"
    if rule != "vision":
        raise text.error("use_bidirectional_attention", "must be 'vision' or absent", rule)
    return "all" if unified else "sliding"


def _rope(text: CheckpointConfig, kind: str) -> RopeParameters:
    """Fill what an entry of ``rope_parameters`` leaves out, by layer type."""
    parameters = text.section("rope_parameters")
    unknown = [name for name in parameters if name not in (FULL, SLIDING)]
    if unknown:
        raise text.error("rope_parameters", f"must hold {FULL!r} and {SLIDING!r}", unknown[0])
    entry = parameters.section(kind)
    full = kind == FULL
    rope_type = entry.string(
        "rope_type",
        default="proportional" if full else "default",
        choices=("default", "linear", "proportional"),
    )
    theta = entry.number(
        "rope_theta", default=DEFAULT_FULL_THETA if full else DEFAULT_SLIDING_THETA, above=1
    )
    factor = 1.0 if rope_type == "default" else entry.number("factor", default=1.0, above=0)
    proportional = rope_type == "proportional"
    share = entry.number(
        "partial_rotary_factor", default=DEFAULT_ROTARY_SHARE if full else 1.0, above=0, maximum=1
    )
    # transformers rotates the whole head in the other types, whatever the share says.
    return RopeParameters(
        theta=theta,
        factor=factor,
        rotary_share=share if proportional else 1.0,
        proportional=proportional,
    )


def _moe(text: CheckpointConfig) -> MoeConfig | None:
    if not text.boolean("enable_moe_block", default=False):
        return None
    experts = text.integer("num_experts", minimum=1)
    return MoeConfig(
        experts=experts,
        top_k=text.integer("top_k_experts", minimum=1, maximum=experts),
        width=text.integer("moe_intermediate_size", minimum=1),
    )


def _placeholders(config: CheckpointConfig) -> tuple[int, ...]:
    return tuple(
        config.integer(name, default=default, minimum=0) for name, default in PLACEHOLDERS.items()
    )
