"""What the handles of one worker share: the worker, its info and how a request gets onto it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from engine_core.generation import Control
from engine_core.worker import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.channel import Channel
    from engine_core.events import Event
    from engine_core.info import ClientInfo
    from engine_core.session import Session
    from engine_core.worker import Worker

__all__ = ["Lease"]

ResultT = TypeVar("ResultT")


class Lease:
    """A worker shared by handles; it ends with the last of them.

    Attributes:
        worker: The worker.
        info: One entry, replaced by the worker after every request.
    """

    def __init__(self, worker: Worker[Session], info: list[ClientInfo]) -> None:
        """Share a started worker.

        Args:
            worker: The worker.
            info: Filled by it while it loaded.
        """
        self.worker = worker
        self.info = info
        self._handles = 0
        self._lock = threading.RLock()  # reentrant: a finalizer may run inside

    def acquire(self) -> None:
        """Count one more handle."""
        with self._lock:
            self._handles += 1

    def release(self, jobs: set[Job[Session, Any]], *, wait: bool) -> None:
        """Cancel a handle's requests and count it off; the last one ends the worker.

        Args:
            jobs: The handle's requests.
            wait: Whether to wait for the end of the thread.
        """
        if not self.worker.is_own_process:
            return
        with self._lock:
            self._handles -= 1
            last = self._handles == 0
        for job in tuple(jobs):
            self.worker.cancel(job)
        if last:
            self.worker.close(wait=wait)

    def submit(
        self,
        jobs: set[Job[Session, Any]],
        function: Callable[[Session, Control], ResultT],
        channel: Channel[Event] | None = None,
    ) -> Job[Session, ResultT]:
        """Queue a request.

        Args:
            jobs: The handle's requests; this one is among them until it has ended.
            function: What to do on the worker.
            channel: Where its events go; ended with the request.

        Returns:
            The job.

        Raises:
            EngineError: As :meth:`engine_core.worker.Worker.submit`.
        """
        info = self.info

        def run(session: Session, job: Job[Session, ResultT]) -> ResultT:
            put = None if channel is None else channel.put
            try:
                return function(session, Control(is_cancelled=job.cancelled.is_set, put=put))
            finally:
                info[-1] = session.info

        job: Job[Session, ResultT] = Job(run)
        if channel is not None:
            job.future.add_done_callback(lambda done: channel.finish(done.exception()))
        jobs.add(job)
        job.future.add_done_callback(lambda _: jobs.discard(job))
        try:
            return self.worker.submit(job)
        except BaseException:
            jobs.discard(job)
            raise
