"""SHA-256 of shards on other threads, beside the reading.

Two digests of a shard are compared. The *leading* one is computed from the descriptor ahead of
the reader: no byte is used before it was hashed. The *trailing* one is computed from the very
bytes that became weights, in private memory, so nothing can change between hash and use.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

from engine_core.checkpoint.files import read_range, stamp
from engine_core.errors import CheckpointError

if TYPE_CHECKING:
    from engine_core.checkpoint.index import Shard

__all__ = ["HashThreads", "LeadingDigest", "TrailingDigest", "changed_error", "unreadable_error"]

BLOCK_BYTES: Final = 8 * 1024 * 1024
_WORKERS: Final = 4
_AHEAD_BYTES: Final = 128 * 1024 * 1024


def changed_error(name: str) -> CheckpointError:
    """Build the error for a file that changed under the loader.

    Args:
        name: File name.

    Returns:
        The error, code ``checkpoint.changed``.
    """
    return CheckpointError(
        f"{name}: must not change while it is loaded",
        code="checkpoint.changed",
        hint="wait until the download has finished, then load again",
    )


def unreadable_error(name: str, exc: OSError) -> CheckpointError:
    """Build the error for a file that the disk does not deliver.

    Args:
        name: File name.
        exc: What the system said.

    Returns:
        The error, code ``checkpoint.unreadable``.
    """
    return CheckpointError(
        f"{name}: must be readable, got {exc.strerror!r}",
        code="checkpoint.unreadable",
        hint="check the disk",
    )


class LeadingDigest:
    """Digest of a whole file, computed from its descriptor ahead of a reader."""

    def __init__(self, shard: Shard) -> None:
        """Prepare; ``run`` does the work.

        Args:
            shard: An open shard.
        """
        self._shard = shard
        self._state = threading.Condition()
        self._position = 0
        self._ended = False
        self._failure: OSError | None = None
        self._digest = ""

    def run(self, stop: threading.Event) -> None:
        """Hash the file from start to end.

        Args:
            stop: Ends the work early.
        """
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(BLOCK_BYTES))
        size = self._shard.header.stamp.size
        try:
            while self._position < size and not stop.is_set():
                count = read_range(self._shard.fd, buffer[: size - self._position], self._position)
                if count == 0:
                    break
                digest.update(buffer[:count])
                with self._state:
                    self._position += count
                    self._state.notify_all()
        except OSError as exc:
            self._failure = exc
        finally:
            with self._state:
                self._digest = digest.hexdigest() if self._position == size else ""
                self._ended = True
                self._state.notify_all()

    def wait(self, position: int) -> None:
        """Block until a position was hashed.

        Args:
            position: Bytes from the start of the file.

        Raises:
            CheckpointError: Code ``checkpoint.changed``, the file ended before; code
                ``checkpoint.unreadable``, the disk failed.
        """
        with self._state:
            self._state.wait_for(lambda: self._ended or self._position >= position)
            if self._position >= position:
                return
            if self._failure is not None:
                raise unreadable_error(self._shard.name, self._failure) from self._failure
            raise changed_error(self._shard.name)

    def result(self) -> str:
        """Wait for the end and give the digest.

        Returns:
            Hex digits.

        Raises:
            CheckpointError: Code ``checkpoint.changed``; the file ended early.
        """
        self.wait(self._shard.header.stamp.size)
        with self._state:
            self._state.wait_for(lambda: self._ended)
            return self._digest


class TrailingDigest:
    """Digest of bytes in the order they are handed over, computed on another thread."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        """Start empty.

        Args:
            executor: Has exactly one thread, so that updates keep their order.
        """
        self._executor = executor
        self._digest = hashlib.sha256()
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._ahead = 0

    def update(self, data: memoryview) -> None:
        """Queue bytes; waits when too many are queued already.

        Args:
            data: Must not be written to until the digest was taken.
        """
        self._pending.append((self._executor.submit(self._digest.update, data), len(data)))
        self._ahead += len(data)
        while self._ahead > _AHEAD_BYTES:
            self._settle()

    def result(self) -> str:
        """Wait for all queued bytes and give the digest.

        Returns:
            Hex digits.
        """
        while self._pending:
            self._settle()
        return self._digest.hexdigest()

    def _settle(self) -> None:
        future, length = self._pending.popleft()
        future.result()
        self._ahead -= length


class HashThreads:
    """The threads of one load; use it as a context manager, which joins them."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        """Start hashing the shards in order.

        Args:
            shards: Open shards, in the order in which they will be read.
        """
        self._stop = threading.Event()
        workers = max(1, min(_WORKERS, os.cpu_count() or 1, len(shards)))
        self._leading_threads = ThreadPoolExecutor(workers, thread_name_prefix="engine-hash")
        self._trailing_thread = ThreadPoolExecutor(1, thread_name_prefix="engine-hash")
        self.leading = [LeadingDigest(shard) for shard in shards]
        self._running = [
            self._leading_threads.submit(leading.run, self._stop) for leading in self.leading
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._leading_threads.shutdown(cancel_futures=True)
        self._trailing_thread.shutdown(cancel_futures=True)

    def trailing(self) -> TrailingDigest:
        """Start the digest of what is read from one shard.

        Returns:
            An empty digest.
        """
        return TrailingDigest(self._trailing_thread)

    def check(self, shard: Shard, number: int, trailing: TrailingDigest) -> str:
        """Compare the digests of a shard that was read completely.

        Args:
            shard: The shard.
            number: Its index.
            trailing: Digest of what was read.

        Returns:
            The digest, hex.

        Raises:
            CheckpointError: Code ``checkpoint.changed``.
        """
        leading = self.leading[number].result()
        if leading != trailing.result() or stamp(shard.fd) != shard.header.stamp:
            raise changed_error(shard.name)
        return leading
