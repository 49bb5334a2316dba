"""A corpus of hostile and damaged checkpoints, read as a user would read them.

Each is refused with a typed error that names the file or the tensor, without MLX, without leaking
a descriptor and without writing anything.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from engine_core.checkpoint.quantization import plan_quantization
from engine_core.checkpoint.reader import read_checkpoint
from engine_core.errors import CheckpointError, EngineError
from engine_core.testing.checkpoints import write_checkpoint, write_safetensors
from engine_core.weight_plan import Rename, Stack, WeightPlan

if TYPE_CHECKING:
    from collections.abc import Callable

ONE = "model-00001-of-00002.safetensors"
TWO = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG: dict[str, Any] = {
    "model_type": "tiny",
    "quantization": {"bits": 4, "group_size": 32, "a": {"bits": 8, "group_size": 32}},
}
TENSORS = {
    "model.a.weight": np.zeros((4, 16), np.uint32),
    "model.a.scales": np.ones((4, 2), np.float32),
    "model.a.biases": np.ones((4, 2), np.float32),
    "model.e.0.w": np.ones((2, 2), np.float32),
    "model.e.1.w": np.ones((2, 2), np.float32),
    "model.norm.weight": np.ones(64, np.float32),
}
PLAN = WeightPlan((Rename("model.", ""), Stack("e.{}.w", "experts", 2)))


def read(path: Path) -> None:
    """Everything that happens before a model is built."""
    with read_checkpoint(path) as checkpoint:
        resolved = PLAN.resolve(checkpoint.tensors)
        plan_quantization(checkpoint.config, PLAN, resolved.infos)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def rewrite(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change a shard's header as an object; the payload stays."""

    def apply(path: Path) -> None:
        header, payload = header_of(path / name)
        change(header)
        put_raw(path / name, json.dumps(header).encode(), payload)

    return apply


