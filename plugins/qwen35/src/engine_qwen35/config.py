"""Qwen3.5 configuration: every published spelling, dense and sparse, parsed into one record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from engine_core.rope_spec import LinearScaling, RopeSpec, YarnScaling

if TYPE_CHECKING:
    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.rope_spec import RopeScaling

__all__ = ["ExpertsConfig", "LinearConfig", "Qwen35Config"]

FULL: Final = "full_attention"
LINEAR: Final = "linear_attention"
DEFAULT_INTERVAL: Final = 4
DEFAULT_ROTARY_FACTOR: Final = 0.25
DEFAULT_EPS: Final = 1e-6
# Fields that would change the mathematics, with the only value that this family trains with.
FIXED_FLAGS: Final = {
    "attention_bias": False,
    "attn_output_gate": True,
    "mtp_use_dedicated_embeddings": False,
    "norm_topk_prob": True,
}


@attrs.frozen(kw_only=True)
class LinearConfig:
    """Sizes of a gated delta layer.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, a multiple of ``key_heads``.
        key_dim: Dk.
        value_dim: Dv.
        kernel: Positions one convolution output sees.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Channels of all keys (and of all queries)."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values


@attrs.frozen(kw_only=True)
class ExpertsConfig:
    """Sizes of a sparse feed-forward block.

    Attributes:
        count: E.
        per_token: Experts that one token uses.
        intermediate_size: Width of each expert.
        shared_intermediate_size: Width of the expert that every token uses.
    """

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int


