"""The thread-safe handle: any thread and any event loop, one worker thread behind it.

Only plain data crosses to the worker and back; every array stays on the worker thread.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Self, TypeVar

from engine_core.backend import clear_thread_state
from engine_core.channel import Channel
from engine_core.client_asyncio import AsyncClientMethods
from engine_core.generation import Request
from engine_core.lease import Lease
from engine_core.limits import LIMITS
from engine_core.option_checks import unknown_option
from engine_core.runtime_probe import probe_request
from engine_core.session import Session
from engine_core.streaming import ReplyStream
from engine_core.worker import Job, Worker

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from engine_core.events import Event
    from engine_core.info import ClientInfo, PromptCacheInfo
    from engine_core.request import GenerateReply

__all__ = ["Client"]

ResultT = TypeVar("ResultT")

# Options of a load; how a session is told to stop loading is between it and its worker.
_LOAD_OPTIONS = (
    "queue_jobs",
    *(
        name
        for name in inspect.signature(Session.load).parameters
        if name not in {"path", "is_cancelled"}
    ),
)


class Client(AsyncClientMethods):
    """A loaded model, usable from any thread and from asyncio.

    Made by :meth:`load`. A context manager, plain and asynchronous, that closes itself.
    """

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        queue_jobs: int = LIMITS.queue_jobs,
        on_load_progress: Callable[[int, int], bool | None] | None = None,
        **options: Any,
    ) -> Client:
        """Start a worker thread and load a checkpoint on it.

        Args:
            path: Directory of the checkpoint.
            queue_jobs: Requests that may wait, the running one not counted (1 to 64).
            on_load_progress: Called on the worker with bytes done and all bytes; ``False``
                cancels the load.
            **options: What :meth:`engine_core.session.Session.load` takes: ``template``,
                ``compute_dtype``, ``quantized_weights``, ``plugins``, ``family``,
                ``certificates``, ``extra_eos_tokens``, ``allocator_cache_bytes``,
                ``prompt_cache_bytes``, ``prompt_cache_ttl``, ``limits``.

        Returns:
            A client whose model is loaded.

        Raises:
            EngineError: Whatever kept the checkpoint from loading; no thread is left behind.
        """
        for name in options:
            if name not in _LOAD_OPTIONS:
                raise unknown_option("Client.load", name, _LOAD_OPTIONS, {})
        info: list[ClientInfo] = []

        def open_session(job: Job[None, Session]) -> Session:
            session = Session.load(
                path,
                on_load_progress=on_load_progress,
                is_cancelled=job.cancelled.is_set,
                **options,
            )
            info.append(session.info)
            return session

        def close_session(session: Session) -> None:
            session.close()
            info[-1] = session.info

        worker: Worker[Session] = Worker(
            open_session, close_session, clear_thread_state, queue_jobs=queue_jobs
        )
        worker.start()
        return cls(Lease(worker, info))

    def clone(self) -> Client:
        """Make another handle on the same worker.

        Returns:
            A handle with its own requests; the worker ends with the last handle.

        Raises:
            ClientClosed: This handle is closed.
        """
        self._check_open()
        return type(self)(self._lease)

    @property
    def info(self) -> ClientInfo:
        """What was loaded; memory figures are those after the last request."""
        return self._lease.info[-1]

    def cache_info(self) -> PromptCacheInfo:
        """Describe the stored prompt prefixes after the last request; never waits.

        Returns:
            The same as ``info.prompt_cache``.
        """
        return self.info.prompt_cache

    def generate(self, messages: Sequence[Any], **options: Any) -> GenerateReply:
        """Answer a conversation and wait for the whole reply.

        Args:
            messages: ``Message`` records or OpenAI-style dicts.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            The reply.

        Raises:
            EngineError: The request is invalid, failed or was cancelled; the client stays usable.
        """
        return self._wait(self._submit_chat(messages, options))

    def complete(self, prompt: str | Sequence[int], **options: Any) -> GenerateReply:
        """Continue raw text or token ids, without a template, and wait for the reply.

        Args:
            prompt: Text, or token ids.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            The reply.

        Raises:
            EngineError: The request is invalid, failed or was cancelled; the client stays usable.
        """
        return self._wait(self._submit_completion(prompt, options))

    def score(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Compute the logits after every given token.

        Args:
            token_ids: ``[T]`` token ids.

        Returns:
            float32 ``[T, V]``; row ``t`` scores the token after ``token_ids[: t + 1]``.

        Raises:
            EngineError: The ids are invalid or the forward failed.
        """
        return self._wait(self._submit_score(token_ids))

    def runtime_probe(self) -> GenerateReply:
        """Show that the loaded model can answer: one greedy token of the smallest request.

        A model that only translates gets a translation, one without template bare token ids.

        Returns:
            A reply of one token.

        Raises:
            EngineError: The model cannot run.
        """
        self._check_open()
        return self._wait(self._submit_request(probe_request(self.info), None))

    def save_cache(
        self,
        path: str | os.PathLike[str],
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
        self._check_open()
        request = Request.either(messages, prompt, options)
        return self._wait(
            self._lease.submit(self._jobs, lambda session, _: session.save_prefix(request, path))
        )

    def load_cache(self, path: str | os.PathLike[str]) -> int:
        """Load what :meth:`save_cache` wrote, so that requests can start from it.

        Load only files of your own: what is in one decides what the model believes to have read.

        Args:
            path: The file; it must have been written with the same model.

        Returns:
            Tokens loaded.

        Raises:
            CacheError: The file is damaged, of another model, or too large for the pool.
        """
        self._check_open()
        return self._wait(
            self._lease.submit(self._jobs, lambda session, _: session.load_cache(path))
        )

    def stream(self, messages: Sequence[Any], **options: Any) -> ReplyStream:
        """Answer a conversation event by event.

        Args:
            messages: ``Message`` records or OpenAI-style dicts.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            An iterator of events; the last carries ``reply``. Closing or dropping it cancels.

        Raises:
            EngineError: The request is invalid or the queue is full.
        """
        channel: Channel[Event] = Channel()
        job = self._submit_chat(messages, options, channel)
        return ReplyStream(self, self._lease.worker, job, channel)

    def stream_complete(self, prompt: str | Sequence[int], **options: Any) -> ReplyStream:
        """Continue raw text or token ids event by event.

        Args:
            prompt: Text, or token ids.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            An iterator of events; the last carries ``reply``. Closing or dropping it cancels.

        Raises:
            EngineError: The request is invalid or the queue is full.
        """
        channel: Channel[Event] = Channel()
        job = self._submit_completion(prompt, options, channel)
        return ReplyStream(self, self._lease.worker, job, channel)

    def cancel(self) -> None:
        """Cancel every request made through this handle; each of them raises ``Cancelled``.

        May be called inside a callback, too.

        Raises:
            ClientClosed: Called in a forked process.
        """
        self._lease.worker.check_process()
        for job in tuple(self._jobs):
            self._lease.worker.cancel(job)

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()
