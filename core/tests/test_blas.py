"""The fast BLAS: when it is opened, when it is not, and how many threads it gets."""

import sys
import types

import pytest

from engine_core import backend, blas
from engine_core.blas import FastBlas, open_blas


def package(monkeypatch, library_path):
    module = types.ModuleType("engine_openblas")
    module.VERSION = "9.9"
    module.library_path = library_path
    monkeypatch.setitem(sys.modules, "engine_openblas", module)


def refuse():
    raise OSError("no library here")


@pytest.fixture
def before_mlx(monkeypatch):
    """A Linux process that has not imported MLX."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)


def test_blas_not_installed_means_bundled(monkeypatch, before_mlx):
    monkeypatch.setitem(sys.modules, "engine_openblas", None)
    assert open_blas() == FastBlas()
    assert FastBlas().threads is None


def test_blas_after_mlx_is_not_opened_and_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(backend, "_process", backend._Process())
    backend.load_mlx()
    monkeypatch.setattr(backend, "_process", backend._Process())
    package(monkeypatch, refuse)
    report = backend.backend_report()
    assert report.blas == "bundled"
    assert report.note == "engine-openblas is not in use: mlx was imported first"


def test_blas_that_cannot_be_located_leaves_the_bundled_one(monkeypatch, before_mlx):
    package(monkeypatch, refuse)
    found = open_blas()
    assert (found.name, found.threads) == ("bundled", None)
    assert "no library here" in found.note


def test_blas_that_cannot_be_opened_leaves_the_bundled_one(monkeypatch, before_mlx, tmp_path):
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"not a library")
    package(monkeypatch, lambda: broken)
    found = open_blas()
    assert found.name == "bundled"
    assert "not in use" in found.note


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="opens a Linux library")
def test_blas_library_without_its_functions_is_not_used(monkeypatch, before_mlx):
    package(monkeypatch, lambda: "libc.so.6")
    found = open_blas()
    assert found.library is None
    assert "openblas_set_num_threads" in found.note


def test_blas_on_macos_is_not_wanted(monkeypatch, before_mlx):
    monkeypatch.setattr(sys, "platform", "darwin")
    package(monkeypatch, refuse)
    assert open_blas() == FastBlas()


# --- threads --------------------------------------------------------------------------------


class FakeLibrary:
    """A BLAS whose products take a stated time for each number of threads, on a fake clock."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.count = 99
        self.now = 100.0
        self.products = []

    def openblas_set_num_threads(self, count):
        self.count = count

    def openblas_get_num_threads(self):
        return self.count

    def cblas_sgemm(self, *arguments):
        self.products.append(self.count)
        self.now += self.seconds[self.count]


@pytest.fixture
def tuned(monkeypatch):
    def tune(processors, seconds):
        library = FakeLibrary(seconds)
        monkeypatch.setattr(blas.time, "perf_counter", lambda: library.now)
        monkeypatch.setattr(blas.time, "monotonic", lambda: library.now)
        monkeypatch.setattr(blas, "_available_processors", lambda: processors)
        fast = FastBlas(name="fake", library=library)
        fast.tune()
        return fast, library

    return tune


def test_tune_quiet_machine_takes_every_processor(tuned):
    fast, _ = tuned(8, {8: 0.1e-3, 4: 0.2e-3, 2: 0.4e-3, 1: 0.8e-3})
    assert fast.threads == 8


def test_tune_busy_machine_takes_one_thread_and_stops_trying_early(tuned):
    fast, library = tuned(2, {2: 24e-3, 1: 0.8e-3})
    assert fast.threads == 1
    assert library.products.count(2) == 1


def test_tune_slow_runs_after_a_fast_first_one_are_given_up(tuned):
    class Slowing(dict):
        def __getitem__(self, count):
            return 0.8e-3 if count == 1 or library.products.count(2) == 1 else 24e-3

    fast, library = tuned(2, {2: 0.4e-3, 1: 0.8e-3})
    library.seconds = Slowing()
    library.products.clear()
    library.now += 10.0
    fast.tune()
    assert (fast.threads, library.products.count(2)) == (1, 2)


def test_tune_partly_busy_machine_takes_what_is_fastest(tuned):
    fast, _ = tuned(16, {16: 20e-3, 8: 0.15e-3, 4: 0.2e-3, 2: 0.4e-3, 1: 0.8e-3})
    assert fast.threads == 8


def test_tune_one_processor_takes_one_thread(tuned):
    fast, library = tuned(1, {1: 0.8e-3})
    assert fast.threads == 1
    assert set(library.products) == {1}


def test_tune_again_soon_is_free_and_later_follows_the_machine(tuned):
    fast, library = tuned(2, {2: 0.4e-3, 1: 0.8e-3})
    done = len(library.products)
    library.seconds = {2: 24e-3, 1: 0.8e-3}
    library.now += 4.0
    fast.tune()
    assert (fast.threads, len(library.products)) == (2, done)
    library.now += 4.0
    fast.tune()
    assert fast.threads == 1


def test_tune_without_a_fast_blas_does_nothing(monkeypatch):
    monkeypatch.setattr(backend, "_process", backend._Process())
    backend.tune_blas()
    assert backend._process.blas == FastBlas()
