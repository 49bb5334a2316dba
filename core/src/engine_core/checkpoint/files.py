"""The checkpoint directory, reached through one descriptor.

Every file is opened relative to that descriptor, without following links and without blocking on
a FIFO, and must be a regular file. No path is opened twice, so nobody can swap a file between
the check and the use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Self

import attrs

from engine_core.checkpoint.mistaken import (
    POINTER_BYTES,
    missing_directory,
    not_a_directory,
    refuse_pointer,
    shown_path,
)
from engine_core.errors import CheckpointError
from engine_core.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_core.limits import Limits

__all__ = ["CheckpointFiles", "FileStamp", "open_directory", "read_range", "stamp"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BLOBS = "../../blobs"
_READ_BYTES = 64 * 1024 * 1024


@attrs.frozen
class FileStamp:
    """What changes when a file is replaced or rewritten.

    Attributes:
        device: Device number.
        inode: Inode number.
        size: Bytes.
        modified: Time of the last write (nanoseconds).
        changed: Time of the last change of content or attributes (nanoseconds).
    """

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def stamp(fd: int) -> FileStamp:
    """Take the stamp of an open file.

    Args:
        fd: Its descriptor.

    Returns:
        The stamp.
    """
    status = os.fstat(fd)
    return FileStamp(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


def read_range(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from an open file without moving its position.

    Args:
        fd: Descriptor.
        buffer: Writable bytes.
        offset: Where to start (bytes).

    Returns:
        Bytes read; fewer than asked only at the end of the file.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done : done + _READ_BYTES]], offset + done)
        if count == 0:
            break
        done += count
    return done


@attrs.define
class CheckpointFiles:
    """An open checkpoint directory; close it, or use it as a context manager.

    Attributes:
        names: Entries of the directory, sorted.
        limits: Bounds on entries.
    """

    _directory: int
    _blobs: int | None
    names: tuple[str, ...]
    limits: Limits
    _open: set[int] = attrs.field(factory=set, repr=False)
    _closed: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, name: str) -> int:
        """Open one file.

        Args:
            name: Entry name; ``folder/file`` for a file one folder down.

        Returns:
            A descriptor of a regular file, owned and closed by this object.

        Raises:
            CheckpointError: The file is absent, a link, no regular file, or unreadable.
        """
        fd = self._open_file(name)
        self._open.add(fd)
        return fd

    def read_bytes(self, name: str, cap: int) -> bytes:
        """Read one small file.

        Args:
            name: Entry name; ``folder/file`` for a file one folder down.
            cap: Largest allowed size (bytes).

        Returns:
            Its content.

        Raises:
            CheckpointError: As ``open``, or the file is larger than ``cap``.
        """
        fd = self._open_file(name)
        try:
            size = os.fstat(fd).st_size
            if size > cap:
                raise CheckpointError(
                    f"{name}: must have at most {cap} bytes, got {size}",
                    code="checkpoint.too_large",
                    hint="this is no file of that kind; fetch the checkpoint again",
                )
            buffer = bytearray(size + 1)
            if read_range(fd, memoryview(buffer), 0) != size:
                raise CheckpointError(
                    f"{name}: must not change while it is read, got another size",
                    code="checkpoint.changed",
                    hint="wait until the download has finished",
                )
            refuse_pointer(name, bytes(buffer[:POINTER_BYTES]))
            return bytes(buffer[:size])
        except OSError as exc:
            raise _unreadable(name, exc) from exc
        finally:
            os.close(fd)

    def folder(self, name: str) -> tuple[str, ...]:
        """List the files one folder down.

        Args:
            name: Folder name.

        Returns:
            ``folder/file`` names, sorted; empty when there is no such folder.

        Raises:
            CheckpointError: The folder is a link, unreadable or has too many entries.
        """
        if name not in self.names:
            return ()
        with self._folder(name) as fd:
            return tuple(f"{name}/{entry}" for entry in _entries(fd, name, self.limits))

    def close(self) -> None:
        """Close every descriptor; safe to call again."""
        if self._closed:
            return
        self._closed = True
        for fd in (*self._open, self._directory, self._blobs):
            if fd is not None:
                os.close(fd)
        self._open.clear()

    @contextlib.contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        try:
            fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._directory)
        except OSError as exc:
            raise _unreadable(name, exc) from exc
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_file(self, name: str) -> int:
        if self._closed:
            raise CheckpointError(
                f"{name}: the checkpoint must be open, got a closed one",
                code="checkpoint.closed",
                hint="read the checkpoint again",
            )
        folder, slash, entry = name.rpartition("/")
        if "\0" in name or "/" in folder or not entry or {folder, entry} & {".", ".."}:
            raise CheckpointError(
                f"{name!r}: must be a plain file name inside the checkpoint",
                code="checkpoint.path",
                hint="the checkpoint names a file outside its own directory",
            )
        if not slash:
            return self._open_at(self._directory, entry, name)
        with self._folder(folder) as fd:
            return self._open_at(fd, entry, name)

    def _open_at(self, directory: int, entry: str, name: str) -> int:
        try:
            try:
                fd = os.open(entry, _FILE, dir_fd=directory)
            except OSError as exc:
                if exc.errno not in {errno.ELOOP, errno.EMLINK} or self._blobs is None:
                    raise
                fd = self._open_blob(directory, entry, name)
        except OSError as exc:
            raise _unreadable(name, exc) from exc
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CheckpointError(
                f"{name}: must be a regular file",
                code="checkpoint.not_regular",
                hint="a directory, device or pipe stands where a file belongs",
            )
        return fd

    def _open_blob(self, directory: int, entry: str, name: str) -> int:
        """Open the target of a cache link, by its name inside the blobs folder.

        The link's folder must be the very blobs folder that is already open, however it is
        spelled; the file is then opened relative to that descriptor, again without links.
        """
        folder, _, blob = os.readlink(entry, dir_fd=directory).rpartition("/")
        blobs = os.fstat(self._blobs) if self._blobs is not None else None
        where = os.stat(folder or ".", dir_fd=directory)
        if (
            blobs is None
            or (where.st_dev, where.st_ino) != (blobs.st_dev, blobs.st_ino)
            or blob in {"", ".", ".."}
        ):
            raise CheckpointError(
                f"{name}: a cache link must lead to the blobs folder of its own repository",
                code="checkpoint.link",
                hint="the cache is damaged; fetch the checkpoint again",
            )
        return os.open(blob, _FILE, dir_fd=self._blobs)


def open_directory(
    path: str | os.PathLike[str], limits: Limits = LIMITS, *, cache_links: bool = False
) -> CheckpointFiles:
    """Open a checkpoint directory.

    Args:
        path: The directory; may itself be a link.
        limits: Bound on the number of entries.
        cache_links: Accept links into the ``blobs`` folder two levels up, the layout of the
            Hugging Face cache. Only the cache resolver asks for it.

    Returns:
        The open directory.

    Raises:
        CheckpointError: Absent, no directory, unreadable, or with too many entries.
    """
    where = os.fsdecode(path)  # takes bytes paths, too
    shown = shown_path(where)
    try:
        directory = os.open(where, _DIRECTORY)
    except FileNotFoundError as exc:
        raise missing_directory(where) from exc
    except NotADirectoryError as exc:
        raise not_a_directory(where) from exc
    except (OSError, ValueError) as exc:
        raise _unreadable(shown, exc) from exc
    blobs: int | None = None
    try:
        names = _entries(directory, shown, limits)
        if cache_links:
            blobs = os.open(_BLOBS, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except OSError as exc:
        os.close(directory)
        raise _unreadable(shown, exc) from exc
    except CheckpointError:
        os.close(directory)
        raise
    return CheckpointFiles(directory, blobs, names, limits)


def _entries(fd: int, name: str, limits: Limits) -> tuple[str, ...]:
    names: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if len(names) == limits.directory_entries:
                raise CheckpointError(
                    f"{name}: must have at most {limits.directory_entries} entries",
                    code="checkpoint.too_large",
                    hint="this is no checkpoint directory",
                )
            names.append(entry.name)
    return tuple(sorted(names))


def _unreadable(name: str, exc: OSError | ValueError) -> CheckpointError:
    number = exc.errno if isinstance(exc, OSError) else None
    if number in {errno.ELOOP, errno.EMLINK}:
        return CheckpointError(
            f"{name}: must be a regular file, got a link",
            code="checkpoint.link",
            hint="copy the files, or resolve a Hugging Face cache with resolve_hub",
        )
    if number == errno.ENOENT:
        return CheckpointError(
            f"{name}: must exist",
            code="checkpoint.missing_file",
            hint="check the path, or fetch the checkpoint again",
        )
    if number == errno.ENOTDIR:
        return CheckpointError(
            f"{name}: must be a directory and no link",
            code="checkpoint.not_a_directory",
            hint="pass the directory that holds config.json",
        )
    reason = exc.strerror if isinstance(exc, OSError) else str(exc)
    return CheckpointError(
        f"{name}: must be readable, got {reason!r}",
        code="checkpoint.unreadable",
        hint="check the permissions and the number of open files",
    )
