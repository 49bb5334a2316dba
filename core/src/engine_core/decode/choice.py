"""From the model's logit row to a chosen token with everything that must be known about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import mlx.core as mx

from engine_core.decode.logprobs import measure_logprobs
from engine_core.decode.processors import LogitAdjuster, run_user_processors
from engine_core.decode.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.decode.logprobs import LazyLogprobs
    from engine_core.decode.processors import SeenTokens
    from engine_core.decode.sampling import SamplingOptions

__all__ = ["Choice", "TokenChooser"]


@attrs.frozen(kw_only=True, eq=False)
class Choice:
    """A token drawn but perhaps not computed yet.

    Attributes:
        row: ``[V]`` the model's logits.
        adjusted: What it was drawn from: ids that exist, with bias, penalties and processors.
        seen: Penalty state before it.
        seen_after: Penalty state after it.
        token: ``[1]`` int32.
        is_finite: Scalar bool: the model's logits of the ids that exist are finite.
        is_possible: Scalar bool: a token was left to choose; ``None`` when nothing removes any.
        is_covered: Scalar bool: the candidates were enough; ``None`` when all were looked at.
        logprobs: Log-probabilities when asked for.
    """

    row: mx.array
    adjusted: mx.array
    seen: SeenTokens
    seen_after: SeenTokens
    token: mx.array
    is_finite: mx.array
    is_possible: mx.array | None
    is_covered: mx.array | None
    logprobs: LazyLogprobs | None

    def arrays(self) -> list[mx.array]:
        """List what is evaluated together so that reading the choice computes nothing more.

        Returns:
            The arrays.
        """
        arrays = [self.token, self.is_finite]
        arrays += [flag for flag in (self.is_possible, self.is_covered) if flag is not None]
        if self.logprobs is not None:
            arrays += self.logprobs.arrays()
        return arrays + self.seen_after.arrays()


class TokenChooser:
    """Chooses the tokens of one request."""

    def __init__(
        self,
        options: SamplingOptions,
        *,
        prompt: Sequence[int],
        rows: int,
        mask: mx.array | None,
        top_logprobs: int | None,
    ) -> None:
        """Prepare for a request.

        Args:
            options: How to choose.
            prompt: Ids of the whole prompt.
            rows: Logits from this row on belong to no token.
            mask: ``[V]`` float32 added to the logits.
            top_logprobs: As for ``Decoder``.

        Raises:
            InvalidRequest: The options name a token that has no row.
        """
        self._sampler = Sampler(options)
        self._adjuster = LogitAdjuster(options, rows)
        self._processors = options.logits_processors
        self._prompt = prompt
        self._rows = rows
        self._mask = None if mask is None else mask[:rows]
        self._top_logprobs = top_logprobs

    def start(self) -> SeenTokens:
        """Give the penalty state after the prompt.

        Returns:
            The state.
        """
        return self._adjuster.start(self._prompt)

    def push(self, seen: SeenTokens, token: int) -> SeenTokens:
        """Add a token that was not chosen here.

        Args:
            seen: State before it.
            token: Its id.

        Returns:
            State after it.
        """
        return self._adjuster.push(seen, mx.array([token], dtype=mx.int32))

    def choose(
        self, row: mx.array, seen: SeenTokens, ordinal: int, emitted: Sequence[int] = ()
    ) -> Choice:
        """Build the graph that draws a token from a logit row.

        Args:
            row: ``[V]`` the model's logits, any floating dtype.
            seen: Penalty state before the token.
            ordinal: Index of the token in the reply.
            emitted: Reply so far, for the caller's processors.

        Returns:
            The lazy choice.

        Raises:
            CallbackError: A caller's processor failed.
        """
        adjusted = row[: self._rows] if self._rows < row.size else row
        is_finite = mx.isfinite(mx.sum(adjusted.astype(mx.float32)))
        changes = self._adjuster.is_active or self._mask is not None or bool(self._processors)
        if changes or not self._sampler.is_greedy:
            adjusted = adjusted.astype(mx.float32)
        if self._mask is not None:
            adjusted = adjusted + self._mask
        if self._adjuster.is_active:
            adjusted = self._adjuster.adjust(adjusted, seen)
        if self._processors:
            token_ids = (*self._prompt, *emitted)
            adjusted = run_user_processors(self._processors, token_ids, adjusted)
        draw = self._sampler.draw(adjusted, ordinal)
        return Choice(
            row=row,
            adjusted=adjusted,
            seen=seen,
            seen_after=self._adjuster.push(seen, draw.token),
            token=draw.token,
            is_finite=is_finite,
            is_possible=mx.isfinite(mx.max(adjusted)) if changes else None,
            is_covered=draw.is_covered,
            logprobs=self._measure(row, draw.token),
        )

    def widen(self, choice: Choice, ordinal: int) -> Choice:
        """Draw again with more candidates, because those of the first draw proved too few.

        Args:
            choice: What was drawn.
            ordinal: Index of the token in the reply.

        Returns:
            The lazy choice.
        """
        self._sampler.widen()
        draw = self._sampler.draw(choice.adjusted, ordinal)
        return attrs.evolve(
            choice,
            seen_after=self._adjuster.push(choice.seen, draw.token),
            token=draw.token,
            is_covered=draw.is_covered,
            logprobs=self._measure(choice.row, draw.token),
        )

    def _measure(self, row: mx.array, token: mx.array) -> LazyLogprobs | None:
        if self._top_logprobs is None:
            return None
        return measure_logprobs(row, token, self._top_logprobs, self._rows)
