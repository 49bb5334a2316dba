"""Find a checkpoint in the local Hugging Face cache; nothing is ever fetched.

The cache keeps the files of a repository under ``blobs`` and, for every revision, a folder of
links to them. Those links are the only ones the engine follows, and only for a directory that
came through this resolver.
"""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import Final

import attrs

from engine_core.checkpoint.mistaken import not_a_directory
from engine_core.errors import CheckpointError

__all__ = ["HubSnapshot", "resolve_hub"]

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_REVISION: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,127}(/[A-Za-z0-9][\w.-]{0,127}){0,7}", re.ASCII)
_REFERENCE_BYTES: Final = 256


@attrs.frozen
class HubSnapshot(os.PathLike[str]):
    """A checkpoint directory whose links into the cache's blobs may be followed.

    Attributes:
        path: The directory.
        cache_links: Whether the directory has the cache's layout; false for a plain one.
    """

    path: Path
    cache_links: bool

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        """Give the path, as for any other path."""
        return str(self.path)


def resolve_hub(
    repository: str | os.PathLike[str],
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> HubSnapshot:
    """Turn a repository name or a directory into a checkpoint directory.

    An existing directory wins over a repository of the same spelling.

    Args:
        repository: ``"owner/name"``, or a directory.
        revision: Branch, tag or commit; ``main`` when omitted. Meaningless for a directory.
        cache_dir: The cache; the user's ``~/.cache/huggingface/hub`` when omitted.

    Returns:
        The directory, to be passed on as the checkpoint's path.

    Raises:
        CheckpointError: Codes ``checkpoint.hub_name`` and ``checkpoint.hub_missing``, and
            ``checkpoint.not_a_directory`` for a file.
    """
    name = os.fspath(repository)
    directory = Path(repository)
    if name and _is_directory(directory):
        return HubSnapshot(directory, _has_cache_layout(directory))
    if not _REPOSITORY.fullmatch(name) or ".." in name or "--" in name:
        _refuse_file(directory)
        raise CheckpointError(
            f"model {name!r}: must be a directory or a repository name such as 'owner/name', "
            "got no such directory",
            code="checkpoint.hub_name",
            hint="check the path",
        )
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise CheckpointError(
            f"revision: must be a branch, tag or commit, got {revision!r}",
            code="checkpoint.hub_name",
            hint="leave revision= out for the main branch",
        )
    cache = Path(cache_dir) if cache_dir is not None else _default_cache()
    folder = cache / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    commit = _read_reference(folder / "refs" / wanted) or wanted
    snapshot = folder / "snapshots" / commit
    if "/" in commit or not _is_directory(snapshot) or not _has_cache_layout(snapshot):
        _refuse_file(directory)
        missing = (
            f"revision {wanted!r} of that repository"
            if _is_directory(folder)
            else "such repository"
        )
        raise CheckpointError(
            f"model {name!r}: must be a directory or a repository of the local cache, "
            f"got no such directory and no {missing} in {cache}",
            code="checkpoint.hub_missing",
            hint="check the path, or fetch the repository first, for example with 'hf download'; "
            "cache_dir= names another cache",
        )
    return HubSnapshot(snapshot, cache_links=True)


def _refuse_file(path: Path) -> None:
    if os.path.isfile(path):  # noqa: PTH113 - as in _is_directory
        raise not_a_directory(str(path))


def _default_cache() -> Path:
    """Locate the cache under the account's home directory, without reading the environment."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError as exc:
        raise CheckpointError(
            "cache_dir: must be given, this account has no home directory",
            code="checkpoint.hub_missing",
            hint="pass cache_dir=",
        ) from exc
    return Path(home) / ".cache" / "huggingface" / "hub"


def _is_directory(path: Path) -> bool:
    """Whether the path leads to a directory; false, too, where the system refuses to look."""
    # ``Path.is_dir`` raises for a name that is too long and for a folder that may not be entered.
    return os.path.isdir(path)  # noqa: PTH112


def _has_cache_layout(directory: Path) -> bool:
    """Whether the directory is ``<repository>/snapshots/<commit>`` beside a ``blobs`` folder."""
    parent = Path(os.path.realpath(directory)).parent
    return parent.name == "snapshots" and _is_directory(parent.parent / "blobs")


def _read_reference(path: Path) -> str | None:
    """Read the commit that a branch or tag stands for, ``None`` when there is no such file."""
    try:
        with path.open("rb") as file:
            text = file.read(_REFERENCE_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _REVISION.fullmatch(text) and ".." not in text else None
