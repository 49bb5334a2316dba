"""The engine bound to one thread: it loads a checkpoint there and runs every request there."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import attrs

from engine_core.backend import OwnerThread, memory_report
from engine_core.errors import AffinityError, ClientClosed
from engine_core.generation import Control, Request, checked_token_ids
from engine_core.info import PromptCacheInfo
from engine_core.limits import LIMITS
from engine_core.option_checks import refuse
from engine_core.runtime_probe import probe_request
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from engine_core.cache.base import LayerCache
    from engine_core.info import ClientInfo
    from engine_core.limits import Limits
    from engine_core.loading import Loaded
    from engine_core.plugins import Plugins
    from engine_core.request import GenerateReply
    from engine_core.step import CausalLM

__all__ = ["Session"]


class Session:
    """A loaded model that only the loading thread may use; a context manager.

    Every public method refuses another thread before it touches MLX. Use
    :class:`engine_core.client.Client` for a handle without that restriction.
    """

    def __init__(self, loaded: Loaded | None = None) -> None:
        """Take over what was loaded; use :meth:`load`.

        Args:
            loaded: Loaded on this thread.

        Raises:
            InvalidRequest: Nothing loaded was given, such as a path.
        """
        if loaded is None or isinstance(loaded, (str, bytes, PathLike)):
            refuse("session", "must be made by Session.load(path)", shown(loaded))
        self._owner = OwnerThread()
        self._loaded: Loaded | None = loaded
        self._info = loaded.info
        self._is_running = False

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        template: str | bool | None = None,
        compute_dtype: str = "auto",
        quantized_weights: str = "auto",
        plugins: Plugins | None = None,
        family: str | None = None,
        certificates: Sequence[Any] = (),
        extra_eos_tokens: Sequence[str] = (),
        allocator_cache_bytes: int | None = None,
        prompt_cache_bytes: int | None = None,
        prompt_cache_ttl: float | None = None,
        limits: Limits = LIMITS,
        on_load_progress: Callable[[int, int], bool | None] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Session:
        """Load a checkpoint on this thread.

        Args:
            path: Directory of the checkpoint, or what ``resolve_hub`` returned.
            template: Source of a chat template to use instead of the checkpoint's; ``False``
                loads without one, for ``complete`` and ``score`` only.
            compute_dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
            quantized_weights: ``"auto"``, ``"keep"`` or ``"dequantize"``.
            plugins: Plugins to choose from; all installed ones when omitted.
            family: Family to use, when several claim the checkpoint.
            certificates: Certificates for speculative decoding.
            extra_eos_tokens: Token texts that end a reply beside the configured ones.
            allocator_cache_bytes: Freed memory MLX may keep (bytes), the same for every session of
                a process; none on a CPU and 2 GiB on a GPU when omitted.
            prompt_cache_bytes: Memory for stored prompt prefixes (bytes); the smaller of 2 GiB and
                an eighth of the memory when omitted, 0 for none.
            prompt_cache_ttl: Seconds after which an unused prefix is dropped; never when omitted.
            limits: Bounds on files, templates and stored prefixes, and the size of a prefill
                chunk; what a request says is checked against the default ones.
            on_load_progress: Called with bytes done and all bytes; ``False`` cancels.
            is_cancelled: Polled while loading.

        Returns:
            The session.

        Raises:
            EngineError: Whatever kept the checkpoint from loading.
        """
        from engine_core.load_options import LoadOptions
        from engine_core.loading import load_checkpoint

        options = LoadOptions(
            path=path,
            template=template,
            compute_dtype=compute_dtype,
            quantized_weights=quantized_weights,
            plugins=plugins,
            family=family,
            certificates=certificates,
            extra_eos_tokens=extra_eos_tokens,
            allocator_cache_bytes=allocator_cache_bytes,
            prompt_cache_bytes=prompt_cache_bytes,
            prompt_cache_ttl=prompt_cache_ttl,
            limits=limits,
            on_progress=on_load_progress,
            is_cancelled=is_cancelled,
        )
        return cls(load_checkpoint(options))

    @property
    def info(self) -> ClientInfo:
        """What was loaded; memory figures are current."""
        self._owner.check()
        if self._loaded is not None:
            pool = self._loaded.pool
            self._info = attrs.evolve(
                self._info,
                memory=memory_report(),
                kernels=self._loaded.kernels.report(),
                prompt_cache=PromptCacheInfo() if pool is None else pool.report(),
            )
        return self._info

    def cache_info(self) -> PromptCacheInfo:
        """Describe the stored prompt prefixes.

        Returns:
            The same as ``info.prompt_cache``.
        """
        return self.info.prompt_cache

    @property
    def model(self) -> CausalLM:
        """The family's model, for experiments on this thread."""
        return self._ready().model

    def new_caches(self) -> list[LayerCache]:
        """Make caches that the caller owns, for :meth:`generate` and :meth:`complete`.

        Returns:
            One empty cache a layer.
        """
        return self._ready().new_caches()

    def generate(
        self,
        messages: Sequence[Any],
        *,
        caches: Sequence[LayerCache] | None = None,
        **options: Any,
    ) -> GenerateReply:
        """Answer a conversation.

        Args:
            messages: ``Message`` records or OpenAI-style dicts.
            caches: Caches of the caller, which hold a prefix of what this prompt renders to and
                grow by the rest; ``None`` for the session's own.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            The reply.

        Raises:
            EngineError: The request is invalid, failed or was cancelled; the session stays
                usable.
        """
        self._owner.check()
        return self.run(Request.chat(messages, options), caches=caches)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        caches: Sequence[LayerCache] | None = None,
        **options: Any,
    ) -> GenerateReply:
        """Continue raw text or token ids, without a template.

        Args:
            prompt: Text, or token ids.
            caches: As for :meth:`generate`.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            The reply.

        Raises:
            EngineError: The request is invalid, failed or was cancelled; the session stays
                usable.
        """
        self._owner.check()
        return self.run(Request.completion(prompt, options), caches=caches)

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Compute the logits after every given token.

        Args:
            token_ids: ``[T]`` token ids.

        Returns:
            float32 ``[T, V]``; row ``t`` scores the token after ``token_ids[: t + 1]``.

        Raises:
            EngineError: The ids are invalid or the forward failed.
        """
        self._owner.check()
        return self.score_ids(checked_token_ids(token_ids, "token_ids"), Control())

    def runtime_probe(self) -> GenerateReply:
        """Show that the loaded model can answer: one greedy token of the smallest request.

        Returns:
            A reply of one token.

        Raises:
            EngineError: The model cannot run.
        """
        return self.run(probe_request(self.info))

    def run(
        self,
        request: Request,
        control: Control | None = None,
        *,
        caches: Sequence[LayerCache] | None = None,
    ) -> GenerateReply:
        """Run a checked request; what :meth:`generate` and a client's worker share.

        Args:
            request: The request.
            control: The caller's side of it.
            caches: As for :meth:`generate`.

        Returns:
            The reply.

        Raises:
            EngineError: As :meth:`generate`.
        """
        from engine_core.answering import answer

        with self._running() as loaded:
            return answer(loaded, request, control or Control(), caches)

    def score_ids(self, token_ids: Sequence[int], control: Control) -> npt.NDArray[np.float32]:
        """Score checked ids; what :meth:`score` and a client's worker share.

        Args:
            token_ids: Checked ids.
            control: The caller's side.

        Returns:
            As :meth:`score`.

        Raises:
            EngineError: As :meth:`score`.
        """
        from engine_core.answering import score_tokens

        with self._running() as loaded:
            return score_tokens(loaded, token_ids, control)

    def save_cache(
        self,
        path: str | PathLike[str],
        messages: Sequence[Any] | None = None,
        *,
        prompt: str | Sequence[int] | None = None,
        **options: Any,
    ) -> int:
        """Save the stored prefix that a request would start from, for a later process.

        Args:
            path: File to write (safetensors); it holds the conversation's state and token ids.
            messages: The conversation, or
            prompt: the raw prompt; exactly one of the two.
            **options: Options of the request as far as its prompt depends on them.

        Returns:
            Tokens saved.

        Raises:
            CacheError: Nothing of the prompt is stored, or the file cannot be written.
            EngineError: The request is invalid.
        """
        self._owner.check()
        return self.save_prefix(Request.either(messages, prompt, options), path)

    def save_prefix(self, request: Request, path: str | PathLike[str]) -> int:
        """Save for a checked request; what :meth:`save_cache` and a client's worker share.

        Args:
            request: The request; it is not run.
            path: As for :meth:`save_cache`.

        Returns:
            Tokens saved.

        Raises:
            EngineError: As :meth:`save_cache`.
        """
        from engine_core.prompt_saving import save_prefix

        return save_prefix(self._ready(), request, path)

    def load_cache(self, path: str | PathLike[str]) -> int:
        """Load what :meth:`save_cache` wrote, so that requests can start from it.

        Load only files of your own: what is in one decides what the model believes to have read.

        Args:
            path: The file; it must have been written with the same model.

        Returns:
            Tokens loaded.

        Raises:
            CacheError: The file is damaged, of another model, or too large for the pool.
        """
        from engine_core.prompt_saving import load_prefix

        return load_prefix(self._ready(), path)

    def close(self) -> None:
        """Drop the model on this thread; idempotent.

        Raises:
            AffinityError: Called on another thread, or inside a callback.
        """
        self._owner.check()
        self._refuse_reentry()
        if self._loaded is not None:
            if self._loaded.pool is not None:
                self._loaded.pool.clear()
            self._info = self.info
            self._loaded.allocator.release()
            self._loaded = None
            # Reference cycles would otherwise be freed later, perhaps by another thread.
            gc.collect()

    def __enter__(self) -> Self:
        """Return the session.

        Raises:
            AffinityError: Entered on another thread.
        """
        self._owner.check()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self.close()

    def _ready(self) -> Loaded:
        self._owner.check()
        self._refuse_reentry()
        if self._loaded is None:
            raise ClientClosed("session: must be open, got a closed one", hint="load a new one")
        return self._loaded

    def _refuse_reentry(self) -> None:
        if self._is_running:
            raise AffinityError(
                "session: must not be called inside its own callback, got a call while it runs",
                code="reentrant_call",
                hint="return from the callback first, or use another session",
            )

    @contextmanager
    def _running(self) -> Iterator[Loaded]:
        loaded = self._ready()
        self._is_running = True
        try:
            yield loaded
        finally:
            self._is_running = False
