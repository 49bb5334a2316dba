"""Laguna configuration: every published spelling parsed into one record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from engine_laguna.positions import FULL, GLOBAL, SLIDING, parse_ropes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.rope_spec import RopeSpec

__all__ = ["ExpertConfig", "LagunaConfig", "LayerConfig"]

DENSE: Final = "dense"
SPARSE: Final = "sparse"
PER_HEAD: Final = "per-head"
PER_ELEMENT: Final = "per-element"
DEFAULT_CONTEXT: Final = 131_072
DEFAULT_HEAD_DIM: Final = 128
# Switches of exporters that would need other arithmetic, with the only value that does not.
FIXED: Final = (
    ("moe_apply_router_weight_on_input", False),
    ("swa_attention_sink_enabled", False),
    ("moe_router_use_sigmoid", True),
)


@attrs.frozen(kw_only=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
        heads: N, query heads.
        slides: Whether attention is limited to the window.
        sparse: Whether the feed-forward block is a mixture of experts.
        gates_elements: Whether each channel has its own output gate, not only each head.
    """

    heads: int
    slides: bool
    sparse: bool
    gates_elements: bool


@attrs.frozen(kw_only=True)
class ExpertConfig:
    """The mixture of experts of the sparse layers.

    Attributes:
        count: E, routed experts.
        chosen: Experts a token uses.
        intermediate_size: Size of an expert's gated row.
        shared_intermediate_size: Size of the shared expert's gated row.
        scaling: Factor of the routed experts' sum. Dimensionless.
        softcap: ``c`` of ``c * tanh(logits / c)``, ``None`` for none.
    """

    count: int
    chosen: int
    intermediate_size: int
    shared_intermediate_size: int
    scaling: float
    softcap: float | None


