"""Every published spelling of a llama ``config.json``, read into one record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from engine_core.rope_spec import (
    BandScaling,
    DynamicScaling,
    LinearScaling,
    RopeSpec,
    YarnScaling,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.rope_spec import RopeScaling

__all__ = ["LlamaConfig"]

DEFAULT_CONTEXT: Final = 2048
DEFAULT_THETA: Final = 10_000.0
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn")
# Fields by which other exporters say that pairs of neighbours are rotated. Weights of this family
# are stored for half-split pairs; only a converter could honour these.
INTERLEAVED_FIELDS: Final = ("rope_traditional", "rope_interleaved")


@attrs.frozen(kw_only=True)
class LlamaConfig:
    """Sizes and switches of a llama model.

    Attributes:
        vocab_size: V.
        hidden_size: H.
        intermediate_size: Size of the gated row.
        layers: Number of blocks.
        heads: N.
        kv_heads: K, divides N.
        head_dim: D; N * D need not be H.
        norm_eps: Added to the mean square of the norms.
        context_length: Longest context (tokens).
        rope: Rotary parameters of all blocks.
        attention_bias: Whether q, k, v and o have biases.
        mlp_bias: Whether gate, up and down have biases.
        windows: Window of each block (tokens), ``None`` for full attention.
        tie_word_embeddings: As configured, ``None`` when the file is silent.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope: RopeSpec
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool | None

    @classmethod
    def parse(cls, config: CheckpointConfig) -> LlamaConfig:
        """Read a configuration.

        Args:
            config: Parsed ``config.json``.

        Returns:
            The record.

        Raises:
            ConfigError: A field is missing, malformed, or asks for what this family cannot do.
        """
        config.string("hidden_act", default="silu", choices=("silu", "swish"))
        for field in INTERLEAVED_FIELDS:
            if config.boolean(field, default=False):
                raise config.error(field, "must be false: pairs are half-split", True)  # noqa: FBT003
        hidden_size = config.integer("hidden_size", minimum=1)
        heads = config.integer("num_attention_heads", minimum=1)
        kv_heads = config.integer("num_key_value_heads", default=heads, minimum=1)
        if heads % kv_heads:
            raise config.error(
                "num_attention_heads", f"must be a multiple of {kv_heads} kv heads", heads
            )
        head_dim = config.integer("head_dim", default=None, minimum=1)
        if head_dim is None:
            if hidden_size % heads:
                raise config.error(
                    "hidden_size", f"must be a multiple of {heads} heads", hidden_size
                )
            head_dim = hidden_size // heads
        layers = config.integer("num_hidden_layers", minimum=1)
        context_length = config.integer(
            "max_position_embeddings", default=DEFAULT_CONTEXT, minimum=1
        )
        return cls(
            vocab_size=config.integer("vocab_size", minimum=1),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size", minimum=1),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=config.number("rms_norm_eps", above=0),
            context_length=context_length,
            rope=_parse_rope(config, head_dim, context_length),
            attention_bias=config.boolean("attention_bias", default=False),
            mlp_bias=config.boolean("mlp_bias", default=False),
            windows=_parse_windows(config, layers),
            tie_word_embeddings=config.boolean("tie_word_embeddings", default=None),
        )

    def is_tied(self, keys: Iterable[str]) -> bool:
        """Decide whether the token table is the output projection too.

        A silent configuration means two matrices; it means one only when the checkpoint ships no
        head at all.

        Args:
            keys: Checkpoint or mapped keys.

        Returns:
            Whether there is no separate head.
        """
        if self.tie_word_embeddings is not None:
            return self.tie_word_embeddings
        return not any(key.startswith("lm_head.") for key in keys)


def _parse_windows(config: CheckpointConfig, layers: int) -> tuple[int | None, ...]:
    """Read ``layer_types`` and ``sliding_window``; without types every layer is full."""
    types = config.sequence("layer_types", default=(), length=layers, choices=(FULL, SLIDING))
    if SLIDING not in types:
        return (None,) * layers
    window = config.integer("sliding_window", minimum=1)
    return tuple(window if kind == SLIDING else None for kind in types)


def _rope_section(config: CheckpointConfig) -> CheckpointConfig:
    """Give the scaling entry: ``rope_scaling`` when it says anything, else ``rope_parameters``."""
    scaling = config.section("rope_scaling")
    return scaling if len(scaling) else config.section("rope_parameters")


def _parse_rope(config: CheckpointConfig, head_dim: int, context_length: int) -> RopeSpec:
    """Read both spellings; values inside the entry win over those beside it."""
    section = _rope_section(config)
    for holder in (section, config):
        if holder.number("partial_rotary_factor", default=1.0) != 1.0:
            raise holder.error(
                "partial_rotary_factor",
                "must be 1: heads are rotated whole",
                holder.get("partial_rotary_factor"),
            )
    theta = section.number("rope_theta", default=None)
    if theta is None:
        theta = config.number("rope_theta", default=DEFAULT_THETA)
    try:
        return RopeSpec(
            head_dim=head_dim,
            theta=theta,
            scaling=_parse_scaling(config, section, context_length),
        )
    except ValueError as exc:
        raise config.error(section.path or "rope_theta", f"cannot be used: {exc}") from exc


def _parse_scaling(
    config: CheckpointConfig, section: CheckpointConfig, context_length: int
) -> RopeScaling | None:
    """Read the scaling by its type; ``rope_type`` wins over its older name ``type``."""
    if any(isinstance(section.get(key), dict) for key in section) or "mrope_section" in section:
        raise config.error(section.path, "must be one flat entry for all layers")
    field = "rope_type" if "rope_type" in section else "type"
    kind = section.string(field, default=None, choices=ROPE_TYPES)
    if kind is None and "factor" in section:
        raise section.error("rope_type", "is required beside a factor")
    match kind:
        case "linear":
            return LinearScaling(factor=section.number("factor"))
        case "dynamic":
            section.number("factor")
            return DynamicScaling(limit=context_length)
        case "llama3":
            return BandScaling(
                factor=section.number("factor"),
                low_freq_factor=section.number("low_freq_factor"),
                high_freq_factor=section.number("high_freq_factor"),
                original_context=_original_context(config, section, context_length),
            )
        case "yarn":
            return _parse_yarn(config, section, context_length)
        case _:
            return None


def _parse_yarn(
    config: CheckpointConfig, section: CheckpointConfig, context_length: int
) -> YarnScaling:
    original = _original_context(config, section, context_length)
    factor = section.number("factor", default=None)
    if factor is None and original == context_length:
        raise section.error("factor", "is required when no shorter original context is given")
    return YarnScaling(
        # A factor that is written as null means the ratio of the two lengths.
        factor=context_length / original if factor is None else factor,
        original_context=original,
        # Zero stands for the default in the files, as it does for the reference.
        beta_fast=section.number("beta_fast", default=0.0) or 32.0,
        beta_slow=section.number("beta_slow", default=0.0) or 1.0,
        truncate=section.boolean("truncate", default=True),
        attention_factor=section.number("attention_factor", default=None),
        mscale=section.number("mscale", default=None),
        mscale_all_dim=section.number("mscale_all_dim", default=None),
    )


def _original_context(
    config: CheckpointConfig, section: CheckpointConfig, context_length: int
) -> int:
    """Read the length before the extension: beside the entry, inside it, else the full length."""
    inside = section.integer("original_max_position_embeddings", default=None, minimum=1)
    return config.integer(
        "original_max_position_embeddings",
        default=context_length if inside is None else inside,
        minimum=1,
    )
