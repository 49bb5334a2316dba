"""Hooks of the Qwen3.5 family; helpers are imported inside, so that listing stays light."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from engine_core.family import (
    Architecture,
    FamilyInfo,
    Full,
    MediaPlan,
    MtpPlan,
    NormFold,
    Recurrent,
    WeightPlan,
)
from engine_core.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import LayerSpec, TensorInfo, ToolSyntax
    from engine_core.step import BuildContext, CausalLM
    from engine_qwen35.config import Qwen35Config

# A conversion without generation_config.json would otherwise never see its turn end.
TURN_END = "<|im_end|>"
MTP_REASON = "the multi-token-prediction module is attached later; its tensors stay unread"


@hookimpl
def engine_families() -> Iterable[FamilyInfo]:
    """Own dense and sparse checkpoints, multimodal and text-only."""
    return [
        FamilyInfo(
            name="qwen35",
            model_types={"qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"},
            architectures={
                "Qwen3_5ForCausalLM",
                "Qwen3_5ForConditionalGeneration",
                "Qwen3_5MoeForCausalLM",
                "Qwen3_5MoeForConditionalGeneration",
            },
            dialects=("chatml",),
            tool_syntaxes=("qwen_xml", "hermes"),
            text_only=False,
        )
    ]


@hookimpl
def engine_tool_syntaxes() -> Iterable[ToolSyntax]:
    """Contribute the XML-like syntax of this family's templates."""
    from engine_qwen35.tools import QWEN_XML

    return (QWEN_XML,)


@hookimpl
def engine_weight_plan(config: CheckpointConfig, tensors: Mapping[str, TensorInfo]) -> WeightPlan:
    """Bring every key family and expert layout to one tree."""
    from engine_qwen35.config import Qwen35Config
    from engine_qwen35.weights import plan_weights

    return plan_weights(Qwen35Config.parse(config), tensors)


@hookimpl
def engine_norm_fold(
    config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> NormFold | None:
    """Fold the text norms of an original checkpoint; a converted one holds them folded."""
    from engine_qwen35.config import Qwen35Config
    from engine_qwen35.weights import is_converted, norm_fold

    parsed = Qwen35Config.parse(config)
    return None if is_converted(parsed, tensors) else norm_fold(parsed)


@hookimpl
def engine_architecture(
    config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> Architecture:
    """Describe caches and sizes."""
    from engine_qwen35.config import Qwen35Config
    from engine_qwen35.weights import MTP, float32_parameters

    parsed = Qwen35Config.parse(config)
    declared = parsed.mtp_layers and "mtp_num_hidden_layers" in (
        config.section("text_config") if "text_config" in config else config
    )
    stripped = declared and not any(key.startswith(MTP) for key in tensors)
    return Architecture(
        build=partial(_build, parsed, frozenset(tensors)),
        layers=tuple(_layer(parsed, full=full) for full in parsed.full),
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        context_length=parsed.context_length,
        keep_float32=float32_parameters(parsed),
        extra_eos=(TURN_END,),
        notes=(
            ("config.json declares a multi-token-prediction module; its tensors were removed",)
            if stripped
            else ()
        ),
    )


@hookimpl
def engine_mtp(config: CheckpointConfig, tensors: Mapping[str, TensorInfo]) -> MtpPlan | None:
    """Recognise the multi-token-prediction module; it is checked by shape and left unread."""
    from engine_qwen35.config import Qwen35Config
    from engine_qwen35.layouts import check_layout, mtp_layout
    from engine_qwen35.weights import MTP

    expected = mtp_layout(Qwen35Config.parse(config), tensors)
    if not expected:
        return None
    check_layout(expected, tensors, MTP)
    return MtpPlan(expected=expected, reason=MTP_REASON)


@hookimpl
def engine_media(config: CheckpointConfig, tensors: Mapping[str, TensorInfo]) -> MediaPlan | None:
    """Recognise the vision tower; it is checked by shape and left unread."""
    from engine_qwen35.config import Qwen35Config
    from engine_qwen35.layouts import check_layout, vision_layout
    from engine_qwen35.weights import VISION

    vision = config.section("vision_config")
    expected = vision_layout(Qwen35Config.parse(config), vision, tensors)
    if not expected:
        return None
    check_layout(expected, tensors, VISION)
    return MediaPlan(
        modalities={"image"}, expected=expected, placeholders={"image": "<|image_pad|>"}
    )


def _layer(config: Qwen35Config, *, full: bool) -> LayerSpec:
    if full:
        return Full(kv_heads=config.kv_heads, head_dim=config.head_dim)
    linear = config.linear
    return Recurrent(
        shapes=(
            (linear.kernel - 1, linear.channels),
            (linear.value_heads, linear.value_dim, linear.key_dim),
        ),
        dtypes=("compute", "float32"),
    )


def _build(config: Qwen35Config, parameters: frozenset[str], context: BuildContext) -> CausalLM:
    from engine_qwen35.model import Qwen35Model

    return Qwen35Model(config, parameters, context.kernels)
