"""The safetensors header, against files written byte by byte."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest

from engine_core.checkpoint.header import DTYPE_BITS, payload_bytes, read_header
from engine_core.errors import CheckpointError
from engine_core.limits import LIMITS
from engine_core.testing.checkpoints import bfloat16, encode_safetensors
from engine_core.weight_plan import TensorInfo

if TYPE_CHECKING:
    from pathlib import Path


def read(tmp_path: Path, content: bytes, limits=LIMITS, shard: int = 0):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, path.name, limits, shard=shard)
    finally:
        os.close(fd)


def encode(header: object, payload: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + payload


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_header_of_a_good_file_gives_places_in_file_order(tmp_path: Path) -> None:
    tensors = {
        "b": np.ones((2, 3), np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "a": bfloat16(np.ones(5)),
        "scalar": np.array(1, np.uint8),
    }
    content = encode_safetensors(tensors, {"format": "mlx"})
    header = read(tmp_path, content, shard=3)
    assert list(header.tensors) == ["b", "empty", "a", "scalar"]
    assert header.tensors["b"].info == TensorInfo((2, 3), "F32", 3)
    assert header.tensors["a"].info == TensorInfo((5,), "BF16", 3)
    assert header.tensors["scalar"].info.shape == ()
    assert header.metadata == {"format": "mlx"}
    assert header.tensors["b"].start == header.data_start
    assert header.tensors["scalar"].stop == len(content) == header.stamp.size


def test_header_written_by_another_writer_is_read(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    path = tmp_path / "mlx.safetensors"
    mx.save_safetensors(
        str(path), {"w": mx.zeros((4, 8), mx.bfloat16), "q": mx.zeros((3,), mx.uint32)}
    )
    header = read(tmp_path, path.read_bytes())
    infos = {key: tensor.info for key, tensor in header.tensors.items()}
    assert infos == {"w": TensorInfo((4, 8), "BF16"), "q": TensorInfo((3,), "U32")}


HOSTILE = {
    "empty file": (b"", "header length"),
    "truncated length": (b"\1\0\0", "header length"),
    "zero header": (bytes(8), "must fit"),
    "header past the end": ((100).to_bytes(8, "little") + b"{}", "must fit"),
    "huge header": ((2**63).to_bytes(8, "little") + b"{}", "at most"),
    "not json": (encode(b"hello!"), "JSON"),
    "not utf-8": (encode(b'{"\xff":1}'), "UTF-8"),
    "array": (encode([]), "object"),
    "no tensors": (encode({}), "at least one tensor"),
    "only metadata": (encode({"__metadata__": {}}), "at least one tensor"),
    "metadata of numbers": (encode({"__metadata__": {"a": 1}, "t": entry()}, bytes(4)), "texts"),
    "duplicate key": (
        encode(b'{"t":' + json.dumps(entry()).encode() + b',"t":{}}', bytes(4)),
        "unique",
    ),
    "duplicate field": (
        encode(b'{"t":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "unique",
    ),
    "nan": (encode(b'{"t":NaN}'), "finite"),
    "deep nesting": (encode(b'{"t":' + b"[" * 500 + b"]" * 500 + b"}"), "deep"),
    "unknown dtype": (encode({"t": entry("F7")}, bytes(4)), "dtype"),
    "dtype list": (encode({"t": entry(["F32"])}, bytes(4)), "dtype"),
    "missing field": (encode({"t": {"dtype": "F32", "shape": [1]}}, bytes(4)), "fields"),
    "further field": (encode({"t": {**entry(), "x": 1}}, bytes(4)), "fields"),
    "tensor is text": (encode({"t": "F32"}, bytes(4)), "fields"),
    "rank 33": (encode({"t": entry(shape=[1] * 33)}, bytes(4)), "at most 32"),
    "shape is text": (encode({"t": {**entry(), "shape": "1"}}, bytes(4)), "list"),
    "negative size": (encode({"t": entry(shape=[-1])}, bytes(4)), "sizes"),
    "boolean size": (encode({"t": entry(shape=[True])}, bytes(4)), "sizes"),
    "float size": (encode({"t": entry(shape=[1.0])}, bytes(4)), "sizes"),
    "dimension too large": (encode({"t": entry(shape=[2**31])}, bytes(4)), "sizes"),
    "product overflows 64 bits": (encode({"t": entry(shape=[2**31 - 1] * 3)}, bytes(4)), "bytes"),
    "product wraps to the right length": (
        encode({"t": entry(shape=[2**30, 2**30, 2**4], offsets=(0, 0))}),
        "bytes",
    ),
    "negative offset": (encode({"t": entry(offsets=(-4, 0))}, bytes(4)), "data_offsets"),
    "huge offset": (encode({"t": entry(offsets=(2**64, 2**64 + 4))}, bytes(4)), "data_offsets"),
    "offset past the end": (encode({"t": entry(offsets=(0, 4))}, bytes(3)), "inside the file"),
    "offsets reversed": (encode({"t": entry(offsets=(4, 0))}, bytes(4)), "bytes"),
    "one offset": (encode({"t": entry(offsets=(4,))}, bytes(4)), "data_offsets"),
    "wrong length": (encode({"t": entry(offsets=(0, 5))}, bytes(5)), "bytes"),
    "overlap": (encode({"t": entry(), "u": entry(offsets=(2, 6))}, bytes(6)), "overlap"),
    "same place": (encode({"t": entry(), "u": entry()}, bytes(4)), "overlap"),
    "hole": (encode({"t": entry(), "u": entry(offsets=(8, 12))}, bytes(12)), "hole"),
    "hole at the start": (encode({"t": entry(offsets=(4, 8))}, bytes(8)), "hole"),
    "trailing bytes": (encode({"t": entry()}, bytes(5)), "trailing"),
    "name with nul": (encode({"a\0b": entry()}, bytes(4)), "NUL"),
    "empty name": (encode({"": entry()}, bytes(4)), "name"),
    "long name": (encode({"n" * 4097: entry()}, bytes(4)), "name"),
    "half a byte": (encode({"t": entry("F4", [3], (0, 1))}, bytes(1)), "bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_header_hostile_file_is_a_typed_error_that_names_it(tmp_path: Path, name: str) -> None:
    content, part = HOSTILE[name]
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, content)
    assert caught.value.code in {"checkpoint.header", "checkpoint.json", "checkpoint.too_large"}
    assert caught.value.hint
    message = str(caught.value)
    assert message.startswith("x.safetensors")
    assert part in message
    assert len(message) < 600


def test_header_above_the_byte_limit_is_not_read(tmp_path: Path) -> None:
    content = encode_safetensors({"t": np.zeros(1, np.float32)})
    limits = attrs.evolve(LIMITS, header_bytes=16)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, content, limits)
    assert caught.value.code == "checkpoint.too_large"


def test_payload_bytes_are_exact_for_any_size() -> None:
    assert payload_bytes((2**31 - 1,) * 4, "F64") == (2**31 - 1) ** 4 * 8
    assert payload_bytes((3,), "F4") is None
    assert payload_bytes((), "BF16") == 2
    assert payload_bytes((0, 7), "F32") == 0
    assert set(DTYPE_BITS.values()) == {4, 6, 8, 16, 32, 64}
