"""The library neither writes to the standard streams nor reads the environment."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in (ROOT / "core/src", *(ROOT / "plugins").glob("*/src"), ROOT / "certs/src")
    for path in folder.rglob("*.py")
    if "cli" not in path.relative_to(folder).parts
    # The kit reads the environment to show that a family leaves it alone.
    and path.name != "conformance.py"
)
STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
PRINTERS = {"print", "pprint", "breakpoint", "input"}
LOGGING = {"basicConfig", "addHandler", "StreamHandler", "FileHandler", "lastResort"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in PRINTERS:
                found.append(f"{node.lineno}: calls {node.func.id}")
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner == "sys" and node.attr in STREAMS) or (
                owner == "os" and node.attr in ENVIRONMENT
            ):
                found.append(f"{node.lineno}: uses {owner}.{node.attr}")
            if node.attr in LOGGING or (owner == "traceback" and node.attr.startswith("print")):
                found.append(f"{node.lineno}: uses {owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if (node.module == "sys" and names & STREAMS) or (
                node.module == "os" and names & ENVIRONMENT
            ):
                found.append(f"{node.lineno}: imports from {node.module}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_library_source_has_no_output_and_no_environment(path: Path) -> None:
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "print('x')",
        "import sys\nsys.stderr.write('x')",
        "from sys import stdout",
        "import os\nvalue = os.environ['A']",
        "import os\nvalue = os.getenv('A')",
        "from os import environ",
        "import logging\nlogging.basicConfig()",
        "import traceback\ntraceback.print_exc()",
    ],
)
def test_offence_search_finds_a_planted_offence(source: str) -> None:
    assert len(offences(source)) == 1
