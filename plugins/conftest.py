"""What the tests of all families share: the oracle runs only when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that need torch are collected only when their folder or file is named."""
    if collection_path.parts[-2:] != ("tests", "oracle"):
        return None
    named = [
        Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args
    ]
    oracle = collection_path.resolve()
    return None if any(path.is_relative_to(oracle) for path in named) else True
