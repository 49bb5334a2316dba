"""How checkpoint keys become parameters: key families, storage layout, expert layouts.

Canonical names: ``language_model.model.*``, ``language_model.lm_head.*``, ``vision_tower.*`` and
``mtp.*``. The rules are data, so the very same mapping serves tensors and quantization overrides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_core.errors import CheckpointError
from engine_core.family import Drop, NormFold, Permute, Rename, Split, Stack, WeightPlan
from engine_core.fusion import attention_fusions, fuse_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine_core.family import Rule, TensorInfo
    from engine_qwen35.config import Qwen35Config

__all__ = [
    "HEAD",
    "MTP",
    "TEXT",
    "VISION",
    "float32_parameters",
    "is_converted",
    "norm_fold",
    "plan_weights",
]

TEXT: Final = "language_model.model."
HEAD: Final = "language_model.lm_head."
VISION: Final = "vision_tower."
MTP: Final = "mtp."

CANONICAL_RULES: Final = (
    Rename(prefix="model.language_model.visual.", to=VISION),
    Rename(prefix="model.visual.", to=VISION),
    # Converters that kept the module wrote it under the prefix of what they loaded.
    Rename(prefix="language_model.mtp.", to=MTP),
    Rename(prefix="model.mtp.", to=MTP),
    # Multimodal files, then text-only ones.
    Rename(prefix="model.language_model.", to=TEXT),
    Rename(prefix="model.", to=TEXT),
    Rename(prefix="lm_head.", to=HEAD),
)

# Who wrote the text tower shows in its keys: transformers (original layout) or an MLX converter.
ORIGINAL_PREFIX: Final = "model.language_model."
CONVERTED_PREFIX: Final = TEXT
PLAIN_PREFIX: Final = "model."
NOT_TEXT: Final = ("model.language_model.visual.", "model.visual.", "model.mtp.")

CONVOLUTION: Final = ".linear_attn.conv1d.weight"
# The state's decay is exponentiated twice, so these two are not rounded to the compute dtype.
FLOAT32_PARAMETERS: Final = ("linear_attn.A_log", "linear_attn.dt_bias")
IN_PROJECTIONS: Final = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
EXPERT_PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")
PACKED_PARTS: Final = ("weight", "scales", "biases")
HINT: Final = "download the original checkpoint again, or convert it again in one pass"


def plan_weights(config: Qwen35Config, tensors: Mapping[str, TensorInfo]) -> WeightPlan:
    """Plan the weights of a checkpoint of any key family.

    Args:
        config: Sizes.
        tensors: Checkpoint-verbatim key -> header facts.

    Returns:
        The rules.

    Raises:
        CheckpointError: Key prefixes and the layout of the convolutions contradict one another.
    """
    rules: list[Rule] = list(CANONICAL_RULES)
    named = WeightPlan(rules).resolve(tensors).infos
    converted = is_converted(config, named)
    _check_prefix(tensors, converted=converted)
    if not converted:
        rules.append(Permute(suffix=CONVOLUTION, axes=(0, 2, 1)))
    if config.tied:
        rules.append(Drop(prefix=HEAD, reason="the token table is the output projection"))
    if config.experts is not None:
        rules += _expert_rules(config, named)
    mapped = WeightPlan(rules).resolve(tensors).infos
    return WeightPlan((*rules, *_fusions(config, mapped)))


def is_converted(config: Qwen35Config, tensors: Mapping[str, TensorInfo]) -> bool:
    """Tell an MLX conversion from an original checkpoint.

    Converters move the kernel axis of the convolutions and fold the norm scales in one pass, so
    the shape of the convolutions tells both. Whether an ``mtp`` module is present tells nothing.

    Args:
        config: Sizes.
        tensors: Canonical key -> header facts as stored.

    Returns:
        Whether the text tower is stored as MLX converters store it.

    Raises:
        CheckpointError: A convolution has neither layout, or layers differ.
    """
    channels, kernel = config.linear.channels, config.linear.kernel
    layouts = {(channels, 1, kernel): False, (channels, kernel, 1): True}
    found: dict[bool, str] = {}
    for index, full in enumerate(config.full):
        key = f"{TEXT}layers.{index}{CONVOLUTION}"
        if full or key not in tensors:
            continue  # a missing one is named when parameters and tensors are compared
        shape = tensors[key].shape
        if shape not in layouts:
            rule = " or ".join(str(list(one)) for one in layouts)
            raise CheckpointError(
                f"tensor {key!r}: must have shape {rule}, got {list(shape)}",
                code="checkpoint.tensor_shape",
                hint="the checkpoint does not match its config.json",
            )
        found.setdefault(layouts[shape], key)
    if len(found) == 2:
        raise CheckpointError(
            f"checkpoint: all convolutions must have one layout, got the original one in "
            f"{found[False]!r} and a converted one in {found[True]!r}",
            code="checkpoint.layout",
            hint=HINT,
        )
    return True in found


def _check_prefix(tensors: Iterable[str], *, converted: bool) -> None:
    """Fail closed when key prefixes contradict one another or the layout."""
    found: dict[str, str] = {}
    for key in tensors:
        if key.startswith(NOT_TEXT):
            continue
        for prefix in (ORIGINAL_PREFIX, CONVERTED_PREFIX, PLAIN_PREFIX):
            if key.startswith(prefix):
                found.setdefault(prefix, key)
                break
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise CheckpointError(
            f"checkpoint: text tensors must share one prefix, got {first!r} and {second!r}",
            code="checkpoint.layout",
            hint=HINT,
        )
    # The plain prefix is written by transformers and by converters alike.
    contradicting = ORIGINAL_PREFIX if converted else CONVERTED_PREFIX
    if contradicting in found:
        layout = "a converted" if converted else "the original"
        raise CheckpointError(
            f"checkpoint: key prefix and convolution layout must agree, got "
            f"{found[contradicting]!r} beside {layout} layout",
            code="checkpoint.layout",
            hint=HINT,
        )


def _expert_rules(config: Qwen35Config, named: Mapping[str, TensorInfo]) -> list[Rule]:
    """Bring the three expert layouts to one stack a projection."""
    if config.experts is None:
        return []
    blocks = [f"{TEXT}layers.{index}.mlp." for index in range(config.layers)]
    blocks += [f"{MTP}layers.{index}.mlp." for index in range(config.mtp_layers)]
    rules: list[Rule] = []
    for block in blocks:
        source, target = f"{block}experts.", f"{block}switch_mlp."
        size = config.experts.intermediate_size
        into = (f"{target}gate_proj.weight", f"{target}up_proj.weight")
        # Published files join the two, gate rows first.
        rules.append(Split(f"{source}gate_up_proj", into, (size, size), axis=1))
        rules.append(Rename(f"{source}down_proj", f"{target}down_proj.weight"))
        rules += [
            Stack(f"{source}{{}}.{name}.{part}", f"{target}{name}.{part}", config.experts.count)
            for name in EXPERT_PROJECTIONS
            for part in PACKED_PARTS
            if f"{source}0.{name}.{part}" in named
        ]
    return rules


def _fusions(config: Qwen35Config, mapped: Mapping[str, TensorInfo]) -> tuple[Rule, ...]:
    """Join projections that read the same input and are stored alike."""
    rules: list[Rule] = list(attention_fusions(f"{TEXT}layers", config.layers, mapped))
    for index in range(config.layers):
        mixer = f"{TEXT}layers.{index}.linear_attn."
        rules += fuse_rows([f"{mixer}{name}" for name in IN_PROJECTIONS], f"{mixer}in_proj", mapped)
        shared = f"{TEXT}layers.{index}.mlp.shared_expert."
        parts = [f"{shared}gate_proj", f"{shared}up_proj"]
        rules += fuse_rows(parts, f"{shared}gate_up_proj", mapped)
    return tuple(rules)


def norm_fold(config: Qwen35Config) -> NormFold:
    """Name the text norms that an original checkpoint stores as deltas from 1.

    The gated norm of the delta layers is stored as it is.

    Args:
        config: Sizes.

    Returns:
        The fold.
    """
    keys = {f"{TEXT}norm.weight"}
    for index, full in enumerate(config.full):
        names = ["input_layernorm", "post_attention_layernorm"]
        names += ["self_attn.q_norm", "self_attn.k_norm"] if full else []
        keys |= {f"{TEXT}layers.{index}.{name}.weight" for name in names}
    return NormFold(keys=frozenset(keys))


def float32_parameters(config: Qwen35Config) -> frozenset[str]:
    """Name the parameters that keep full precision.

    Args:
        config: Sizes.

    Returns:
        Mapped keys of the decay parameters of every delta layer.
    """
    return frozenset(
        f"{TEXT}layers.{index}.{name}"
        for index, full in enumerate(config.full)
        if not full
        for name in FLOAT32_PARAMETERS
    )
