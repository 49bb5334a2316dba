"""The only guard around MLX: how it is imported, bounded, owned by a thread and evaluated.

Importing this module does not import MLX.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import weakref
from importlib import metadata
from typing import TYPE_CHECKING, Any

import attrs

from engine_core.blas import FastBlas, open_blas
from engine_core.errors import AffinityError, BackendError, BackendUnavailable

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "AllocatorHold",
    "BackendReport",
    "MemoryReport",
    "OwnerThread",
    "backend_report",
    "clear_thread_state",
    "evaluate",
    "load_mlx",
    "memory_report",
    "set_allocator_limit",
    "tune_blas",
]

# Each of these puts a libmlx into the same folder, so that the last one installed wins.
BACKEND_DISTRIBUTIONS = ("mlx-cpu", "mlx-cuda", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")
INSTALL_LINES = {
    "linux": "pip install 'mlx[cpu]>=0.32.4,<0.33' (NVIDIA: 'mlx[cuda13]>=0.32.4,<0.33')",
    "darwin": "pip install 'mlx>=0.32.4,<0.33' (Apple silicon, macOS 14 or later)",
}


@attrs.frozen(kw_only=True)
class BackendReport:
    """What computes.

    Attributes:
        device: ``"cpu"``, ``"metal"`` or ``"cuda"``.
        mlx_version: Version of MLX.
        blas: Name and version of the BLAS opened before MLX, ``"bundled"`` for MLX's own.
        blas_threads: Threads of that BLAS, ``None`` when it is MLX's own.
        note: Why a fast BLAS that is installed is not in use; empty otherwise.
    """

    device: str
    mlx_version: str
    blas: str
    blas_threads: int | None = None
    note: str = ""


@attrs.frozen(kw_only=True)
class MemoryReport:
    """MLX's allocator, in bytes.

    Attributes:
        active: In use.
        peak: Most in use at once.
        cached: Freed and kept for reuse.
        limit: Bound on ``cached`` set by this process, ``None`` before a load set one.
    """

    active: int
    peak: int
    cached: int
    limit: int | None


@attrs.define
class _Process:
    """State that exists once a process, guarded by its lock."""

    lock: threading.RLock = attrs.field(factory=threading.RLock)
    mlx: ModuleType | None = None
    blas: FastBlas = attrs.field(factory=FastBlas)
    cache_limit: int | None = None
    holds: int = 0


_process = _Process()


def load_mlx() -> ModuleType:
    """Import ``mlx.core``, after opening a fast BLAS where one is installed.

    Returns:
        The module ``mlx.core``.

    Raises:
        BackendUnavailable: MLX cannot be imported, or two MLX backends overwrite each other.
    """
    with _process.lock:
        if _process.mlx is None:
            _refuse_conflict()
            _process.blas = open_blas()
            _process.mlx = _import_mlx()
        return _process.mlx


def _refuse_conflict() -> None:
    """Refuse an environment in which one MLX backend was installed over another."""
    installed = []
    for name in BACKEND_DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        installed.append(name)
    if len(installed) > 1:
        raise BackendUnavailable(
            f"mlx: exactly one backend may be installed, got {' and '.join(installed)}",
            code="backend.conflict",
            hint=(
                f"run pip uninstall -y {' '.join(installed)}, then pip install "
                f"--no-deps {installed[-1]} (or the one you want): they share files, so "
                "uninstalling one alone breaks the other"
            ),
        )


def _import_mlx() -> ModuleType:
    """Import ``mlx.core`` or say exactly what to install."""
    try:
        return importlib.import_module("mlx.core")
    except ImportError as exc:
        raise BackendUnavailable(
            f"mlx: must be importable with a backend, got {exc}",
            hint=INSTALL_LINES.get(sys.platform, "MLX has no wheels for this platform"),
        ) from exc


def _device(core: Any) -> str:
    """Name the kind of the default device."""
    if core.default_device().type == core.DeviceType.cpu:
        return "cpu"
    return "metal" if core.metal.is_available() else "cuda"


def backend_report() -> BackendReport:
    """Say what computes, for ``client.info`` and ``engine inspect``.

    Returns:
        Device, versions and the BLAS in use.

    Raises:
        BackendUnavailable: As :func:`load_mlx`.
    """
    core = load_mlx()
    return BackendReport(
        device=_device(core),
        mlx_version=str(core.__version__),
        blas=_process.blas.name,
        blas_threads=_process.blas.threads,
        note=_process.blas.note,
    )


def tune_blas() -> None:
    """Fit the threads of the fast BLAS to what else the machine is doing; nothing without one.

    Call it at the start of a request, while nothing computes: another program that keeps one
    processor busy makes products on all processors 20 times slower.
    """
    with _process.lock:
        _process.blas.tune()


class AllocatorHold:
    """A claim on the process's allocator limit, which binds other clients while it is held.

    It ends with :meth:`release` or with the object, so that neither a failed load nor a closed
    client leaves its limit behind for the next one.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Set the limit and hold it.

        Args:
            limit_bytes: Bytes, 0 or more.

        Raises:
            BackendError: As :func:`set_allocator_limit`.
        """
        with _process.lock:
            set_allocator_limit(limit_bytes)
            _process.holds += 1
        self.release = weakref.finalize(self, _release_hold, _process)
        self.release.atexit = False


def _release_hold(process: _Process) -> None:
    with process.lock:
        process.holds -= 1
        if process.holds == 0:
            process.cache_limit = None


def set_allocator_limit(limit_bytes: int) -> None:
    """Bound the memory MLX keeps for reuse, for the whole process.

    Args:
        limit_bytes: Bytes, 0 or more.

    Raises:
        BackendError: MLX did not take the value, the value is no size, or another client of this
            process asked for a different one.
    """
    if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 0:
        raise BackendError(
            f"allocator limit: must be a number of bytes, got {limit_bytes!r}",
            code="backend.allocator_limit",
        )
    with _process.lock:
        if _process.cache_limit not in (None, limit_bytes):
            raise BackendError(
                f"allocator limit: one process has one limit, {_process.cache_limit!r} bytes, "
                f"got {limit_bytes!r}",
                code="backend.allocator_conflict",
                hint="load every client of a process with the same allocator limit",
            )
        core = load_mlx()
        core.set_cache_limit(limit_bytes)
        # The setter returns the value it replaces; there is no other way to read it.
        taken = core.set_cache_limit(limit_bytes)
        if taken != limit_bytes:
            raise BackendError(
                f"allocator limit: MLX must take {limit_bytes!r} bytes, got {taken!r}",
                code="backend.allocator_limit",
            )
        _process.cache_limit = limit_bytes


def memory_report() -> MemoryReport:
    """Read MLX's allocator.

    Returns:
        Bytes active, at peak and cached.

    Raises:
        BackendUnavailable: As :func:`load_mlx`.
    """
    core = load_mlx()
    return MemoryReport(
        active=core.get_active_memory(),
        peak=core.get_peak_memory(),
        cached=core.get_cache_memory(),
        limit=_process.cache_limit,
    )


@attrs.frozen
class OwnerThread:
    """The thread and process that own arrays.

    MLX arrays belong to the thread that recorded them, and a forked child has neither the
    parent's threads nor its device.

    Attributes:
        subject: What is owned, for messages.
        thread: Identifier of the owning thread.
        process: Identifier of the owning process.
    """

    subject: str = "session"
    thread: int = attrs.field(factory=threading.get_ident)
    process: int = attrs.field(factory=os.getpid)

    def check(self) -> None:
        """Refuse any caller but the owner; call it before the first MLX call.

        Raises:
            AffinityError: Another thread or a forked process is calling.
        """
        if os.getpid() != self.process:
            raise AffinityError(
                f"{self.subject}: belongs to process {self.process!r}, got a call from process "
                f"{os.getpid()!r}",
                code="affinity.forked",
                hint="load the model in the child process, or start children with spawn",
            )
        if threading.get_ident() != self.thread:
            raise AffinityError(
                f"{self.subject}: belongs to the thread that made it, got a call from thread "
                f"{threading.current_thread().name!r}",
                hint="use a Client, whose handle any thread may use",
            )


def evaluate(*arrays: Any) -> None:
    """Evaluate arrays, turning every failure of the device into a typed error.

    Args:
        *arrays: Arrays, or lists, tuples and dicts of arrays.

    Raises:
        BackendError: The evaluation failed; MLX's own error is the cause.
    """
    core: Any = sys.modules.get("mlx.core") or load_mlx()
    try:
        core.eval(*arrays)
    except (RuntimeError, ValueError, MemoryError, OSError) as exc:
        raise evaluation_error(exc) from exc


def evaluation_error(exc: BaseException) -> BackendError:
    """Describe a failed evaluation.

    Args:
        exc: What MLX raised.

    Returns:
        The error to raise from ``exc``.
    """
    text = " ".join(str(exc).split())[:500]
    return BackendError(
        f"evaluation: must succeed on the device, got {type(exc).__name__}: {text}",
        hint="see the cause; a smaller context or model helps when memory ran out",
    )


def clear_thread_state() -> None:
    """Finish and drop what MLX keeps for the calling thread; call it before the thread ends.

    Streams and what was compiled on them live in thread storage. Left to be destroyed as the
    thread or the process ends, they now and then abort it.

    Raises:
        BackendError: Work that was still queued failed; the state is dropped all the same.
    """
    core: Any = sys.modules.get("mlx.core")
    if core is None:
        return
    try:
        core.synchronize()
    except RuntimeError as exc:
        raise evaluation_error(exc) from exc
    finally:
        core.clear_streams()
        core.clear_cache()
