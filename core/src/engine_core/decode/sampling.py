"""From a logit row to a token, on the device.

Filters see the adjusted logits (bias, penalties, caller's processors) at temperature 1, in this
order: top-p, min-p, XTC, top-k. The temperature is applied to what they leave, then one token is
drawn. Every filter is a threshold on the logit value, so tokens with equal logits share their
fate: a tie at a threshold is kept whole (top-k may keep more than k tokens).

A full sort of a large vocabulary costs many times the rest, so top-p, min-p and top-k look at
candidates: the vocabulary is cut into blocks of 32, and the blocks with the largest maxima are
taken. No token outside them exceeds the largest maximum left out, so a threshold above that
maximum is exact; otherwise the draw says that it is not covered and is repeated with more
candidates, in the end with all. The drawn token does not depend on how many candidates there were.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Draw", "Sampler", "SamplingOptions", "leading_candidates", "step_key"]

BLOCK = 32
# Candidate blocks a level; after the last level the whole row is sorted.
LEVELS = (256, 1024)
# Tokens after which a wider level is tried narrower again.
NARROW_AFTER = 32
WORD = 2**64 - 1


@attrs.frozen(kw_only=True, eq=False)
class SamplingOptions:
    """How tokens are chosen; ranges are those that the request was validated against.

    Attributes:
        temperature: 0 or less is greedy; then the filters and the seed have no effect.
        top_p: Keep the smallest set of most probable tokens whose mass reaches this; 1 is off.
        top_k: Keep this many most probable tokens; ``None``, 0 or less is off.
        min_p: Keep tokens at least this share as probable as the most probable one; 0 is off.
        min_tokens_to_keep: Tokens that min-p never removes.
        xtc_probability: How often XTC applies to a token; 0 is off.
        xtc_threshold: XTC removes all tokens more probable than the least probable of those above
            this probability.
        xtc_protected: Ids XTC never removes (ends of sequence, line breaks).
        repetition_penalty: Factor on logits of seen tokens; 1 is off.
        repetition_context_size: Tokens of prompt and reply it looks back; ``None`` is all.
        presence_penalty: Subtracted from logits of generated tokens; 0 is off.
        frequency_penalty: Subtracted once an occurrence; 0 is off.
        logit_bias: Token id -> added to its logit.
        logits_processors: Caller's functions ``f(token_ids, logits [V]) -> logits [V]``.
        seed: Start of the random sequence; ``None`` draws one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_protected: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    repetition_context_size: int | None = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)
    logits_processors: Sequence[Callable[[Sequence[int], mx.array], mx.array]] = ()
    seed: int | None = None


@attrs.frozen(kw_only=True, eq=False)
class Draw:
    """One drawn token, lazy.

    Attributes:
        token: ``[1]`` int32.
        is_covered: Scalar bool: the candidates proved the thresholds; ``None`` when nothing had
            to be proved.
    """

    token: mx.array
    is_covered: mx.array | None = None


