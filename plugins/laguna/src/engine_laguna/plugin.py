"""Hooks of the Laguna family; helpers are imported inside, so that listing stays light."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from engine_core.family import Architecture, FamilyInfo, Full, Sliding
from engine_core.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import (
        LayerSpec,
        TemplateDialect,
        TensorInfo,
        ToolSyntax,
        WeightPlan,
    )
    from engine_core.step import BuildContext, CausalLM
    from engine_laguna.config import LagunaConfig, LayerConfig

# Files of the tokenizer call this token ordinary, and only the configurations name its id.
TURN_END = "</assistant>"


@hookimpl
def engine_families() -> Iterable[FamilyInfo]:
    """Own Laguna checkpoints."""
    return [
        FamilyInfo(
            name="laguna",
            model_types={"laguna"},
            architectures={"LagunaForCausalLM", "LagunaModel"},
            dialects=("laguna",),
            tool_syntaxes=("laguna",),
        )
    ]


@hookimpl
def engine_template_dialects() -> Iterable[TemplateDialect]:
    """Contribute the dialect of the published templates."""
    from engine_laguna.template import LAGUNA_DIALECT

    return [LAGUNA_DIALECT]


@hookimpl
def engine_tool_syntaxes() -> Iterable[ToolSyntax]:
    """Contribute the syntax of keys and values between tags."""
    from engine_laguna.tools import LAGUNA_SYNTAX

    return [LAGUNA_SYNTAX]


@hookimpl
def engine_weight_plan(config: CheckpointConfig, tensors: Mapping[str, TensorInfo]) -> WeightPlan:
    """Bring every layout to one tree, then fuse projections stored alike."""
    from engine_laguna.config import LagunaConfig
    from engine_laguna.weights import plan_weights

    return plan_weights(LagunaConfig.parse(config), tensors)


@hookimpl
def engine_architecture(
    config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> Architecture:
    """Describe caches and sizes."""
    from engine_laguna.config import LagunaConfig
    from engine_laguna.weights import float32_keys

    parsed = LagunaConfig.parse(config)
    return Architecture(
        build=partial(_build, parsed, frozenset(tensors)),
        layers=tuple(_cache_of(parsed, layer) for layer in parsed.layers),
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        context_length=parsed.context_length,
        keep_float32=float32_keys(tensors),
        extra_eos=(TURN_END,),
    )


def _cache_of(config: LagunaConfig, layer: LayerConfig) -> LayerSpec:
    if layer.slides and config.window is not None:
        return Sliding(window=config.window, kv_heads=config.kv_heads, head_dim=config.head_dim)
    return Full(kv_heads=config.kv_heads, head_dim=config.head_dim)


def _build(config: LagunaConfig, parameters: frozenset[str], context: BuildContext) -> CausalLM:
    """Make the model; dtypes and packed layers are the loader's."""
    from engine_laguna.model import LagunaModel

    del context
    return LagunaModel(config, parameters)
