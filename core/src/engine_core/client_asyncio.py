"""The client's methods for asyncio; none of them blocks the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from engine_core.channel import Channel
from engine_core.client_handle import ClientHandle
from engine_core.streaming import AsyncReplyStream, LoopWaker

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from engine_core.events import Event
    from engine_core.request import GenerateReply

__all__ = ["AsyncClientMethods"]


class AsyncClientMethods(ClientHandle):
    """Twins of the blocking methods; cancelling the task cancels the request."""

    async def agenerate(self, messages: Sequence[Any], **options: Any) -> GenerateReply:
        """Do what :meth:`generate` does without blocking the event loop.

        Args:
            messages: ``Message`` records or OpenAI-style dicts.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            The reply. Cancelling the task cancels the request.

        Raises:
            EngineError: As :meth:`generate`.
        """
        return await self._await(self._submit_chat(messages, options))

    async def acomplete(self, prompt: str | Sequence[int], **options: Any) -> GenerateReply:
        """Do what :meth:`complete` does without blocking the event loop.

        Args:
            prompt: Text, or token ids.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            The reply. Cancelling the task cancels the request.

        Raises:
            EngineError: As :meth:`complete`.
        """
        return await self._await(self._submit_completion(prompt, options))

    async def ascore(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Do what :meth:`score` does without blocking the event loop.

        Args:
            token_ids: ``[T]`` token ids.

        Returns:
            float32 ``[T, V]``.

        Raises:
            EngineError: As :meth:`score`.
        """
        return await self._await(self._submit_score(token_ids))

    def astream(self, messages: Sequence[Any], **options: Any) -> AsyncReplyStream:
        """Do what :meth:`stream` does for ``async for``.

        Args:
            messages: ``Message`` records or OpenAI-style dicts.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            An asynchronous iterator of events; the last carries ``reply``.

        Raises:
            EngineError: The request is invalid or the queue is full.
        """
        waker = LoopWaker()
        channel: Channel[Event] = Channel(notify=waker)
        job = self._submit_chat(messages, options, channel)
        return AsyncReplyStream(self, self._lease.worker, job, channel, waker)

    def astream_complete(self, prompt: str | Sequence[int], **options: Any) -> AsyncReplyStream:
        """Do what :meth:`stream_complete` does for ``async for``.

        Args:
            prompt: Text, or token ids.
            **options: Fields of :class:`engine_core.request.GenerateOptions`.

        Returns:
            An asynchronous iterator of events; the last carries ``reply``.

        Raises:
            EngineError: The request is invalid or the queue is full.
        """
        waker = LoopWaker()
        channel: Channel[Event] = Channel(notify=waker)
        job = self._submit_completion(prompt, options, channel)
        return AsyncReplyStream(self, self._lease.worker, job, channel, waker)

    async def aclose(self) -> None:
        """Do what :meth:`close` does without blocking the event loop.

        Raises:
            AffinityError: Called inside a callback of this client (``reentrant_call``).
        """
        import asyncio

        self._lease.worker.check_caller()
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the client."""
        await self.aclose()
