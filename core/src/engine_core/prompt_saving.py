"""Stored prefixes that outlive the process: saved to a file, loaded into the pool."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine_core.cache.pool_entry import EntryKind
from engine_core.cache.pool_file import read_prefix, write_prefix
from engine_core.errors import CacheError, InvalidRequest
from engine_core.values import shown

if TYPE_CHECKING:
    from engine_core.cache.pool import PromptPool
    from engine_core.generation import Request
    from engine_core.loading import Loaded

__all__ = ["load_prefix", "save_prefix"]


def save_prefix(loaded: Loaded, request: Request, path: str | os.PathLike[str]) -> int:
    """Save what a request would start from.

    Args:
        loaded: The model and what belongs to it.
        request: The request; it is not run.
        path: File to write.

    Returns:
        Tokens saved.

    Raises:
        CacheError: Nothing of its prompt is stored (``cache.not_stored``), or the file cannot be
            written (``cache.file``).
        EngineError: The request cannot be rendered.
    """
    _check_path(path)
    key = loaded.prompter.prompt(request).key
    found = _pool(loaded).peek(loaded.spec.fingerprint, key)
    if found is None:
        raise CacheError(
            f"prompt cache: a prefix of the {len(key.ids)} tokens must be stored, got none",
            code="cache.not_stored",
            hint="run a request with this prompt first",
        )
    prefix, hit = found
    write_prefix(path, loaded.spec.fingerprint, prefix, hit.caches)
    return hit.length


def load_prefix(loaded: Loaded, path: str | os.PathLike[str]) -> int:
    """Load a saved prefix into the pool.

    Args:
        loaded: The model and what belongs to it.
        path: The file.

    Returns:
        Tokens loaded.

    Raises:
        CacheError: The file is unusable (``cache.file``), of another model
            (``cache.other_model``) or too large for the pool (``cache.too_large``).
        InvalidRequest: ``path`` is no path.
    """
    _check_path(path)
    pool = _pool(loaded)
    caches = loaded.new_caches()
    key = read_prefix(
        path,
        loaded.spec.fingerprint,
        caches,
        budget_bytes=pool.budget_bytes,
        vocab_size=loaded.spec.answers.architecture.vocab_size,
        limits=loaded.limits,
    )
    pool.publish(loaded.spec.fingerprint, key, caches, EntryKind.BOUNDARY)
    pool.settle()
    found = pool.peek(loaded.spec.fingerprint, key)
    if found is None or found[1].length < len(key.ids):
        raise CacheError(
            f"prompt cache: {len(key.ids)} tokens must stay stored in {pool.budget_bytes} bytes, "
            "got dropped at once",
            code="cache.too_large",
            hint="load the model with a larger prompt_cache_bytes=, or a longer prompt_cache_ttl=",
        )
    return len(key.ids)


def _check_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidRequest(
            f"path: must be a local file name, got {shown(path)}", code="request.path"
        )


def _pool(loaded: Loaded) -> PromptPool:
    if loaded.pool is None:
        raise CacheError(
            "prompt cache: saving and loading need a pool, got a budget of 0 bytes",
            code="cache.no_pool",
            hint="load the model with a prompt_cache_bytes= above 0",
        )
    return loaded.pool
