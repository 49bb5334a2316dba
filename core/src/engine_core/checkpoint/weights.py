"""Turn payload bytes into arrays: bounded, in file order, through the validated descriptor.

MLX's own reader is not used: it reads lazily, so a file that changes between the opening and the
evaluation would be read as it is then, and it cannot hash what it read.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import attrs
import mlx.core as mx
import numpy as np

from engine_core.backend import evaluate
from engine_core.checkpoint.digest import (
    BLOCK_BYTES,
    HashThreads,
    TrailingDigest,
    changed_error,
    unreadable_error,
)
from engine_core.checkpoint.files import read_range, stamp
from engine_core.weight_nodes import (
    ConcatNode,
    Node,
    PermuteNode,
    Source,
    SplitNode,
    StackNode,
    TensorInfo,
    sources,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from engine_core.checkpoint.index import Shard, ShardSet

__all__ = ["ARRAY_TYPES", "Job", "combine", "materialise", "to_array"]

GROUP_BYTES: Final = 128 * 1024 * 1024
PROGRESS_BYTES: Final = 16 * 1024 * 1024
ARRAY_TYPES: Final[Mapping[str, tuple[type[np.generic], mx.Dtype]]] = {
    "F16": (np.float16, mx.float16),
    "BF16": (np.uint16, mx.bfloat16),
    "F32": (np.float32, mx.float32),
    "F64": (np.float64, mx.float32),
    "U8": (np.uint8, mx.uint8),
    "U32": (np.uint32, mx.uint32),
}


@attrs.frozen(kw_only=True, eq=False)
class Job:
    """One step of materialisation: what it is made of and how.

    Attributes:
        nodes: Expressions that must be available together.
        finish: Gets their arrays in order; gives parameter path -> array, unevaluated.
    """

    nodes: tuple[Node, ...]
    finish: Callable[[Sequence[mx.array]], Mapping[str, mx.array]]


def to_array(data: np.ndarray[Any, np.dtype[np.uint8]], info: TensorInfo) -> mx.array:
    """Make an array of a payload; the bytes are copied.

    Args:
        data: The payload, little endian.
        info: Header facts; the dtype is a key of ``ARRAY_TYPES``.

    Returns:
        The tensor in its stored dtype (``F64`` becomes float32).
    """
    stored, dtype = ARRAY_TYPES[info.dtype]
    values = data.view(np.dtype(stored).newbyteorder("<")).reshape(info.shape)
    if info.dtype == "F64":
        values = values.astype(np.float32)
    array = mx.array(values)
    return array if array.dtype == dtype else array.view(dtype)


def combine(node: Node, arrays: Mapping[str, mx.array]) -> mx.array:
    """Evaluate an expression over checkpoint tensors.

    Args:
        node: The expression.
        arrays: Checkpoint key -> tensor, for every source in it.

    Returns:
        The mapped tensor, unevaluated.
    """
    match node:
        case Source():
            return arrays[node.key]
        case PermuteNode():
            return mx.transpose(combine(node.child, arrays), node.axes)
        case SplitNode():
            cut = (slice(None),) * node.axis + (slice(node.start, node.stop),)
            # A view would keep the whole tensor, and kernels would copy it on every call.
            return mx.contiguous(combine(node.child, arrays)[cut])
        case StackNode():
            return mx.stack([combine(child, arrays) for child in node.children])
        case ConcatNode():
            children = [combine(child, arrays) for child in node.children]
            return mx.concatenate(children, axis=node.axis)


@attrs.define
class _Ready:
    """Tensors that were read and jobs that wait for more of them."""

    jobs: Sequence[Job]
    consumers: dict[str, list[int]] = attrs.field(factory=lambda: defaultdict(list))
    missing: list[int] = attrs.field(factory=list)
    waiting: dict[str, int] = attrs.field(factory=dict)
    arrays: dict[str, mx.array] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for number, job in enumerate(self.jobs):
            keys = {leaf.key for node in job.nodes for leaf in sources(node)}
            self.missing.append(len(keys))
            for key in keys:
                self.consumers[key].append(number)
        self.waiting = {key: len(numbers) for key, numbers in self.consumers.items()}

    def add(self, key: str, array: mx.array) -> Iterable[tuple[str, mx.array]]:
        """Take one tensor in; give what it completes, and forget what nobody waits for."""
        self.arrays[key] = array
        for number in self.consumers[key]:
            self.missing[number] -= 1
            if self.missing[number]:
                continue
            job = self.jobs[number]
            yield from job.finish([combine(node, self.arrays) for node in job.nodes]).items()
            for used in {leaf.key for node in job.nodes for leaf in sources(node)}:
                self.waiting[used] -= 1
                if not self.waiting[used]:
                    del self.arrays[used]


def materialise(
    shards: ShardSet,
    jobs: Sequence[Job],
    store: Callable[[Mapping[str, mx.array]], None],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, str]:
    """Read every shard once, make the jobs' arrays group by group, and verify the digests.

    Tensors that no job wants are hashed but never become arrays. At most one group (128 MiB of
    payload, or one larger tensor) is held beside the finished arrays and beside tensors that wait
    for others of the same job.

    Args:
        shards: The open shards.
        jobs: What to make.
        store: Takes finished, evaluated arrays by parameter path, several times.
        on_progress: Told bytes done and bytes in all, every 16 MiB or tensor; what it raises
            ends the load.

    Returns:
        Shard name -> SHA-256 (hex).

    Raises:
        CheckpointError: Code ``checkpoint.changed``; a file changed since its header was read.
    """
    ready = _Ready(jobs)
    total = sum(shard.header.stamp.size for shard in shards.shards)
    group: dict[str, mx.array] = {}
    held = done = reported = 0
    digests: dict[str, str] = {}

    def report() -> None:
        nonlocal reported
        reported = done
        if on_progress is not None:
            on_progress(done, total)

    def flush() -> None:
        nonlocal held
        evaluate(group)
        store(group)
        group.clear()
        held = 0
        report()

    with HashThreads(shards.shards) as threads:
        report()
        for number, shard in enumerate(shards.shards):
            if stamp(shard.fd) != shard.header.stamp:
                raise changed_error(shard.name)
            reader = _ShardReader(shard, threads, number)
            head = reader.read(0, shard.header.data_start)
            if hashlib.sha256(head.data).hexdigest() != shard.header.digest:
                raise changed_error(shard.name)
            for key, stored in shard.header.tensors.items():
                length = stored.stop - stored.start
                if key in ready.consumers:
                    data = reader.read(stored.start, length)
                    group.update(ready.add(key, to_array(data, stored.info)))
                    held += length
                else:
                    reader.skip(stored.start, length)
                done += length
                if held >= GROUP_BYTES:
                    flush()
                elif done - reported >= PROGRESS_BYTES:
                    report()
            done += shard.header.data_start
            digests[shard.name] = threads.check(shard, number, reader.trailing)
        flush()
    return digests


class _ShardReader:
    """Reads one shard from start to end, behind its leading digest."""

    def __init__(self, shard: Shard, threads: HashThreads, number: int) -> None:
        self._shard = shard
        self._leading = threads.leading[number]
        self.trailing: TrailingDigest = threads.trailing()

    def read(self, start: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read a range into private memory; the trailing digest sees the same memory."""
        data = np.empty(length, dtype=np.uint8)
        view = data.data
        for offset in range(0, length, BLOCK_BYTES):
            block = view[offset : offset + BLOCK_BYTES]
            position = start + offset
            self._leading.wait(position + len(block))
            try:
                count = read_range(self._shard.fd, block, position)
            except OSError as exc:
                raise unreadable_error(self._shard.name, exc) from exc
            if count < len(block):
                raise changed_error(self._shard.name)
            self.trailing.update(block)
        return data

    def skip(self, start: int, length: int) -> None:
        """Hash a range without keeping it."""
        for offset in range(0, length, BLOCK_BYTES):
            self.read(start + offset, min(BLOCK_BYTES, length - offset))
