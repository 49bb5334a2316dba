"""The decode loop: one token at a time, with exact ledgers.

Per token, in this order: the token is read, emitted and handed to the caller; end of sequence and
the caller's stop finish without feeding it; so does the last token that ``max_tokens`` allows,
because nobody reads the logits after it (``committed_len`` says so). Every other token is fed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Self, cast

import attrs

from engine_core.decode.choice import TokenChooser
from engine_core.decode.finish import stronger_reason
from engine_core.decode.stepper import Stepper
from engine_core.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import mlx.core as mx

    from engine_core.cache.base import LayerCache
    from engine_core.decode.sampling import SamplingOptions
    from engine_core.request import TokenLogprob
    from engine_core.step import CausalLM

__all__ = ["DecodeOutcome", "DecodeStep", "Decoder"]


@attrs.frozen(kw_only=True)
class DecodeStep:
    """One emitted token.

    Attributes:
        token: Its id.
        ordinal: Its index in the reply.
        is_forced: The caller forced it; the model did not choose it.
        is_eos: It ends the sequence; no further step follows.
        logprobs: Its log-probabilities when asked for and not forced.
    """

    token: int
    ordinal: int
    is_forced: bool = False
    is_eos: bool = False
    logprobs: TokenLogprob | None = None


@attrs.frozen(kw_only=True)
class DecodeOutcome:
    """How decoding ended.

    Attributes:
        emitted: Every token delivered, in order.
        committed_len: How many of them are in the caches.
        finish: Why it ended.
        caches_valid: Whether the caches equal a cold feed of prompt and committed tokens; false
            means that they must not be used again.
    """

    emitted: tuple[int, ...]
    committed_len: int
    finish: FinishReason
    caches_valid: bool


class Decoder:
    """Iterates over the tokens of one reply.

    Between two steps the caller may :meth:`stop` or :meth:`force`. Leaving the loop early, by an
    exception too, requires :meth:`close`; used as a context manager the decoder does it itself::

        with Decoder(...) as decoder:
            for step in decoder:
                ...
        outcome = decoder.outcome

    Attributes:
        emitted: Tokens delivered so far. Do not change the list.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[LayerCache],
        logits: mx.array,
        options: SamplingOptions,
        *,
        prompt: Sequence[int],
        max_tokens: int,
        eos: Collection[int] = (),
        position: int | None = None,
        vocab_size: int | None = None,
        mask: mx.array | None = None,
        top_logprobs: int | None = None,
        lookahead: bool = True,
    ) -> None:
        """Take over caches that hold exactly the prompt.

        Args:
            model: The family's model.
            caches: One cache a layer.
            logits: ``[V]`` of the prompt's last row, evaluated.
            options: How to choose tokens.
            prompt: Ids of the whole prompt, for penalties and processors.
            max_tokens: Tokens to emit at most, forced ones included.
            eos: Ids that end the sequence.
            position: Absolute position of the first generated token; ``len(prompt)`` when
                omitted.
            vocab_size: Ids from here on have no token (padded rows) and are never chosen.
            mask: ``[V]`` float32 added to the logits, ``-inf`` for ids never to be chosen.
            top_logprobs: How many most probable tokens each step lists; ``None`` asks for no
                log-probabilities at all.
            lookahead: Queue the next step before reading a token. Without effect on the result;
                caller's processors need the token, so they run without.

        Raises:
            InvalidRequest: The options name a token that has no row.
        """
        self.emitted: list[int] = []
        self._limit = max_tokens
        self._eos = frozenset(eos)
        chooser = TokenChooser(
            options,
            prompt=prompt,
            rows=logits.size if vocab_size is None else min(vocab_size, logits.size),
            mask=mask,
            top_logprobs=top_logprobs,
        )
        self._stepper = Stepper(
            model,
            caches,
            logits,
            chooser,
            origin=len(prompt) if position is None else position,
            lookahead=lookahead and not options.logits_processors,
        )
        self._forced: deque[int] = deque()
        self._finish: FinishReason | None = FinishReason.LENGTH if max_tokens <= 0 else None
        self._closed = self._finish is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    @property
    def committed_len(self) -> int:
        """How many delivered tokens are in the caches; a queued step does not count."""
        return self._stepper.committed_len

    @property
    def caches_valid(self) -> bool:
        """As in :class:`DecodeOutcome`."""
        return self._stepper.caches_valid

    @property
    def device_failed(self) -> bool:
        """Whether the device failed while something was queued, which no error tells."""
        return self._stepper.device_failed

    @property
    def outcome(self) -> DecodeOutcome:
        """How decoding ended; a decoder closed early counts as aborted."""
        return DecodeOutcome(
            emitted=tuple(self.emitted),
            committed_len=self.committed_len,
            finish=self._finish or FinishReason.ABORTED,
            caches_valid=self.caches_valid,
        )

    def stop(self, reason: FinishReason) -> None:
        """Finish after the token just delivered, which is not fed.

        Args:
            reason: Why. When decoding ended by itself with that token, the stronger reason stays.
        """
        self._finish = reason if self._finish is None else stronger_reason(self._finish, reason)
        self.close()

    def force(self, ids: Sequence[int], *, extends_limit: bool = False) -> None:
        """Make the next tokens these instead of the model's own.

        They are delivered one by one like any other token, and fed together with the token before
        them after the last was delivered. They advance the ordinal, so the draws after them are
        those of their ordinals.

        Args:
            ids: Tokens to force.
            extends_limit: Raise ``max_tokens`` by their number; the caller has checked that they
                fit the context.
        """
        self._forced.extend(ids)
        if extends_limit:
            self._limit += len(ids)

    def close(self) -> None:
        """Take a queued step back, wait for the device and end; closing twice changes nothing."""
        if self._closed:
            return
        self._closed = True
        self._forced.clear()
        self._stepper.close()

    def __next__(self) -> DecodeStep:
        """Deliver the next token.

        Returns:
            The step.

        Raises:
            StopIteration: Decoding ended.
            ModelError: A forward failed or a logit row is not finite (``model.non_finite``).
            BackendError: An evaluation failed.
            CallbackError: A caller's processor failed.
            InvalidRequest: The processors left no token to choose.
        """
        if not self._closed and len(self.emitted) >= self._limit:
            self.stop(FinishReason.LENGTH)
        if self._closed:
            raise StopIteration
        try:
            step = self._force_next() if self._forced else self._choose_next()
        except BaseException:
            self.close()
            raise
        self.emitted.append(step.token)
        if step.is_eos:
            self.stop(FinishReason.STOP)
        return step

    def _force_next(self) -> DecodeStep:
        token = self._forced.popleft()
        self._stepper.force(token)
        return self._step(token, is_forced=True)

    def _choose_next(self) -> DecodeStep:
        is_last = len(self.emitted) + 1 >= self._limit
        choice = self._stepper.choose(self.emitted, is_last=is_last)
        token = cast("int", choice.token.item())
        logprobs = None if choice.logprobs is None else choice.logprobs.read(token)
        return self._step(token, logprobs=logprobs)

    def _step(
        self, token: int, *, is_forced: bool = False, logprobs: TokenLogprob | None = None
    ) -> DecodeStep:
        return DecodeStep(
            token=token,
            ordinal=len(self.emitted),
            is_forced=is_forced,
            is_eos=token in self._eos,
            logprobs=logprobs,
        )
