"""The decoder against transformers' recorded logits and an independent float64 pass."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_qwen35 as tiny
from harness_qwen35 import distance, feed, logits, sizes
from reference_qwen35 import forward

from engine_core.cache.build import build_caches
from engine_core.cache.layers import keep_caches, mark_caches
from engine_core.cache.recurrent import RecurrentCache
from engine_core.errors import ModelError
from engine_core.limits import Limits
from engine_core.step import StepInput
from engine_core.testing.checkpoints import bfloat16, write_checkpoint
from engine_core.testing.conformance import load, quantize
from engine_core.testing.reference import dequantize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine_core.family import LayerSpec
    from engine_core.session import Session

GOLDENS = Path(__file__).resolve().parent / "goldens"
MANIFEST = json.loads((GOLDENS / "MANIFEST.json").read_text(encoding="utf-8"))
# Of logits of size 4. Transformers and this engine are each up to 6e-5 from the float64 pass: a
# norm of a nearly empty read-out magnifies rounding in single rows; the median row is at 5e-6.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, np.ndarray]:
    return np.load(GOLDENS / "tiny_logits.npz")


@pytest.fixture(scope="module", params=["dense_untied", "moe_tied"])
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    text = tiny.text_config(request.param)
    path = tmp_path_factory.mktemp(request.param) / "model"
    write_checkpoint(path, tiny.whole_config(text), tiny.tensors_of(text))
    with load(path) as loaded:
        yield loaded


def case_of(session: Session) -> tiny.Config:
    dense = session.info.model_type == "qwen3_5"
    return tiny.text_config("dense_untied" if dense else "moe_tied")


def test_manifest_matches_the_files() -> None:
    files = {path for path in GOLDENS.iterdir() if path.name != "MANIFEST.json"}
    assert set(MANIFEST["files"]) == {path.name for path in files}
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert MANIFEST["files"][path.name]["sha256"] == digest
    assert sum(path.stat().st_size for path in GOLDENS.iterdir()) < 256 * 1024


def test_every_case_is_recorded(recorded: Mapping[str, np.ndarray]) -> None:
    assert set(recorded) == set(tiny.CASES) == set(MANIFEST["greedy_ids"])


@pytest.mark.parametrize("name", tiny.CASES)
def test_logits_and_greedy_ids_equal_transformers_and_float64(
    name: str, recorded: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    text = tiny.text_config(name)
    tensors = tiny.tensors_of(text)
    path = write_checkpoint(tmp_path / "model", tiny.whole_config(text), tensors)
    ids = tiny.prompt()
    with load(path) as loaded:
        got = loaded.score(ids)
        assert distance(got[tiny.RECORDED_ROWS], recorded[name]) < TOLERANCE
        assert distance(got, forward(text, tensors, ids)) < TOLERANCE
        reply = loaded.complete(ids, max_tokens=8, logit_bias={text["eos_token_id"]: -100.0})
        assert list(reply.token_ids) == MANIFEST["greedy_ids"][name]


@pytest.mark.parametrize("chunk", [1, 7, 16, 256, 257])
def test_chunks_give_the_logits_of_one_pass(session: Session, chunk: int) -> None:
    ids = tiny.prompt(270 if chunk > tiny.LENGTH else tiny.LENGTH)
    assert distance(logits(session, ids, sizes(len(ids), chunk)), logits(session, ids)) < TOLERANCE


def test_prefill_in_any_chunk_gives_equal_ids(tmp_path: Path) -> None:
    text = tiny.text_config("irregular")
    path = write_checkpoint(tmp_path / "m", tiny.whole_config(text), tiny.tensors_of(text))
    replies = set()
    for chunk in (7, 256, 257):
        with load(path, limits=Limits(prefill_chunk_tokens=chunk)) as loaded:
            replies.add(loaded.complete(tiny.prompt(260), max_tokens=6).token_ids)
    assert len(replies) == 1


# ------------------------------------------------------------------ layouts

LAYOUTS: dict[str, Any] = {
    "text only": tiny.text_only,
    "an expert each": tiny.split_experts,
    "stacked experts": tiny.stack_experts,
    "text only, an expert each": lambda held: tiny.text_only(tiny.split_experts(held)),
    "converted": tiny.converted,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_equal_logits(session: Session, layout: str, tmp_path: Path) -> None:
    """mlx-lm 0.32.2 does not load one tensor an expert, nor the text-only model types."""
    text = case_of(session)
    config = tiny.flat_config(text) if "text" in layout else tiny.whole_config(text)
    tensors = LAYOUTS[layout](tiny.tensors_of(text))
    with load(write_checkpoint(tmp_path / "other", config, tensors)) as other:
        # A stored sum 1 + w is rounded to float32 once more than a fold of w is.
        limit = 1e-5 if layout == "converted" else 0.0
        assert distance(logits(other, tiny.prompt()), logits(session, tiny.prompt())) <= limit


@pytest.mark.parametrize("layout", ["raw", "converted"])
def test_unread_modules_change_no_logit(session: Session, layout: str, tmp_path: Path) -> None:
    """The presence of ``mtp`` once made converters shift the norms twice."""
    text = case_of(session)
    tensors = {
        **tiny.tensors_of(text),
        **tiny.drawn(tiny.mtp_shapes(text)),
        **tiny.drawn(tiny.vision_shapes(tiny.VISION)),
    }
    if layout == "converted":
        tensors = tiny.converted(tensors)
    config = tiny.whole_config(text, vision_config=tiny.VISION)
    with load(write_checkpoint(tmp_path / "whole", config, tensors)) as whole:
        assert distance(logits(whole, tiny.prompt()), logits(session, tiny.prompt())) < 1e-5


def test_tie_flag_of_the_text_level_alone_is_enough(session: Session, tmp_path: Path) -> None:
    text = case_of(session)
    config = tiny.whole_config(text)
    del config["tie_word_embeddings"]
    with load(write_checkpoint(tmp_path / "m", config, tiny.tensors_of(text))) as other:
        assert distance(logits(other, tiny.prompt()), logits(session, tiny.prompt())) == 0.0


def test_interval_without_layer_types_gives_equal_logits(tmp_path: Path) -> None:
    kinds = [tiny.FULL if i % 2 else tiny.LINEAR for i in range(4)]
    text = tiny.text_config("dense_tied", layer_types=kinds)
    tensors = tiny.tensors_of(text)
    spelled = {key: value for key, value in text.items() if key != "layer_types"}
    config = tiny.whole_config({**spelled, "full_attention_interval": 2})
    with load(write_checkpoint(tmp_path / "m", config, tensors)) as loaded:
        assert (
            distance(loaded.score(tiny.prompt()), forward(text, tensors, tiny.prompt())) < TOLERANCE
        )


def test_weights_as_published_load(tmp_path: Path) -> None:
    """Weights as published: bfloat16 with A_log in float32, computed in float32."""
    text = tiny.text_config("dense_tied")
    tensors = tiny.tensors_of(text)
    stored = {
        key: value if key.endswith("A_log") else bfloat16(value) for key, value in tensors.items()
    }
    rounded = {
        key: value if isinstance(value, np.ndarray) else widen(value[2], value[1])
        for key, value in stored.items()
    }
    with load(write_checkpoint(tmp_path / "m", tiny.whole_config(text), stored)) as loaded:
        expected = forward(text, rounded, tiny.prompt())
        assert distance(loaded.score(tiny.prompt()), expected) < TOLERANCE


def widen(payload: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """Read bfloat16 bytes."""
    return (np.frombuffer(payload, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)


@pytest.mark.parametrize("name", ["dense_untied", "moe_tied"])
def test_half_precision_stays_close(name: str, tmp_path: Path) -> None:
    from engine_core.session import Session

    text = tiny.text_config(name)
    tensors = tiny.tensors_of(text)
    path = write_checkpoint(tmp_path / "m", tiny.whole_config(text), tensors)
    expected = forward(text, tensors, tiny.prompt(40))
    with Session.load(path, template=False, compute_dtype="bfloat16") as half:
        got = half.score(tiny.prompt(40))
        assert np.abs(got - expected).mean() < 0.03 * np.abs(expected).max()
        state = half.new_caches()[0]
        assert [slot.dtype for slot in state.slots] == [mx.bfloat16, mx.float32]
        mixer = half.model.language_model.model.layers[0].linear_attn
        assert mixer.A_log.dtype == mixer.dt_bias.dtype == mx.float32


# ------------------------------------------------------------------ quantized


@pytest.mark.parametrize("layout", ["raw", "converted"])
@pytest.mark.parametrize("name", ["dense_untied", "moe_tied"])
def test_packed_weights_equal_their_unpacked_values(name: str, layout: str, tmp_path: Path) -> None:
    """Experts included, and the router at 8 bits as MLX's converter leaves it."""
    text = tiny.text_config(name, moe_intermediate_size=64)
    if name == "dense_untied":
        del text["moe_intermediate_size"]
    source = tiny.stack_experts(tiny.tensors_of(text))
    packed: dict[str, Any] = {}
    unpacked: tiny.Tensors = {}
    quantization: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "affine"}
    for key, value in source.items():
        packable = key.endswith(".weight") and value.ndim > 1 and value.shape[-1] % 32 == 0
        if not packable:
            packed[key] = unpacked[key] = value
            continue
        router = key.endswith((".mlp.gate.weight", ".shared_expert_gate.weight"))
        bits = 8 if router else 4
        if router:
            path = key.removesuffix(".weight").replace(tiny.TEXT, "language_model.model.")
            quantization[path] = {"group_size": 32, "bits": 8}
        parts = [np.array(p) for p in mx.quantize(mx.array(value), group_size=32, bits=bits)]
        stem = key.removesuffix("weight")
        packed |= dict(zip((key, f"{stem}scales", f"{stem}biases"), parts, strict=True))
        flat = [part.reshape(-1, part.shape[-1]) for part in parts]
        whole = dequantize(*flat, mode="affine", bits=bits, group_size=32)
        unpacked[key] = whole.reshape(value.shape)
    expected = forward(text, fused_experts(unpacked), tiny.prompt())
    tensors = tiny.converted(packed) if layout == "converted" else packed
    config = tiny.whole_config(text, quantization=quantization)
    path = write_checkpoint(tmp_path / "packed", config, tensors)
    for policy in ("keep", "dequantize"):
        with load(path, quantized_weights=policy) as loaded:
            assert distance(loaded.score(tiny.prompt()), expected) < 2e-4


