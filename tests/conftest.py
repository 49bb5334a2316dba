"""Fixtures for tests over all packages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real small checkpoint; ``nox -s integration`` always provides it."""
    path = os.environ.get("ENGINE_DEMO_MODEL")
    if not path:
        pytest.skip("the real checkpoint is fetched by nox -s integration")
    return Path(path)
