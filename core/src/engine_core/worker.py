"""One dedicated thread that owns a resource: it opens it, runs every job on it and drops it.

MLX streams belong to the thread that made them, so a session may only be touched by one thread.
A :class:`Worker` is that thread with a bounded queue before it; callers on any thread hand it
:class:`Job` objects and wait on their futures. Nothing here knows what the resource is.

The thread is a daemon that an ``atexit`` callback stops and joins. A non-daemon thread would be
joined by the interpreter *before* anything could tell it to stop, and would then wait for jobs
for ever; the ``atexit`` callback runs after all ordinary threads have ended, so that they can use
their clients until their own end.
"""

from __future__ import annotations

import atexit
import os
import threading
import traceback
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from engine_core.errors import (
    AffinityError,
    Busy,
    Cancelled,
    ClientClosed,
    EngineError,
    WorkerDied,
)
from engine_core.limits import LIMITS
from engine_core.option_checks import integer
from engine_core.values import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Job", "Worker"]

ResourceT = TypeVar("ResourceT")
ResultT = TypeVar("ResultT")

_started: set[Worker[Any]] = set()
_started_lock = threading.RLock()
_registered = False


@attrs.define(eq=False)
class Job(Generic[ResourceT, ResultT]):
    """A function to run on the worker, with a flag that asks it to stop early.

    Attributes:
        function: Called with the resource on the worker thread. It polls ``cancelled`` and
            raises ``Cancelled`` by itself.
        cancelled: Set when somebody asked the job to stop.
        future: Resolved on the worker thread after the job has left it.
    """

    function: Callable[[ResourceT, Job[ResourceT, ResultT]], ResultT]
    cancelled: threading.Event = attrs.field(factory=threading.Event)
    future: Future[ResultT] = attrs.field(factory=Future)

    def cancel(self) -> None:
        """Ask the job to stop; returns at once."""
        self.cancelled.set()

    def run(self, resource: ResourceT) -> None:
        """Run on the current thread and resolve the future with the result or the exception."""
        if self.cancelled.is_set():
            self.fail(_cancelled_before_start())
            return
        try:
            result = self.function(resource, self)
        except Exception as exc:  # noqa: BLE001 - the worker's boundary: the waiter gets it
            self.fail(exc)
        else:
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Resolve the future with an error, unless it is resolved already."""
        _clear_frames(error)
        if not self.future.done():
            self.future.set_exception(error)


class Worker(Generic[ResourceT]):
    """A thread, the resource it owns and the queue of jobs before it."""

    def __init__(
        self,
        open_resource: Callable[[Job[None, ResourceT]], ResourceT],
        close_resource: Callable[[ResourceT], None],
        end_thread: Callable[[], None],
        *,
        queue_jobs: int = LIMITS.queue_jobs,
    ) -> None:
        """Prepare a worker; :meth:`start` makes the thread.

        Args:
            open_resource: Makes the resource, on the worker thread.
            close_resource: Closes the resource, on the worker thread.
            end_thread: Clears per-thread state of the backend; the last call on the thread.
            queue_jobs: Waiting jobs admitted, the running one not counted (1 to 64).

        Raises:
            InvalidRequest: ``queue_jobs`` is out of range.
        """
        self._queue_jobs: int = integer(1, LIMITS.queue_jobs_max)("queue_jobs", queue_jobs)
        self._open = open_resource
        self._close = close_resource
        self._end_thread = end_thread
        self._changed = threading.Condition()  # over a reentrant lock: finalizers may need it
        self._queue: deque[Job[ResourceT, Any]] = deque()
        self._running: Job[ResourceT, Any] | None = None
        self._opening: Job[None, ResourceT] | None = Job(lambda _, job: self._open(job))
        self._opened: Job[None, None] = Job(lambda _, __: None)
        self._closing = False
        self._death: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._main, name="engine-worker", daemon=True)

    def start(self) -> None:
        """Start the thread, open the resource on it and wait until it is open.

        Raises:
            Exception: Whatever opening raised; the thread has ended then.
        """
        global _registered
        with _started_lock:
            if not _registered:
                atexit.register(_close_all)
                _registered = True
            _started.add(self)
        self._thread.start()
        try:
            self._opened.future.result()
        except BaseException:
            self.close()
            raise

    def submit(self, job: Job[ResourceT, ResultT]) -> Job[ResourceT, ResultT]:
        """Queue a job, or refuse at once.

        Args:
            job: The job; its future resolves when it has left the worker.

        Returns:
            The same job.

        Raises:
            Busy: The queue is full.
            ClientClosed: The worker was closed, or belongs to another process.
            WorkerDied: The thread ended unexpectedly.
            AffinityError: Called on the worker thread itself (``reentrant_call``).
        """
        self.check_caller()
        with self._changed:
            if self._death is not None:
                raise _died(self._death) from self._death
            if self._closing:
                raise _closed()
            if len(self._queue) >= self._queue_jobs:
                raise Busy(
                    f"client: at most {self._queue_jobs} requests may wait, got one more",
                    hint="retry later, or load the client with a larger queue_jobs=",
                )
            self._queue.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job[ResourceT, ResultT]) -> None:
        """Cancel a job; one that still waits leaves the queue at once.

        Args:
            job: A job given to :meth:`submit`.
        """
        if not self.is_own_process:
            return
        job.cancel()
        with self._changed:
            waiting = job in self._queue
            if waiting:
                self._queue.remove(job)
        if waiting:
            job.fail(_cancelled_before_start())

    def close(self, *, wait: bool = True) -> None:
        """Cancel the running job, refuse the waiting ones and end the thread; idempotent.

        Args:
            wait: Whether to wait for the end of the thread.

        Raises:
            ClientClosed: The worker belongs to another process.
            AffinityError: ``wait`` is set and this is the worker thread (``reentrant_call``).
        """
        if wait:
            self.check_caller()
        elif not self.is_own_process:
            return
        with self._changed:
            self._closing = True
            waiting = list(self._queue)
            self._queue.clear()
            running, opening = self._running, self._opening
            self._changed.notify_all()
        for job in waiting:
            job.fail(_closed())
        if running is not None:
            running.cancel()
        if opening is not None:
            opening.cancel()
        if wait and self._thread.ident is not None:
            self._thread.join()
            with _started_lock:
                _started.discard(self)

    @property
    def is_alive(self) -> bool:
        """Whether the thread can still take jobs."""
        return (
            self.is_own_process
            and not self._closing
            and self._death is None
            and self._thread.is_alive()
        )

    @property
    def is_own_process(self) -> bool:
        """Whether the thread belongs to this process, not to one it was forked from."""
        return os.getpid() == self._process

    @property
    def waiting(self) -> int:
        """Number of queued jobs, the running one not counted."""
        return len(self._queue)

    def check_process(self) -> None:
        """Refuse a call from another process.

        Raises:
            ClientClosed: This process was forked from the one that made the worker.
        """
        if not self.is_own_process:
            raise ClientClosed(
                f"client: belongs to process {self._process!r}, got a call in {os.getpid()!r}",
                hint="load a client in each process; threads do not survive a fork",
            )

    def check_caller(self) -> None:
        """Refuse a call from another process or from the worker thread itself.

        Raises:
            ClientClosed: This process was forked from the one that made the worker.
            AffinityError: This is the worker thread (``reentrant_call``).
        """
        self.check_process()
        if threading.current_thread() is self._thread:
            raise AffinityError(
                "client: must not be called inside its own callback, got a call on its worker",
                code="reentrant_call",
                hint="return from the callback first, or use another client",
            )

    def _main(self) -> None:
        """Thread body; never raises, because an unhandled error would be printed."""
        try:
            self._serve()
        except BaseException as exc:  # noqa: BLE001 - the thread's boundary: every waiter gets it
            self._die(exc)
        try:
            self._end_thread()
        except BaseException as exc:  # noqa: BLE001 - the thread's boundary
            self._die(exc)

    def _serve(self) -> None:
        opening, opened = self._opening, self._opened
        if opening is None:  # pragma: no cover - start() sets it
            return
        opening.run(None)
        self._opening = None
        error = opening.future.exception()
        if error is not None:
            with self._changed:
                self._closing = True
            opened.fail(error)
            return
        resource = opening.future.result()
        opening.future = Future()  # drop its reference to the resource
        opened.future.set_result(None)
        try:
            while (job := self._next()) is not None:
                job.run(resource)
                del job
        finally:
            self._close(resource)

    def _next(self) -> Job[ResourceT, Any] | None:
        """Wait for a job; ``None`` when the worker is to end."""
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return None
            self._running = self._queue.popleft()
            return self._running

    def _die(self, cause: BaseException) -> None:
        _clear_frames(cause)
        with self._changed:
            self._death = cause
            jobs = [job for job in (self._running, *self._queue) if job is not None]
            self._running = None
            self._queue.clear()
        waiters: list[Job[Any, Any]] = [*jobs, self._opened]
        for job in waiters:
            error = _died(cause)
            error.__cause__ = cause
            job.fail(error)


def _close_all() -> None:
    """Stop and join every worker of this process; registered with ``atexit``."""
    with _started_lock:
        workers = [worker for worker in _started if worker._process == os.getpid()]  # noqa: SLF001
        _started.clear()
    for worker in workers:
        worker.close(wait=False)
    for worker in workers:
        worker.close()


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables an exception chain keeps alive: they may be arrays or a model."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _closed() -> EngineError:
    return ClientClosed("client: must be open, got a closed one", hint="load a new client")


def _died(cause: BaseException) -> EngineError:
    return WorkerDied(
        f"worker: must run until it is closed, got {reason_of(cause)}",
        hint="load a new client; this one cannot be used any more",
    )


def _cancelled_before_start() -> EngineError:
    return Cancelled("request: was cancelled before it started")