def fused_experts(tensors: tiny.Tensors) -> tiny.Tensors:
    """Back to the published layout of experts, for the reference."""
    result: tiny.Tensors = {}
    for key, value in tensors.items():
        if key.endswith("switch_mlp.gate_proj.weight"):
            up = tensors[key.replace("gate_proj", "up_proj")]
            stem = key.removesuffix("switch_mlp.gate_proj.weight")
            result[f"{stem}experts.gate_up_proj"] = np.concatenate([value, up], axis=1)
        elif key.endswith("switch_mlp.down_proj.weight"):
            stem = key.removesuffix("switch_mlp.down_proj.weight")
            result[f"{stem}experts.down_proj"] = value
        elif "switch_mlp" not in key:
            result[key] = value
    return result


def test_an_expert_each_may_be_packed(tmp_path: Path) -> None:
    text = tiny.text_config("moe_untied", moe_intermediate_size=64)
    tensors, quantization = quantize(tiny.split_experts(tiny.tensors_of(text)))
    assert any("experts.5.down_proj.scales" in key for key in tensors)
    config = tiny.whole_config(text, quantization=quantization)
    path = write_checkpoint(tmp_path / "packed", config, tensors)
    with (
        load(path, quantized_weights="keep") as kept,
        load(path, quantized_weights="dequantize") as dense,
    ):
        assert distance(kept.score(tiny.prompt()), dense.score(tiny.prompt())) < 2e-4
        assert "Quantized" in type(experts_of(kept).down_proj).__name__


