"""What differs from layer to layer, resolved once from every spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from engine_core.checkpoint.config import CheckpointConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FULL", "SLIDING", "LayerConfig", "resolve_layers"]

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
DEFAULT_PERIOD: Final = 6
DEFAULT_HEAD_DIM: Final = 256
DEFAULT_GLOBAL_HEAD_DIM: Final = 512
OVERRIDES: Final = frozenset({"head_dim", "num_key_value_heads"})


@attrs.frozen(kw_only=True)
class LayerConfig:
    """One decoder layer.

    Attributes:
        sliding: Whether it sees a window only.
        head_dim: D of its queries, keys and values.
        kv_heads: K.
        mlp_width: Width of its dense feed-forward block.
        key_is_value: Whether its values are the raw keys.
        donor: The layer whose keys and values it reads, ``None`` when it has its own.
    """

    sliding: bool
    head_dim: int
    kv_heads: int
    mlp_width: int
    key_is_value: bool = False
    donor: int | None = None


def resolve_layers(text: CheckpointConfig, heads: int) -> tuple[LayerConfig, ...]:
    """Resolve every layer: its ``per_layer_config`` entry, the older fields, the defaults.

    Args:
        text: The text section of ``config.json``.
        heads: N, query heads.

    Returns:
        One record a layer.

    Raises:
        ConfigError: A field is malformed, or a layer has no donor.
    """
    count = text.integer("num_hidden_layers", minimum=1, maximum=1024)
    sliding = _layer_mix(text, count)
    shared = text.integer("num_kv_shared_layers", default=0, minimum=0, maximum=count - 1)
    first_shared = count - shared
    entries = _entries(text, count)
    width = text.integer("intermediate_size", minimum=1)
    double = text.boolean("use_double_wide_mlp", default=False)
    key_is_value = text.boolean("attention_k_eq_v", default=False)
    head_dims, kv_heads = _defaults(text, key_is_value=key_is_value)
    layers: list[LayerConfig] = []
    for index, slides in enumerate(sliding):
        entry = entries.get(index, CheckpointConfig())
        donor = None
        if index >= first_shared:
            donor = _donor(text, sliding[:first_shared], slides=slides)
        layer = LayerConfig(
            sliding=slides,
            head_dim=entry.integer("head_dim", default=head_dims[slides], minimum=2),
            kv_heads=entry.integer("num_key_value_heads", default=kv_heads[slides], minimum=1),
            mlp_width=2 * width if double and donor is not None else width,
            key_is_value=key_is_value and not slides,
            donor=donor,
        )
        _check(text, layer, heads, None if donor is None else layers[donor])
        layers.append(layer)
    return tuple(layers)


def _layer_mix(text: CheckpointConfig, count: int) -> tuple[bool, ...]:
    """Say for each layer whether it slides; the last one never does."""
    if text.sequence("layer_types", default=()):
        names = text.sequence("layer_types", length=count, choices=(FULL, SLIDING))
    else:
        period = text.integer("sliding_window_pattern", default=None, minimum=1)
        if period is None:
            period = text.integer("_sliding_window_pattern", default=DEFAULT_PERIOD, minimum=1)
        names = tuple(SLIDING if (index + 1) % period else FULL for index in range(count))
    return (*(name == SLIDING for name in names[:-1]), False)


def _defaults(
    text: CheckpointConfig, *, key_is_value: bool
) -> tuple[Mapping[bool, int], Mapping[bool, int]]:
    """Give head size and K of the layers that slide, and of those that do not."""
    head_dim = text.integer("head_dim", default=DEFAULT_HEAD_DIM, minimum=2)
    # Where layers are listed one by one, only those that deviate from head_dim are.
    listed = "per_layer_config" in text
    full_dim = text.integer(
        "global_head_dim", default=head_dim if listed else DEFAULT_GLOBAL_HEAD_DIM, minimum=2
    )
    kv_heads = text.integer("num_key_value_heads", default=4, minimum=1)
    full_kv_heads = kv_heads
    if key_is_value:
        full_kv_heads = text.integer("num_global_key_value_heads", default=kv_heads, minimum=1)
    return {True: head_dim, False: full_dim}, {True: kv_heads, False: full_kv_heads}


def _entries(text: CheckpointConfig, count: int) -> dict[int, CheckpointConfig]:
    """Read ``per_layer_config``; its keys are layer indices as text, sometimes zero-padded."""
    section = text.section("per_layer_config")
    entries: dict[int, CheckpointConfig] = {}
    for key in section:
        index = int(key) if key.isascii() and key.isdecimal() and len(key) < 8 else count
        if index >= count:
            raise section.error(key, f"must be a layer index below {count}")
        if index in entries:
            raise section.error(key, "must be given once for a layer")
        entry = section.section(key)
        for name in entry:
            if name not in OVERRIDES:
                raise entry.error(name, f"must be one of {sorted(OVERRIDES)}", entry.get(name))
        entries[index] = entry
    return entries


def _donor(text: CheckpointConfig, owners: tuple[bool, ...], *, slides: bool) -> int:
    """Find the last layer of the same kind that has keys and values of its own."""
    for index in reversed(range(len(owners))):
        if owners[index] == slides:
            return index
    raise text.error(
        "num_kv_shared_layers",
        f"must leave a {SLIDING if slides else FULL} layer with keys and values of its own",
        text.get("num_kv_shared_layers"),
    )


def _check(
    text: CheckpointConfig, layer: LayerConfig, heads: int, donor: LayerConfig | None
) -> None:
    if heads % layer.kv_heads:
        rule = f"must be a multiple of its key and value heads ({layer.kv_heads})"
        raise text.error("num_attention_heads", rule, heads)
    if layer.head_dim % 2:
        raise text.error("head_dim", "must be even", layer.head_dim)
    if donor is not None and (donor.head_dim, donor.kv_heads) != (layer.head_dim, layer.kv_heads):
        raise text.error(
            "per_layer_config",
            "must give a layer the head size and key heads of the layer that it shares with",
            [layer.head_dim, layer.kv_heads],
        )
