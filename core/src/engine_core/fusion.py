"""Rules that join projections reading the same input: fewer, larger matrix products.

A decode step on a GPU is bound by the number of kernels, not by arithmetic, so q, k and v (and
gate and up) become one product each when the checkpoint stores them alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_core.weight_plan import Concat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.weight_plan import TensorInfo

__all__ = ["attention_fusions", "fuse_rows", "mlp_fusions"]

PARAMETERS: Final = ("weight", "scales", "biases", "bias")


def fuse_rows(
    sources: Sequence[str], into: str, tensors: Mapping[str, TensorInfo]
) -> tuple[Concat, ...]:
    """Join modules by output rows when all of them are stored alike.

    Args:
        sources: Module paths, in the order of the joined rows.
        into: Path of the joined module.
        tensors: Mapped key -> header facts.

    Returns:
        One rule a parameter; none when a module is missing, or they differ in dtype, in columns
        (another packing has another number of words), or in which parameters they have.
    """
    facts = [{name: tensors.get(f"{source}.{name}") for name in PARAMETERS} for source in sources]
    if any(fact["weight"] is None for fact in facts):
        return ()
    rules = []
    for name in PARAMETERS:
        infos = [fact[name] for fact in facts]
        present = [info for info in infos if info is not None]
        if not present:
            continue
        frames = {(info.dtype, info.shape[1:]) for info in present}
        if len(present) != len(sources) or len(frames) != 1:
            return ()
        rules.append(
            Concat(
                sources=tuple(f"{source}.{name}" for source in sources),
                into=f"{into}.{name}",
                axis=0,
            )
        )
    return tuple(rules)


def attention_fusions(
    prefix: str, layers: int, tensors: Mapping[str, TensorInfo]
) -> tuple[Concat, ...]:
    """Join q, k and v of every layer into ``self_attn.qkv_proj``, gate and up as well.

    Args:
        prefix: Path before the layer index, e.g. ``"model.layers"``.
        layers: Number of layers.
        tensors: Mapped key -> header facts.

    Returns:
        Rules for the layers that store them alike.
    """
    rules: list[Concat] = []
    for index in range(layers):
        block = f"{prefix}.{index}.self_attn"
        parts = [f"{block}.{name}_proj" for name in ("q", "k", "v")]
        rules += fuse_rows(parts, f"{block}.qkv_proj", tensors)
    return (*rules, *mlp_fusions(prefix, layers, tensors))


def mlp_fusions(prefix: str, layers: int, tensors: Mapping[str, TensorInfo]) -> tuple[Concat, ...]:
    """Join gate and up of every layer's ``mlp`` into ``mlp.gate_up_proj``.

    Args:
        prefix: Path before the layer index.
        layers: Number of layers.
        tensors: Mapped key -> header facts.

    Returns:
        Rules for the layers that store them alike.
    """
    rules: list[Concat] = []
    for index in range(layers):
        block = f"{prefix}.{index}.mlp"
        parts = [f"{block}.gate_proj", f"{block}.up_proj"]
        rules += fuse_rows(parts, f"{block}.gate_up_proj", tensors)
    return tuple(rules)