def experts_of(session: Session) -> Any:
    model: Any = session.model
    return model.language_model.model.layers[0].mlp.switch_mlp


# ------------------------------------------------------------------ state


@pytest.mark.parametrize("kept", [0, 1, 2, 5, 9])
def test_rows_taken_back_leave_the_state_of_a_fresh_feed(session: Session, kept: int) -> None:
    ids = tiny.prompt()
    caches = session.new_caches()
    feed(session, caches, 0, ids[:100])
    marks = mark_caches(caches)
    feed(session, caches, 100, ids[100:109])
    keep_caches(caches, marks, kept)
    fresh = session.new_caches()
    feed(session, fresh, 0, ids[: 100 + kept])
    for one, other in zip(caches, fresh, strict=True):
        assert one.offset == other.offset == 100 + kept
        if isinstance(one, RecurrentCache) and isinstance(other, RecurrentCache):
            for mine, theirs in zip(one.slots, other.slots, strict=True):
                assert float(mx.abs(mine - theirs).max()) < 1e-5
    rest = ids[120:]
    mine = feed(session, caches, 100 + kept, rest)
    assert distance(mine, feed(session, fresh, 100 + kept, rest)) < TOLERANCE


def test_recorded_rows_replay_bit_for_bit(session: Session) -> None:
    """The same rows through the same operations: keeping all of them changes nothing."""
    ids = tiny.prompt()
    model: Any = session.model
    mixer = model.language_model.model.layers[0].linear_attn
    layer = session.new_caches()[0]
    x = mx.random.normal((1, 6, 64), key=mx.random.key(1))
    mixer(model.embed(mx.array([ids[:50]])), layer)
    old, mark = layer.slots, layer.mark()
    mixer(x, layer)
    (segment,) = layer._tape
    replayed = segment.replay(old)
    for mine, theirs in zip(replayed, layer.slots, strict=True):
        assert mx.array_equal(mine, theirs)
    layer.keep(mark, 6)


