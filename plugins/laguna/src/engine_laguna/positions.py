"""Rotary parameters of full and sliding layers, whichever way a configuration spells them.

Published files nest one entry a layer kind under ``rope_parameters``; some keep shared values
beside the entries or at the top level. Older exports describe full layers by a flat
``rope_parameters`` or by ``rope_theta`` and ``rope_scaling``, and sliding layers by
``swa_rope_parameters``. A value inside an entry always wins over one outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.rope_spec import LinearScaling, RopeSpec, YarnScaling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.rope_spec import RopeScaling

__all__ = ["FULL", "GLOBAL", "SLIDING", "parse_ropes"]

FULL: Final = "full_attention"
GLOBAL: Final = "global_attention"
SLIDING: Final = "sliding_attention"
ROPE_TYPES: Final = ("default", "linear", "yarn")

# What a silent configuration means (transformers' defaults).
FULL_THETA: Final = 500_000.0
FULL_PARTIAL: Final = 0.5
SLIDING_THETA: Final = 10_000.0

# Values that files keep beside the entries they belong to.
SHARED: Final = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def parse_ropes(
    config: CheckpointConfig, head_dim: int, context_length: int
) -> tuple[RopeSpec, RopeSpec]:
    """Read the rotary parameters of both layer kinds.

    Args:
        config: Parsed ``config.json``.
        head_dim: D.
        context_length: Longest context (tokens).

    Returns:
        The spec of full layers and the spec of sliding layers.

    Raises:
        ConfigError: An entry is malformed or asks for what this family cannot do.
    """
    full = _full_entry(config)
    sliding = _sliding_entry(config)
    return (
        _parse_entry(full, head_dim, context_length, FULL_THETA),
        _parse_entry(sliding, head_dim, context_length, SLIDING_THETA),
    )


def _nested(parameters: CheckpointConfig) -> bool:
    return any(name in parameters for name in (FULL, GLOBAL, SLIDING))


def _inherit(entry: CheckpointConfig, *holders: CheckpointConfig) -> CheckpointConfig:
    """Complete an entry with the shared values that stand outside of it, nearest first."""
    data: dict[str, Any] = dict(entry.data)
    for holder in holders:
        for field in SHARED:
            if field in holder:
                data.setdefault(field, holder.get(field))
    return CheckpointConfig(data, name=entry.name, path=entry.path)


def _full_entry(config: CheckpointConfig) -> CheckpointConfig:
    parameters = config.section("rope_parameters")
    if _nested(parameters):
        if FULL in parameters and GLOBAL in parameters:
            raise parameters.error(GLOBAL, f"must be absent beside {FULL!r}")
        name = GLOBAL if GLOBAL in parameters else FULL
        if name in parameters:
            return _inherit(parameters.section(name), parameters, config)
        return _default(config, "rope_parameters")
    if len(parameters):
        return _inherit(parameters, config)
    scaling = config.section("rope_scaling")
    if len(scaling):
        return _inherit(scaling, config)
    return _default(config, "rope_theta")


def _default(config: CheckpointConfig, path: str) -> CheckpointConfig:
    """Describe full layers of which the file says at most the shared values."""
    fallback: Mapping[str, Any] = {"partial_rotary_factor": FULL_PARTIAL}
    given = {field: config.get(field) for field in SHARED if field in config}
    return CheckpointConfig({**fallback, **given}, name=config.name, path=path)


def _sliding_entry(config: CheckpointConfig) -> CheckpointConfig:
    parameters = config.section("rope_parameters")
    if SLIDING in parameters:
        return _inherit(parameters.section(SLIDING), parameters, config)
    return config.section("swa_rope_parameters")


def _parse_entry(
    entry: CheckpointConfig, head_dim: int, context_length: int, theta: float
) -> RopeSpec:
    scaling = _parse_scaling(entry, context_length)
    try:
        return RopeSpec(
            head_dim=head_dim,
            theta=entry.number("rope_theta", default=theta),
            partial_rotary_factor=entry.number("partial_rotary_factor", default=1.0),
            scaling=scaling,
        )
    except ValueError as exc:
        raise entry.error("rope_theta", f"cannot be used: {exc}") from exc


def _parse_scaling(entry: CheckpointConfig, context_length: int) -> RopeScaling | None:
    """Read the scaling by its type; ``rope_type`` wins over its older name ``type``."""
    nested = next((key for key in entry if isinstance(entry.get(key), dict)), None)
    if nested is not None:
        raise entry.error(nested, "must be no object inside an entry", entry.get(nested))
    field = "rope_type" if "rope_type" in entry else "type"
    kind = entry.string(field, default=None, choices=ROPE_TYPES)
    if kind is None and "factor" in entry:
        raise entry.error("rope_type", "is required beside a factor")
    if kind == "linear":
        return LinearScaling(factor=entry.number("factor", above=0))
    return _parse_yarn(entry, context_length) if kind == "yarn" else None


def _parse_yarn(entry: CheckpointConfig, context_length: int) -> YarnScaling:
    original = entry.integer("original_max_position_embeddings", default=context_length, minimum=1)
    return YarnScaling(
        # A factor that is left out means the ratio of the two lengths.
        factor=entry.number("factor", default=context_length / original, above=0),
        original_context=original,
        # Zero stands for the default, as it does for the reference.
        beta_fast=entry.number("beta_fast", default=0.0, minimum=0) or 32.0,
        beta_slow=entry.number("beta_slow", default=0.0, minimum=0) or 1.0,
        truncate=entry.boolean("truncate", default=True),
        attention_factor=entry.number("attention_factor", default=None, above=0),
        mscale=entry.number("mscale", default=None),
        mscale_all_dim=entry.number("mscale_all_dim", default=None),
    )
