"""Helper modules of this folder are imported by name; the oracle runs only when asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

TESTS = Path(__file__).resolve().parent
ORACLE = TESTS / "oracle"
sys.path.insert(0, str(TESTS))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that need torch are collected only when their folder or file is named."""
    if collection_path != ORACLE:
        return None
    named = [
        Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args
    ]
    return None if any(path.is_relative_to(ORACLE) for path in named) else True
