"""Which shards make up the checkpoint, and the tensors they hold together."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs

from engine_core.checkpoint.header import ShardHeader, read_header
from engine_core.checkpoint.jsonio import parse_json_object
from engine_core.checkpoint.mistaken import FOREIGN_HINT, foreign_weights
from engine_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine_core.checkpoint.files import CheckpointFiles
    from engine_core.limits import Limits
    from engine_core.weight_plan import TensorInfo

__all__ = ["INDEX_NAME", "Shard", "ShardSet", "plan_shards"]

INDEX_NAME: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_SUFFIX: Final = ".safetensors"
_NUMBERED: Final = re.compile(r"(model.*)-(\d{1,6})-of-(\d{1,6})\.safetensors", re.ASCII)


@attrs.frozen(kw_only=True)
class Shard:
    """One open, checked file.

    Attributes:
        name: File name.
        fd: Descriptor, owned by the checkpoint's files.
        header: Its header.
    """

    name: str
    fd: int
    header: ShardHeader


@attrs.frozen(kw_only=True)
class ShardSet:
    """The checkpoint's tensors and where they lie.

    Attributes:
        shards: Open files in name order; ``TensorInfo.shard`` counts in this order.
        tensors: Key -> header facts over all shards.
        unread: Safetensors files that do not belong to the checkpoint and were not opened.
        notes: Remarks for the user.
    """

    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    unread: tuple[str, ...]
    notes: tuple[str, ...]


def plan_shards(files: CheckpointFiles, limits: Limits) -> ShardSet:
    """Find the shards, open them and check their headers against one another.

    Args:
        files: The open directory.
        limits: Bounds on shards, headers and tensors.

    Returns:
        The shard set; no payload was read.

    Raises:
        CheckpointError: Shards are missing, damaged, or contradict the index.
    """
    candidates = [name for name in files.names if name.endswith(_SUFFIX)]
    notes: list[str] = []
    weight_map = _read_index(files, limits)
    if weight_map is not None:
        named = sorted(set(weight_map.values()))
        missing = [name for name in named if name not in files.names]
        if len(missing) == len(named) and any(name.startswith("model") for name in candidates):
            notes.append(f"{INDEX_NAME} names no file that exists and was set aside")
            weight_map = None
        elif missing:
            raise _missing_shard(missing[0], INDEX_NAME)
    names = _unindexed(candidates, files.names) if weight_map is None else named
    if len(names) > limits.shards:
        raise CheckpointError(
            f"checkpoint: must have at most {limits.shards} shards, got {len(names)}",
            code="checkpoint.too_large",
            hint="merge the shards",
        )
    shards = _open_shards(files, names, limits)
    tensors, owners = _merge(shards)
    if weight_map is not None:
        _check_index(weight_map, owners)
    unread = tuple(sorted(set(candidates) - set(names)))
    if unread:
        notes.append(f"not part of the model and not opened: {', '.join(unread)}")
    return ShardSet(
        shards=shards, tensors=MappingProxyType(tensors), unread=unread, notes=tuple(notes)
    )


def _read_index(files: CheckpointFiles, limits: Limits) -> dict[str, str] | None:
    if INDEX_NAME not in files.names:
        return None
    index = parse_json_object(files.read_bytes(INDEX_NAME, limits.index_bytes), INDEX_NAME, limits)
    weight_map: Any = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _invalid("weight_map must be an object with entries")
    if len(weight_map) > limits.tensors:
        raise _invalid(f"must name at most {limits.tensors} tensors, got {len(weight_map)}")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_shard_name(name):
            raise _invalid(
                f"tensor {key[:200]!r} must lie in a .safetensors file of this directory, "
                f"got {str(name)[:200]!r}"
            )
    return weight_map


def _is_shard_name(name: str) -> bool:
    return (
        name.endswith(_SUFFIX)
        and not name.startswith(".")
        and not any(mark in name for mark in ("/", "\\", "\0"))
    )


def _invalid(rule: str) -> CheckpointError:
    return CheckpointError(
        f"{INDEX_NAME}: {rule}",
        code="checkpoint.index",
        hint="the index does not belong to these files; fetch the checkpoint again",
    )


def _missing_shard(name: str, because: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: must exist beside {because}",
        code="checkpoint.shard_missing",
        hint="the download is incomplete; fetch the checkpoint again",
    )


def _unindexed(candidates: Iterable[str], entries: Iterable[str]) -> list[str]:
    """Choose the shards without an index: the single file, else every ``model*`` file."""
    names = {name for name in candidates if name.startswith("model")}
    if _SINGLE in names:
        return [_SINGLE]
    if not names:
        raise CheckpointError(
            "checkpoint: must hold model.safetensors or an index with its shards, "
            f"got {foreign_weights(entries) or 'neither'}",
            code="checkpoint.no_weights",
            hint=FOREIGN_HINT,
        )
    numbered = (_NUMBERED.fullmatch(name) for name in sorted(names))
    for stem, digits, total in dict.fromkeys(
        (match[1], len(match[2]), match[3]) for match in numbered if match is not None
    ):
        for number in range(1, int(total) + 1):
            expected = f"{stem}-{number:0{digits}d}-of-{total}{_SUFFIX}"
            if expected not in names:
                raise _missing_shard(expected, "its numbered siblings")
    return sorted(names)


def _open_shards(files: CheckpointFiles, names: list[str], limits: Limits) -> tuple[Shard, ...]:
    shards: list[Shard] = []
    header_bytes = tensors = 0
    for number, name in enumerate(names):
        fd = files.open(name)
        header = read_header(fd, name, limits, shard=number)
        header_bytes += header.data_start
        tensors += len(header.tensors)
        if header_bytes > limits.headers_total_bytes or tensors > limits.tensors:
            raise CheckpointError(
                f"{name}: all headers must have at most {limits.headers_total_bytes} bytes and "
                f"{limits.tensors} tensors, got {header_bytes} and {tensors}",
                code="checkpoint.too_large",
                hint="this is no language model",
            )
        shards.append(Shard(name=name, fd=fd, header=header))
    return tuple(shards)


def _merge(shards: tuple[Shard, ...]) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    tensors: dict[str, TensorInfo] = {}
    owners: dict[str, str] = {}
    for shard in shards:
        for key, stored in shard.header.tensors.items():
            if key in owners:
                raise CheckpointError(
                    f"tensor {key!r}: must lie in one shard, got {owners[key]} and {shard.name}",
                    code="checkpoint.tensor_duplicate",
                    hint="two uploads are mixed in this directory",
                )
            tensors[key] = stored.info
            owners[key] = shard.name
    return tensors, owners


def _check_index(weight_map: Mapping[str, str], owners: Mapping[str, str]) -> None:
    for key, name in weight_map.items():
        if owners.get(key) != name:
            raise _invalid(f"tensor {key!r} must lie in {name}, got {owners.get(key)!r}")
    for key, name in owners.items():
        if key not in weight_map:
            raise _invalid(f"must name every tensor, got {key!r} in {name} unnamed")
