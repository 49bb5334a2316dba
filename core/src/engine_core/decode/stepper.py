"""One forward and one choice a token, the next ones already queued, and caches that stay exact.

With look-ahead the forward and the sampling of the next token are queued before a token is read on
the host, so the device works while the host does. A queued step that turns out not to be wanted is
taken back on every cache. Whatever happens, the caches hold exactly the prompt and the first
``committed_len`` emitted tokens, or ``caches_valid`` is false.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from engine_core.backend import evaluate
from engine_core.cache.layers import cache_arrays, distinct_caches, keep_caches
from engine_core.decode.forward import (
    forward_hidden,
    head_rows,
    non_finite_error,
    queue,
    wait_for_queued,
)
from engine_core.decode.prefill import run_prefill
from engine_core.errors import BackendError, EngineError, InvalidRequest
from engine_core.nn.activations import computes_on_cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from engine_core.cache.base import LayerCache, Mark
    from engine_core.decode.choice import Choice, TokenChooser
    from engine_core.step import CausalLM

__all__ = ["Stepper"]


@attrs.frozen(kw_only=True, eq=False)
class _Ahead:
    """A queued step: the marks before its forward, and the choice drawn from it."""

    marks: tuple[Mark, ...]
    choice: Choice


class Stepper:
    """Feeds the tokens of one reply and chooses the next ones.

    Attributes:
        committed_len: How many emitted tokens are in the caches; a queued step does not count.
        caches_valid: Whether the caches equal a cold feed of prompt and committed tokens.
        device_failed: Whether the device failed while something was queued, which no error tells.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[LayerCache],
        logits: mx.array,
        chooser: TokenChooser,
        *,
        origin: int,
        lookahead: bool,
    ) -> None:
        """Take over caches that hold exactly the prompt.

        Args:
            model: The family's model.
            caches: One cache a layer.
            logits: ``[V]`` of the prompt's last row, evaluated.
            chooser: Chooses the tokens.
            origin: Absolute position of the first generated token.
            lookahead: Queue the next step before reading a token.
        """
        self.committed_len = 0
        self.caches_valid = True
        self.device_failed = False
        self._model = model
        self._caches = caches
        self._states = distinct_caches(caches)
        self._origin = origin
        self._lookahead = lookahead
        # Running work keeps its buffers alive. On a CPU a step queued behind it could not append in
        # place and would copy every cache (230 ms instead of 29 at 30,000 positions), so there only
        # the building of the next step overlaps with the running one.
        self._waits_before_queueing = computes_on_cpu()
        self._chooser = chooser
        self._first_row: mx.array | None = logits
        self._seen = chooser.start()
        self._ahead: _Ahead | None = None
        self._awaited: Choice | None = None
        self._failure: Exception | None = None

    def choose(self, emitted: Sequence[int], *, is_last: bool) -> Choice:
        """Feed what is emitted but not committed and choose the next token.

        Args:
            emitted: The reply so far.
            is_last: Whether no token follows this one, so that none is queued.

        Returns:
            The choice, computed and checked.

        Raises:
            ModelError: A forward failed or a logit row is not finite (``model.non_finite``).
            BackendError: An evaluation failed.
            CallbackError: A caller's processor failed.
            InvalidRequest: The processors left no token to choose.
        """
        self._raise_failure()
        choice = self._take(emitted)
        ordinal = len(emitted)
        if self._lookahead and not is_last:
            self._queue_ahead(choice, ordinal)
        choice = self._settle(choice, ordinal)
        self._seen = choice.seen_after
        return choice

    def force(self, token: int) -> None:
        """Take a token that the model did not choose; a queued step is taken back.

        Args:
            token: Its id.

        Raises:
            Exception: The queued step failed in a way that lost the caches.
        """
        self._undo()
        self._raise_failure()
        self._first_row = None
        self._seen = self._chooser.push(self._seen, token)

    def close(self) -> None:
        """Take a queued step back and wait for the device."""
        self._first_row = None
        self._undo()
        if self._lookahead:
            try:
                wait_for_queued()
            except BackendError:
                # The tokens delivered so far stand; only the caches are lost.
                self.caches_valid = False
                self.device_failed = True

    def _raise_failure(self) -> None:
        """Raise what went wrong while queueing ahead, now that its result is wanted."""
        if self._failure is not None:
            raise self._failure

    def _take(self, emitted: Sequence[int]) -> Choice:
        """Take the queued step's choice; without one, feed and choose now."""
        if self._ahead is not None:
            choice, self._ahead = self._ahead.choice, None
            self.committed_len += 1
            return choice
        row = self._feed(emitted)
        choice = self._chooser.choose(row, self._seen, len(emitted), emitted)
        if self._lookahead:
            queue(choice.arrays())
        return choice

    def _feed(self, emitted: Sequence[int]) -> mx.array:
        row, self._first_row = self._first_row, None
        if row is not None:
            return row
        start = self._origin + self.committed_len
        try:
            row = run_prefill(self._model, self._caches, emitted[self.committed_len :], start=start)
        except BaseException:
            self.caches_valid = False
            raise
        self.committed_len = len(emitted)
        return row

    def _queue_ahead(self, choice: Choice, ordinal: int) -> None:
        """Queue the step after a chosen token that the host has not read yet.

        A failure is kept until the result is wanted: the token may turn out to be the last.
        """
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

    def _settle(self, choice: Choice, ordinal: int) -> Choice:
        """Wait for a choice and check it: the one host synchronisation of a token."""
        while True:
            self._wait(choice)
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
