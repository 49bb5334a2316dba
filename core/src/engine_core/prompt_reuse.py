"""What one request starts from, and what of it is kept for later ones.

The one place where requests and stored prefixes meet. However a request ends, its caches are let
go of here, and the pool holds nothing whose state is in doubt.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

import attrs

from engine_core.backend import evaluate
from engine_core.cache.layers import cache_arrays, fork_caches, plan_fork, reset_caches
from engine_core.cache.pool_entry import EntryKind
from engine_core.decode.prefill import feed_prompt, run_prefill
from engine_core.errors import BackendError, CacheError, Cancelled, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import mlx.core as mx

    from engine_core.cache.base import LayerCache
    from engine_core.cache.pool import PromptPool
    from engine_core.decode.loop import Decoder
    from engine_core.loading import Loaded
    from engine_core.prompting import Prompt

__all__ = ["PromptStart"]


@attrs.frozen(eq=False)
class _Snapshot:
    """The state after a part of the prompt, held back until the prefill completes."""

    length: int
    kind: EntryKind
    caches: list[LayerCache]


@attrs.define(eq=False)
class PromptStart:
    """The caches of one request while it runs; a context manager.

    Attributes:
        caches: One a layer.
        cached: Prompt tokens in them already, served by the pool.
        origin: Tokens in caches of the caller's before this prompt.
        decoder: Set once the prompt is fed; what it has committed at the end is kept.
    """

    caches: Sequence[LayerCache]
    cached: int = 0
    origin: int = 0
    decoder: Decoder | None = None
    _loaded: Loaded = attrs.field(kw_only=True)
    _prompt: Prompt = attrs.field(kw_only=True)
    _pool: PromptPool | None = attrs.field(kw_only=True, default=None)
    _is_own: bool = attrs.field(kw_only=True, default=True)
    _continues: bool = attrs.field(kw_only=True, default=False)
    _snapshots: list[_Snapshot] = attrs.field(init=False, factory=list)

    @classmethod
    def resolve(
        cls,
        loaded: Loaded,
        prompt: Prompt,
        caches: Sequence[LayerCache] | None,
        *,
        uses_pool: bool,
    ) -> PromptStart:
        """Decide what a request starts from.

        Args:
            loaded: The model and what belongs to it.
            prompt: The prompt.
            caches: Caches of the caller, which the pool never sees; ``None`` for own ones.
            uses_pool: Whether the pool may serve and keep this request.

        Returns:
            The start.
        """
        if caches is not None:
            origin = caches[0].offset if caches else 0
            return cls(caches, origin=origin, loaded=loaded, prompt=prompt, is_own=False)
        fresh = loaded.new_caches()
        # A model without layers has no state that could be stored.
        pool = loaded.pool if uses_pool and fresh else None
        hit = None if pool is None else pool.find(loaded.spec.fingerprint, prompt.key)
        if hit is None:
            return cls(fresh, loaded=loaded, prompt=prompt, pool=pool)
        return cls(
            hit.caches,
            hit.length,
            loaded=loaded,
            prompt=prompt,
            pool=pool,
            continues=hit.is_exact,
        )

    def __enter__(self) -> Self:
        return self

    def prefill(self, checkpoint: Callable[[], None], on_fed: Callable[[int], None]) -> mx.array:
        """Feed what is left of the prompt, and publish its boundaries when all of it is fed.

        Args:
            checkpoint: Polled between chunks; raises to cancel.
            on_fed: Called after each chunk with the prompt tokens in the caches.

        Returns:
            ``[V]`` logits after the prompt.

        Raises:
            EngineError: The prefill failed or was cancelled; nothing of it is published.
        """
        ids = self._prompt.ids
        wanted = {} if self._pool is None else self._boundaries()
        at = self.cached
        for stop in sorted(wanted):
            if plan_fork(self.caches, stop, len(ids) - stop):
                continue
            feed_prompt(
                self._loaded.model,
                self.caches,
                ids[at:stop],
                start=self.origin + at,
                chunk=self._loaded.limits.prefill_chunk_tokens,
                checkpoint=checkpoint,
                on_chunk=partial(_report, on_fed, at),
            )
            at = stop
            self._hold_back(stop, wanted.pop(stop))
        logits = run_prefill(
            self._loaded.model,
            self.caches,
            ids[at:],
            start=self.origin + at,
            chunk=self._loaded.limits.prefill_chunk_tokens,
            checkpoint=checkpoint,
            on_chunk=partial(_report, on_fed, at),
        )
        for length, kind in wanted.items():
            self._hold_back(length, kind)
        while self._snapshots:
            self._publish(self._snapshots.pop(0))
        return logits

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Keep what may be kept, and let go of the caches."""
        if not self._is_own:
            return
        if self._is_sound(error):
            if self.decoder is not None and not isinstance(error, Cancelled):
                self._keep_reply(self.decoder)
        elif self._pool is not None:
            self._pool.discard_sharing(self.caches)
        # A stored exception may refer to the caches for as long as somebody keeps it.
        for caches in (self.caches, *(snapshot.caches for snapshot in self._snapshots)):
            reset_caches(caches)
        if self._pool is not None:
            self._pool.settle()

    def _boundaries(self) -> dict[int, EntryKind]:
        """Say after which parts of the prompt its state is worth keeping."""
        key, outline = self._prompt.key, self._prompt.outline
        whole = len(key.ids)
        if self._can_rewind():
            # The whole prompt serves whatever begins like it, its opening block for instance.
            wanted = {whole: EntryKind.BOUNDARY}
        elif outline is None:
            # Sent again or continued, all of a raw prompt can be used but its last token.
            wanted = {whole - 1: EntryKind.BOUNDARY}
        else:
            wanted = {min(outline.transcript(), whole - 1): EntryKind.BOUNDARY}
            if not self._continues:
                wanted[min(outline.opening(), whole - 1)] = EntryKind.OPENING
        return {
            length: kind
            for length, kind in wanted.items()
            if self.cached < length == key.floor(length)
        }

    def _can_rewind(self) -> bool:
        """Whether the state after the prompt can be rewound to any part of it."""
        spare = [cache.spare_rows for cache in self.caches]
        return all(rows is None or rows >= len(self._prompt.ids) for rows in spare)

    def _hold_back(self, length: int, kind: EntryKind) -> None:
        """Take the state after a part of the prompt; a family may leave a cache without one."""
        with suppress(CacheError):
            self._snapshots.append(_Snapshot(length, kind, fork_caches(self.caches, length)))

    def _publish(self, snapshot: _Snapshot) -> None:
        if self._pool is not None:
            self._pool.publish(
                self._loaded.spec.fingerprint,
                self._prompt.key.first(snapshot.length),
                snapshot.caches,
                snapshot.kind,
            )

    def _keep_reply(self, decoder: Decoder) -> None:
        """Keep prompt and committed tokens; they may have been committed before a failure."""
        outcome = decoder.outcome
        if self._pool is None or not outcome.caches_valid:
            return
        ids = (*self._prompt.ids, *outcome.emitted[: outcome.committed_len])
        key = attrs.evolve(self._prompt.key, ids=ids)
        forks = fork_caches(self.caches)
        self._pool.publish(self._loaded.spec.fingerprint, key, forks, EntryKind.REPLY)

    def _is_sound(self, error: BaseException | None) -> bool:
        """Whether every row that stored prefixes share with these caches is what it was.

        A forward that fails half-way leaves lazy work on shared buffers; done, it adds rows beyond
        the stored lengths only. After a device fault nothing shared can be trusted.
        """
        is_expected = error is None or isinstance(error, EngineError)
        if not is_expected or isinstance(error, BackendError):
            return False
        if self.decoder is not None and self.decoder.device_failed:
            return False
        try:
            evaluate(*cache_arrays(self.caches))
        except BackendError:
            return False
        return True


def _report(on_fed: Callable[[int], None], before: int, done: int, _: int) -> None:
    on_fed(before + done)
