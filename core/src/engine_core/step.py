"""The forward contract between core and a family's model.

A model is stateless between calls: everything a request owns arrives in ``StepInput`` and the
caches, so one model serves any number of conversations. A module that needs MLX only for these
annotations can import this file without importing MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.core as mx

    from engine_core.cache.base import LayerCache
    from engine_core.kernels import KernelRegistry
    from engine_core.quantization import QuantizationPlan

__all__ = ["BuildContext", "CausalLM", "StepInput", "StepOutput"]


@attrs.frozen(kw_only=True, eq=False)
class BuildContext:
    """What a family needs to build its model; new fields always get defaults.

    Attributes:
        compute_dtype: Dtype of activations and of every parameter that is not kept otherwise.
        quantization: Mapped module path -> how its weight is packed. Core replaces those layers
            after ``build``; a family reads it only to choose a structure.
        kernels: Registry through which every custom kernel is built.
        shard_rank: Index of this tensor-parallel shard, 0 when there is one.
        shard_size: Number of tensor-parallel shards.
    """

    compute_dtype: mx.Dtype
    quantization: QuantizationPlan
    kernels: KernelRegistry
    shard_rank: int = 0
    shard_size: int = 1


@attrs.frozen(kw_only=True, eq=False)
class StepInput:
    """One forward call.

    Attributes:
        ids: Token ids ``[B, L]`` int32; present even beside ``embeddings`` (some families look
            per-layer rows up by id).
        embeddings: ``[B, L, H]`` in compute dtype when media replaced some rows, already scaled
            as ``embed`` scales; ``None`` means ``embed(ids)``.
        positions: Offset of the first row as an int (tokens), or int32 ``[B, L]``, or int32
            ``[3, B, L]`` (temporal, height, width). A model never derives positions from a cache.
        lengths: Valid rows of each batch row ``[B]`` int32, ``None`` when all are valid.
        spans: Half-open row ranges ``(start, stop)`` of this call whose rows see one another in
            both directions (image soft tokens).
        collect: Extra hidden states wanted, by name; a model puts those it knows into
            ``StepOutput.extras``.
    """

    ids: mx.array
    embeddings: mx.array | None = None
    positions: int | mx.array = 0
    lengths: mx.array | None = None
    spans: tuple[tuple[int, int], ...] = ()
    collect: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True, eq=False)
class StepOutput:
    """What a forward call gives back.

    Attributes:
        hidden: ``[B, L, H]`` after the final norm, compute dtype.
        extras: Named extra states asked for in ``StepInput.collect``.
    """

    hidden: mx.array
    extras: Mapping[str, mx.array] = attrs.field(factory=dict)


class CausalLM(Protocol):
    """What core calls on a family's model.

    The object is an ``engine_core.nn.Module`` whose parameter paths equal the mapped weight keys,
    so that quantization, adapters and sharding replace layers by path. It holds no request state.
    """

    def embed(self, ids: mx.array) -> mx.array:
        """Look token rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]`` in compute dtype, scaled as the family scales.
        """
        ...

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> StepOutput:
        """Run all layers and append to the caches.

        Args:
            step: Ids, positions and optional embeddings.
            caches: One cache a layer, as core built them from ``Architecture.layers``.

        Returns:
            Hidden states after the final norm.

        Raises:
            ModelError: An optional component that this call needs is missing.
        """
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Project hidden rows to the vocabulary, softcap included.

        Args:
            hidden: ``[B, N, H]``, only rows whose logits somebody reads.

        Returns:
            ``[B, N, V]``.
        """
        ...
