"""How checkpoint keys become model parameters: three expert layouts, one tree.

The tree uses the names of MLX conversions: ``mlp.switch_mlp`` for the stacked experts,
``mlp.gate.proj`` for the router. The rules depend on the configuration only, except where they join
projections that a checkpoint stores alike, so quantization overrides map in every spelling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_core.fusion import attention_fusions, fuse_rows
from engine_core.weight_plan import Drop, Rename, Rule, Split, Stack, WeightPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine_core.weight_plan import TensorInfo
    from engine_laguna.config import LagunaConfig

__all__ = ["float32_keys", "plan_weights"]

BACKBONE: Final = "model."
BACKBONE_PARTS: Final = ("embed_tokens.", "layers.", "norm.")
PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")
PARAMETERS: Final = ("weight", "scales", "biases")
BIAS: Final = "e_score_correction_bias"


def plan_weights(config: LagunaConfig, tensors: Mapping[str, TensorInfo]) -> WeightPlan:
    """Plan the weights of a checkpoint in any published layout.

    Args:
        config: Sizes.
        tensors: Checkpoint-verbatim key -> header facts.

    Returns:
        The rules.
    """
    rules: list[Rule] = [Rename("language_model.", "")]
    rules += [Rename(part, BACKBONE + part) for part in BACKBONE_PARTS]
    rules.append(Drop(suffix=".rotary_emb.inv_freq", reason="computed from the configuration"))
    if config.is_tied(tensors):
        rules.append(Drop(prefix="lm_head.", reason="the token table is the output projection"))
    blocks = [
        f"{BACKBONE}layers.{index}.mlp" for index, layer in enumerate(config.layers) if layer.sparse
    ]
    if config.experts is not None:
        # All stacks come first: a rename looks at every key, and stacks leave few of them.
        for block in blocks:
            rules += _stacks(block, config.experts.count)
        for block in blocks:
            rules += _names(block)
            rules += _splits(block, config.experts.intermediate_size)
    named = WeightPlan(rules).resolve(tensors).infos
    for block in blocks:
        shared = f"{block}.shared_expert"
        parts = [f"{shared}.gate_proj", f"{shared}.up_proj"]
        rules += fuse_rows(parts, f"{shared}.gate_up_proj", named)
    return WeightPlan((*rules, *attention_fusions(f"{BACKBONE}layers", len(config.layers), named)))


def float32_keys(tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Name what stays float32: choosing experts is discrete, so rounding would flip choices.

    Args:
        tensors: Mapped key -> header facts.

    Returns:
        The routers' floating parameters.
    """
    return frozenset(
        key
        for key, info in tensors.items()
        if ".mlp.gate." in key and info.dtype not in ("U32", "U8")
    )


def _stacks(block: str, count: int) -> Iterator[Stack]:
    """Stack experts that are stored one by one."""
    for projection in PROJECTIONS:
        for parameter in PARAMETERS:
            yield Stack(
                f"{block}.experts.{{}}.{projection}.{parameter}",
                f"{block}.switch_mlp.{projection}.{parameter}",
                count,
            )


def _names(block: str) -> Iterator[Rename]:
    """Bring the other names of a sparse block to those of the tree."""
    stacked = f"{block}.switch_mlp"
    # transformers holds the stacked experts as bare tensors, gate rows before up rows.
    for projection in ("gate_up_proj", "down_proj"):
        source = f"{block}.experts.{projection}"
        yield Rename(f"{source}.", f"{stacked}.{projection}.")
        yield Rename(source, f"{stacked}.{projection}.weight")
    yield Rename(f"{block}.experts.{BIAS}", f"{block}.gate.{BIAS}")
    for parameter in PARAMETERS:
        yield Rename(f"{block}.gate.{parameter}", f"{block}.gate.proj.{parameter}")
    yield Rename(f"{block}.shared_experts.", f"{block}.shared_expert.")


def _splits(block: str, size: int) -> Iterator[Split]:
    """Take joined gate and up of the experts apart, gate rows first."""
    for parameter in PARAMETERS:
        into = [f"{block}.switch_mlp.{name}.{parameter}" for name in PROJECTIONS[:2]]
        # In a stack of experts the output rows are the second axis.
        yield Split(f"{block}.switch_mlp.gate_up_proj.{parameter}", into, (size, size), axis=1)
