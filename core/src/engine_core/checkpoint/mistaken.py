"""What is passed for a checkpoint by mistake, said as what it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "FOREIGN_HINT",
    "POINTER_BYTES",
    "foreign_weights",
    "missing_directory",
    "not_a_directory",
    "refuse_pointer",
    "shown_path",
]

FOREIGN_HINT: Final = "only safetensors checkpoints can be loaded; fetch the model in that format"
POINTER_BYTES: Final = 64  # enough of a file's start to tell a Git LFS pointer
# Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER: Final = b"version https://git-lfs.github.com/spec/"
_FOREIGN: Final = {".gguf": "GGUF", ".bin": "PyTorch", ".pt": "PyTorch", ".pth": "PyTorch"}
_SHOWN_CHARS: Final = 500


def shown_path(path: str) -> str:
    """Write a path for an error.

    Args:
        path: The path as the caller gave it.

    Returns:
        The path, its end when it is very long.
    """
    return path[-_SHOWN_CHARS:] or "checkpoint"


def not_a_directory(path: str) -> CheckpointError:
    """Describe a path that leads to something else than a directory.

    Args:
        path: The path as the caller gave it.

    Returns:
        The error to raise.
    """
    kind = foreign_weights([path])
    return CheckpointError(
        f"{shown_path(path)}: must be a directory, got {kind or 'something else'}",
        code="checkpoint.not_a_directory",
        hint=FOREIGN_HINT if kind else "pass the directory that holds config.json",
    )


def foreign_weights(names: Iterable[str]) -> str:
    """Find weights in a format that the engine does not read.

    Args:
        names: File names.

    Returns:
        Format and name of the first such file, empty when there is none.
    """
    for name in names:
        kind = _FOREIGN.get(Path(name).suffix.lower())
        if kind is not None:
            return f"a {kind} file ({Path(name).name[:100]})"
    return ""


def refuse_pointer(name: str, start: bytes) -> None:
    """Refuse a file that only says where Git LFS keeps its content.

    Args:
        name: File name.
        start: Its first ``POINTER_BYTES`` bytes, all of a shorter file.

    Raises:
        CheckpointError: It is one, code ``checkpoint.lfs_pointer``.
    """
    if start.startswith(_POINTER):
        raise CheckpointError(
            f"{name}: must hold the content, got a Git LFS pointer to it",
            code="checkpoint.lfs_pointer",
            hint="run 'git lfs pull' in the repository, or fetch the checkpoint again",
        )


def missing_directory(path: str) -> CheckpointError:
    """Describe a checkpoint directory that does not exist.

    Args:
        path: The path as the caller gave it.

    Returns:
        The error to raise.
    """
    hint = "check the path; resolve_hub('owner/name') finds a repository of the local cache"
    if path.startswith("~"):
        hint = "write the home directory out, '~' is not expanded"
    return CheckpointError(
        f"{shown_path(path)}: must exist", code="checkpoint.missing_file", hint=hint
    )
