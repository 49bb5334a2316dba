"""What every handle of a client shares: its lease on the worker, and how requests are handed in."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from engine_core.errors import ClientClosed
from engine_core.generation import Request, checked_token_ids
from engine_core.lease import Lease
from engine_core.option_checks import refuse
from engine_core.streaming import wait_for_job
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from engine_core.channel import Channel
    from engine_core.events import Event
    from engine_core.request import GenerateReply
    from engine_core.session import Session
    from engine_core.worker import Job

__all__ = ["ClientHandle"]

ResultT = TypeVar("ResultT")


class ClientHandle:
    """One handle on a worker; :class:`~engine_core.client.Client` adds what callers use."""

    def __init__(self, lease: Lease | None = None) -> None:
        """Make a handle; use :meth:`load` or :meth:`clone`.

        Args:
            lease: The worker to share.

        Raises:
            InvalidRequest: Anything else was given, such as a path.
        """
        if not isinstance(lease, Lease):
            refuse("client", "must be made by Client.load(path)", shown(lease))
        lease.acquire()
        self._lease = lease
        self._jobs: set[Job[Session, Any]] = set()
        self._release = weakref.finalize(self, lease.release, self._jobs, wait=False)
        self._release.atexit = False  # the worker module joins every worker at exit
        self._closed = False

    def close(self) -> None:
        """Cancel this handle's requests; the last handle ends the worker and waits for it.

        Idempotent.

        Raises:
            AffinityError: Called inside a callback of this client (``reentrant_call``).
            ClientClosed: Called in a forked process.
        """
        self._lease.worker.check_caller()
        self._closed = True
        if self._release.detach() is not None:
            self._lease.release(self._jobs, wait=True)

    def _check_open(self) -> None:
        self._lease.worker.check_caller()
        if self._closed:
            raise ClientClosed("client: must be open, got a closed one", hint="load a new client")

    def _submit_chat(
        self,
        messages: Sequence[Any],
        options: Mapping[str, Any],
        channel: Channel[Event] | None = None,
    ) -> Job[Session, GenerateReply]:
        self._check_open()
        return self._submit_request(Request.chat(messages, options), channel)

    def _submit_completion(
        self,
        prompt: str | Sequence[int],
        options: Mapping[str, Any],
        channel: Channel[Event] | None = None,
    ) -> Job[Session, GenerateReply]:
        self._check_open()
        return self._submit_request(Request.completion(prompt, options), channel)

    def _submit_request(
        self, request: Request, channel: Channel[Event] | None
    ) -> Job[Session, GenerateReply]:
        return self._lease.submit(
            self._jobs, lambda session, control: session.run(request, control), channel
        )

    def _submit_score(self, token_ids: Sequence[int]) -> Job[Session, npt.NDArray[np.float32]]:
        self._check_open()
        ids = checked_token_ids(token_ids, "token_ids")
        return self._lease.submit(
            self._jobs, lambda session, control: session.score_ids(ids, control)
        )

    def _wait(self, job: Job[Session, ResultT]) -> ResultT:
        try:
            return job.future.result()
        finally:
            if not job.future.done():  # an interrupt ended the waiting
                self._lease.worker.cancel(job)

    async def _await(self, job: Job[Session, ResultT]) -> ResultT:
        result: ResultT = await wait_for_job(self._lease.worker, job)
        return result