def test_state_and_history_have_the_layout_of_mlx_conversions(session: Session) -> None:
    recurrent = session.new_caches()[0]
    assert [slot.shape for slot in recurrent.slots] == [(1, 3, 160), (1, 4, 24, 16)]
    assert recurrent.slots[1].dtype == mx.float32


# ------------------------------------------------------------------ forward contract


def test_hidden_rows_are_those_the_head_reads(session: Session) -> None:
    ids = tiny.prompt(20)
    model: Any = session.model
    step = StepInput(ids=mx.array([ids], mx.int32))
    hidden = model.forward(step, session.new_caches()).hidden
    assert hidden.shape == (1, 20, 64)
    got = np.array(model.head(hidden[:, -1:]))[0]
    assert distance(got, logits(session, ids)[-1:]) < 1e-5


def test_embeddings_and_three_position_streams_equal_float64(session: Session) -> None:
    """As media use them: rows replaced, positions of a picture on two axes."""
    text = case_of(session)
    ids = tiny.prompt(24)
    grid = [(4, 4 + row, 4 + column) for row in range(3) for column in range(4)]
    triples = [(i, i, i) for i in range(4)] + grid
    triples += [(8 + i,) * 3 for i in range(len(ids) - len(triples))]
    positions = np.array(triples).T
    tensors = tiny.tensors_of(text)
    embeddings = tensors[f"{tiny.TEXT}embed_tokens.weight"][ids].copy()
    embeddings[4:16] = tiny.draw("picture", (12, 64))
    expected = forward(text, tensors, ids, positions=positions, embeddings=embeddings)
    model: Any = session.model

    def run(caches: list[Any], part: slice) -> np.ndarray:
        step = StepInput(
            ids=mx.array([ids[part]], mx.int32),
            embeddings=mx.array(embeddings[None, part]),
            positions=mx.array(positions[:, None, part], mx.int32),
        )
        return np.array(model.head(model.forward(step, caches).hidden))[0]

    assert distance(run(session.new_caches(), slice(0, 24)), expected) < TOLERANCE
    caches = session.new_caches()
    split = [run(caches, part) for part in (slice(0, 9), slice(9, 10), slice(10, 24))]
    assert distance(np.concatenate(split), expected) < TOLERANCE
    plain = forward(text, tensors, ids, embeddings=embeddings)
    assert distance(expected, plain) > 100 * TOLERANCE


