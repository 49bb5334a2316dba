"""A broken third-party plugin is one failed row; everything else works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def write_plugin(folder: Path, name: str, module: str, source: str) -> None:
    """Lay a distribution out on disk as an installer would."""
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    info = folder / f"engine_{name}-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: engine-{name}\nVersion: 1.0.0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        f"[engine_core.families.v1]\n{name} = {module}\n", encoding="utf-8"
    )


def run_engine(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine_core.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "source", "status"),
    [
        ("raises", "raise RuntimeError('cannot start')\n", "failed"),
        ("exits", "raise SystemExit(3)\n", "failed"),
        ("missing", "import a_module_that_does_not_exist\n", "failed"),
        (
            "misspelt",
            "from engine_core.markers import hookimpl\n@hookimpl\ndef engine_family(): ...\n",
            "failed",
        ),
    ],
)
def test_broken_plugin_is_listed_and_others_stay_active(
    tmp_path: Path, name: str, source: str, status: str
) -> None:
    write_plugin(tmp_path, name, f"broken_{name}", source)
    result = run_engine(tmp_path, "plugins", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    rows = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert rows[name]["status"] == status
    assert rows[name]["distribution"] == f"engine-{name}"
    assert rows[name]["reason"]
    assert rows["llama"]["status"] == "active"
    assert run_engine(tmp_path, "plugins", "--strict").returncode == 1


def test_strict_wants_every_plugin_active_and_without_rival(tmp_path: Path) -> None:
    assert run_engine(tmp_path, "plugins", "--strict").returncode == 0
    assert run_engine(tmp_path, "plugins", "--strict", "--no-plugin", "llama").returncode == 1
    source = """
        from engine_core.family import FamilyInfo
        from engine_core.markers import hookimpl

        @hookimpl
        def engine_families():
            return [FamilyInfo(name="rival", model_types={"llama"})]
    """
    write_plugin(tmp_path, "rival", "rival_plugin", textwrap.dedent(source))
    result = run_engine(tmp_path, "plugins", "--strict")
    assert "also claimed by" in result.stdout
    assert result.returncode == 1
    assert run_engine(tmp_path, "plugins").returncode == 0


def test_blocked_plugin_is_listed_as_blocked() -> None:
    result = run_engine(Path.cwd(), "plugins", "--json", "--no-plugin", "llama")
    rows = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert rows["llama"]["status"] == "blocked"