@attrs.frozen(kw_only=True)
class LagunaConfig:
    """What the model needs.

    Attributes:
        vocab_size: V.
        hidden_size: H.
        intermediate_size: Size of the gated row of dense layers.
        kv_heads: K, divides every layer's N.
        head_dim: D.
        norm_eps: Added to the mean square of the norms.
        context_length: Longest context (tokens).
        attention_bias: Whether q, k, v and o have biases.
        layers: One record a layer, in order.
        window: Positions a sliding layer sees, itself included (tokens); ``None`` when none slides.
        full_rope: Rotary parameters of full layers.
        sliding_rope: Rotary parameters of sliding layers.
        experts: ``None`` when no layer is sparse.
        tie_word_embeddings: As configured, ``None`` when the file is silent.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    attention_bias: bool
    layers: tuple[LayerConfig, ...]
    window: int | None
    full_rope: RopeSpec
    sliding_rope: RopeSpec
    experts: ExpertConfig | None
    tie_word_embeddings: bool | None

    @classmethod
    def parse(cls, config: CheckpointConfig) -> LagunaConfig:
        """Read ``config.json``.

        Args:
            config: The whole file.

        Returns:
            The record.

        Raises:
            ConfigError: A field is missing, malformed, or asks for what this family cannot do.
        """
        _check_fixed(config)
        kv_heads = config.integer("num_key_value_heads", minimum=1)
        head_dim = config.integer("head_dim", default=DEFAULT_HEAD_DIM, minimum=1)
        context_length = config.integer(
            "max_position_embeddings", default=DEFAULT_CONTEXT, minimum=1
        )
        layers = _parse_layers(config, kv_heads)
        slides = any(layer.slides for layer in layers)
        full_rope, sliding_rope = parse_ropes(config, head_dim, context_length)
        return cls(
            vocab_size=config.integer("vocab_size", minimum=1),
            hidden_size=config.integer("hidden_size", minimum=1),
            intermediate_size=config.integer("intermediate_size", minimum=1),
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=config.number("rms_norm_eps", default=1e-6, above=0),
            context_length=context_length,
            attention_bias=config.boolean("attention_bias", default=False),
            layers=layers,
            # Absent beside sliding layers is an error: any guess would give wrong numbers.
            window=config.integer("sliding_window", minimum=1) if slides else None,
            full_rope=full_rope,
            sliding_rope=sliding_rope,
            experts=_parse_experts(config) if any(layer.sparse for layer in layers) else None,
            tie_word_embeddings=config.boolean("tie_word_embeddings", default=None),
        )

    def is_tied(self, keys: Iterable[str]) -> bool:
        """Decide whether the token table is the output projection too.

        A silent configuration means two matrices; it means one only when the checkpoint ships no
        head at all.

        Args:
            keys: Keys with or without the wrapper's prefix.

        Returns:
            Whether there is no separate head.
        """
        if self.tie_word_embeddings is not None:
            return self.tie_word_embeddings
        return not any(key.startswith(("lm_head.", "language_model.lm_head.")) for key in keys)


def _check_fixed(config: CheckpointConfig) -> None:
    """Refuse switches whose other value nobody ever defined."""
    config.string("hidden_act", default="silu", choices=("silu", "swish"))
    config.string("moe_router_score_func", default="sigmoid", choices=("sigmoid",))
    config.string("rope_style", default="rotate-half", choices=("rotate-half",))
    for field, only in FIXED:
        value = config.boolean(field, default=only)
        if value != only:
            raise config.error(field, f"must be {str(only).lower()} for this family", value)


def _parse_layers(config: CheckpointConfig, kv_heads: int) -> tuple[LayerConfig, ...]:
    count = config.integer("num_hidden_layers", minimum=1, maximum=1024)
    rows = zip(
        _parse_heads(config, count, kv_heads),
        _parse_kinds(config, count),
        _parse_mixture(config, count),
        _parse_gates(config, count),
        strict=True,
    )
    return tuple(
        LayerConfig(heads=heads, slides=slides, sparse=sparse, gates_elements=elements)
        for heads, slides, sparse, elements in rows
    )


def _parse_heads(config: CheckpointConfig, count: int, kv_heads: int) -> tuple[int, ...]:
    key = "num_attention_heads_per_layer"
    items = config.sequence(key, default=None, length=count)
    if items is None:
        key = "num_attention_heads"
        items = (config.integer(key, minimum=1),) * count
    for heads in items:
        # JSON true would count as one head.
        if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
            raise config.error(key, "must hold positive integers", heads)
        if heads % kv_heads:
            raise config.error(key, f"must hold multiples of {kv_heads} kv heads", heads)
    return items


def _parse_kinds(config: CheckpointConfig, count: int) -> tuple[bool, ...]:
    """Say for each layer whether it slides; a silent file means that none does."""
    kinds = config.sequence(
        "layer_types",
        default=(FULL,) * count,
        length=count,
        choices=(FULL, GLOBAL, SLIDING),
    )
    return tuple(kind == SLIDING for kind in kinds)


def _parse_mixture(config: CheckpointConfig, count: int) -> tuple[bool, ...]:
    """Say for each layer whether it is sparse: by its type, else by the older pair of fields."""
    kinds = config.sequence("mlp_layer_types", default=None, length=count, choices=(DENSE, SPARSE))
    if kinds is not None:
        return tuple(kind == SPARSE for kind in kinds)
    if config.integer("num_experts", default=1, minimum=0) == 0:
        return (False,) * count
    key = "mlp_only_layers"
    dense = config.sequence(key, default=(0,))
    for index in dense:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise config.error(key, f"must hold layer indices below {count}", index)
    step = config.integer("decoder_sparse_step", default=1, minimum=1)
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))


def _parse_gates(config: CheckpointConfig, count: int) -> tuple[bool, ...]:
    """Say for each layer whether its output gate works on channels.

    The list is the more precise field: ``true`` was written before the finer gate existed.
    """
    key = "gating_types"
    items = config.sequence(key, default=None, length=count)
    if items is None:
        key = "gating"
        gating = config.get(key, True)
        if gating is False:
            raise config.error(key, "must not be false: every layer has an output gate", gating)
        items = (PER_HEAD if gating is True else gating,) * count
    spelled = [item.replace("_", "-") if isinstance(item, str) else item for item in items]
    for item in spelled:
        if item not in (PER_HEAD, PER_ELEMENT):
            raise config.error(key, f"must hold some of {[PER_ELEMENT, PER_HEAD]}", item)
    return tuple(item == PER_ELEMENT for item in spelled)


def _parse_experts(config: CheckpointConfig) -> ExpertConfig:
    count = config.integer("num_experts", minimum=1)
    softcap = config.number("moe_router_logit_softcapping", default=0.0, minimum=0)
    return ExpertConfig(
        count=count,
        chosen=config.integer("num_experts_per_tok", minimum=1, maximum=count),
        intermediate_size=config.integer("moe_intermediate_size", minimum=1),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", minimum=1),
        scaling=config.number("moe_routed_scaling_factor", default=1.0),
        softcap=softcap or None,
    )
