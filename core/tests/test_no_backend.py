"""Where MLX is not installed: one typed error with a cure, never an import error."""

from __future__ import annotations

import subprocess  # noqa: TID251 - only a fresh interpreter has not imported MLX
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engine_core.testing.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

# Hides MLX as an environment without it does, for this process alone.
HIDE = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mlx":
            raise ModuleNotFoundError("No module named 'mlx'", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    tensors = {"a.weight": np.ones((2, 2), np.float32)}
    return str(write_checkpoint(tmp_path / "model", {"model_type": "llama"}, tensors))


def run(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", HIDE + source, *arguments],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [
        "engine_core.Client.load(sys.argv[1])",
        "engine_core.Session.load(sys.argv[1])",
        "importlib.import_module('engine_core.nn')",
        "importlib.import_module('engine_core.cache.kv')",
        "importlib.import_module('engine_core.loading')",
    ],
)
def test_call_without_mlx_is_the_typed_error(model: str, call: str) -> None:
    done = run(
        "import importlib, engine_core\n"
        f"try:\n    {call}\n"
        "except engine_core.BackendUnavailable as error:\n    print(error.code, error.hint)\n",
        model,
    )
    assert done.stdout.startswith("backend.unavailable pip install 'mlx"), done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "-p", "a", "--model"],
        ["chat", "--model"],
        ["verify"],
        ["bench", "--model"],
        ["inspect", "--backend"],
    ],
)
def test_command_without_mlx_is_one_error_with_its_cure(model: str, command: list[str]) -> None:
    done = run("from engine_core.cli import main\nsys.exit(main())\n", *command, model)
    assert done.returncode == 1
    assert done.stderr.startswith("error: mlx: must be importable"), done.stderr
    assert "[backend.unavailable]" in done.stderr
    assert "hint: pip install 'mlx" in done.stderr
    assert "Traceback" not in done.stderr


def test_public_names_and_commands_without_a_model_need_no_mlx() -> None:
    done = run("import engine_core\nfor name in engine_core.__all__: getattr(engine_core, name)\n")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("from engine_core.cli import main\nsys.exit(main())\n", "plugins")
    assert (done.returncode, done.stderr) == (0, "")