def put_raw(path: Path, header: bytes, payload: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def raw_header(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        header, payload = header_of(path / ONE)
        put_raw(path / ONE, change(json.dumps(header).encode()), payload)

    return apply


def content(name: str, data: bytes | str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(
        data if isinstance(data, bytes) else data.encode()
    )


def edit_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


def edit_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        value = json.loads((path / name).read_text())
        change(value)
        (path / name).write_text(json.dumps(value))

    return apply


def replace_by(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return apply


def link(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        target = path.parent / "target"
        (path / name).rename(target)
        (path / name).symlink_to(target)

    return apply


def put_tensor(key: str, array: np.ndarray) -> Callable[[Path], None]:
    """Write the checkpoint again with one tensor replaced or added."""
    return lambda path: write_checkpoint(path, CONFIG, {**TENSORS, key: array}, shards=2) and None


def drop_tensor(key: str) -> Callable[[Path], None]:
    rest = {name: tensor for name, tensor in TENSORS.items() if name != key}
    return lambda path: write_checkpoint(path, CONFIG, rest, shards=2) and None


def both_spellings(path: Path) -> None:
    put_tensor("norm.weight", np.ones(64, np.float32))(path)


def offsets(first: int, last: int) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["model.a.weight"].update(data_offsets=[first, last])


def field(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["model.a.weight"].update(values)


SIZE = 4 * 16 * 4
CORPUS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "header truncated": (edit_bytes(ONE, lambda b: b[:20]), "checkpoint.header", ONE),
    "header length truncated": (edit_bytes(ONE, lambda b: b[:5]), "checkpoint.header", ONE),
    "header longer than the file": (
        edit_bytes(ONE, lambda b: (10**6).to_bytes(8, "little") + b[8:]),
        "checkpoint.header",
        ONE,
    ),
    "header of exabytes": (
        edit_bytes(ONE, lambda b: (2**63).to_bytes(8, "little") + b[8:]),
        "checkpoint.too_large",
        ONE,
    ),
    "header of zero bytes": (
        edit_bytes(ONE, lambda b: bytes(8) + b[8:]),
        "checkpoint.header",
        ONE,
    ),
    "header no json": (raw_header(lambda h: b"x" * len(h)), "checkpoint.json", ONE),
    "header duplicate key": (
        raw_header(lambda h: h[:-1] + b',"model.a.weight":{}}'),
        "checkpoint.json",
        ONE,
    ),
    "header nan": (raw_header(lambda h: h[:-1] + b',"n":NaN}'), "checkpoint.json", ONE),
    "header nested": (
        raw_header(lambda h: h[:-1] + b',"n":' + b"[" * 9999 + b"]" * 9999 + b"}"),
        "checkpoint.json",
        ONE,
    ),
    "ranges overlap": (rewrite(ONE, offsets(4, SIZE + 4)), "checkpoint.header", ONE),
    "offset negative": (rewrite(ONE, offsets(-SIZE, 0)), "checkpoint.header", "model.a.weight"),
    "offset huge": (
        rewrite(ONE, offsets(2**62, 2**62 + SIZE)),
        "checkpoint.header",
        "model.a.weight",
    ),
    "offsets reversed": (rewrite(ONE, offsets(SIZE, 0)), "checkpoint.header", "model.a.weight"),
    "length wrong": (rewrite(ONE, offsets(0, SIZE - 4)), "checkpoint.header", "model.a.weight"),
    "hole": (rewrite(ONE, lambda h: h.pop("model.a.scales")), "checkpoint.header", ONE),
    "trailing bytes": (edit_bytes(ONE, lambda b: b + b"\0"), "checkpoint.header", ONE),
    "payload truncated": (edit_bytes(ONE, lambda b: b[:-1]), "checkpoint.header", ONE),
    "dtype unknown": (rewrite(ONE, field(dtype="Q4_K")), "checkpoint.header", "model.a.weight"),
    "rank 33": (rewrite(ONE, field(shape=[1] * 33)), "checkpoint.header", "model.a.weight"),
    "dimension overflow": (
        rewrite(ONE, field(shape=[2**31 - 1, 2**31 - 1, 2**31 - 1])),
        "checkpoint.header",
        "model.a.weight",
    ),
    "name with nul": (
        rewrite(ONE, lambda h: h.update({"a\0b": h.pop("model.a.weight")})),
        "checkpoint.header",
        ONE,
    ),
    "no tensors": (rewrite(ONE, lambda h: h.clear()), "checkpoint.header", ONE),
    "tensor in two shards": (
        lambda path: write_safetensors(path / TWO, TENSORS),
        "checkpoint.tensor_duplicate",
        TWO,
    ),
    "index traversal": (
        edit_json(
            INDEX, lambda i: i["weight_map"].update({"model.norm.weight": "../x.safetensors"})
        ),
        "checkpoint.index",
        "../x.safetensors",
    ),
    "index unknown tensor": (
        edit_json(INDEX, lambda i: i["weight_map"].update(ghost=ONE)),
        "checkpoint.index",
        "ghost",
    ),
    "index lacks a tensor": (
        edit_json(INDEX, lambda i: i["weight_map"].pop("model.norm.weight")),
        "checkpoint.index",
        "model.norm.weight",
    ),
    "index no json": (content(INDEX, "{"), "checkpoint.json", INDEX),
    "index duplicate key": (
        content(INDEX, '{"weight_map":{"a":"x.safetensors","a":"x.safetensors"}}'),
        "checkpoint.json",
        INDEX,
    ),
    "shard missing": (lambda path: (path / TWO).unlink(), "checkpoint.shard_missing", TWO),
    "shard is a fifo": (replace_by(TWO, os.mkfifo), "checkpoint.not_regular", TWO),
    "shard is a directory": (replace_by(TWO, os.mkdir), "checkpoint.not_regular", TWO),
    "shard is a link": (link(TWO), "checkpoint.link", TWO),
    "shard is a dangling link": (
        replace_by(TWO, lambda p: p.symlink_to("nowhere")),
        "checkpoint.link",
        TWO,
    ),
    "config is a link": (link("config.json"), "checkpoint.link", "config.json"),
    "config is a directory": (
        replace_by("config.json", os.mkdir),
        "checkpoint.not_regular",
        "config.json",
    ),
    "config is a fifo": (
        replace_by("config.json", os.mkfifo),
        "checkpoint.not_regular",
        "config.json",
    ),
    "config missing": (
        lambda path: (path / "config.json").unlink(),
        "checkpoint.missing_file",
        "config.json",
    ),
    "config huge": (
        lambda path: os.truncate(path / "config.json", 2**40),
        "checkpoint.too_large",
        "config.json",
    ),
    "config nested": (content("config.json", "[" * 10**6), "checkpoint.json", "config.json"),
    "config infinite": (content("config.json", '{"a":1e999}'), "checkpoint.json", "config.json"),
    "config duplicate key": (
        content("config.json", '{"model_type":"a","model_type":"b"}'),
        "checkpoint.json",
        "config.json",
    ),
    "config not utf-8": (
        content("config.json", b'{"a":"\xc3("}'),
        "checkpoint.json",
        "config.json",
    ),
    "tokenizer huge": (
        lambda path: (
            (path / "tokenizer.json").touch(),
            os.truncate(path / "tokenizer.json", 2**40),
        ),
        "checkpoint.too_large",
        "tokenizer.json",
    ),
    "tokenizer config is a list": (
        content("tokenizer_config.json", "[]"),
        "checkpoint.json",
        "tokenizer_config.json",
    ),
    "quantization foreign": (
        edit_json("config.json", lambda c: c["quantization"].update(quant_method="gptq")),
        "config.quant_method",
        "gptq",
    ),
    "quantization of seven bits": (
        edit_json("config.json", lambda c: c["quantization"].update(bits=7)),
        "config.invalid",
        "config.json",
    ),
    "quantization contradicts the shapes": (
        edit_json("config.json", lambda c: c["quantization"]["a"].update(bits=4)),
        "checkpoint.quantization",
        "a.weight",
    ),
    "quantization says dense": (
        edit_json("config.json", lambda c: c["quantization"].update(a=False)),
        "checkpoint.quantization",
        "a.scales",
    ),
    "scales missing": (drop_tensor("model.a.scales"), "checkpoint.quantization", "a.scales"),
    "biases missing": (drop_tensor("model.a.biases"), "checkpoint.quantization", "a.biases"),
    "scales of other rows": (
        put_tensor("model.a.scales", np.ones((3, 2), np.float32)),
        "checkpoint.quantization",
        "a.scales",
    ),
    "expert missing": (drop_tensor("model.e.1.w"), "checkpoint.tensor_missing", "e.1.w"),
    "expert misshapen": (
        put_tensor("model.e.1.w", np.ones((3, 2), np.float32)),
        "checkpoint.tensor_shape",
        "e.1.w",
    ),
    "two spellings of a tensor": (both_spellings, "checkpoint.tensor_collision", "norm.weight"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "c", CONFIG, TENSORS, shards=2)


@pytest.fixture(autouse=True)
def _no_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        msg = "MLX was used before everything was checked"
        raise AssertionError(msg)

    for name in ("array", "zeros", "ones", "full", "arange", "load", "eval", "stack"):
        monkeypatch.setattr(mx, name, refuse)


def state(path: Path) -> list[tuple[str, int, int]]:
    return sorted((p.name, p.lstat().st_size, p.lstat().st_mtime_ns) for p in path.rglob("*"))


def descriptors() -> int:
    return sum(1 for _ in Path("/dev/fd").iterdir())


def test_corpus_starts_from_a_good_checkpoint(path: Path) -> None:
    read(path)
    assert len(CORPUS) >= 50


@pytest.mark.parametrize("name", CORPUS)
def test_hostile_checkpoint_is_a_typed_error_that_says_where(path: Path, name: str) -> None:
    spoil, code, where = CORPUS[name]
    spoil(path)
    before, opened = state(path), descriptors()
    with pytest.raises(EngineError) as caught:
        read(path)
    assert caught.value.code == code
    assert where in str(caught.value)
    assert len(str(caught.value)) < 700
    assert state(path) == before
    assert descriptors() == opened


@pytest.mark.parametrize("cut", range(0, 700, 23))
def test_truncation_anywhere_is_a_typed_error(path: Path, cut: int) -> None:
    content = (path / ONE).read_bytes()
    (path / ONE).write_bytes(content[: min(cut, len(content) - 1)])
    with pytest.raises(EngineError, match=ONE):
        read(path)


def test_any_flipped_header_byte_is_refused_or_harmless(path: Path) -> None:
    """No single-byte change makes anything but a typed error or the same number of tensors."""
    content = bytearray((path / ONE).read_bytes())
    length = int.from_bytes(content[:8], "little")
    random = np.random.default_rng(3)
    for position in random.integers(0, 8 + length, 200).tolist():
        changed = bytearray(content)
        changed[position] ^= 1 << int(random.integers(0, 8))
        (path / ONE).write_bytes(changed)
        with contextlib.suppress(CheckpointError), read_checkpoint(path) as checkpoint:
            assert len(checkpoint.tensors) == len(TENSORS)
