"""Hooks of the Gemma 4 family; helpers are imported inside, so that listing stays light."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.family import Architecture, FamilyInfo, Full, MediaPlan, Shared, Sliding
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
    from engine_gemma4.layers import LayerConfig


@hookimpl
def engine_families() -> Iterable[FamilyInfo]:
    """Own text, multimodal and unified Gemma 4 checkpoints, and refuse its drafters by name."""
    return [
        FamilyInfo(
            name="gemma4",
            model_types={
                "gemma4",
                "gemma4_text",
                "gemma4_unified",
                "gemma4_unified_text",
                "gemma4_assistant",
                "gemma4_unified_assistant",
            },
            architectures={
                "Gemma4ForCausalLM",
                "Gemma4ForConditionalGeneration",
                "Gemma4UnifiedForCausalLM",
                "Gemma4UnifiedForConditionalGeneration",
                "Gemma4AssistantForCausalLM",
                "Gemma4UnifiedAssistantForCausalLM",
            },
            dialects=("gemma4",),
            tool_syntaxes=("gemma4",),
            text_only=False,
        )
    ]


@hookimpl
def engine_template_dialects() -> Iterable[TemplateDialect]:
    """Bring the dialect that puts tool results beside their calls."""
    from engine_gemma4.template import GEMMA4_DIALECT

    return [GEMMA4_DIALECT]


@hookimpl
def engine_tool_syntaxes() -> Iterable[ToolSyntax]:
    """Bring the call syntax with the argument language of its own."""
    from engine_gemma4.tools import GEMMA4_SYNTAX

    return [GEMMA4_SYNTAX]


@hookimpl
def engine_weight_plan(config: CheckpointConfig, tensors: Mapping[str, TensorInfo]) -> WeightPlan:
    """Bring every spelling to one tree, drop stray tensors, join projections stored alike."""
    from engine_gemma4.config import Gemma4Config
    from engine_gemma4.weights import weight_plan

    return weight_plan(Gemma4Config.parse(config), tensors)


@hookimpl
def engine_architecture(
    config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> Architecture:
    """Parse the configuration and describe caches and model."""
    from engine_gemma4.config import Gemma4Config
    from engine_gemma4.weights import HEAD, missing_modules

    parsed = Gemma4Config.parse(config)
    keys = frozenset(tensors)
    notes = []
    if HEAD in keys:
        notes.append("the checkpoint carries its own head: embeddings are not tied")
    missing = missing_modules(parsed, keys)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        notes.append(f"the checkpoint lacks {missing[0]}{more}: requests will fail")

    def build(context: BuildContext) -> CausalLM:
        from engine_gemma4.model import Gemma4Model

        return Gemma4Model(parsed, keys, context.compute_dtype)

    return Architecture(
        build=build,
        layers=tuple(_cache_spec(layer, parsed.sliding_window) for layer in parsed.layers),
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        context_length=parsed.context_length,
        # After its calls a model asks for their results, which ends the reply.
        extra_eos=("<|tool_response>",),
        notes=tuple(notes),
    )


@hookimpl
def engine_media(config: CheckpointConfig, tensors: Mapping[str, TensorInfo]) -> MediaPlan | None:
    """Recognise towers and embedders; they are checked by shape and left unread."""
    from engine_gemma4.config import Gemma4Config
    from engine_gemma4.media import media_plan

    return media_plan(config, Gemma4Config.parse(config), tensors)


def _cache_spec(layer: LayerConfig, window: int) -> LayerSpec:
    if layer.donor is not None:
        return Shared(donor=layer.donor)
    sizes = {"kv_heads": layer.kv_heads, "head_dim": layer.head_dim}
    return Sliding(window=window, **sizes) if layer.sliding else Full(**sizes)
