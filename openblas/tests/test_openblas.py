"""The distribution brings a library that takes the place of MLX's own BLAS."""

import ctypes
import importlib.util
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import engine_openblas

ON_LINUX = sys.platform.startswith("linux")
HOOK = Path(__file__).resolve().parent.parent / "hatch_build.py"


def run_python(code):
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_version_agrees_with_the_pinned_source():
    pyproject = (HOOK.parent / "pyproject.toml").read_text()
    assert f"scipy-openblas32=={engine_openblas.VERSION}." in pyproject


@pytest.mark.skipif(not ON_LINUX, reason="the library exists on Linux only")
class TestLibrary:
    def test_library_exports_standard_names_only(self):
        library = ctypes.CDLL(str(engine_openblas.library_path()))
        for name in ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "sgemm_", "sgesdd_", "dpotrf_"):
            assert getattr(library, name)
            assert not hasattr(library, f"scipy_{name}")

    def test_library_is_the_stated_version(self):
        library = ctypes.CDLL(str(engine_openblas.library_path()))
        library.openblas_get_config.restype = ctypes.c_char_p
        assert f"OpenBLAS {engine_openblas.VERSION}." in library.openblas_get_config().decode()

    def test_licence_lies_beside_the_library(self):
        text = (engine_openblas.library_path().parent / "LICENSE.openblas").read_text()
        assert "The OpenBLAS Project" in text

    def test_library_multiplies_correctly(self):
        library = ctypes.CDLL(str(engine_openblas.library_path()))
        left = (ctypes.c_float * 4)(1, 2, 3, 4)
        right = (ctypes.c_float * 4)(5, 6, 7, 8)
        result = (ctypes.c_float * 4)()
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        library.cblas_sgemm(101, 111, 111, 2, 2, 2, one, left, 2, right, 2, zero, result, 2)
        assert list(result) == [19, 22, 43, 50]

    def test_engine_core_opens_it_before_mlx(self):
        pytest.importorskip("engine_core", reason="engine-core is not installed beside it")
        done = run_python(
            "from engine_core.backend import load_mlx, backend_report\n"
            "import os\n"
            "mx = load_mlx()\n"
            "report = backend_report()\n"
            "print(report.blas, report.note)\n"
            "print(1 <= report.blas_threads <= len(os.sched_getaffinity(0)))\n"
            "product = mx.ones((64, 300)) @ mx.full((300, 65), 2.0)\n"
            "print(mx.all(product == 600).item())\n"
        )
        assert done.stderr == ""
        assert done.stdout.splitlines() == [f"openblas {engine_openblas.VERSION} ", "True", "True"]


def test_library_path_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="Linux only"):
        engine_openblas.library_path()


def test_library_path_of_an_incomplete_installation_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(engine_openblas, "LIBRARY_NAME", "libmissing.so")
    with pytest.raises(FileNotFoundError, match="reinstall"):
        engine_openblas.library_path()


# --- build hook -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    spec = importlib.util.spec_from_file_location("engine_openblas_build", HOOK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library_image(names):
    """A 64-bit ELF file that has nothing but a dynamic symbol table."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name, _ in names)
    symbols = bytes(24)
    position = 1
    for name, defined in names:
        symbols += struct.pack("<IBBHQQ", position, 0x12, 0, 1 if defined else 0, 0, 0)
        position += len(name) + 1
    header = 64
    at_symbols, at_strings = header, header + len(symbols)
    at_table = at_strings + len(strings)
    image = bytearray(header)
    image[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", image, 0x28, at_table)
    struct.pack_into("<HH", image, 0x3A, 64, 3)
    table = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (0, 11, 0, 0, at_symbols, len(symbols), 2, 0, 0, 24),
        (0, 3, 0, 0, at_strings, len(strings), 0, 0, 0, 0),
    ]
    packed = b"".join(struct.pack("<IIQQQQIIQQ", *section) for section in table)
    return bytes(image) + symbols + strings + packed


def test_exported_names_lists_defined_symbols(hook):
    image = library_image([("scipy_a", True), ("memcpy", False), ("b_", True)])
    assert hook.exported_names(image) == ["scipy_a", "b_"]


def test_exported_names_of_another_format_is_refused(hook):
    with pytest.raises(RuntimeError, match="ELF"):
        hook.exported_names(b"MZ" + bytes(200))


class FakeDistribution(metadata.Distribution):
    def __init__(self, wheel):
        self.wheel = wheel

    def read_text(self, filename):
        return self.wheel if filename == "WHEEL" else None

    def locate_file(self, path):
        return path


def test_wheel_tag_is_that_of_the_library(hook):
    source = FakeDistribution(
        "Wheel-Version: 1.0\n"
        "Tag: py3-none-manylinux_2_28_aarch64\n"
        "Tag: py3-none-manylinux_2_27_aarch64\n"
    )
    tag = "py3-none-manylinux_2_27_aarch64.manylinux_2_28_aarch64"
    assert hook.wheel_tag(source) == tag
    with pytest.raises(RuntimeError):
        hook.wheel_tag(FakeDistribution(None))
