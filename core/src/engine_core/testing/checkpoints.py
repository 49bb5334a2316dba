"""Write tiny checkpoints for tests, in plain Python.

Nothing is shared with the reader, so that a mistake in one cannot hide in the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

__all__ = ["bfloat16", "encode_safetensors", "write_checkpoint", "write_safetensors"]

_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
_ALIGNMENT: Final = 8

Raw = tuple[str, tuple[int, ...], bytes]
"""A tensor as ``(safetensors dtype, shape, payload)``."""


def bfloat16(array: np.ndarray) -> Raw:
    """Round a float array to bfloat16, ties to even.

    Args:
        array: Finite numbers, any shape and floating dtype.

    Returns:
        The tensor in raw form.
    """
    bits = np.ascontiguousarray(array, dtype="<f4").view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return ("BF16", tuple(array.shape), rounded.astype("<u2").tobytes())


def _raw(tensor: np.ndarray | Raw) -> Raw:
    if isinstance(tensor, tuple):
        return tensor
    little = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False)
    return (_NAMES[tensor.dtype.name], tuple(tensor.shape), np.ascontiguousarray(little).tobytes())


def encode_safetensors(
    tensors: Mapping[str, np.ndarray | Raw], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Encode tensors as the bytes of one safetensors file.

    Args:
        tensors: Key -> array, or raw form for dtypes that NumPy lacks.
        metadata: Free texts.

    Returns:
        The file's content, tensors in the order given.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    payloads = []
    position = 0
    for key, tensor in tensors.items():
        dtype, shape, payload = _raw(tensor)
        stop = position + len(payload)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        payloads.append(payload)
        position = stop
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return b"".join([len(encoded).to_bytes(8, "little"), encoded, *payloads])


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray | Raw],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write one safetensors file.

    Args:
        path: The file.
        tensors: Key -> array, or raw form for dtypes that NumPy lacks.
        metadata: Free texts.

    Returns:
        The file's path.
    """
    file = Path(path)
    file.write_bytes(encode_safetensors(tensors, metadata))
    return file


def write_checkpoint(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | Raw],
    *,
    shards: int = 1,
    tokenizer: Mapping[str, Any] | bytes | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint directory.

    Args:
        directory: Created when absent.
        config: ``config.json``.
        tensors: Key -> array, or raw form for dtypes that NumPy lacks.
        shards: Number of weight files, at most one a tensor; several get an index.
        tokenizer: ``tokenizer.json``, as an object or as bytes.
        tokenizer_config: ``tokenizer_config.json``.
        generation_config: ``generation_config.json``.
        chat_template: ``chat_template.jinja``.
        files: Further files by name, ``folder/file`` allowed.

    Returns:
        The directory.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    contents: dict[str, bytes] = {"config.json": _json(config), **(files or {})}
    if tokenizer is not None:
        contents["tokenizer.json"] = tokenizer if isinstance(tokenizer, bytes) else _json(tokenizer)
    if tokenizer_config is not None:
        contents["tokenizer_config.json"] = _json(tokenizer_config)
    if generation_config is not None:
        contents["generation_config.json"] = _json(generation_config)
    if chat_template is not None:
        contents["chat_template.jinja"] = chat_template.encode()
    contents.update(_weight_files(tensors, shards))
    for name, content in contents.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return root


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


def _weight_files(tensors: Mapping[str, np.ndarray | Raw], shards: int) -> dict[str, bytes]:
    metadata = {"format": "mlx"}
    if shards == 1:
        return {"model.safetensors": encode_safetensors(tensors, metadata)}
    keys: Sequence[str] = list(tensors)
    contents: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        first, last = number * len(keys) // shards, (number + 1) * len(keys) // shards
        part = {key: tensors[key] for key in keys[first:last]}
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        contents[name] = encode_safetensors(part, metadata)
        weight_map.update(dict.fromkeys(part, name))
        total += sum(len(_raw(tensor)[2]) for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    contents["model.safetensors.index.json"] = _json(index)
    return contents
