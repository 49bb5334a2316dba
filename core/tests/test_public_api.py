"""``import engine_core``: quick, lazy, complete."""

from __future__ import annotations

import subprocess  # noqa: TID251 - a fresh interpreter shows what an import brings
import sys

import pytest

import engine_core

REQUIRED = {"Client", "Session", "GenerateReply", "TokenKind", "FinishReason", "EngineError"}
HEAVY = ("mlx", "jinja2", "jsonschema", "tokenizers", "numpy", "asyncio", "pluggy")


def test_import_brings_no_heavy_module() -> None:
    source = (
        "import sys, engine_core; "
        f"print([name for name in {HEAVY!r} if name in sys.modules], engine_core.__version__)"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.startswith("[] 20")


def test_every_public_name_resolves_and_is_listed() -> None:
    assert set(engine_core.__all__) >= REQUIRED
    assert sorted(engine_core.__all__) == sorted(set(engine_core.__all__))
    for name in engine_core.__all__:
        assert getattr(engine_core, name) is not None
        assert name in dir(engine_core)


def test_every_engine_error_is_public() -> None:
    from engine_core import errors

    assert set(errors.__all__) <= set(engine_core.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        engine_core.no_such_name  # noqa: B018
