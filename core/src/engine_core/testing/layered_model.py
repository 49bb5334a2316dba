"""The model of :mod:`engine_core.testing.layered`; apart, because it imports MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from engine_core.family import Recurrent, Shared
from engine_core.nn import Embedding, Linear, Module, attend, attention_mask
from engine_core.step import StepInput, StepOutput
from engine_core.testing.layered import CONV_ROWS, WIDTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.cache.base import LayerCache
    from engine_core.family import LayerSpec

__all__ = ["LayeredModel"]

# What is left of a row after one more row: the state remembers about a hundred rows.
DECAY = 0.97


def recur(
    slots: tuple[mx.array, ...],
    inputs: tuple[mx.array, ...],
    _: mx.array | None,
    ends: tuple[int, ...],
) -> tuple[mx.array, list[tuple[mx.array, ...]]]:
    """Run the recurrence ``s[t] = DECAY s[t-1] + mean(x[t-3..t])``.

    Args:
        slots: Last ``CONV_ROWS`` inputs ``[B, 3, H]`` and the sum ``[B, H]``.
        inputs: Rows ``[B, L, H]``.
        ends: Row counts after which the slots are wanted.

    Returns:
        The sums ``[B, L, H]`` and the slots after each of ``ends``.
    """
    (window, state), (x,) = slots, inputs
    rows = x.shape[1]
    padded = mx.concatenate([window, x], axis=1)
    shifted = mx.stack([padded[:, at : at + rows] for at in range(CONV_ROWS + 1)])
    mixed = mx.mean(shifted, axis=0)
    powers = mx.arange(rows)[:, None] - mx.arange(rows)[None]
    weights = mx.where(powers >= 0, DECAY ** mx.maximum(powers, 0), 0.0)
    carried = DECAY ** mx.arange(1, rows + 1)[:, None] * state[:, None]
    states = weights.astype(x.dtype) @ mixed + carried.astype(x.dtype)
    return states, [(padded[:, end : end + CONV_ROWS], states[:, end - 1]) for end in ends]


class Block(Module):
    """One layer of any kind; its parameters are those its kind needs."""

    def __init__(self, layer: LayerSpec) -> None:
        """Make the projections.

        Args:
            layer: Its spec.
        """
        super().__init__()
        if isinstance(layer, Recurrent):
            self.input = Linear(WIDTH, WIDTH)
            self.mix = Linear(WIDTH, WIDTH)
        else:
            self.query = Linear(WIDTH, WIDTH)
        if not isinstance(layer, (Recurrent, Shared)):
            self.key = Linear(WIDTH, WIDTH)
            self.value = Linear(WIDTH, WIDTH)
        self.output = Linear(WIDTH, WIDTH)


class LayeredModel(Module):
    """Residual blocks over a token table; a sine tells positions apart."""

    def __init__(self, layers: Sequence[LayerSpec], vocab_size: int) -> None:
        """Make the layers with placeholder parameters.

        Args:
            layers: Specs in order.
            vocab_size: V.
        """
        super().__init__()
        self.embedding = Embedding(vocab_size, WIDTH)
        self.blocks = [Block(layer) for layer in layers]
        self.head_projection = Linear(WIDTH, vocab_size)
        self._layers = tuple(layers)

    def embed(self, ids: mx.array) -> mx.array:
        """Look rows up.

        Args:
            ids: ``[B, L]`` int32.

        Returns:
            ``[B, L, H]``.
        """
        return self.embedding(ids)

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> StepOutput:
        """Run the blocks.

        Args:
            step: Ids or embeddings, at an integer position.
            caches: One a layer.

        Returns:
            Hidden rows.
        """
        x = self.embed(step.ids) if step.embeddings is None else step.embeddings
        rows = x.shape[1]
        places = step.positions + mx.arange(rows)
        x = x + 0.3 * mx.sin(places[:, None] / mx.arange(1, WIDTH + 1)).astype(x.dtype)
        seen: dict[int, Any] = {}
        for index, (block, layer) in enumerate(zip(self.blocks, self._layers, strict=True)):
            cache: Any = caches[index]
            if isinstance(layer, Recurrent):
                states = cache.run(recur, (block.input(x),))
                x = x + block.output(mx.tanh(block.mix(states)))
                continue
            donor = layer.donor if isinstance(layer, Shared) else index
            if donor == index:
                mask = attention_mask(cache, rows)
                seen[index] = (*cache.append(block.key(x)[:, None], block.value(x)[:, None]), mask)
            keys, values, mask = seen[donor]
            mixed = attend(block.query(x)[:, None], keys, values, WIDTH**-0.5, mask)
            x = x + block.output(mixed[:, 0])
        return StepOutput(hidden=mx.tanh(x) * 2)

    def head(self, hidden: mx.array) -> mx.array:
        """Score the next token.

        Args:
            hidden: ``[B, N, H]``.

        Returns:
            ``[B, N, V]``.
        """
        return self.head_projection(hidden)
