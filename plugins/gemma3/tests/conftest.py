"""The comparison with transformers runs only when its folder or file is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ORACLE = Path(__file__).resolve().parent / "oracle"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that need torch are collected only when their folder or file is named."""
    if collection_path != ORACLE:
        return None
    named = [
        Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args
    ]
    return None if any(path.is_relative_to(ORACLE) for path in named) else True
