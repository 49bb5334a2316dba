"""Rules of the repository that no single package can check."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
LIBRARY = [
    path
    for folder in (ROOT / "core" / "src", *(ROOT / "plugins" / name / "src" for name in FAMILIES))
    for path in sorted(folder.rglob("*.py"))
]
# Names of published models that would betray a family in core, beside the plugins' own names.
MODEL_NAMES = ("qwen", "gemma", "llama", "laguna", "smollm", "mistral", "poolside")


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_core_source_names_no_family() -> None:
    pattern = re.compile("|".join({*FAMILIES, *MODEL_NAMES}), re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "core" / "src").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("family", FAMILIES)
def test_plugin_imports_no_other_plugin(family: str) -> None:
    others = {f"engine_{name}" for name in FAMILIES if name != family}
    for path in (ROOT / "plugins" / family).rglob("*.py"):
        roots = {name.split(".")[0] for name in imported_modules(path)}
        assert not roots & others, path


@pytest.mark.parametrize("family", FAMILIES)
def test_plugin_binds_core_above_and_below(family: str) -> None:
    text = (ROOT / "plugins" / family / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = tomllib.loads(text)["project"]["dependencies"]
    (core,) = (name for name in dependencies if name.startswith("engine-core"))
    assert re.fullmatch(r"engine-core>=2026\.\d+,<2027", core)


def test_versions_of_all_packages_are_equal_and_above_the_stranger() -> None:
    versions = {
        path: tomllib.loads(path.read_text(encoding="utf-8"))["project"]["version"]
        for path in sorted(ROOT.glob("*/pyproject.toml"))
        + sorted(ROOT.glob("plugins/*/pyproject.toml"))
    }
    assert len(set(versions.values())) == 1, versions
    year, month, patch = (int(part) for part in next(iter(versions.values())).split("."))
    assert (year, month, patch) > (2026, 0, 0)


def test_only_the_command_prints_and_reads_the_environment() -> None:
    found = []
    for path in LIBRARY:
        if {"cli", "testing"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in ("print", "logging.basicConfig") or name.endswith(".addHandler"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_library_starts_no_process_and_opens_no_connection() -> None:
    banned = {
        "subprocess",
        "socket",
        "urllib.request",
        "http.client",
        "requests",
        "huggingface_hub",
    }
    found = [
        (str(path.relative_to(ROOT)), name)
        for path in LIBRARY
        for name in sorted(imported_modules(path) & banned)
        if path.name != "certify_runner.py" and "testing" not in path.parts
    ]
    assert found == []


def test_source_files_stay_readable() -> None:
    """Over about 400 lines a file holds more than one concept."""
    long = {
        str(path.relative_to(ROOT)): count
        for path in LIBRARY
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 420
    }
    assert long == {}


def test_changelog_names_the_version() -> None:
    text = (ROOT / "core" / "pyproject.toml").read_text(encoding="utf-8")
    version = tomllib.loads(text)["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