@attrs.frozen(kw_only=True)
class Qwen35Config:
    """What the text tower needs.

    Attributes:
        hidden_size: H.
        vocab_size: V, padded.
        full: For each layer whether it is a full-attention one; the others are gated delta layers.
        heads: N, query heads.
        kv_heads: K, key and value heads.
        head_dim: D.
        linear: Sizes of the gated delta layers.
        intermediate_size: Width of the feed-forward block, 0 for a sparse model.
        experts: Sizes of the sparse blocks, ``None`` for a dense model.
        rms_norm_eps: Added to the mean square under the root.
        rope: Rotary parameters of the full-attention layers.
        mrope_section: Rotary channels owned by the temporal, height and width stream, ``None``
            when the configuration does not say.
        tied: Whether the token table is the output projection.
        context_length: ``max_position_embeddings`` (tokens).
        mtp_layers: Decoder layers of the multi-token-prediction module.
    """

    hidden_size: int
    vocab_size: int
    full: tuple[bool, ...]
    heads: int
    kv_heads: int
    head_dim: int
    linear: LinearConfig
    intermediate_size: int
    experts: ExpertsConfig | None
    rms_norm_eps: float
    rope: RopeSpec
    mrope_section: tuple[int, int, int] | None
    tied: bool
    context_length: int
    mtp_layers: int

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.full)

    @classmethod
    def parse(cls, config: CheckpointConfig) -> Qwen35Config:
        """Read ``config.json``.

        Args:
            config: The whole file; text fields stand under ``text_config`` or at the root.

        Returns:
            The record.

        Raises:
            ConfigError: A field is missing, malformed, or asks for something unsupported.
        """
        text = config.section("text_config") if "text_config" in config else config
        _refuse_unsupported(text)
        heads = text.integer("num_attention_heads", minimum=1)
        kv_heads = text.integer("num_key_value_heads", default=heads, minimum=1)
        if heads % kv_heads:
            rule = f"must be a multiple of num_key_value_heads ({kv_heads})"
            raise text.error("num_attention_heads", rule, heads)
        experts = _experts(text)
        rope = _rope(text)
        return cls(
            hidden_size=text.integer("hidden_size", minimum=1),
            vocab_size=text.integer("vocab_size", minimum=1),
            full=_layer_mix(text),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=rope.head_dim,
            linear=_linear(text),
            intermediate_size=(
                text.integer("intermediate_size", minimum=1) if experts is None else 0
            ),
            experts=experts,
            rms_norm_eps=text.number("rms_norm_eps", default=DEFAULT_EPS, minimum=0),
            rope=rope,
            mrope_section=_mrope_section(text, rope.dims // 2),
            tied=_tied(config, text),
            context_length=text.integer("max_position_embeddings", minimum=1),
            mtp_layers=text.integer("mtp_num_hidden_layers", default=1, minimum=0, maximum=64),
        )


def _refuse_unsupported(text: CheckpointConfig) -> None:
    for flag, wanted in FIXED_FLAGS.items():
        if text.boolean(flag, default=wanted) is not wanted:
            rule = f"must be {str(wanted).lower()} for this family"
            raise text.error(flag, rule, text.get(flag))
    text.string("hidden_act", default="silu", choices=("silu", "swish"))
    text.string("output_gate_type", default="swish", choices=("silu", "swish"))
    dense = text.sequence("mlp_only_layers", default=())
    if dense and text.integer("num_experts", default=0) > 0:
        raise text.error("mlp_only_layers", "must be empty: every layer is sparse", dense)
    if text.integer("decoder_sparse_step", default=1) != 1:
        rule = "must be 1: every layer is sparse"
        raise text.error("decoder_sparse_step", rule, text.get("decoder_sparse_step"))


def _tied(config: CheckpointConfig, text: CheckpointConfig) -> bool:
    """Read the flag: the text level wins over the top level."""
    tied = text.boolean("tie_word_embeddings", default=None)
    return config.boolean("tie_word_embeddings", default=False) if tied is None else tied


def _layer_mix(text: CheckpointConfig) -> tuple[bool, ...]:
    """Say for each layer whether it attends in full: ``layer_types``, else an interval."""
    layers = text.integer("num_hidden_layers", minimum=1, maximum=1024)
    names = text.sequence("layer_types", default=None, length=layers, choices=(FULL, LINEAR))
    if names is None:
        interval = text.integer("full_attention_interval", default=DEFAULT_INTERVAL, minimum=1)
        full = tuple((index + 1) % interval == 0 for index in range(layers))
    else:
        full = tuple(name == FULL for name in names)
    if all(full):
        # Its convolution is also what tells an original checkpoint from a converted one.
        raise text.error("layer_types", f"must hold at least one {LINEAR!r}")
    return full


def _linear(text: CheckpointConfig) -> LinearConfig:
    key_heads = text.integer("linear_num_key_heads", minimum=1)
    value_heads = text.integer("linear_num_value_heads", minimum=1)
    if value_heads % key_heads:
        rule = f"must be a multiple of linear_num_key_heads ({key_heads})"
        raise text.error("linear_num_value_heads", rule, value_heads)
    return LinearConfig(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=text.integer("linear_key_head_dim", minimum=1),
        value_dim=text.integer("linear_value_head_dim", minimum=1),
        kernel=text.integer("linear_conv_kernel_dim", default=4, minimum=2, maximum=64),
    )


def _experts(text: CheckpointConfig) -> ExpertsConfig | None:
    count = text.integer("num_experts", default=0, minimum=0, maximum=65_536)
    if count == 0:
        return None
    return ExpertsConfig(
        count=count,
        per_token=text.integer("num_experts_per_tok", minimum=1, maximum=count),
        intermediate_size=text.integer("moe_intermediate_size", minimum=1),
        shared_intermediate_size=text.integer("shared_expert_intermediate_size", minimum=1),
    )


def _rope(text: CheckpointConfig) -> RopeSpec:
    parameters = text.section("rope_parameters")
    factor = parameters.number("partial_rotary_factor", default=None)
    if factor is None:
        factor = text.number("partial_rotary_factor", default=DEFAULT_ROTARY_FACTOR)
    holder = parameters if "rope_theta" in parameters else text
    theta = holder.number("rope_theta")
    head_dim = text.integer("head_dim", minimum=2)
    try:
        return RopeSpec(
            head_dim=head_dim,
            theta=theta,
            partial_rotary_factor=factor,
            scaling=_scaling(parameters, text),
        )
    except ValueError as exc:
        raise text.error("rope_parameters", f"must be usable ({exc})") from exc


def _scaling(parameters: CheckpointConfig, text: CheckpointConfig) -> RopeScaling | None:
    name = "rope_type" if "rope_type" in parameters else "type"
    kind = parameters.string(name, default="default", choices=("default", "linear", "yarn"))
    if kind == "linear":
        return LinearScaling(factor=parameters.number("factor"))
    if kind == "yarn":
        context = parameters.integer("original_max_position_embeddings", default=None, minimum=1)
        if context is None:
            context = text.integer("max_position_embeddings", minimum=1)
        return YarnScaling(
            factor=parameters.number("factor"),
            original_context=context,
            beta_fast=parameters.number("beta_fast", default=32.0),
            beta_slow=parameters.number("beta_slow", default=1.0),
            truncate=parameters.boolean("truncate", default=True),
            attention_factor=parameters.number("attention_factor", default=None),
            mscale=parameters.number("mscale", default=None),
            mscale_all_dim=parameters.number("mscale_all_dim", default=None),
        )
    return None


def _mrope_section(text: CheckpointConfig, channels: int) -> tuple[int, int, int] | None:
    parameters = text.section("rope_parameters")
    if not parameters.boolean("mrope_interleaved", default=True):
        raise parameters.error("mrope_interleaved", "must be true for this family")
    section = parameters.sequence("mrope_section", default=None)
    if section is None:
        return None
    whole = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in section)
    if len(section) != 3 or not whole or sum(section) != channels:
        rule = f"must be three whole numbers with the sum {channels}"
        raise parameters.error("mrope_section", rule, list(section))
    temporal, height, width = section
    if max(3 * height - 2, 3 * width - 1) >= channels:
        # Height owns channels 1, 4, 7, ... and width 2, 5, 8, ...
        rule = f"must fit interleaved into {channels} channels"
        raise parameters.error("mrope_section", rule, list(section))
    return temporal, height, width
