"""Iterators over the events of a running request, for threads and for asyncio.

Closing or dropping an iterator cancels its request. The worker never waits for a consumer that
has left, and a consumer on an event loop never blocks the loop.
"""

from __future__ import annotations

import weakref
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from engine_core.channel import Channel, ChannelEnd
from engine_core.errors import Cancelled, EngineError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Iterator

    from engine_core.events import Event
    from engine_core.request import GenerateReply
    from engine_core.worker import Job, Worker

__all__ = ["AsyncReplyStream", "LoopWaker", "ReplyStream", "wait_for_job"]


class _Running:
    """What both kinds of stream share: the job, its channel and the way to abandon both."""

    def __init__(
        self, owner: object, worker: Worker[Any], job: Job[Any, Any], channel: Channel[Event]
    ) -> None:
        self._owner = owner  # a stream keeps its client, and so the worker, alive
        self._worker = worker
        self._job = job
        self._channel = channel
        self._reply: GenerateReply | None = None
        self._finalizer = weakref.finalize(self, _abandon, worker, job, channel)
        self._finalizer.atexit = False

    @property
    def reply(self) -> GenerateReply | None:
        """The finished reply; ``None`` until the last event was read."""
        return self._reply

    def _note(self, event: Event) -> Event:
        reply = getattr(event, "reply", None)
        if reply is not None:
            self._reply = reply
            self._finalizer.detach()
        return event


class ReplyStream(_Running):
    """A blocking iterator over the events of one request; the last one carries ``reply``.

    Usable as a context manager, which closes it. An open stream that nobody reads holds the worker
    once the events it may buffer are there: other requests wait until it is read on or closed.
    """

    def __iter__(self) -> Iterator[Event]:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Event:
        """Wait for the next event.

        Returns:
            The event.

        Raises:
            StopIteration: The reply was read, or the stream was closed.
            ClientClosed: Called in a forked process.
            EngineError: The request failed or was cancelled by someone else.
        """
        self._worker.check_process()  # a forked child has no worker that could fill the channel
        try:
            return self._note(self._channel.get())
        except ChannelEnd:
            raise StopIteration from None
        except KeyboardInterrupt:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the stream."""
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs; returns at once. Idempotent.

        Does nothing in a forked process.
        """
        self._finalizer()

    def cancel_and_wait(self, timeout: float | None = None) -> None:
        """Cancel the request and wait until it has left the worker thread.

        Args:
            timeout: Longest wait (seconds); ``None`` waits without a bound.

        Raises:
            TimeoutError: The job was still running after ``timeout``.
            AffinityError: Called inside a callback of the same client (``reentrant_call``).
        """
        self._worker.check_caller()
        self.close()
        if not wait([self._job.future], timeout).done:
            msg = f"stream: the request must leave the worker in time, got {timeout!r} seconds"
            raise TimeoutError(msg)


class AsyncReplyStream(_Running):
    """An asynchronous iterator over the events of one request; the last carries ``reply``.

    Cancelling the task that waits for an event cancels the request.
    """

    def __init__(
        self,
        owner: object,
        worker: Worker[Any],
        job: Job[Any, Any],
        channel: Channel[Event],
        waker: LoopWaker,
    ) -> None:
        """Wrap a queued job.

        Args:
            owner: Kept alive as long as the stream.
            worker: Runs the job.
            job: The request.
            channel: Filled by the job.
            waker: The channel's ``notify``.
        """
        super().__init__(owner, worker, job, channel)
        self._waker = waker
        waker.abandon = partial(_abandon, worker, job, channel)

    def __aiter__(self) -> AsyncIterator[Event]:
        """Return the iterator itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event without blocking the event loop.

        Returns:
            The event.

        Raises:
            StopAsyncIteration: The reply was read, or the stream was closed.
            ClientClosed: Called in a forked process.
            EngineError: The request failed or was cancelled by someone else.
        """
        self._worker.check_process()
        arrived = self._waker.attach()
        try:
            while True:
                arrived.clear()
                for event in self._channel.poll():
                    return self._note(event)
                await arrived.wait()
        except ChannelEnd:
            if self._waker.lost_loop:  # cut short by nobody's wish: not a normal end
                raise Cancelled(
                    "request: was cancelled, the event loop it served is closed"
                ) from None
            raise StopAsyncIteration from None
        except EngineError:
            raise
        except BaseException:  # a cancelled task above all
            self._finalizer()
            raise

    async def __aenter__(self) -> Self:
        """Return the stream."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the stream."""
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the request if it still runs; does not wait for it. Idempotent.

        Does nothing in a forked process.
        """
        self._finalizer()

    async def cancel_and_wait(self) -> None:
        """Cancel the request and wait until it has left the worker thread.

        Raises:
            AffinityError: Called inside a callback of the same client (``reentrant_call``).
        """
        self._worker.check_caller()
        self._finalizer()
        try:
            await wait_for_job(self._worker, self._job)
        except EngineError:
            return


class LoopWaker:
    """A channel's ``notify`` that sets an asyncio event on the consumer's loop."""

    def __init__(self) -> None:
        """Make a waker without a loop; the first waiting consumer attaches its own."""
        self._target: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.abandon: Callable[[], None] | None = None
        self.lost_loop = False

    def attach(self) -> asyncio.Event:
        """Bind to the running loop.

        Returns:
            The event that is set after each addition to the channel.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        if self._target is None or self._target[0] is not loop:
            self._target = (loop, asyncio.Event())
        return self._target[1]

    def __call__(self) -> None:
        """Wake the consumer; runs on the worker thread."""
        if self._target is not None:
            loop, event = self._target
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the loop was closed, nobody will read on
                self._target = None
                self.lost_loop = True
                if self.abandon is not None:
                    self.abandon()


async def wait_for_job(worker: Worker[Any], job: Job[Any, Any]) -> Any:
    """Wait for a job without blocking the event loop; cancelling the task cancels the job.

    Args:
        worker: Runs the job.
        job: A submitted job.

    Returns:
        Its result.

    Raises:
        Exception: What the job raised.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    left = asyncio.Event()

    def resolved(_: object) -> None:
        try:
            loop.call_soon_threadsafe(left.set)
        except RuntimeError:  # the loop was closed, nobody waits any more
            return

    job.future.add_done_callback(resolved)
    try:
        await left.wait()
    except BaseException:
        worker.cancel(job)
        raise
    return job.future.result()


def _abandon(worker: Worker[Any], job: Job[Any, Any], channel: Channel[Event]) -> None:
    if not worker.is_own_process:  # its locks may be held by threads that the fork left behind
        return
    channel.close()
    worker.cancel(job)