def step_key(seed: int, ordinal: int) -> mx.array:
    """Derive the random key of one token, so that an undone or repeated step draws the same.

    Args:
        seed: The request's seed.
        ordinal: Index of the token in the reply.

    Returns:
        Key for ``mx.random``.

    Source: SplitMix64 (Steele, Lea, Flood 2014): output ``ordinal`` of the stream of ``seed``.
    """
    word = (seed + (ordinal + 1) * 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return mx.random.key(word ^ (word >> 31))


def leading_candidates(row: mx.array, blocks: int) -> tuple[mx.array, mx.array, mx.array | None]:
    """Take the blocks of a row that hold its largest values.

    Args:
        row: ``[V]`` float32.
        blocks: How many blocks to take.

    Returns:
        Values ``[M]``, their ids ``[M]`` int32 ascending, and a scalar that no value outside
        exceeds; the whole row and ``None`` when it is not larger than that. ``M`` may count
        padding, which has value ``-inf``.
    """
    size = row.size
    count = -(-size // BLOCK)
    if count <= blocks:
        return row, mx.arange(size, dtype=mx.int32), None
    if size % BLOCK:
        row = mx.pad(row, (0, count * BLOCK - size), constant_values=-math.inf)
    table = row.reshape(count, BLOCK)
    maxima = table.max(axis=1)
    order = mx.argpartition(maxima, kth=count - blocks - 1)
    # Ascending ids make the result independent of how many blocks are taken.
    chosen = mx.sort(order[count - blocks :]).astype(mx.int32)
    ids = chosen[:, None] * BLOCK + mx.arange(BLOCK, dtype=mx.int32)
    return table[chosen].reshape(-1), ids.reshape(-1), maxima[order[count - blocks - 1]]


class Sampler:
    """Draws the tokens of one request."""

    def __init__(self, options: SamplingOptions) -> None:
        """Prepare the request's sampler.

        Args:
            options: Validated options.
        """
        self._options = options
        self.is_greedy = options.temperature <= 0.0
        self.seed = int.from_bytes(os.urandom(8)) if options.seed is None else options.seed
        self._top_k = options.top_k if options.top_k is not None and options.top_k > 0 else None
        self._cuts_low = options.top_p < 1.0 or options.min_p > 0.0 or self._top_k is not None
        self._ranks = max(self._top_k or 1, options.min_tokens_to_keep)
        self._protected = (
            mx.array(options.xtc_protected, dtype=mx.int32) if options.xtc_protected else None
        )
        # A rank must lie inside the leading values of a level.
        self._floor = sum(self._ranks >= blocks for blocks in LEVELS)
        self._level = self._floor
        self._draws_at_level = 0

    def draw(self, row: mx.array, ordinal: int) -> Draw:
        """Choose a token.

        Args:
            row: ``[V]`` adjusted logits of the tokens that exist; float32 unless greedy.
            ordinal: Index of the token in the reply.

        Returns:
            The draw; the same for the same row, seed and ordinal.
        """
        if self.is_greedy:
            return Draw(token=mx.argmax(row, keepdims=True).astype(mx.int32))
        options = self._options
        key = step_key(self.seed, ordinal)
        excludes_top: mx.array | None = None
        if options.xtc_probability > 0.0:
            key, coin = mx.random.split(key)
            excludes_top = mx.random.uniform(key=coin) < options.xtc_probability
        if self._cuts_low:
            return self._draw_from_leading(row, key, excludes_top)
        if excludes_top is not None:
            ids = mx.arange(row.size, dtype=mx.int32)
            row = self._exclude_top(row, ids, mx.logsumexp(row), excludes_top)
        token = mx.random.categorical(row * (1.0 / options.temperature), key=key)
        return Draw(token=token.reshape(1).astype(mx.int32))

    def widen(self) -> None:
        """Take more candidates from now on: the last draw was not covered."""
        self._level += 1
        self._draws_at_level = 0

    def _next_level_blocks(self, row: mx.array) -> int:
        if self._level > self._floor:
            self._draws_at_level += 1
            if self._draws_at_level > NARROW_AFTER:
                self._level -= 1
                self._draws_at_level = 0
        return LEVELS[self._level] if self._level < len(LEVELS) else row.size

    def _draw_from_leading(
        self, row: mx.array, key: mx.array, excludes_top: mx.array | None
    ) -> Draw:
        options = self._options
        blocks = self._next_level_blocks(row)
        values, ids, outside = leading_candidates(row, blocks)
        lower = mx.array(-math.inf)
        ranked = _ranked(values, blocks)
        if options.top_p < 1.0:
            lower = _top_p_threshold(ranked, mx.logsumexp(row), options.top_p, outside)
        if options.min_p > 0.0:
            lower = mx.maximum(lower, _min_p_threshold(ranked, options))
        is_covered: mx.array | None = None
        if excludes_top is not None:
            if options.top_p < 1.0 or options.min_p > 0.0:
                values = mx.where(values >= lower, values, -math.inf)
                log_mass = mx.logsumexp(values)
                if outside is not None:
                    is_covered = lower > outside
            else:
                log_mass = mx.logsumexp(row)
                if outside is not None:
                    is_covered = mx.exp(outside - log_mass) <= options.xtc_threshold
            values = self._exclude_top(values, ids, log_mass, excludes_top)
            ranked = _ranked(values, blocks)
        if self._top_k is not None and self._top_k < ranked.size:
            lower = mx.maximum(lower, ranked[self._top_k - 1])
        if outside is not None:
            proved = (lower > outside) | (outside == -math.inf)
            is_covered = proved if is_covered is None else is_covered & proved
        hit = _pick(values, lower, options.temperature, mx.random.uniform(key=key))
        return Draw(token=ids[hit].reshape(1), is_covered=is_covered)

    def _exclude_top(
        self, values: mx.array, ids: mx.array, log_mass: mx.array, applies: mx.array
    ) -> mx.array:
        """Apply XTC to values whose probabilities are ``exp(values - log_mass)``.

        Source: the "exclude top choices" proposal, text-generation-webui pull request 6335.
        """
        is_above = mx.exp(values - log_mass) > self._options.xtc_threshold
        least = mx.min(mx.where(is_above, values, math.inf))
        is_removed = (values > least) & applies
        if self._protected is not None:
            is_kept = mx.any(ids[:, None] == self._protected[None, :], axis=1)
            is_removed = is_removed & mx.logical_not(is_kept)
        return mx.where(is_removed, -math.inf, values)


def _ranked(values: mx.array, count: int) -> mx.array:
    leading = mx.topk(values, count) if count < values.size else values
    return mx.sort(leading)[::-1]


def _top_p_threshold(
    ranked: mx.array, log_mass: mx.array, top_p: float, outside: mx.array | None
) -> mx.array:
    probabilities = mx.exp(ranked - log_mass)
    reached = mx.cumsum(probabilities)
    # A token is kept while the mass before it is short of top_p.
    kept = mx.maximum(mx.sum((reached - probabilities) < top_p), 1)
    threshold = ranked[kept - 1]
    if outside is None:
        return threshold
    return mx.where(reached[-1] >= top_p, threshold, -math.inf)


def _min_p_threshold(ranked: mx.array, options: SamplingOptions) -> mx.array:
    threshold = ranked[0] + math.log(options.min_p)
    least = min(options.min_tokens_to_keep, ranked.size)
    return mx.minimum(threshold, ranked[least - 1])


def _pick(values: mx.array, lower: mx.array, temperature: float, uniform: mx.array) -> mx.array:
    """Draw an index by inverting the cumulative weights; only a positive weight is ever hit."""
    scaled = (values - mx.max(values)) * (1.0 / temperature)
    weights = mx.where(values >= lower, mx.exp(scaled), 0.0)
    reached = mx.cumsum(weights)
    # Just below 1, so that rounding cannot push the target to the total itself.
    target = uniform * reached[-1] * (1.0 - 2.0**-23)
    rank = mx.where(weights > 0, 1 + (reached > target).astype(mx.int32), 0)
    return mx.argmax(rank)
