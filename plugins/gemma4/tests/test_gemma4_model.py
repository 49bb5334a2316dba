"""The decoder against transformers' recorded logits and an independent float64 pass."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from reference_gemma4 import forward
from tiny_gemma4 import (
    CASES,
    DENSE,
    MOE,
    PLAIN,
    UNIFIED,
    multimodal,
    prompt,
    tensor,
    tensors_of,
)

from engine_core.errors import ModelError
from engine_core.limits import Limits
from engine_core.step import StepInput
from engine_core.testing.checkpoints import write_checkpoint
from engine_core.testing.conformance import load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.session import Session

GOLDENS = Path(__file__).resolve().parent / "goldens"
TOLERANCE = 2e-5
IMAGE = 152


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, np.ndarray]:
    return np.load(GOLDENS / "tiny_logits.npz")


def distance(first: np.ndarray, second: np.ndarray) -> float:
    assert first.shape == second.shape
    return float(np.abs(first - second).max())


def text_checkpoint(path: Path, config: dict[str, Any]) -> Path:
    return write_checkpoint(path, config, tensors_of(config))


def test_manifest_matches_the_files() -> None:
    manifest = json.loads((GOLDENS / "MANIFEST.json").read_text(encoding="utf-8"))
    files = {path.name: path for path in GOLDENS.iterdir() if path.name != "MANIFEST.json"}
    assert manifest["files"].keys() == files.keys()
    for name, path in files.items():
        assert manifest["files"][name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_case_is_recorded(recorded: Mapping[str, np.ndarray]) -> None:
    assert set(recorded) == set(CASES) | {f"{name}.greedy" for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_and_float64_whatever_the_chunks(
    name: str, recorded: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    config = CASES[name]
    path = text_checkpoint(tmp_path / name, config)
    double = forward(config, tensors_of(config), prompt())
    # Both references are independent: a golden that did not belong to these weights shows here.
    assert distance(recorded[name], double) < TOLERANCE
    for size in (512, 1, 7):
        with load(path, limits=Limits(prefill_chunk_tokens=size)) as session:
            logits = session.score(prompt())
            assert distance(logits, recorded[name]) < TOLERANCE
            assert distance(logits, double) < TOLERANCE


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_long_prompt_is_the_same_in_every_chunking(name: str, tmp_path: Path) -> None:
    config = CASES[name] | {"sliding_window": 100}
    path, ids = text_checkpoint(tmp_path / name, config), prompt(300)
    double = forward(config, tensors_of(config), ids)
    for size in (7, 256, 257, 512):
        with load(path, limits=Limits(prefill_chunk_tokens=size)) as session:
            assert distance(session.score(ids), double) < TOLERANCE, size


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_equal_transformers(
    name: str, recorded: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    expected = [int(token) for token in recorded[f"{name}.greedy"]]
    with load(text_checkpoint(tmp_path / name, CASES[name])) as session:
        assert 1 not in expected
        reply = session.complete(prompt(), max_tokens=len(expected))
        assert list(reply.token_ids) == expected


def test_shared_layers_own_no_cache(tmp_path: Path) -> None:
    with load(text_checkpoint(tmp_path, DENSE)) as session:
        caches = session.new_caches()
    assert len(caches) == 10
    assert len({id(cache) for cache in caches}) == 5
    # The last layer of each kind that owns keys and values gives them to all that follow.
    assert all(caches[index] is caches[3] for index in (5, 6, 7, 8))
    assert caches[9] is caches[4]


def embeddings_of(
    session: Session, ids: Sequence[int], media: Mapping[int, np.ndarray]
) -> mx.array:
    rows = session.model.embed(mx.array([list(ids)], mx.int32))
    for row, embedding in media.items():
        rows[:, row] = mx.array(embedding)
    return rows


SPANS = {
    "none": (multimodal(DENSE), 3),
    "sliding": (multimodal(PLAIN), 3),
    "all": (multimodal(UNIFIED), 3),
    "sliding in a wide window": (multimodal(PLAIN), 12),
    "all in a wide window": (multimodal(UNIFIED), 12),
}


@pytest.mark.parametrize("case", SPANS)
def test_media_rows_are_attended_as_the_variant_says(case: str, tmp_path: Path) -> None:
    """Masks: unified ones join whole spans everywhere; others within the window, or nowhere."""
    whole, window = SPANS[case]
    text = whole["text_config"] = {**whole["text_config"], "sliding_window": window}
    spans = [(4, 12), (15, 19)]
    media_rows = [row for start, stop in spans for row in range(start, stop)]
    ids = [IMAGE if row in media_rows else token for row, token in enumerate(prompt(26))]
    media = {row: tensor(f"media {row}", (72,)) * 4 for row in media_rows}
    tensors = tensors_of(text)
    expected = forward(text, tensors, ids, media=media, spans=spans, rule=case.split()[0])
    with load(write_checkpoint(tmp_path, whole, tensors)) as session:
        step = StepInput(
            ids=mx.array([ids], mx.int32),
            embeddings=embeddings_of(session, ids, media),
            spans=tuple(spans),
        )
        hidden = session.model.forward(step, session.new_caches()).hidden
        logits = np.array(session.model.head(hidden))[0]
    assert distance(logits, expected) < TOLERANCE
    plain = forward(text, tensors, ids, media=media, rule="none")
    # The spans matter wherever the variant honours them, else the comparison shows nothing.
    assert (distance(plain, expected) > 1e-2) == (case != "none")


LACKING = [
    (DENSE, "layers.2.self_attn.k_proj.weight"),
    (DENSE, "layers.2.self_attn.v_proj.weight"),
    (DENSE, "layers.4.self_attn.k_norm.weight"),
    (DENSE, "layers.7.per_layer_input_gate.weight"),
    (DENSE, "layers.7.per_layer_projection.weight"),
    (DENSE, "layers.7.post_per_layer_input_norm.weight"),
    (DENSE, "embed_tokens_per_layer.weight"),
    (DENSE, "per_layer_model_projection.weight"),
    (DENSE, "per_layer_projection_norm.weight"),
    (MOE, "layers.5.self_attn.k_proj.weight"),
    (MOE, "layers.3.router.proj.weight"),
    (MOE, "layers.3.experts.gate_up_proj"),
    (MOE, "layers.3.experts.down_proj"),
]


@pytest.mark.parametrize(("config", "key"), LACKING, ids=[key for _, key in LACKING])
def test_missing_optional_projection_loads_and_fails_when_used(
    config: dict[str, Any], key: str, tmp_path: Path
) -> None:
    tensors = tensors_of(config)
    del tensors[f"model.{key}"]
    with load(write_checkpoint(tmp_path, config, tensors)) as session:
        assert any("lacks" in note for note in session.info.notes)
        for _ in range(2):
            with pytest.raises(ModelError) as caught:
                session.score(prompt(4))
            assert caught.value.code == "model.missing_component"
            assert key.removesuffix(".weight").removesuffix("gate_up_proj") in str(caught.value)


def test_all_keys_and_values_of_a_layer_missing_fails_when_used(tmp_path: Path) -> None:
    tensors = {
        key: value
        for key, value in tensors_of(DENSE).items()
        if not key.startswith("model.layers.1.self_attn.") or "q_" in key or "o_" in key
    }
    with (
        load(write_checkpoint(tmp_path, DENSE, tensors)) as session,
        pytest.raises(ModelError, match="k_proj"),
    ):
        session.score(prompt(4))


def test_bfloat16_rounds_the_embedding_scale_as_transformers_does(tmp_path: Path) -> None:
    from engine_core.session import Session

    path = text_checkpoint(tmp_path, PLAIN)
    with Session.load(path, template=False, compute_dtype="bfloat16") as session:
        table = mx.array(tensors_of(PLAIN)["model.embed_tokens.weight"]).astype(mx.bfloat16)
        rows = session.model.embed(mx.array([[5, 6]], mx.int32))
        # sqrt(72) = 8.485 rounds to 8.5 in bfloat16.
        assert rows.dtype == mx.bfloat16
        assert mx.array_equal(rows[0], table[mx.array([5, 6])] * mx.array(8.5, mx.bfloat16))


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    from engine_core.session import Session

    path = text_checkpoint(tmp_path, CASES[name])
    with load(path) as session:
        exact = session.score(prompt())
    with Session.load(path, template=False, compute_dtype="bfloat16") as session:
        # A rounded router score may choose another expert for a row, so no single row is bounded;
        # transformers in bfloat16 is 0.02 (dense) and 0.04 (sparse) away on average.
        assert np.abs(session.score(prompt()) - exact).mean() < 0.1 * exact.std()
