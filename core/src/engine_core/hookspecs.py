"""The eight hooks a family plugin may implement.

Contributions (``engine_families``, ``engine_template_dialects``, ``engine_tool_syntaxes``) are
asked of every plugin once per :class:`~engine_core.plugins.Plugins`. Questions (the other five)
are asked only of the plugin that owns the checkpoint, once per load, on the worker thread, before
any tensor payload is read. No hook is called while tokens are generated: the answers are frozen
into a :class:`~engine_core.spec.ModelSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.markers import hookspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import (
        Architecture,
        FamilyInfo,
        MediaPlan,
        MtpPlan,
        NormFold,
        TemplateDialect,
        TensorInfo,
        ToolSyntax,
        WeightPlan,
    )


@hookspec
def engine_families() -> Iterable[FamilyInfo]:
    """Name the model families this plugin owns.

    Asked of every plugin, once per process-local ``Plugins`` object, at discovery. Must not
    import MLX.

    Returns:
        One record a family; an empty iterable when the plugin only brings dialects or syntaxes.

    Versions:
        Since hook API 1.
    """


@hookspec
def engine_template_dialects() -> Iterable[TemplateDialect]:
    """Contribute template dialects.

    Asked of every plugin, once, at discovery. A name claimed twice is a conflict.

    Returns:
        Dialect records.

    Versions:
        Since hook API 1.
    """


@hookspec
def engine_tool_syntaxes() -> Iterable[ToolSyntax]:
    """Contribute tool-call syntaxes.

    Asked of every plugin, once, at discovery. A name claimed twice is a conflict.

    Returns:
        Syntax objects.

    Versions:
        Since hook API 1.
    """


@hookspec(firstresult=True)
def engine_weight_plan(
    family: str, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> WeightPlan | None:
    """Say how checkpoint tensors become model parameters.

    Asked of the owner first, before every other question. Required.

    Args:
        family: ``FamilyInfo.name`` the owner declared.
        config: Parsed ``config.json``; ``null`` entries are absent.
        tensors: Checkpoint-verbatim key -> header facts.

    Returns:
        Ordered data rules. The same plan maps quantization overrides.

    Versions:
        Since hook API 1.
    """


@hookspec(firstresult=True)
def engine_norm_fold(
    family: str, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> NormFold | None:
    """Say which norm scales of this checkpoint are stored as deltas.

    Asked of the owner after ``engine_weight_plan``.

    Args:
        family: ``FamilyInfo.name`` the owner declared.
        config: Parsed ``config.json``; ``null`` entries are absent.
        tensors: Mapped key -> header facts *as stored* (shape before a permutation). Use them to
            tell an original checkpoint from one that a converter already folded.

    Returns:
        The fold, or ``None`` when every scale is already effective.

    Versions:
        Since hook API 1.
    """


@hookspec(firstresult=True)
def engine_architecture(
    family: str, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> Architecture | None:
    """Describe the model: caches, sizes, and how to build it.

    Asked of the owner after ``engine_norm_fold``. Required.

    Args:
        family: ``FamilyInfo.name`` the owner declared.
        config: Parsed ``config.json``; ``null`` entries are absent.
        tensors: Mapped key -> header facts *as mapped* (after split, stack and permutation).

    Returns:
        The architecture.

    Versions:
        Since hook API 1.
    """


@hookspec(firstresult=True)
def engine_mtp(
    family: str, config: CheckpointConfig, tensors: Mapping[str, TensorInfo]
) -> MtpPlan | None:
    """Describe the checkpoint's multi-token-prediction module.

    Asked of the owner after ``engine_architecture``.

    Args:
        family: ``FamilyInfo.name`` the owner declared.
        config: Parsed ``config.json``; ``null`` entries are absent.
        tensors: Mapped key -> header facts as mapped.

    Returns:
        The exact layout, or ``None`` when the family or the checkpoint has no such module.

    Versions:
        Since hook API 1.
    """


@hookspec(firstresult=True)
def engine_media(
    family: str,
    config: CheckpointConfig,
    tensors: Mapping[str, TensorInfo],
    processor: CheckpointConfig,
) -> MediaPlan | None:
    """Describe the checkpoint's media towers.

    Asked of the owner last.

    Args:
        family: ``FamilyInfo.name`` the owner declared.
        config: Parsed ``config.json``; ``null`` entries are absent.
        tensors: Mapped key -> header facts as mapped.
        processor: Parsed ``processor_config.json`` or ``preprocessor_config.json``, empty when
            neither exists.

    Returns:
        The plan, or ``None`` for a text-only checkpoint.

    Versions:
        Since hook API 1.
    """
