"""Materialisation: exact values, bounded memory, and files that change under the reader."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

from engine_core.checkpoint import weights as weights_module
from engine_core.checkpoint.reader import read_checkpoint
from engine_core.checkpoint.weights import Job, materialise, to_array
from engine_core.errors import CheckpointError
from engine_core.testing.checkpoints import bfloat16, write_checkpoint
from engine_core.weight_plan import (
    Concat,
    Drop,
    Permute,
    Split,
    Stack,
    TensorInfo,
    WeightPlan,
)

if TYPE_CHECKING:
    from pathlib import Path

RANDOM = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def jobs_of(checkpoint, plan: WeightPlan) -> list[Job]:
    resolved = plan.resolve(checkpoint.tensors)
    return [
        Job(nodes=(node,), finish=lambda arrays, key=key: {key: arrays[0]})
        for key, node in resolved.targets.items()
    ]


def load(path: Path, *rules, on_progress=None):
    found: dict[str, np.ndarray] = {}

    def store(group) -> None:
        for key, array in group.items():
            assert key not in found
            found[key] = np.array(array)

    with read_checkpoint(path) as checkpoint:
        jobs = jobs_of(checkpoint, WeightPlan(rules))
        digests = materialise(checkpoint.shards, jobs, store, on_progress)
    return found, digests


@pytest.mark.parametrize("shards", [1, 3, 7])
def test_materialise_every_rule_gives_what_numpy_gives(tmp_path: Path, shards: int) -> None:
    tensors = {
        "qkv": normal(8, 3),
        "e.1.w": normal(4, 5),
        "conv": normal(6, 1, 4),
        "gate": normal(2, 3),
        "dropped": normal(9),
        "e.0.w": normal(4, 5),
        "up": normal(4, 3),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = write_checkpoint(tmp_path / "c", {}, tensors, shards=shards)
    found, digests = load(
        path,
        Split("qkv", ("q", "k", "v"), (4, 2, 2)),
        Stack("e.{}.w", "experts", 2),
        Permute("conv", (0, 2, 1)),
        Concat(("gate", "up"), "gate_up"),
        Drop("dropped"),
    )
    expected = {
        "q": tensors["qkv"][:4],
        "k": tensors["qkv"][4:6],
        "v": tensors["qkv"][6:],
        "experts": np.stack([tensors["e.0.w"], tensors["e.1.w"]]),
        "conv": tensors["conv"].transpose(0, 2, 1),
        "gate_up": np.concatenate([tensors["gate"], tensors["up"]]),
        "scalar": tensors["scalar"],
        "empty": tensors["empty"],
    }
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert np.array_equal(found[key], value)
    assert digests == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.glob("*.safetensors")
    }


def test_to_array_keeps_the_bits_of_every_stored_type() -> None:
    values = normal(3, 4)
    cases = {
        "F32": (values.tobytes(), mx.float32, values),
        "F16": (values.astype(np.float16).tobytes(), mx.float16, values.astype(np.float16)),
        "F64": (values.astype(np.float64).tobytes(), mx.float32, values),
        "U32": (values.tobytes(), mx.uint32, values.view(np.uint32)),
        "U8": (values.astype(np.uint8).tobytes(), mx.uint8, values.astype(np.uint8)),
    }
    for dtype, (payload, mlx_dtype, expected) in cases.items():
        array = to_array(np.frombuffer(payload, np.uint8).copy(), TensorInfo((3, 4), dtype))
        assert array.dtype == mlx_dtype
        assert np.array_equal(np.array(array), expected)
    payload = bfloat16(values)[2]
    array = to_array(np.frombuffer(payload, np.uint8).copy(), TensorInfo((3, 4), "BF16"))
    assert array.dtype == mx.bfloat16
    exact = (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(np.array(array.astype(mx.float32)), exact.reshape(3, 4))


def test_bfloat16_writer_rounds_to_nearest_even() -> None:
    values = np.concatenate([normal(1000), np.float32([1.00390625, 1.01171875, 0.0, -0.0])])
    _, _, payload = bfloat16(values)
    expected = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(np.frombuffer(payload, "<u2"), expected)


def test_materialise_reports_progress_up_to_the_total(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(weights_module, "GROUP_BYTES", 100)
    tensors = {f"t{n}": normal(5, 5) for n in range(6)}
    path = write_checkpoint(tmp_path / "c", {}, tensors, shards=2)
    calls: list[tuple[int, int]] = []
    found, _ = load(path, on_progress=lambda done, total: calls.append((done, total)))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert len(found) == 6
    assert len(calls) >= 6
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {total for _, total in calls} == {size}
    assert calls[-1] == (size, size)


def test_materialise_ends_when_progress_raises_and_joins_its_threads(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", {}, {"t": normal(4, 4)}, shards=1)
    before = threading.active_count()

    def refuse(done: int, total: int) -> None:
        raise KeyError(done, total)

    with pytest.raises(KeyError):
        load(path, on_progress=refuse)
    assert threading.active_count() == before


def test_unwanted_tensors_never_become_arrays(tmp_path: Path, monkeypatch) -> None:
    path = write_checkpoint(tmp_path / "c", {}, {"mtp.w": normal(4), "w": normal(4)})
    made: list[TensorInfo] = []
    original = weights_module.to_array
    monkeypatch.setattr(
        weights_module, "to_array", lambda data, info: made.append(info) or original(data, info)
    )
    found, _ = load(path, Drop("mtp."))
    assert list(found) == ["w"]
    assert len(made) == 1


def test_group_bound_holds_for_waiting_and_finished_arrays(tmp_path: Path, monkeypatch) -> None:
    """No more than one group of new arrays may exist before it is evaluated and handed over."""
    monkeypatch.setattr(weights_module, "GROUP_BYTES", 4096)
    tensors = {f"t{n:02d}": normal(16, 16) for n in range(32)}
    path = write_checkpoint(tmp_path / "c", {}, tensors)
    sizes: list[int] = []
    with read_checkpoint(path) as checkpoint:
        jobs = jobs_of(checkpoint, WeightPlan())
        materialise(
            checkpoint.shards,
            jobs,
            lambda group: sizes.append(sum(a.nbytes for a in group.values())),
        )
    assert sum(sizes) == 32 * 1024
    assert max(sizes) <= 4096


# ------------------------------------------------------------------ files that change


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "c", {}, {f"t{n}": normal(64, 64) for n in range(4)})


def changed(path: Path, change, when: str = "before") -> None:
    """Read the headers, change the file, then load; every way must be noticed."""
    file = path / "model.safetensors"

    def store(group) -> None:
        if when == "during":
            change(file)

    with read_checkpoint(path) as checkpoint:
        jobs = jobs_of(checkpoint, WeightPlan())
        if when == "before":
            change(file)
        with pytest.raises(CheckpointError) as caught:
            materialise(checkpoint.shards, jobs, store)
    assert caught.value.code == "checkpoint.changed"
    assert "model.safetensors" in str(caught.value)


def flip_byte(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.seek(-5, os.SEEK_END)
        byte = handle.read(1)[0]
        handle.seek(-5, os.SEEK_END)
        handle.write(bytes([byte ^ 1]))


def flip_byte_and_keep_the_time(file: Path) -> None:
    status = file.stat()
    flip_byte(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_bytes_changed_after_the_headers_are_noticed(path: Path) -> None:
    changed(path, flip_byte)
    changed(path, flip_byte_and_keep_the_time)


def test_file_truncated_after_the_headers_is_noticed(path: Path) -> None:
    changed(path, lambda file: os.truncate(file, file.stat().st_size - 8))


def test_file_grown_after_the_headers_is_noticed(path: Path) -> None:
    changed(path, lambda file: os.truncate(file, file.stat().st_size + 8))


def test_bytes_changed_between_the_groups_are_noticed(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(weights_module, "GROUP_BYTES", 1)
    changed(path, flip_byte, "during")
    changed(path, flip_byte_and_keep_the_time, "during")


def test_digests_alone_notice_a_change_that_leaves_no_stamp(path: Path, monkeypatch) -> None:
    """A writer that maps the file may leave its times alone: take the stamps away."""
    with read_checkpoint(path) as checkpoint:
        shard = checkpoint.shards.shards[0]
        monkeypatch.setattr("engine_core.checkpoint.digest.stamp", lambda fd: shard.header.stamp)
        monkeypatch.setattr(weights_module, "stamp", lambda fd: shard.header.stamp)
        monkeypatch.setattr(weights_module, "GROUP_BYTES", 1)
        original = weights_module.read_range
        reads = 0

        def flip_before_the_last_read(fd: int, buffer: memoryview, offset: int) -> int:
            nonlocal reads
            reads += 1
            if offset + len(buffer) == shard.header.stamp.size:
                flip_byte(path / "model.safetensors")
            return original(fd, buffer, offset)

        monkeypatch.setattr(weights_module, "read_range", flip_before_the_last_read)
        with pytest.raises(CheckpointError) as caught:
            materialise(checkpoint.shards, jobs_of(checkpoint, WeightPlan()), lambda group: None)
    assert reads > 1
    assert caught.value.code == "checkpoint.changed"


def test_file_replaced_after_the_headers_is_noticed(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(weights_module, "GROUP_BYTES", 1)

    def replace(file: Path) -> None:
        (file.parent / "new").write_bytes(file.read_bytes())
        (file.parent / "new").replace(file)

    changed(path, replace)
    changed(path, replace, "during")


def test_header_changed_after_the_plan_is_noticed_without_stamps(path: Path, monkeypatch) -> None:
    file = path / "model.safetensors"
    with read_checkpoint(path) as checkpoint:
        header = checkpoint.shards.shards[0].header
        for module in ("digest", "weights"):
            monkeypatch.setattr(f"engine_core.checkpoint.{module}.stamp", lambda fd: header.stamp)
        file.write_bytes(file.read_bytes().replace(b"t0", b"t9", 1))
        with pytest.raises(CheckpointError) as caught:
            materialise(checkpoint.shards, jobs_of(checkpoint, WeightPlan()), lambda group: None)
    assert caught.value.code == "checkpoint.changed"


@pytest.mark.parametrize("module", ["digest", "weights"])
def test_disk_that_fails_is_a_typed_error(path: Path, monkeypatch, module: str) -> None:
    def fail(fd: int, buffer: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with read_checkpoint(path) as checkpoint:
        monkeypatch.setattr(f"engine_core.checkpoint.{module}.read_range", fail)
        with pytest.raises(CheckpointError) as caught:
            materialise(checkpoint.shards, jobs_of(checkpoint, WeightPlan()), lambda group: None)
    assert caught.value.code == "checkpoint.unreadable"
    assert isinstance(caught.value.__cause__, OSError)
