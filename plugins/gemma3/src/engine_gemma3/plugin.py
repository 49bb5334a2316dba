"""Hooks of the Gemma 3 family; helpers are imported inside, so that listing stays light."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.family import (
    Architecture,
    FamilyInfo,
    Full,
    MediaPlan,
    NormFold,
    Sliding,
    WeightPlan,
)
from engine_core.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import TemplateDialect, TensorInfo, ToolSyntax
    from engine_core.step import BuildContext, CausalLM

HEAD = "language_model.lm_head.weight"


@hookimpl
def engine_families() -> Iterable[FamilyInfo]:
    """Own text and multimodal Gemma 3 checkpoints."""
    return [
        FamilyInfo(
            name="gemma3",
            model_types={"gemma3", "gemma3_text"},
            architectures={"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"},
            dialects=("gemma3", "chatml"),
            tool_syntaxes=("function_gemma",),
            text_only=False,
        )
    ]


@hookimpl
def engine_template_dialects() -> Iterable[TemplateDialect]:
    """Contribute the dialect of the published templates."""
    from engine_gemma3.template import GEMMA3_DIALECT

    return [GEMMA3_DIALECT]


@hookimpl
def engine_tool_syntaxes() -> Iterable[ToolSyntax]:
    """Contribute the syntax of FunctionGemma."""
    from engine_gemma3.tools import FUNCTION_GEMMA

    return [FUNCTION_GEMMA]


@hookimpl
def engine_weight_plan(config: CheckpointConfig, tensors: Mapping[str, TensorInfo]) -> WeightPlan:
    """Bring every spelling to one tree, then fuse projections stored alike."""
    from engine_core.fusion import attention_fusions
    from engine_gemma3.config import Gemma3Config
    from engine_gemma3.weights import CANONICAL_RULES, TEXT

    layers = Gemma3Config.parse(config).layers
    canonical = WeightPlan(rules=CANONICAL_RULES)
    mapped = canonical.resolve(tensors).infos
    return WeightPlan(rules=(*CANONICAL_RULES, *attention_fusions(f"{TEXT}layers", layers, mapped)))


@hookimpl
def engine_norm_fold(config: CheckpointConfig) -> NormFold:
    """All text norms are stored as deltas from 1, in every layout."""
    from engine_gemma3.config import Gemma3Config
    from engine_gemma3.weights import norm_fold

    return norm_fold(Gemma3Config.parse(config).layers)


@hookimpl
def engine_architecture(
    config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> Architecture:
    """Parse the configuration and describe caches and model."""
    from engine_gemma3.config import Gemma3Config

    parsed = Gemma3Config.parse(config)
    keys = frozenset(tensors)
    tied = HEAD not in keys

    def build(context: BuildContext) -> CausalLM:
        from engine_gemma3.model import Gemma3Model

        return Gemma3Model(parsed, keys, context.compute_dtype)

    sizes = {"kv_heads": parsed.kv_heads, "head_dim": parsed.head_dim}
    return Architecture(
        build=build,
        layers=tuple(
            Sliding(window=parsed.sliding_window, **sizes) if slides else Full(**sizes)
            for slides in parsed.sliding
        ),
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        context_length=parsed.context_length,
        notes=() if tied else ("the checkpoint carries its own head: embeddings are not tied",),
    )


@hookimpl
def engine_media(config: CheckpointConfig, tensors: Mapping[str, TensorInfo]) -> MediaPlan | None:
    """Recognise the vision tower; it is checked by shape and left unread."""
    from engine_gemma3.config import Gemma3Config
    from engine_gemma3.weights import tower_layout

    expected = tower_layout(
        config.section("vision_config"), Gemma3Config.parse(config).hidden_size, tensors
    )
    if not expected:
        return None
    return MediaPlan(
        modalities={"image"}, expected=expected, placeholders={"image": "<start_of_image>"}
    )
