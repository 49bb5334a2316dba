"""The safetensors header of one shard, checked completely before any payload is read.

A file is eight bytes of header length (little endian), the JSON header, then the payloads, which
must cover the rest of the file without holes and without overlap.

Source: the safetensors format description, https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import hashlib
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs

from engine_core.checkpoint.files import FileStamp, read_range, stamp
from engine_core.checkpoint.jsonio import parse_json_object
from engine_core.checkpoint.mistaken import POINTER_BYTES, refuse_pointer
from engine_core.errors import CheckpointError
from engine_core.limits import LIMITS
from engine_core.weight_plan import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.limits import Limits

__all__ = ["DTYPE_BITS", "ShardHeader", "StoredTensor", "payload_bytes", "read_header"]

DTYPE_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "U16": 16,
        "I16": 16,
        "F16": 16,
        "BF16": 16,
        "U32": 32,
        "I32": 32,
        "F32": 32,
        "U64": 64,
        "I64": 64,
        "F64": 64,
        "C64": 64,
    }
)
_LENGTH_BYTES: Final = 8
_TENSOR_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})
_HINT: Final = "the file is damaged; fetch it again"


@attrs.frozen
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        info: Header facts.
        start: First byte, counted from the start of the file.
        stop: One past the last byte.
    """

    info: TensorInfo
    start: int
    stop: int


@attrs.frozen(kw_only=True)
class ShardHeader:
    """A checked header.

    Attributes:
        name: File name.
        stamp: Identity of the file when the header was read.
        data_start: First payload byte.
        digest: SHA-256 of everything before the payload, as hex.
        tensors: Key -> place, in file order.
        metadata: The free ``__metadata__`` texts.
    """

    name: str
    stamp: FileStamp
    data_start: int
    digest: str
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def payload_bytes(shape: tuple[int, ...], dtype: str) -> int | None:
    """Compute the length of a tensor's payload; Python integers cannot overflow.

    Args:
        shape: Sizes.
        dtype: Key of ``DTYPE_BITS``.

    Returns:
        Bytes, ``None`` when the values do not fill whole bytes.
    """
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    return bits // 8 if bits % 8 == 0 else None


def read_header(fd: int, name: str, limits: Limits = LIMITS, *, shard: int = 0) -> ShardHeader:
    """Read and check the header of an open shard.

    Args:
        fd: Descriptor of a regular file.
        name: File name for errors.
        limits: Bounds on the header, on names and on shapes.
        shard: Index stored in the tensors' facts.

    Returns:
        The header.

    Raises:
        CheckpointError: Codes ``checkpoint.header``, ``checkpoint.json``,
            ``checkpoint.too_large`` and ``checkpoint.lfs_pointer``.
    """
    identity = stamp(fd)
    start = bytearray(POINTER_BYTES)
    if _read(fd, name, start, 0) < _LENGTH_BYTES:
        raise _invalid(name, f"must hold an 8-byte header length, got {identity.size} bytes")
    refuse_pointer(name, bytes(start))
    prefix = start[:_LENGTH_BYTES]
    length = int.from_bytes(prefix, "little")
    if length > limits.header_bytes:
        raise CheckpointError(
            f"{name}: header must have at most {limits.header_bytes} bytes, got {length}",
            code="checkpoint.too_large",
            hint=_HINT,
        )
    available = identity.size - _LENGTH_BYTES
    if not 2 <= length <= available:
        raise _invalid(name, f"header must fit the file's {available} bytes, got {length}")
    raw = bytearray(length)
    if _read(fd, name, raw, _LENGTH_BYTES) < length:
        raise _invalid(name, "header must not be truncated")
    fields = parse_json_object(bytes(raw), f"{name} header", limits)
    metadata = _metadata(name, fields.pop("__metadata__", None))
    data_start = _LENGTH_BYTES + length
    tensors = [
        (key, _tensor(name, key, value, data_start, identity.size, limits, shard))
        for key, value in fields.items()
    ]
    tensors.sort(key=lambda item: (item[1].start, item[1].stop))
    _check_coverage(name, tensors, data_start, identity.size)
    return ShardHeader(
        name=name,
        stamp=identity,
        data_start=data_start,
        digest=hashlib.sha256(prefix + raw).hexdigest(),
        tensors=MappingProxyType(dict(tensors)),
        metadata=MappingProxyType(metadata),
    )


def _read(fd: int, name: str, buffer: bytearray, offset: int) -> int:
    try:
        return read_range(fd, memoryview(buffer), offset)
    except OSError as exc:
        raise CheckpointError(
            f"{name}: must be readable, got {os.strerror(exc.errno or 0)!r}",
            code="checkpoint.unreadable",
            hint="check the disk",
        ) from exc


def _invalid(name: str, rule: str) -> CheckpointError:
    return CheckpointError(f"{name}: {rule}", code="checkpoint.header", hint=_HINT)


def _is_size(value: Any, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum


def _metadata(name: str, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _invalid(name, "__metadata__ must map texts to texts")
    return value


def _tensor(
    name: str, key: str, value: Any, data_start: int, size: int, limits: Limits, shard: int
) -> StoredTensor:
    def refuse(rule: str) -> CheckpointError:
        return _invalid(name, f"tensor {key[:200]!r}: {rule}")

    if not key or "\0" in key or len(key.encode()) > limits.tensor_name_bytes:
        raise refuse(f"name must have 1 to {limits.tensor_name_bytes} bytes without NUL")
    if not isinstance(value, dict) or value.keys() != _TENSOR_FIELDS:
        raise refuse(f"must have exactly the fields {sorted(_TENSOR_FIELDS)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse(f"dtype must be a safetensors one, got {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > limits.tensor_rank:
        raise refuse(f"shape must be a list of at most {limits.tensor_rank} sizes")
    if not all(_is_size(one, limits.tensor_dimension) for one in shape):
        raise refuse(f"sizes must be integers from 0 to {limits.tensor_dimension}")
    length = payload_bytes(tuple(shape), dtype)
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_size(offset, size - data_start) for offset in offsets)
    ):
        raise refuse("data_offsets must be two places inside the file")
    start, stop = offsets
    if length is None or stop - start != length:
        raise refuse(f"{dtype} {shape} must have {length} bytes, got offsets {offsets}")
    return StoredTensor(TensorInfo(shape, dtype, shard), data_start + start, data_start + stop)


def _check_coverage(
    name: str, tensors: list[tuple[str, StoredTensor]], data_start: int, size: int
) -> None:
    """Demand that payloads follow one another from the header to the end of the file."""
    if not tensors:
        raise _invalid(name, "must hold at least one tensor")
    position = data_start
    for key, tensor in tensors:
        if tensor.start != position:
            rule = "must not overlap another" if tensor.start < position else "must leave no hole"
            raise _invalid(
                name,
                f"tensor {key!r} {rule}, got bytes {tensor.start} to {tensor.stop} "
                f"where {position} was due",
            )
        position = tensor.stop
    if position != size:
        raise _invalid(
            name, f"must not have trailing bytes, got {size} where the header describes {position}"
        )
