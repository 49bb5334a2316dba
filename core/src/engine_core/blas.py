"""A fast BLAS for the CPU: opened before MLX, with as many threads as pay at the moment."""

from __future__ import annotations

import ctypes
import importlib
import os
import statistics
import sys
import time

import attrs

__all__ = ["FastBlas", "open_blas"]

DISTRIBUTION = "engine-openblas"

# The product that thread counts are compared on: [8, 1024] x [1024, 1024], under 1 ms.
TRIAL_ROWS = 8
TRIAL_SIZE = 1024
TRIAL_RUNS = 5
# A count is given up once its runs together took this many times the best median so far.
TRIAL_PATIENCE = 10
RETUNE_SECONDS = 5.0

# Source: CBLAS interface, enumerations CBLAS_LAYOUT and CBLAS_TRANSPOSE.
ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112


@attrs.define
class FastBlas:
    """An opened BLAS, or why there is none.

    Its threads wait for one another by spinning. As soon as another program keeps a processor
    busy that turns a product of 1 ms into 20 ms or more, so the count is measured, not assumed.

    Attributes:
        name: Name and version, ``"bundled"`` when MLX's own is in use.
        note: Why an installed one is not in use; empty otherwise.
        library: The opened library, ``None`` when MLX's own is in use.
        tuned_at: Monotonic time of the last comparison (seconds).
    """

    name: str = "bundled"
    note: str = ""
    library: ctypes.CDLL | None = None
    tuned_at: float | None = None

    @property
    def threads(self) -> int | None:
        """Threads in use, ``None`` when MLX's own BLAS is in use."""
        return None if self.library is None else int(self.library.openblas_get_num_threads())

    def tune(self) -> None:
        """Choose the fastest number of threads, unless that was done in the last 5 seconds.

        Takes a few milliseconds. Call it while nothing of this process computes.
        """
        now = time.monotonic()
        if self.library is None:
            return
        if self.tuned_at is not None and now - self.tuned_at < RETUNE_SECONDS:
            return
        trial = _Trial(self.library)
        best_count, best = 1, trial.median(1, float("inf"))
        for count in _thread_counts(_available_processors()):
            median = trial.median(count, best)
            if median < best:
                best_count, best = count, median
        self.library.openblas_set_num_threads(best_count)
        self.tuned_at = time.monotonic()


def open_blas() -> FastBlas:
    """Open the BLAS of ``engine-openblas``, when that is installed, for all libraries to see.

    MLX finds its BLAS routines by name, so a library opened before MLX takes the place of the
    bundled one, with no environment variable.

    Returns:
        The opened library, tuned; or the bundled BLAS, with a note when another was installed.
    """
    if not sys.platform.startswith("linux"):
        return FastBlas()
    try:
        package = importlib.import_module("engine_openblas")
    except ImportError:
        return FastBlas()
    if "mlx.core" in sys.modules:
        return FastBlas(note=f"{DISTRIBUTION} is not in use: mlx was imported first")
    try:
        library = ctypes.CDLL(str(package.library_path()), mode=ctypes.RTLD_GLOBAL)
        _declare(library)
        if not _answers_globally(library):
            return FastBlas(note=f"{DISTRIBUTION} is not in use: another BLAS was opened first")
    except (OSError, AttributeError) as exc:
        return FastBlas(note=f"{DISTRIBUTION} is not in use: {exc}")
    blas = FastBlas(name=f"openblas {package.VERSION}", library=library)
    blas.tune()
    return blas


class _Trial:
    """Times one product on given numbers of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        floats = ctypes.c_float * (TRIAL_ROWS * TRIAL_SIZE)
        self._library = library
        self._left = floats()
        self._right = (ctypes.c_float * (TRIAL_SIZE * TRIAL_SIZE))()
        self._result = floats()

    def median(self, threads: int, best: float) -> float:
        """Median seconds of a product, infinite once it cannot be the best any more."""
        self._library.openblas_set_num_threads(threads)
        # The first run starts threads and warms caches; it only shows what is hopeless.
        if self._run() > TRIAL_PATIENCE * best:
            return float("inf")
        times: list[float] = []
        while len(times) < TRIAL_RUNS:
            times.append(self._run())
            if sum(times) > TRIAL_PATIENCE * best:
                return float("inf")
        return statistics.median(times)

    def _run(self) -> float:
        size = TRIAL_SIZE
        started = time.perf_counter()
        self._library.cblas_sgemm(
            *(ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE),
            *(TRIAL_ROWS, size, size),
            ctypes.c_float(1.0),
            *(self._left, size, self._right, size),
            ctypes.c_float(0.0),
            *(self._result, size),
        )
        return time.perf_counter() - started


def _available_processors() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0))


def _thread_counts(processors: int) -> list[int]:
    """Counts worth comparing with one thread: all processors, half of them, and so on."""
    counts = []
    while processors > 1:
        counts.append(processors)
        processors //= 2
    return counts


def _declare(library: ctypes.CDLL) -> None:
    """Look up every function used, so that a library lacking one is refused when opened."""
    library.openblas_set_num_threads.argtypes = [ctypes.c_int]
    library.openblas_set_num_threads.restype = None
    library.openblas_get_num_threads.argtypes = []
    library.openblas_get_num_threads.restype = ctypes.c_int
    library.cblas_sgemm.restype = None


def _answers_globally(library: ctypes.CDLL) -> bool:
    """Whether a library that looks ``cblas_sgemm`` up by name finds this one's."""
    ours = ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value
    found = ctypes.cast(ctypes.CDLL(None).cblas_sgemm, ctypes.c_void_p).value
    return ours == found
