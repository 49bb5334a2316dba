"""The guard around MLX: import, conflict, BLAS, limits, ownership, evaluation, thread end."""

import os
import subprocess  # noqa: TID251 - imports and thread ends are shown by fresh interpreters
import sys
import threading

import mlx.core as mx
import pytest

from engine_core import backend
from engine_core.errors import AffinityError, BackendError, BackendUnavailable


@pytest.fixture
def untouched(monkeypatch):
    """State of a process that has not loaded MLX through the guard."""
    state = backend._Process()
    monkeypatch.setattr(backend, "_process", state)
    return state


def run_python(code):
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def install(monkeypatch, folder, *names):
    """Make distributions visible to ``importlib.metadata``."""
    for name in names:
        info = folder / f"{name.replace('-', '_')}-0.32.4.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.4\n")
    monkeypatch.syspath_prepend(str(folder))


# --- import ---------------------------------------------------------------------------------


def test_importing_the_backend_does_not_import_mlx():
    done = run_python("import sys, engine_core.backend; print('mlx' in sys.modules)")
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_importing_the_cache_package_goes_through_the_guard():
    done = run_python(
        "import engine_core.cache.kv, engine_core.backend as b; print(b._process.mlx is not None)"
    )
    assert (done.stdout.strip(), done.stderr) == ("True", "")


def test_load_mlx_gives_the_module_every_time():
    assert backend.load_mlx() is mx
    assert backend.load_mlx() is mx


def test_load_mlx_without_mlx_names_the_install_line(monkeypatch, untouched):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(BackendUnavailable) as caught:
        backend.load_mlx()
    assert caught.value.code == "backend.unavailable"
    assert "pip install 'mlx" in caught.value.hint
    assert isinstance(caught.value.__cause__, ImportError)
    assert untouched.mlx is None


@pytest.mark.parametrize(
    ("platform", "line"),
    [
        ("linux", "pip install 'mlx[cpu]>=0.32.4,<0.33'"),
        ("darwin", "pip install 'mlx>=0.32.4,<0.33'"),
        ("win32", "no wheels for this platform"),
    ],
)
def test_load_mlx_install_line_follows_the_platform(monkeypatch, untouched, platform, line):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(BackendUnavailable) as caught:
        backend.load_mlx()
    assert line in caught.value.hint


def test_load_mlx_two_backends_installed_is_a_conflict(monkeypatch, untouched, tmp_path):
    install(monkeypatch, tmp_path, "mlx-cpu", "mlx-cuda-13")
    with pytest.raises(BackendUnavailable) as caught:
        backend.load_mlx()
    assert caught.value.code == "backend.conflict"
    assert "mlx-cpu" in str(caught.value)
    assert "mlx-cuda-13" in str(caught.value)
    assert "pip uninstall -y" in caught.value.hint
    with pytest.raises(BackendUnavailable):
        backend.backend_report()


def test_backend_report_says_what_computes():
    report = backend.backend_report()
    assert report.device in ("cpu", "metal", "cuda")
    assert (report.device == "cpu") == (mx.default_device() == mx.cpu)
    assert report.mlx_version == mx.__version__
    assert report.blas == "bundled" or report.blas.startswith("openblas ")


# --- allocator ------------------------------------------------------------------------------


@pytest.fixture
def allocator(untouched):
    before = mx.set_cache_limit(1 << 30)
    yield untouched
    mx.set_cache_limit(before)


def test_allocator_limit_is_set_and_reported(allocator):
    assert backend.memory_report().limit is None
    backend.set_allocator_limit(123 << 20)
    backend.set_allocator_limit(123 << 20)
    assert mx.set_cache_limit(123 << 20) == 123 << 20
    assert backend.memory_report().limit == 123 << 20


def test_allocator_limit_of_a_second_client_must_agree(allocator):
    backend.set_allocator_limit(100)
    with pytest.raises(BackendError) as caught:
        backend.set_allocator_limit(200)
    assert caught.value.code == "backend.allocator_conflict"
    assert mx.set_cache_limit(100) == 100


@pytest.mark.parametrize("limit", [-1, True, 1.5, "1", None])
def test_allocator_limit_that_is_no_size_is_refused(allocator, limit):
    with pytest.raises(BackendError) as caught:
        backend.set_allocator_limit(limit)
    assert caught.value.code == "backend.allocator_limit"
    assert allocator.cache_limit is None


