"""From layer specs, which are data, to caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine_core.cache.kv import KvCache
from engine_core.cache.recurrent import RecurrentCache
from engine_core.errors import PluginError
from engine_core.family import Full, Recurrent, Shared, Sliding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.family import LayerSpec

__all__ = ["build_caches"]

SLOT_DTYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "int32": mx.int32,
}


def build_caches(layers: Sequence[LayerSpec], dtype: mx.Dtype, batch: int = 1) -> list[LayerCache]:
    """Build one cache a layer.

    Args:
        layers: Specs in layer order.
        dtype: Compute dtype.
        batch: B.

    Returns:
        Empty caches. A shared layer gets its donor's own object.

    Raises:
        PluginError: A spec names an unknown dtype, a donor that is not an earlier owner, or is of
            an unknown kind.
    """
    caches: list[LayerCache] = []
    for index, layer in enumerate(layers):
        match layer:
            case Full():
                caches.append(_attention(layer, dtype, batch, None))
            case Sliding():
                caches.append(_attention(layer, dtype, batch, layer.window))
            case Recurrent():
                caches.append(_recurrent(index, layer, dtype, batch))
            case Shared(donor=donor) if 0 <= donor < index and isinstance(
                layers[donor], (Full, Sliding)
            ):
                caches.append(caches[donor])
            case _:
                raise PluginError(
                    f"layer {index}: spec must be full, sliding, recurrent, or shared with an "
                    f"earlier attention layer, got {layer!r}",
                    code="plugin.layers",
                )
    return caches


def _attention(layer: Full | Sliding, dtype: mx.Dtype, batch: int, window: int | None) -> KvCache:
    return KvCache(
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        dtype=dtype,
        window=window,
        batch=batch,
    )


def _recurrent(index: int, layer: Recurrent, dtype: mx.Dtype, batch: int) -> RecurrentCache:
    known = {"compute": dtype, **SLOT_DTYPES}
    for name in layer.dtypes:
        if name not in known:
            raise PluginError(
                f"layer {index}: slot dtype must be one of {sorted(known)!r}, got {name!r}",
                code="plugin.layers",
            )
    return RecurrentCache(
        shapes=[(batch, *shape) for shape in layer.shapes],
        dtypes=[known[name] for name in layer.dtypes],
    )
