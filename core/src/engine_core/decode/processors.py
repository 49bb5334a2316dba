"""Changes to a logit row before sampling: bias and penalties, on the device, without host reads.

Order: logit bias, repetition penalty, presence penalty, frequency penalty, then the caller's own
processors. State is immutable: a step that is undone leaves nothing behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import mlx.core as mx

from engine_core.callbacks import call_back
from engine_core.errors import CallbackError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.decode.sampling import SamplingOptions

__all__ = ["LogitAdjuster", "SeenTokens", "run_user_processors"]


@attrs.frozen(kw_only=True, eq=False)
class SeenTokens:
    """What the penalties need to know of the tokens so far, as arrays.

    Attributes:
        window: Ids that the repetition penalty looks at, ``[N]`` int32; ``None`` when it is off.
        counts: How often each id was generated, ``[V]`` float32; ``None`` when the presence and
            frequency penalties are off.
    """

    window: mx.array | None = None
    counts: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """List what is evaluated a token so that the graph does not grow.

        Returns:
            The arrays.
        """
        return [array for array in (self.window, self.counts) if array is not None]


class LogitAdjuster:
    """The request's bias and penalties.

    The repetition penalty divides a positive logit of a seen token and multiplies a negative
    one, once a distinct token; it sees the last ``repetition_context_size`` tokens of prompt and
    reply (all of them when the size is ``None``). Presence and frequency penalties see generated
    tokens only: ``logit -= presence * (count > 0) + frequency * count``.

    Source: CTRL (arXiv 1909.05858, section 4.1) for repetition; the OpenAI API reference for
    presence, frequency and logit bias.
    """

    def __init__(self, options: SamplingOptions, vocab_size: int) -> None:
        """Place the constants on the device.

        Args:
            options: Validated options of the request.
            vocab_size: Rows of the logits (tokens).

        Raises:
            InvalidRequest: A biased id has no row.
        """
        for token in options.logit_bias:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"logit_bias: ids must lie in [0, {vocab_size}), got {token!r}",
                    code="request.logit_bias",
                )
        self._vocab_size = vocab_size
        self._bias: tuple[mx.array, mx.array] | None = None
        if options.logit_bias:
            self._bias = (
                mx.array(list(options.logit_bias), dtype=mx.int32),
                mx.array(list(options.logit_bias.values()), dtype=mx.float32),
            )
        self._repetition = options.repetition_penalty
        self._context_size = options.repetition_context_size
        self._presence = options.presence_penalty
        self._frequency = options.frequency_penalty
        self._repeats = self._repetition != 1.0
        self._counts = self._presence != 0.0 or self._frequency != 0.0
        self.is_active = self._bias is not None or self._repeats or self._counts

    def start(self, prompt: Sequence[int]) -> SeenTokens:
        """Build the state before the first generated token.

        Args:
            prompt: Ids of the whole prompt.

        Returns:
            The state.
        """
        window = counts = None
        if self._repeats:
            size = self._context_size
            kept = prompt if size is None else prompt[max(len(prompt) - size, 0) :]
            window = mx.array(list(kept), dtype=mx.int32)
        if self._counts:
            counts = mx.zeros((self._vocab_size,), dtype=mx.float32)
        return SeenTokens(window=window, counts=counts)

    def push(self, seen: SeenTokens, tokens: mx.array) -> SeenTokens:
        """Add generated tokens.

        Args:
            seen: State before them.
            tokens: ``[N]`` ids; may be lazy.

        Returns:
            State after them; ``seen`` is unchanged.
        """
        window, counts = seen.window, seen.counts
        if window is None and counts is None:
            return seen
        if window is not None:
            window = mx.concatenate([window, tokens.astype(mx.int32)])
            size = self._context_size
            if size is not None and window.size > size:
                window = window[window.size - size :]
        if counts is not None:
            counts = counts.at[tokens].add(1.0)
        return SeenTokens(window=window, counts=counts)

    def adjust(self, row: mx.array, seen: SeenTokens) -> mx.array:
        """Apply bias and penalties.

        Args:
            row: ``[V]`` float32 logits.
            seen: State before the token this row is for.

        Returns:
            ``[V]`` float32.
        """
        if self._bias is not None:
            ids, values = self._bias
            row = row.at[ids].add(values)
        if seen.window is not None and seen.window.size > 0:
            chosen = row[seen.window]
            penalised = mx.where(chosen < 0, chosen * self._repetition, chosen / self._repetition)
            # An id that stands twice in the window is written twice with one value.
            row = mx.put_along_axis(row, seen.window, penalised, axis=0)
        if seen.counts is not None:
            if self._presence != 0.0:
                row = row - self._presence * (seen.counts > 0).astype(mx.float32)
            if self._frequency != 0.0:
                row = row - self._frequency * seen.counts
        return row


def run_user_processors(
    processors: Sequence[Callable[[Sequence[int], mx.array], mx.array]],
    token_ids: Sequence[int],
    row: mx.array,
) -> mx.array:
    """Call the caller's logits processors in order.

    Args:
        processors: ``f(token_ids, logits [V]) -> logits [V]``.
        token_ids: Prompt and reply so far.
        row: ``[V]`` float32 logits.

    Returns:
        ``[V]`` float32.

    Raises:
        CallbackError: A processor raised or gave back something that is no logit row.
    """
    for processor in processors:
        result = call_back(processor, "logits_processor", token_ids, row)
        if not isinstance(result, mx.array) or result.shape != row.shape:
            shape = getattr(result, "shape", None)
            raise CallbackError(
                f"logits processor: must return an mx.array of shape {row.shape!r}, "
                f"got {type(result).__name__} of shape {shape!r}",
                code="callback.logits_processor",
            )
        row = result.astype(mx.float32)
    return row