def test_allocator_limit_that_mlx_ignores_is_refused(monkeypatch, allocator):
    monkeypatch.setattr(mx, "set_cache_limit", lambda limit: 7)
    with pytest.raises(BackendError) as caught:
        backend.set_allocator_limit(100)
    assert caught.value.code == "backend.allocator_limit"
    assert allocator.cache_limit is None


def test_memory_report_follows_an_allocation():
    before = backend.memory_report()
    block = mx.ones((1 << 20,))
    mx.eval(block)
    after = backend.memory_report()
    assert after.active - before.active >= block.nbytes
    assert after.peak >= after.active
    assert after.cached >= 0


# --- ownership ------------------------------------------------------------------------------


def test_owner_thread_lets_its_own_thread_through():
    backend.OwnerThread().check()


def test_owner_thread_refuses_another_thread():
    owner = backend.OwnerThread("session")
    caught = []

    def use():
        try:
            owner.check()
        except AffinityError as exc:
            caught.append(exc)

    thread = threading.Thread(target=use, name="stranger")
    thread.start()
    thread.join()
    assert caught[0].code == "affinity.wrong_thread"
    assert "stranger" in str(caught[0])


def test_owner_thread_refuses_a_forked_child():
    done = run_python(
        "import os, engine_core.backend as b\n"
        "from engine_core.errors import AffinityError\n"
        "owner = b.OwnerThread()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        owner.check()\n"
        "    except AffinityError as exc:\n"
        "        os._exit(7 if exc.code == 'affinity.forked' else 1)\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert (done.stdout.strip(), done.stderr) == ("7", "")


def test_owner_thread_of_another_process_is_refused():
    with pytest.raises(AffinityError) as caught:
        backend.OwnerThread(process=os.getpid() + 1).check()
    assert caught.value.code == "affinity.forked"


# --- evaluation -----------------------------------------------------------------------------


def singular():
    return mx.linalg.inv(mx.zeros((3, 3)), stream=mx.cpu)


def test_evaluate_computes_nested_arrays():
    first, second = mx.ones((2,)) + 1, mx.ones((2,)) + 2
    backend.evaluate(first, [second], {"third": first + second})
    assert (first + second).tolist() == [5.0, 5.0]


def test_evaluate_failure_is_typed_and_keeps_its_cause():
    with pytest.raises(BackendError) as caught:
        backend.evaluate(mx.ones(2), singular())
    assert caught.value.code == "backend.failed"
    assert isinstance(caught.value.__cause__, (RuntimeError, ValueError))
    assert str(caught.value.__cause__)[:40] in str(caught.value)
    backend.evaluate(mx.ones(2) + 1)


def test_evaluate_of_a_foreign_lazy_array_is_typed():
    lazy = mx.ones((2,)) + 1
    caught = []

    def use():
        try:
            backend.evaluate(lazy)
        except BackendError as exc:
            caught.append(exc)
        backend.clear_thread_state()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert [exc.code for exc in caught] == ["backend.failed"]


# --- thread end -----------------------------------------------------------------------------

THREADS_THAT_COMPILE = """
import threading
from engine_core import backend

mx = backend.load_mlx()


@mx.compile
def shared(x):
    return mx.exp(x) * 2 + x


class Layer:
    def __init__(self):
        self.weight = mx.ones((64, 64))
        self.step = mx.compile(self.forward)

    def forward(self, x):
        return (x @ self.weight) * 2


kept = []


def work():
    layer = Layer()
    kept.append(layer)
    for rows in range(1, 4):
        mx.eval(shared(mx.ones((4, rows))), layer.step(mx.ones((rows, 64))))
    with mx.stream(mx.new_stream(mx.cpu)):
        mx.eval(layer.step(mx.ones((5, 64))))
    mx.async_eval(layer.step(mx.ones((300, 64))))
    backend.clear_thread_state()


for _ in range(20):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def test_clear_thread_state_lets_compiling_threads_end_quietly():
    for _ in range(3):
        done = run_python(THREADS_THAT_COMPILE)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_clear_thread_state_without_mlx_does_nothing():
    done = run_python(
        "import sys, engine_core.backend as b; b.clear_thread_state(); print('mlx' in sys.modules)"
    )
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_clear_thread_state_reports_queued_work_that_failed():
    caught = []

    def use():
        mx.async_eval(singular())
        try:
            backend.clear_thread_state()
        except BackendError as exc:
            caught.append(exc)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert [exc.code for exc in caught] == ["backend.failed"]
    backend.evaluate(mx.ones(2) + 1)
