"""How checkpoint keys become model parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_core.fusion import attention_fusions
from engine_core.weight_plan import Drop, Rename, Rule, WeightPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.weight_plan import TensorInfo
    from engine_llama.config import LlamaConfig

__all__ = ["plan_weights"]

BACKBONE: Final = "model."
BACKBONE_PARTS: Final = ("embed_tokens.", "layers.", "norm.")


def plan_weights(config: LlamaConfig, tensors: Mapping[str, TensorInfo]) -> WeightPlan:
    """Plan the weights of a checkpoint in Hugging Face or MLX layout.

    Both use the same keys; a save of the bare backbone lacks the ``model.`` before them. Per
    layer, q, k and v (gate and up) become one matrix when they are stored alike.

    Args:
        config: Sizes.
        tensors: Checkpoint-verbatim key -> header facts.

    Returns:
        The rules.
    """
    rules: list[Rule] = []
    if not any(key.startswith(BACKBONE) for key in tensors):
        rules += [Rename(part, BACKBONE + part) for part in BACKBONE_PARTS]
    rules.append(Drop(suffix=".rotary_emb.inv_freq", reason="computed from the configuration"))
    if config.is_tied(tensors):
        rules.append(Drop(prefix="lm_head.", reason="the token table is the output projection"))
    named = WeightPlan(tuple(rules)).resolve(tensors).infos
    return WeightPlan((*rules, *attention_fusions("model.layers", config.layers, named)))