def test_equal_streams_equal_an_offset_and_one_stream(session: Session) -> None:
    ids = tiny.prompt(12)
    model: Any = session.model

    def run(positions: int | mx.array) -> np.ndarray:
        step = StepInput(ids=mx.array([ids], mx.int32), positions=positions)
        return np.array(model.head(model.forward(step, session.new_caches()).hidden))[0]

    row = mx.arange(12, dtype=mx.int32)[None]
    assert distance(run(0), run(row)) < 1e-5
    assert distance(run(0), run(mx.stack([row] * 3))) < 1e-5
    # Only differences of positions count, in all streams alike.
    assert distance(run(0), run(mx.stack([row + 7] * 3))) < TOLERANCE


def test_three_streams_need_their_section(tmp_path: Path) -> None:
    text = tiny.text_config("dense_tied")
    rope = {**text["rope_parameters"], "mrope_section": None}
    config = tiny.whole_config({**text, "rope_parameters": rope})
    streams = mx.zeros((3, 1, 4), mx.int32)
    step = StepInput(ids=mx.array([[1, 2, 3, 4]], mx.int32), positions=streams)
    with load(write_checkpoint(tmp_path / "m", config, tiny.tensors_of(text))) as loaded:
        with pytest.raises(ModelError) as caught:
            loaded.model.forward(step, loaded.new_caches())
        assert caught.value.code == "model.positions"


def test_positions_of_another_length_are_refused(session: Session) -> None:
    step = StepInput(
        ids=mx.array([[1, 2, 3, 4]], mx.int32), positions=mx.zeros((3, 1, 5), mx.int32)
    )
    with pytest.raises(ModelError) as caught:
        session.model.forward(step, session.new_caches())
    assert caught.value.code == "model.positions"


def layers_of(session: Session) -> tuple[LayerSpec, ...]:
    loaded = session._loaded
    assert loaded is not None
    return loaded.spec.answers.architecture.layers


def test_sequences_of_a_batch_do_not_see_one_another(session: Session) -> None:
    first, second = tiny.prompt(40), tiny.prompt(40)[::-1]
    caches = build_caches(layers_of(session), mx.float32, batch=2)
    model: Any = session.model
    rows = []
    for part in (slice(0, 33), slice(33, 34), slice(34, 40)):
        step = StepInput(ids=mx.array([first[part], second[part]], mx.int32), positions=part.start)
        rows.append(np.array(model.head(model.forward(step, caches).hidden)))
    together = np.concatenate(rows, axis=1)
    for got, ids in zip(together, (first, second), strict=True):
        assert distance(got, logits(session, ids)) < TOLERANCE


def test_rows_beyond_a_length_leave_no_trace_in_the_state(session: Session) -> None:
    first, second = tiny.prompt(20), tiny.prompt(9)
    caches = build_caches(layers_of(session), mx.float32, batch=2)
    padded = mx.array([first, second + [3] * 11], mx.int32)
    step = StepInput(ids=padded, lengths=mx.array([20, 9], mx.int32))
    session.model.forward(step, caches)
    for row, ids in enumerate((first, second)):
        alone = session.new_caches()
        feed(session, alone, 0, ids)
        for cache, single in zip(caches, alone, strict=True):
            if isinstance(cache, RecurrentCache) and isinstance(single, RecurrentCache):
                for mine, theirs in zip(cache.slots, single.slots, strict=True):
                    assert float(mx.abs(mine[row] - theirs[0]).max()) < 1e-5
