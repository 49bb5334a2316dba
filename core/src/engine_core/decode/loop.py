"""The decode loop: one token at a time, the next one already queued, exact ledgers.

Per token, in this order: the token is read, emitted and handed to the caller; end of sequence and
the caller's stop finish without feeding it; so does the last token that ``max_tokens`` allows,
because nobody reads the logits after it (``committed_len`` says so). Every other token is fed.

With look-ahead the forward and the sampling of the next token are queued before a token is read on
the host, so the device works while the host does. A queued step that turns out not to be wanted is
taken back on every cache. Whatever happens, the caches hold exactly the prompt and the first
``committed_len`` emitted tokens, or ``caches_valid`` is false.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Self, cast

import attrs

from engine_core.backend import evaluate
from engine_core.cache.layers import cache_arrays, distinct_caches, keep_caches
from engine_core.decode.choice import TokenChooser
from engine_core.decode.finish import stronger_reason
from engine_core.decode.forward import (
    forward_hidden,
    head_rows,
    non_finite_error,
    queue,
    wait_for_queued,
)
from engine_core.decode.prefill import run_prefill
from engine_core.errors import BackendError, EngineError, InvalidRequest
from engine_core.messages import FinishReason
from engine_core.nn.activations import computes_on_cpu

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import mlx.core as mx

    from engine_core.cache.base import LayerCache, Mark
    from engine_core.decode.choice import Choice
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


@attrs.frozen(kw_only=True, eq=False)
class _Ahead:
    """A queued step: the marks before its forward, and the choice drawn from it."""

    marks: tuple[Mark, ...]
    choice: Choice


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
        committed_len: How many of them are in the caches; a queued step does not count.
        caches_valid: As in :class:`DecodeOutcome`.
        device_failed: Whether the device failed while something was queued, which no error tells.
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
        self.committed_len = 0
        self.caches_valid = True
        self.device_failed = False
        self._model = model
        self._caches = caches
        self._states = distinct_caches(caches)
        self._limit = max_tokens
        self._eos = frozenset(eos)
        self._origin = len(prompt) if position is None else position
        self._lookahead = lookahead and not options.logits_processors
        # Running work keeps its buffers alive. On a CPU a step queued behind it could not append in
        # place and would copy every cache (230 ms instead of 29 at 30,000 positions), so there only
        # the building of the next step overlaps with the running one.
        self._waits_before_queueing = computes_on_cpu()
        self._chooser = TokenChooser(
            options,
            prompt=prompt,
            rows=logits.size if vocab_size is None else min(vocab_size, logits.size),
            mask=mask,
            top_logprobs=top_logprobs,
        )
        self._first_row: mx.array | None = logits
        self._seen = self._chooser.start()
        self._forced: deque[int] = deque()
        self._ahead: _Ahead | None = None
        self._awaited: Choice | None = None
        self._failure: Exception | None = None
        self._finish: FinishReason | None = FinishReason.LENGTH if max_tokens <= 0 else None
        self._closed = self._finish is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    @property
    def seed(self) -> int:
        """Seed in use; the drawn one when none was given."""
        return self._chooser.seed

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
        self._first_row = None
        self._undo()
        if self._lookahead:
            try:
                wait_for_queued()
            except BackendError:
                # The tokens delivered so far stand; only the caches are lost.
                self.caches_valid = False
                self.device_failed = True

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
        self._undo()
        self._raise_failure()
        self._first_row = None
        token = self._forced.popleft()
        self._seen = self._chooser.push(self._seen, token)
        return self._step(token, is_forced=True)

    def _choose_next(self) -> DecodeStep:
        self._raise_failure()
        choice = self._take()
        if self._lookahead and len(self.emitted) + 1 < self._limit:
            self._queue_ahead(choice)
        choice = self._settle(choice)
        token = cast("int", choice.token.item())
        self._seen = choice.seen_after
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

    def _raise_failure(self) -> None:
        """Raise what went wrong while queueing ahead, now that its result is wanted."""
        if self._failure is not None:
            raise self._failure

    def _take(self) -> Choice:
        """Feed what is emitted but not committed, unless a queued step did, and choose."""
        if self._ahead is not None:
            choice, self._ahead = self._ahead.choice, None
            self.committed_len += 1
            return choice
        row = self._feed()
        choice = self._chooser.choose(row, self._seen, len(self.emitted), self.emitted)
        if self._lookahead:
            queue(choice.arrays())
        return choice

    def _feed(self) -> mx.array:
        row, self._first_row = self._first_row, None
        if row is not None:
            return row
        start = self._origin + self.committed_len
        try:
            row = run_prefill(
                self._model, self._caches, self.emitted[self.committed_len :], start=start
            )
        except BaseException:
            self.caches_valid = False
            raise
        self.committed_len = len(self.emitted)
        return row

    def _queue_ahead(self, choice: Choice) -> None:
        """Queue the step after a chosen token that the host has not read yet.

        A failure is kept until the result is wanted: the token may turn out to be the last.
        """
        ordinal = len(self.emitted)
        position = self._origin + ordinal
        marks = tuple(cache.mark() for cache in self._states)
        is_fed = False
        self.caches_valid = False
        try:
            ids = choice.token.reshape(1, 1)
            hidden = forward_hidden(self._model, self._caches, ids, position)
            row = head_rows(self._model, hidden, position)[0]
            is_fed = True
            following = self._chooser.choose(row, choice.seen_after, ordinal + 1)
            is_fed = False
            if self._waits_before_queueing:
                self._wait(choice)
            queue([*following.arrays(), *cache_arrays(self._states)])
        except BackendError:
            # The fault may be one of the choice's own computation, which would then read as if it
            # had succeeded.
            raise
        except Exception as exc:  # noqa: BLE001 - raised by the next step, typed or as it is
            self._failure = exc
            if is_fed:
                # The forward is whole and can be taken back; only the choice could not be built.
                self.caches_valid = True
                self._keep(marks)
            return
        self.caches_valid = True
        self._ahead = _Ahead(marks=marks, choice=following)

    def _settle(self, choice: Choice) -> Choice:
        """Wait for a choice and check it: the one host synchronisation of a token."""
        while True:
            self._wait(choice)
            ordinal = len(self.emitted)
            if not choice.is_finite.item():
                # What made the row is in the caches too.
                self.caches_valid = False
                raise non_finite_error(self._origin + ordinal - 1)
            if choice.is_possible is not None and not choice.is_possible.item():
                raise InvalidRequest(
                    f"logits: bias, mask and processors must leave a token, got none at {ordinal}",
                    code="request.no_token",
                    hint="a logits processor must keep at least one finite logit and add no NaN",
                )
            if choice.is_covered is None or choice.is_covered.item():
                return choice
            self._undo()
            choice = self._chooser.widen(choice, ordinal)

    def _wait(self, choice: Choice) -> None:
        """Wait until a choice is computed, once."""
        if self._awaited is choice:
            return
        try:
            evaluate(*choice.arrays())
        except BackendError:
            # With look-ahead a forward is part of what failed, perhaps the next token's.
            self.caches_valid = self.caches_valid and not self._lookahead
            raise
        self._awaited = choice

    def _undo(self) -> None:
        """Take a queued step back, and with it a failure that was only about that step."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._keep(ahead.marks)
        if self.caches_valid:
            self._failure = None

    def _keep(self, marks: tuple[Mark, ...]) -> None:
        try:
            keep_caches(self._states, marks, 0)
        except EngineError:
            # The tokens delivered so far stand; only the caches are lost.
            self.caches_valid = False
