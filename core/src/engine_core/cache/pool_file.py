"""One stored prefix in a safetensors file, bound to the model it was computed with.

The file holds numbers only. Everything in it is checked before it is used: the header as that of
any safetensors file, the model's fingerprint, the names, shapes and dtypes of every tensor against
what the model's layers hold, the size against the pool's budget, and the payload against a digest.
Who can write the file can still choose what the model believes to have read: load only your own.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np

from engine_core.backend import evaluate
from engine_core.cache.base import StateShape
from engine_core.cache.layers import distinct_caches
from engine_core.checkpoint.files import read_range
from engine_core.checkpoint.header import ShardHeader, StoredTensor, read_header
from engine_core.checkpoint.jsonio import parse_json
from engine_core.errors import CacheError, CheckpointError
from engine_core.limits import LIMITS, Limits
from engine_core.prompt_key import MediaSpan, PromptKey
from engine_core.values import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_core.cache.base import LayerCache

__all__ = ["read_prefix", "write_prefix"]

FORMAT: Final = "engine prompt cache 1"
IDS: Final = "ids"
DTYPES: Final[dict[str, tuple[mx.Dtype, type[np.generic]]]] = {
    "F32": (mx.float32, np.float32),
    "F16": (mx.float16, np.float16),
    "BF16": (mx.bfloat16, np.uint16),
    "I32": (mx.int32, np.int32),
}
# What a temporary name keeps of the file's own; file systems take 255 bytes.
_NAME_CHARS: Final = 32
NAMES: Final = {dtype: name for name, (dtype, _) in DTYPES.items()}


def write_prefix(
    path: str | os.PathLike[str], fingerprint: str, key: PromptKey, caches: Sequence[LayerCache]
) -> None:
    """Write a prefix; the file appears whole or not at all, readable by its owner only.

    Args:
        path: File to write; one that exists is replaced.
        fingerprint: Identity of the model.
        key: The prefix.
        caches: One a layer, which hold exactly it.

    Raises:
        CacheError: The file cannot be written (``cache.file``).
        BackendError: The device failed.
    """
    tensors: dict[str, mx.array] = {IDS: mx.array(key.ids, dtype=mx.int32)}
    for name, cache in _named(caches):
        for part, array in cache.state().items():
            tensors[f"{name}.{part}"] = array
    evaluate(list(tensors.values()))
    payload = {name: _to_numpy(array) for name, array in tensors.items()}
    media = json.dumps([[span.start, span.stop, span.digest.hex()] for span in key.media])
    digest = _start_digest(media)
    fields: dict[str, Any] = {}
    at = 0
    for name, values in payload.items():
        digest.update(values.data.cast("B"))
        fields[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    fields["__metadata__"] = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "media": media,
        "sha256": digest.hexdigest(),
    }
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % 8)
    with _replacing(Path(path)) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for values in payload.values():
            file.write(values.data.cast("B"))


def read_prefix(
    path: str | os.PathLike[str],
    fingerprint: str,
    caches: Sequence[LayerCache],
    *,
    budget_bytes: int,
    vocab_size: int,
    limits: Limits = LIMITS,
) -> PromptKey:
    """Read a prefix into caches.

    Args:
        path: The file.
        fingerprint: Identity of the model, which the file must have been written with.
        caches: Empty caches of that model, one a layer; filled.
        budget_bytes: Bound on the file's payload.
        vocab_size: Token ids lie below it.
        limits: Bounds on the header.

    Returns:
        The prefix.

    Raises:
        CacheError: The file cannot be read or is damaged (``cache.file``), is too large
            (``cache.too_large``), or was written with another model (``cache.other_model``). The
            caches may be partly filled.
        BackendError: The device failed.
    """
    name = Path(path).name
    with _opened(path, name) as fd:
        try:
            header = read_header(fd, name, limits)
        except CheckpointError as exc:
            raise _invalid(str(exc)) from exc
        metadata = header.metadata
        if metadata.get("format") != FORMAT:
            raise _invalid(f"{name}: must be a prompt cache, got {shown(metadata.get('format'))}")
        if metadata.get("fingerprint") != fingerprint:
            raise CacheError(
                f"{name}: must belong to the loaded model {fingerprint[:12]!r}, "
                f"got {shown(metadata.get('fingerprint', '')[:12])}",
                code="cache.other_model",
                hint="weights, tokenizer, template, dtype and versions must all be the same",
            )
        size = sum(tensor.stop - tensor.start for tensor in header.tensors.values())
        if size > budget_bytes:
            raise CacheError(
                f"{name}: must fit the budget of {budget_bytes} bytes, got {size}",
                code="cache.too_large",
                hint="load the model with a larger prompt_cache_bytes=",
            )
        length = _check_shapes(name, header, caches)
        digest = _start_digest(metadata.get("media", ""))
        arrays = {
            key: _read_array(fd, name, tensor, digest) for key, tensor in header.tensors.items()
        }
        if digest.hexdigest() != metadata.get("sha256"):
            raise _invalid(f"{name}: content must have the digest that its header states")
    ids = tuple(int(one) for one in np.array(arrays.pop(IDS)))
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise _invalid(f"{name}: token ids must lie in [0, {vocab_size})")
    key = PromptKey(ids, _media(name, metadata["media"], length, limits))
    for prefix, cache in _named(caches):
        cache.restore(length, dict(_parts(prefix, arrays)))
    return key


def _named(caches: Sequence[LayerCache]) -> Iterator[tuple[str, LayerCache]]:
    """Name each distinct cache after the first layer that uses it."""
    for cache in distinct_caches(caches):
        yield f"layers.{list(caches).index(cache)}", cache


def _parts(prefix: str, items: Any) -> Iterator[tuple[str, Any]]:
    for name, item in items.items():
        if name.startswith(f"{prefix}."):
            yield name.removeprefix(f"{prefix}."), item


def _check_shapes(name: str, header: ShardHeader, caches: Sequence[LayerCache]) -> int:
    """Demand exactly the tensors that the layers hold after some number of tokens; give it."""
    shapes: dict[str, StateShape] = {}
    for key, tensor in header.tensors.items():
        if tensor.info.dtype not in DTYPES:
            raise _invalid(f"{name}: dtype must be one of {sorted(DTYPES)}, got {key!r} as another")
        shapes[key] = StateShape(tuple(tensor.info.shape), DTYPES[tensor.info.dtype][0])
    ids = shapes.pop(IDS, None)
    if ids is None or ids.dtype != mx.int32 or len(ids.shape) != 1 or ids.shape[0] < 1:
        raise _invalid(f"{name}: must hold its token ids as one row of int32")
    [length] = ids.shape
    count = 0
    for prefix, cache in _named(caches):
        own = dict(_parts(prefix, shapes))
        count += len(own)
        if not cache.accepts(length, own):
            raise _invalid(f"{name}: {prefix} must be what the model's layer holds")
    if count != len(shapes):
        raise _invalid(f"{name}: must hold nothing but the model's layers, got other tensors")
    return length


def _media(name: str, text: str, length: int, limits: Limits) -> tuple[MediaSpan, ...]:
    try:
        items = parse_json(text.encode(), f"{name} media", limits)
        return tuple(MediaSpan(start, stop, bytes.fromhex(digest)) for start, stop, digest in items)
    except (CheckpointError, CacheError, TypeError, ValueError) as exc:
        raise _invalid(f"{name}: media must be a list of places inside {length} tokens") from exc


def _start_digest(media: str) -> Any:
    return hashlib.sha256(f"{FORMAT}\n{media}\n".encode())


def _to_numpy(array: mx.array) -> np.ndarray[Any, Any]:
    stored = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.array(stored))


def _read_array(fd: int, name: str, tensor: StoredTensor, digest: Any) -> mx.array:
    buffer = np.empty(tensor.stop - tensor.start, np.uint8)
    try:
        count = read_range(fd, buffer.data, tensor.start)
    except OSError as exc:
        raise _unusable(name, "read", exc) from exc
    if count < len(buffer):
        raise _invalid(f"{name}: must not change while it is read")
    digest.update(buffer.data)
    dtype, stored = DTYPES[tensor.info.dtype]
    array = mx.array(buffer.view(np.dtype(stored).newbyteorder("<")).reshape(tensor.info.shape))
    return array if array.dtype == dtype else array.view(dtype)


@contextmanager
def _opened(path: str | os.PathLike[str], name: str) -> Iterator[int]:
    try:
        # Not blocking, so that a named pipe is refused instead of waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as exc:
        raise _unusable(name, "read", exc) from exc
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _invalid(f"{name}: must be a regular file, got something else")
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """Write beside the file and put it in its place at the end; others may write it as well."""
    fresh = path.with_name(f".{path.name[:_NAME_CHARS]}.{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except BaseException:
            with suppress(OSError):
                fresh.unlink()
            raise
    except (OSError, ValueError) as exc:
        raise _unusable(path.name, "written", exc) from exc


def _invalid(message: str) -> CacheError:
    return CacheError(
        message,
        code="cache.file",
        hint="name a file that save_cache wrote; a damaged one can be deleted and written anew",
    )


def _unusable(name: str, action: str, exc: Exception) -> CacheError:
    reason = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else str(exc)
    return CacheError(
        f"{name}: must be possible to be {action}, got {reason!r}",
        code="cache.file",
        hint="check the path and its permissions",
    )
