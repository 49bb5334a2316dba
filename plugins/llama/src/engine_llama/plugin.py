"""Hooks of the llama family; nothing heavy is imported before a hook is asked."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from engine_core.family import Architecture, FamilyInfo, Full, Sliding
from engine_core.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import LayerSpec, TensorInfo, ToolSyntax, WeightPlan
    from engine_core.step import BuildContext, CausalLM
    from engine_llama.config import LlamaConfig

__all__ = [
    "engine_architecture",
    "engine_families",
    "engine_tool_syntaxes",
    "engine_weight_plan",
]

# Turn ends of the third generation; early files of it configure the end of text only.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>")


@hookimpl
def engine_families() -> Iterable[FamilyInfo]:
    """Name the family."""
    return (
        FamilyInfo(
            name="llama",
            model_types=frozenset({"llama"}),
            architectures=frozenset({"LlamaForCausalLM", "LlamaModel"}),
            tool_syntaxes=("llama_json",),
        ),
    )


@hookimpl
def engine_tool_syntaxes() -> Iterable[ToolSyntax]:
    """Contribute the syntax of replies that are one JSON object."""
    from engine_llama.tools import LLAMA_JSON

    return (LLAMA_JSON,)


@hookimpl
def engine_weight_plan(
    family: str, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> WeightPlan | None:
    """Plan the weights of both published layouts."""
    from engine_llama.config import LlamaConfig
    from engine_llama.weights import plan_weights

    return plan_weights(LlamaConfig.parse(config), tensors) if family == "llama" else None


@hookimpl
def engine_architecture(
    family: str, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> Architecture | None:
    """Describe caches and sizes."""
    from engine_llama.config import LlamaConfig

    if family != "llama":
        return None
    parsed = LlamaConfig.parse(config)
    return Architecture(
        build=partial(_build, parsed, frozenset(tensors)),
        layers=tuple(_layer(parsed, window) for window in parsed.windows),
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        context_length=parsed.context_length,
        extra_eos=TURN_ENDS,
    )


def _layer(config: LlamaConfig, window: int | None) -> LayerSpec:
    if window is None:
        return Full(kv_heads=config.kv_heads, head_dim=config.head_dim)
    return Sliding(window=window, kv_heads=config.kv_heads, head_dim=config.head_dim)


def _build(config: LlamaConfig, parameters: frozenset[str], context: BuildContext) -> CausalLM:
    """Make the model; dtypes and packed layers are the loader's."""
    from engine_llama.model import LlamaModel

    del context
    return LlamaModel(config, parameters)
