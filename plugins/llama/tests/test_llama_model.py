"""The decoder against transformers' recorded logits and an independent float64 pass."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from harness import load
from reference_llama import forward
from tiny_llama import BASE, CASES, LENGTH, config_of, hub_spelling, prompt, tensors_of

from engine_core.cache.build import build_caches
from engine_core.checkpoint.config import CheckpointConfig
from engine_core.errors import CheckpointError, ModelError
from engine_core.step import StepInput
from engine_core.testing.checkpoints import write_checkpoint
from engine_core.testing.reference import dequantize

if TYPE_CHECKING:
    from collections.abc import Mapping

GOLDENS = Path(__file__).resolve().parent / "goldens"
TOLERANCE = 5e-5
CHUNKS = [None, [LENGTH - 4, 1, 1, 1, 1], [7, 7, 7, 3], [1] * LENGTH]
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def distance(first: np.ndarray, second: np.ndarray) -> float:
    assert first.shape == second.shape
    return float(np.abs(first - second).max())


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, np.ndarray]:
    return np.load(GOLDENS / "tiny_logits.npz")


def test_manifest_matches_the_files() -> None:
    manifest = json.loads((GOLDENS / "MANIFEST.json").read_text(encoding="utf-8"))
    files = {path for path in GOLDENS.iterdir() if path.name != "MANIFEST.json"}
    assert set(manifest["files"]) == {path.name for path in files}
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert manifest["files"][path.name]["sha256"] == digest
    assert sum(path.stat().st_size for path in GOLDENS.iterdir()) < 256 * 1024
    assert manifest["versions"]["transformers"]


def test_every_case_is_recorded(recorded: Mapping[str, np.ndarray]) -> None:
    assert set(recorded) == set(CASES)


@pytest.mark.parametrize("spelling", [dict, hub_spelling], ids=["parameters", "scaling"])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_and_float64(
    name: str, spelling: Any, recorded: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    config = config_of(name)
    tensors = tensors_of(config)
    tiny = load(write_checkpoint(tmp_path / name, spelling(config), tensors))
    double = forward(config, tensors, prompt())
    # Both references are independent: a golden that did not belong to these weights shows here.
    assert distance(recorded[name], double) < TOLERANCE
    for chunks in CHUNKS:
        logits = tiny.logits(prompt(), chunks)
        assert distance(logits, recorded[name]) < TOLERANCE
        assert distance(logits, double) < TOLERANCE


def test_dynamic_beyond_the_context_is_refused(tmp_path: Path) -> None:
    config = config_of("dynamic_at_limit")
    tiny = load(write_checkpoint(tmp_path, config, tensors_of(config)))
    assert tiny.architecture.context_length == LENGTH
    with pytest.raises(ModelError) as caught:
        tiny.logits(prompt(LENGTH + 1))
    assert caught.value.code == "model.rope_limit"


def test_silent_tie_with_a_head_uses_the_head(tmp_path: Path) -> None:
    config = BASE | ROPE
    tensors = tensors_of(config)
    silent = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    tiny = load(write_checkpoint(tmp_path, silent, tensors))
    assert distance(tiny.logits(prompt()), forward(config, tensors, prompt())) < TOLERANCE


def test_silent_tie_without_a_head_is_tied(tmp_path: Path) -> None:
    config = BASE | ROPE | {"tie_word_embeddings": True}
    tensors = tensors_of(config)
    silent = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    tiny = load(write_checkpoint(tmp_path, silent, tensors))
    assert distance(tiny.logits(prompt()), forward(config, tensors, prompt())) < TOLERANCE


def test_tied_checkpoint_that_ships_a_head_ignores_it(tmp_path: Path) -> None:
    config = BASE | ROPE | {"tie_word_embeddings": True}
    tensors = tensors_of(config)
    shipped = tensors | {"lm_head.weight": np.zeros((96, 64), np.float32)}
    tiny = load(write_checkpoint(tmp_path, config, shipped))
    assert distance(tiny.logits(prompt()), forward(config, tensors, prompt())) < TOLERANCE


def test_untied_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    config = BASE | ROPE
    tensors = tensors_of(config)
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError) as caught:
        load(write_checkpoint(tmp_path, config, tensors))
    assert caught.value.code == "checkpoint.tensor_missing"


def test_bare_backbone_save_loads(tmp_path: Path) -> None:
    config = BASE | ROPE | {"tie_word_embeddings": True}
    tensors = tensors_of(config)
    bare = {key.removeprefix("model."): value for key, value in tensors.items()}
    tiny = load(write_checkpoint(tmp_path, config, bare))
    assert distance(tiny.logits(prompt()), forward(config, tensors, prompt())) < TOLERANCE


@pytest.mark.parametrize("window", [1, 5, 23])
def test_sliding_layers_equal_float64_for_every_chunking(window: int, tmp_path: Path) -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    config = BASE | ROPE | types
    tensors = tensors_of(config)
    tiny = load(write_checkpoint(tmp_path, config, tensors))
    expected = forward(config, tensors, prompt(40))
    for chunks in ([40], [1] * 40, [7] * 5 + [5], [30, 1, 9]):
        assert distance(tiny.logits(prompt(40), chunks), expected) < TOLERANCE


@pytest.mark.parametrize("odd", [None, "v_proj", "up_proj"], ids=str)
@pytest.mark.parametrize("policy", ["keep", "dequantize"])
def test_packed_checkpoint_equals_float64_of_its_unpacked_weights(
    policy: str, odd: str | None, tmp_path: Path
) -> None:
    config = BASE | ROPE
    packed: dict[str, np.ndarray] = {}
    dense: dict[str, np.ndarray] = {}
    overrides: dict[str, Any] = {}
    for key, value in tensors_of(config).items():
        path = key.removesuffix(".weight")
        if value.ndim == 1:
            packed[key] = dense[key] = value
            continue
        bits = 6 if odd is not None and path.endswith(odd) else 4
        if bits == 6:
            overrides[path] = {"group_size": 32, "bits": 6}
        arrays = [np.array(a) for a in mx.quantize(mx.array(value), group_size=32, bits=bits)]
        packed |= dict(zip((key, f"{path}.scales", f"{path}.biases"), arrays, strict=True))
        dense[key] = dequantize(*arrays, mode="affine", bits=bits, group_size=32)
    entry = {"quantization": {"group_size": 32, "bits": 4, **overrides}}
    tiny = load(write_checkpoint(tmp_path, config | entry, packed), quantized_weights=policy)
    expected = forward(config, dense, prompt())
    assert distance(tiny.logits(prompt()), expected) < TOLERANCE
    assert distance(tiny.logits(prompt(), [9, 1, 14]), expected) < TOLERANCE


def test_positions_of_each_row_equal_the_offset(tmp_path: Path) -> None:
    config = BASE | ROPE
    tensors = tensors_of(config)
    tiny = load(write_checkpoint(tmp_path, config, tensors))
    ids = mx.array([prompt(), prompt()[::-1]], dtype=mx.int32)
    positions = mx.broadcast_to(mx.arange(LENGTH, dtype=mx.int32), (2, LENGTH))
    caches = build_caches(tiny.architecture.layers, mx.float32, batch=2)
    out = tiny.model.forward(StepInput(ids=ids, positions=positions), caches)
    logits = np.array(tiny.model.head(out.hidden))
    for row, sequence in enumerate((prompt(), prompt()[::-1])):
        assert distance(logits[row], forward(config, tensors, sequence)) < TOLERANCE


def test_embeddings_replace_the_lookup(tmp_path: Path) -> None:
    config = BASE | ROPE
    tensors = tensors_of(config)
    tiny = load(write_checkpoint(tmp_path, config, tensors))
    ids = mx.array([prompt()], dtype=mx.int32)
    caches = build_caches(tiny.architecture.layers, mx.float32)
    step = StepInput(ids=mx.zeros_like(ids), embeddings=tiny.model.embed(ids))
    logits = np.array(tiny.model.head(tiny.model.forward(step, caches).hidden))[0]
    assert distance(logits, forward(config, tensors, prompt())) < TOLERANCE


def test_parameter_paths_equal_the_mapped_keys(tmp_path: Path) -> None:
    from mlx.utils import tree_flatten

    from engine_core.weight_plan import TensorInfo
    from engine_llama.config import LlamaConfig
    from engine_llama.weights import plan_weights

    config = config_of("biased")
    tensors = tensors_of(config)
    tiny = load(write_checkpoint(tmp_path, config, tensors))
    infos = {key: TensorInfo(value.shape, "F32") for key, value in tensors.items()}
    mapped = plan_weights(LlamaConfig.parse(CheckpointConfig(config)), infos).resolve(infos).infos
    flat = dict(tree_flatten(tiny.model.parameters()))
    assert {key: value.shape for key, value in flat.items()} == {
        key: info.shape for key, info in mapped.items()
    }
