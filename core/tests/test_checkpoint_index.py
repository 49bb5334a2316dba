"""Which files make up a checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest

from engine_core.checkpoint.reader import read_checkpoint
from engine_core.errors import CheckpointError
from engine_core.limits import LIMITS
from engine_core.testing.checkpoints import write_checkpoint, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {f"t{n}": np.full((n + 1, 2), n, np.float32) for n in range(5)}
INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "c", {}, TENSORS, shards=2)


def read(path: Path, limits=LIMITS):
    with read_checkpoint(path, limits) as checkpoint:
        return checkpoint.shards


def refused(path: Path, code: str, *parts: str, limits=LIMITS) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(path, limits)
    assert caught.value.code == code
    assert caught.value.hint
    for part in parts:
        assert part in str(caught.value)


def change_index(path: Path, change) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_indexed_shards_are_merged_with_their_numbers(path: Path) -> None:
    shards = read(path)
    assert [shard.name for shard in shards.shards] == [FIRST, SECOND]
    assert {key: info.shape for key, info in shards.tensors.items()} == {
        key: tensor.shape for key, tensor in TENSORS.items()
    }
    assert {info.shard for info in shards.tensors.values()} == {0, 1}
    assert shards.unread == shards.notes == ()


def test_files_that_the_index_does_not_name_are_listed_and_not_opened(path: Path) -> None:
    for name in ("consolidated.safetensors", "model.safetensors", "adapter.safetensors"):
        (path / name).write_bytes(b"garbage")
    shards = read(path)
    assert shards.unread == (
        "adapter.safetensors",
        "consolidated.safetensors",
        "model.safetensors",
    )
    assert len(shards.notes) == 1


def test_single_file_needs_no_index(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", {}, TENSORS)
    (path / "model.fp16.safetensors").write_bytes(b"garbage")
    shards = read(path)
    assert [shard.name for shard in shards.shards] == ["model.safetensors"]
    assert shards.unread == ("model.fp16.safetensors",)


def test_numbered_shards_without_index_are_read_when_complete(path: Path) -> None:
    (path / INDEX).unlink()
    assert len(read(path).tensors) == 5
    (path / SECOND).unlink()
    refused(path, "checkpoint.shard_missing", SECOND)


def test_numbered_shards_with_an_absurd_count_are_refused(path: Path) -> None:
    (path / INDEX).unlink()
    (path / FIRST).rename(path / "model-00001-of-999999.safetensors")
    refused(path, "checkpoint.shard_missing")


def test_leftover_index_of_another_upload_is_set_aside(tmp_path: Path) -> None:
    for shards in (1, 2):
        path = write_checkpoint(tmp_path / f"c{shards}", {}, TENSORS, shards=shards)
        stale = {"weight_map": {"t0": "model-00001-of-00009.safetensors"}}
        (path / INDEX).write_text(json.dumps(stale))
        found = read(path)
        assert len(found.tensors) == 5
        assert any(INDEX in note for note in found.notes)


def test_leftover_index_beside_an_incomplete_set_is_refused(path: Path) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": {"t0": "gone.safetensors"}}))
    (path / FIRST).unlink()
    refused(path, "checkpoint.shard_missing", FIRST)


def test_leftover_index_does_not_hide_a_tensor_that_lies_twice(path: Path) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": {"t0": "gone.safetensors"}}))
    write_safetensors(path / "model-extra.safetensors", {"t1": TENSORS["t1"]})
    refused(path, "checkpoint.tensor_duplicate", "'t1'", FIRST, "model-extra.safetensors")


def test_index_naming_some_missing_shard_is_refused(path: Path) -> None:
    (path / SECOND).unlink()
    refused(path, "checkpoint.shard_missing", SECOND)


def test_no_weights_at_all_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", {}, TENSORS)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "checkpoint.no_weights")
    (path / INDEX).write_text(json.dumps({"weight_map": {"t0": "model-1.safetensors"}}))
    refused(path, "checkpoint.shard_missing")


def test_tensor_in_two_shards_is_refused(path: Path) -> None:
    write_safetensors(path / SECOND, {"t0": TENSORS["t0"], "t3": TENSORS["t3"]})
    refused(path, "checkpoint.tensor_duplicate", "'t0'", FIRST, SECOND)


def test_index_must_agree_with_the_headers_both_ways(path: Path) -> None:
    change_index(path, lambda m: m.update(t0=SECOND))
    refused(path, "checkpoint.index", "'t0'")
    change_index(path, lambda m: m.update(t0=FIRST, ghost=FIRST))
    refused(path, "checkpoint.index", "'ghost'")
    change_index(path, lambda m: (m.pop("ghost"), m.pop("t1")))
    refused(path, "checkpoint.index", "'t1'")
    change_index(path, lambda m: m.update(t1=FIRST))
    assert len(read(path).tensors) == 5


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/x.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "..safetensors",
        "model.bin",
        "a\0.safetensors",
        "",
        7,
        None,
        ["a.safetensors"],
    ],
)
def test_index_with_a_foreign_path_is_refused(path: Path, name: object) -> None:
    change_index(path, lambda m: m.update(t0=name))
    refused(path, "checkpoint.index", "'t0'")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{", "checkpoint.json"),
        ("[]", "checkpoint.json"),
        ("{}", "checkpoint.index"),
        ('{"weight_map": {}}', "checkpoint.index"),
        ('{"weight_map": []}', "checkpoint.index"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "checkpoint.json"),
    ],
)
def test_malformed_index_is_refused(path: Path, content: str, code: str) -> None:
    (path / INDEX).write_text(content)
    refused(path, code, INDEX)


@pytest.mark.parametrize(
    "bound", [{"shards": 1}, {"tensors": 4}, {"headers_total_bytes": 200}, {"index_bytes": 9}]
)
def test_bounds_over_all_shards_are_kept(path: Path, bound: dict[str, int]) -> None:
    with pytest.raises(CheckpointError):
        read(path, attrs.evolve(LIMITS, **bound))
