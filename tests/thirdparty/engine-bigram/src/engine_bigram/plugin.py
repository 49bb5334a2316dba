"""The hooks this family answers; imports nothing heavy, so that listing plugins stays fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.family import Architecture, FamilyInfo, NormFold, Rename, WeightPlan
from engine_core.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.family import TensorInfo
    from engine_core.step import BuildContext, CausalLM

CONTEXT_LENGTH = 4096


@hookimpl
def engine_families() -> Iterable[FamilyInfo]:
    """Own checkpoints whose ``model_type`` is ``bigram``."""
    return [
        FamilyInfo(
            name="bigram",
            model_types={"bigram"},
            architectures={"BigramForCausalLM"},
            dialects=("chatml",),
        )
    ]


@hookimpl
def engine_weight_plan(config: CheckpointConfig, tensors: Mapping[str, TensorInfo]) -> WeightPlan:
    """Take the checkpoint's ``bigram.`` prefix off; everything else has the model's own names."""
    del config, tensors
    return WeightPlan(rules=(Rename(prefix="bigram.", to=""),))


@hookimpl
def engine_norm_fold(config: CheckpointConfig) -> NormFold:
    """The one norm is stored as a delta from 1."""
    del config
    return NormFold(keys=frozenset({"norm.weight"}))


@hookimpl
def engine_architecture(config: CheckpointConfig) -> Architecture:
    """Read the two sizes and say how to build the model; no layer keeps any state."""
    vocab_size = config.integer("vocab_size", minimum=1)
    hidden_size = config.integer("hidden_size", minimum=1)
    eps = config.number("rms_norm_eps", default=1e-6)

    def build(context: BuildContext) -> CausalLM:
        from engine_bigram.model import Bigram

        del context
        return Bigram(vocab_size=vocab_size, hidden_size=hidden_size, eps=eps)

    return Architecture(
        build=build,
        layers=(),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        context_length=config.integer("max_position_embeddings", default=CONTEXT_LENGTH, minimum=1),
    )
