"""Where the OpenBLAS library of this distribution lies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

__all__ = ["VERSION", "library_path"]

VERSION: Final = "0.3.34"
"""Version of OpenBLAS."""

LIBRARY_NAME: Final = "libengine_openblas.so"


def library_path() -> Path:
    """Locate the library.

    Returns:
        Path of a shared library that exports ``cblas_*``, ``sgemm_`` and the other standard names.

    Raises:
        OSError: This platform has no such library, or the installation is incomplete.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(
            f"engine-openblas: brings a library on Linux only, got platform {sys.platform!r}"
        )
    path = Path(__file__).resolve().parent / LIBRARY_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"engine-openblas: {LIBRARY_NAME} must lie beside the package, got none; "
            "reinstall engine-openblas"
        )
    return path
