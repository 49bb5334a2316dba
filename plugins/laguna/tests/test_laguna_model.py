"""The decoder against transformers' recorded logits and an independent float64 pass."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from harness_laguna import distance, logits
from mlx.utils import tree_flatten
from reference_laguna import forward
from tiny_laguna import (
    CASES,
    FULL,
    LENGTH,
    PLAIN,
    SLIDING,
    YARN,
    config_of,
    prompt,
    relayout,
    tensors_of,
    yarn,
)

from engine_core.cache.build import build_caches
from engine_core.errors import CheckpointError, ConfigError, EngineError
from engine_core.family import Full, Sliding
from engine_core.limits import Limits
from engine_core.step import StepInput
from engine_core.testing.checkpoints import bfloat16, write_checkpoint
from engine_core.testing.conformance import load
from engine_core.testing.reference import dequantize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GOLDENS = Path(__file__).resolve().parent / "goldens"
# The largest logit is 7, and 44 in the tied case.
TOLERANCE = 5e-5
TOLERANCES = {"tied": 2e-4}
CHUNKS = [[], [LENGTH - 4, 1, 1, 1, 1], [7] * 5 + [1], [1] * LENGTH]
MANIFEST = json.loads((GOLDENS / "MANIFEST.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, np.ndarray]:
    return np.load(GOLDENS / "tiny_logits.npz")


def test_manifest_matches_the_files() -> None:
    files = {path for path in GOLDENS.iterdir() if path.name != "MANIFEST.json"}
    assert set(MANIFEST["files"]) == {path.name for path in files}
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert MANIFEST["files"][path.name]["sha256"] == digest
    assert sum(path.stat().st_size for path in GOLDENS.iterdir()) < 256 * 1024


def test_every_case_is_recorded(recorded: Mapping[str, np.ndarray]) -> None:
    assert set(recorded) == set(CASES) == set(MANIFEST["greedy_ids"])


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_ids_equal_transformers_and_float64(
    name: str, recorded: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    config = config_of(name)
    tensors = tensors_of(config)
    tolerance = TOLERANCES.get(name, TOLERANCE)
    double = forward(config, tensors, prompt())
    # Both references are independent: a golden that did not belong to these weights shows here.
    assert distance(recorded[name], double) < tolerance
    with load(write_checkpoint(tmp_path / name, config, tensors)) as session:
        for chunks in CHUNKS:
            ours = logits(session, prompt(), chunks)
            assert distance(ours, recorded[name]) < tolerance
            assert distance(ours, double) < tolerance
        reply = session.complete(prompt(), max_tokens=8, logit_bias={2: -100.0, 24: -100.0})
        assert list(reply.token_ids) == MANIFEST["greedy_ids"][name]


# ------------------------------------------------------------------ rotary spellings


def mixed(config: dict[str, Any]) -> None:
    """XS.2: shared scalars beside the entries, the partial factor at the top level."""
    entries = config["rope_parameters"]
    entry = entries[FULL] = dict(entries[FULL])
    entries["original_max_position_embeddings"] = entry.pop("original_max_position_embeddings")
    config["partial_rotary_factor"] = entry.pop("partial_rotary_factor")


def top_partial(config: dict[str, Any]) -> None:
    entries = config["rope_parameters"]
    entries[FULL] = {k: v for k, v in entries[FULL].items() if k != "partial_rotary_factor"}
    config["partial_rotary_factor"] = 0.5


def flat(config: dict[str, Any]) -> None:
    entries = config.pop("rope_parameters")
    config["rope_parameters"] = dict(entries[FULL])
    config["swa_rope_parameters"] = dict(entries[SLIDING])


def legacy(config: dict[str, Any]) -> None:
    entries = config.pop("rope_parameters")
    scaling = dict(entries[FULL])
    config["rope_theta"] = scaling.pop("rope_theta")
    config["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config["swa_rope_parameters"] = dict(entries[SLIDING])


def alias(config: dict[str, Any]) -> None:
    entries = config["rope_parameters"]
    config["rope_parameters"] = {"global_attention": entries[FULL], SLIDING: entries[SLIDING]}


def older_mixture(config: dict[str, Any]) -> None:
    del config["mlp_layer_types"]
    config |= {"mlp_only_layers": [0], "decoder_sparse_step": 1}


def silent_mixture(config: dict[str, Any]) -> None:
    del config["mlp_layer_types"]


def per_layer_gates(config: dict[str, Any]) -> None:
    config |= {"gating": True, "gating_types": ["per_head"] * 5, "norm_topk_prob": False}


SPELLINGS: list[Callable[[dict[str, Any]], None]] = [
    mixed, top_partial, flat, legacy, alias, older_mixture, silent_mixture, per_layer_gates,
]  # fmt: skip


@pytest.mark.parametrize("respell", SPELLINGS, ids=lambda one: one.__name__)
def test_every_spelling_gives_the_logits_of_the_canonical_one(
    respell: Callable[[dict[str, Any]], None],
    recorded: Mapping[str, np.ndarray],
    tmp_path: Path,
) -> None:
    config = config_of("xs21")
    respell(config)
    with load(write_checkpoint(tmp_path, config, tensors_of(config_of("xs21")))) as session:
        assert distance(logits(session, prompt()), recorded["xs21"]) < TOLERANCE


def test_silent_rotary_parameters_take_the_published_defaults(
    recorded: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    config = config_of("no_rope")
    assert "rope_parameters" not in config
    config["rope_parameters"] = None
    with load(write_checkpoint(tmp_path, config, tensors_of(config))) as session:
        assert distance(logits(session, prompt()), recorded["no_rope"]) < TOLERANCE


@pytest.mark.parametrize(
    "entry",
    [
        {"truncate": False, "beta_fast": 8.0, "original_max_position_embeddings": 1024},
        {"partial_rotary_factor": 0.25, "attention_factor": 0.5},
        {"rope_type": "default", "factor": 1.0},
        {
            "beta_fast": 4.0,
            "beta_slow": 0.2,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
    ],
)
def test_other_rotary_entries_equal_float64(entry: dict[str, Any], tmp_path: Path) -> None:
    config = config_of("xs21") | {"rope_parameters": yarn(**entry)}
    tensors = tensors_of(config)
    expected = forward(config, tensors, prompt())
    with load(write_checkpoint(tmp_path, config, tensors)) as session:
        assert distance(logits(session, prompt()), expected) < TOLERANCE
    # Each value matters here: without it the numbers are others.
    for name in entry:
        other = yarn(**{key: value for key, value in entry.items() if key != name})
        without = forward(config | {"rope_parameters": other}, tensors, prompt())
        assert (distance(without, expected) > 1e-3) == (name != "factor"), name


def test_scaled_sliding_layers_equal_float64(tmp_path: Path) -> None:
    """Nothing but habit keeps yarn to the full layers."""
    entries = {FULL: PLAIN, SLIDING: YARN | {"partial_rotary_factor": 1.0}}
    config = config_of("xs21") | {"rope_parameters": entries}
    tensors = tensors_of(config)
    with load(write_checkpoint(tmp_path, config, tensors)) as session:
        assert distance(logits(session, prompt()), forward(config, tensors, prompt())) < TOLERANCE


# ------------------------------------------------------------------ long prompts


@pytest.mark.parametrize("window", [16, 100, 256])
def test_long_prompts_do_not_depend_on_the_chunk_size(window: int, tmp_path: Path) -> None:
    config = config_of("xs21") | {"sliding_window": window}
    tensors = tensors_of(config)
    ids = prompt(530)
    expected = forward(config, tensors, ids)
    path = write_checkpoint(tmp_path, config, tensors)
    sizes = (1, 7, 256, 257, 530) if window == 100 else (7, 256, 257)
    for size in sizes:
        with load(path, limits=Limits(prefill_chunk_tokens=size)) as session:
            assert distance(session.score(ids), expected) < 1e-4, size


# ------------------------------------------------------------------ layouts


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("layout", ["packed", "mlx", "mlx fused"])
def test_every_expert_layout_gives_the_same_logits(
    layout: str, prefix: str, recorded: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    config = config_of("xs21")
    tensors = relayout(config, tensors_of(config), layout)
    renamed = {prefix + key: value for key, value in tensors.items()}
    with load(write_checkpoint(tmp_path, config, renamed)) as session:
        assert distance(logits(session, prompt()), recorded["xs21"]) < TOLERANCE


def test_bare_backbone_save_loads(recorded: Mapping[str, np.ndarray], tmp_path: Path) -> None:
    config = config_of("tied")
    bare = {key.removeprefix("model."): value for key, value in tensors_of(config).items()}
    with load(write_checkpoint(tmp_path, config, bare)) as session:
        assert distance(logits(session, prompt()), recorded["tied"]) < TOLERANCES["tied"]


def test_tied_checkpoint_that_ships_a_head_ignores_it(
    recorded: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    config = config_of("tied")
    shipped = tensors_of(config) | {"lm_head.weight": np.zeros((96, 64), np.float32)}
    with load(write_checkpoint(tmp_path, config, shipped)) as session:
        assert distance(logits(session, prompt()), recorded["tied"]) < TOLERANCES["tied"]


def test_silent_tie_follows_the_tensors(recorded: Mapping[str, np.ndarray], tmp_path: Path) -> None:
    for name in ("tied", "xs21"):
        config = config_of(name)
        tensors = tensors_of(config)
        del config["tie_word_embeddings"]
        with load(write_checkpoint(tmp_path / name, config, tensors)) as session:
            limit = TOLERANCES.get(name, TOLERANCE)
            assert distance(logits(session, prompt()), recorded[name]) < limit


def test_untied_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    config = config_of("xs21")
    tensors = tensors_of(config)
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError) as caught:
        load(write_checkpoint(tmp_path, config, tensors))
    assert caught.value.code == "checkpoint.tensor_missing"


@pytest.mark.parametrize("name", ["mlp.experts.3.up_proj.weight", "self_attn.g_proj.weight"])
def test_missing_expert_or_gate_is_refused(name: str, tmp_path: Path) -> None:
    config = config_of("xs21")
    tensors = tensors_of(config)
    del tensors[f"model.layers.2.{name}"]
    with pytest.raises(CheckpointError) as caught:
        load(write_checkpoint(tmp_path, config, tensors))
    assert caught.value.code == "checkpoint.tensor_missing"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("per_element", {"gating": "per-head"}),
        ("xs21", {"gating": "per-element"}),
        ("attention_bias", {"attention_bias": False}),
        ("xs21", {"num_attention_heads_per_layer": [4] * 5}),
        ("xs21", {"num_experts": 7}),
        ("xs21", {"mlp_layer_types": ["sparse"] * 5}),
    ],
)
def test_configuration_of_another_checkpoint_is_refused(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tensors = tensors_of(config_of(name))
    with pytest.raises(CheckpointError) as caught:
        load(write_checkpoint(tmp_path, config_of(name) | changes, tensors))
    assert caught.value.code.startswith("checkpoint.tensor_")


def test_sliding_layers_without_a_window_are_refused(tmp_path: Path) -> None:
    config = config_of("xs21") | {"sliding_window": None}
    with pytest.raises(ConfigError):
        load(write_checkpoint(tmp_path, config, tensors_of(config_of("xs21"))))


def test_foreign_packing_is_refused(tmp_path: Path) -> None:
    config = config_of("xs21")
    tensors = tensors_of(config)
    for entry in ({"quant_method": "compressed-tensors"}, {"quant_method": "fp8"}):
        with pytest.raises(EngineError) as caught:
            load(write_checkpoint(tmp_path, config | {"quantization_config": entry}, tensors))
        assert caught.value.code == "config.quant_method"


# ------------------------------------------------------------------ packed weights


def pack(
    config: Mapping[str, Any], choose: Callable[[str], tuple[str, int, int] | None]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Pack matrices of the released layout; give the packed tensors and their dense values."""
    packed: dict[str, np.ndarray] = {}
    dense: dict[str, np.ndarray] = {}
    for key, value in tensors_of(config).items():
        path = key.removesuffix(".weight")
        spec = choose(path) if value.ndim == 2 else None
        if spec is None:
            packed[key] = dense[key] = value
            continue
        mode, bits, group_size = spec
        triple = mx.quantize(mx.array(value), group_size=group_size, bits=bits, mode=mode)
        arrays = [np.array(one) for one in triple]
        packed |= dict(zip((key, f"{path}.scales", f"{path}.biases"), arrays, strict=False))
        dense[key] = dequantize(
            *arrays, *([None] if len(arrays) == 2 else []), mode=mode, bits=bits,
            group_size=group_size,
        )  # fmt: skip
    return packed, dense


def published_mix(path: str) -> tuple[str, int, int] | None:
    """As MLX conversions are: 4 bits, the router and some projections finer."""
    if path.endswith(("mlp.gate", "self_attn.v_proj", "shared_expert.down_proj")):
        return "affine", 8, 64
    return "affine", 4, 32


def nvfp4_mix(path: str) -> tuple[str, int, int] | None:
    """As the official conversions are: dense router and table, experts in nvfp4."""
    return ("nvfp4", 4, 16) if ".experts." in path or "self_attn" in path else None


@pytest.mark.parametrize("policy", ["keep", "dequantize"])
@pytest.mark.parametrize("layout", ["disk", "packed", "mlx", "mlx fused"])
def test_packed_checkpoint_equals_float64_of_its_unpacked_weights(
    layout: str, policy: Any, tmp_path: Path
) -> None:
    config = config_of("xs21")
    packed, dense = pack(config, published_mix)
    if layout == "packed":  # bare fused names exist for dense weights only
        packed = {
            key.replace("experts.gate_up_proj.weight", "experts.gate_up_proj"): value
            for key, value in relayout(config, packed, layout).items()
        }
    else:
        packed = relayout(config, packed, layout)
    overrides: dict[str, Any] = {"group_size": 32, "bits": 4}
    for key in packed:
        path = key.removesuffix(".scales")
        if path != key and path.endswith(
            ("mlp.gate", "mlp.gate.proj", "v_proj", "shared_expert.down_proj",
             "shared_experts.down_proj")
        ):  # fmt: skip
            overrides[path] = {"group_size": 64, "bits": 8}
    path = write_checkpoint(tmp_path, config | {"quantization": overrides}, packed)
    expected = forward(config, dense, prompt())
    with load(path, quantized_weights=policy) as session:
        assert distance(logits(session, prompt()), expected) < TOLERANCE
        assert distance(logits(session, prompt(), [9, 1, 26]), expected) < TOLERANCE
        assert not any("matches no tensor" in note for note in session.info.notes)


@pytest.mark.parametrize("policy", ["keep", "dequantize"])
def test_nvfp4_checkpoint_equals_float64_of_its_unpacked_weights(
    policy: Any, tmp_path: Path
) -> None:
    config = config_of("xs21")
    packed, dense = pack(config, nvfp4_mix)
    entry = {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
    tensors = relayout(config, packed, "mlx")
    with load(write_checkpoint(tmp_path, config | entry, tensors), quantized_weights=policy) as one:
        assert distance(logits(one, prompt()), forward(config, dense, prompt())) < TOLERANCE


# ------------------------------------------------------------------ the contract


def test_router_stays_float32_beside_bfloat16_weights(tmp_path: Path) -> None:
    config = config_of("xs21")
    tensors: dict[str, Any] = {
        key: value if "e_score" in key else bfloat16(value)
        for key, value in tensors_of(config).items()
    }
    from engine_core.session import Session

    path = write_checkpoint(tmp_path, config, tensors)
    with Session.load(path, template=False, compute_dtype="bfloat16") as session:
        flat = dict(tree_flatten(session.model.parameters()))
        exact = {key for key, value in flat.items() if value.dtype == mx.float32}
        assert exact == {
            f"model.layers.{index}.mlp.gate.{name}"
            for index in range(1, 5)
            for name in ("proj.weight", "e_score_correction_bias")
        }
        bias = np.array(flat["model.layers.1.mlp.gate.e_score_correction_bias"])
        stored = tensors_of(config)["model.layers.1.mlp.experts.e_score_correction_bias"]
        assert np.array_equal(bias, stored)
        assert np.isfinite(logits(session, prompt())).all()


def test_caches_follow_the_layer_kinds(tmp_path: Path) -> None:
    from engine_core.checkpoint.config import CheckpointConfig
    from engine_core.weight_plan import TensorInfo
    from engine_laguna import plugin

    config = config_of("xs21")
    infos = {key: TensorInfo(value.shape, "F32") for key, value in tensors_of(config).items()}
    parsed = CheckpointConfig(config)
    mapped = plugin.engine_weight_plan(config=parsed, tensors=infos).resolve(infos).infos
    architecture = plugin.engine_architecture(config=parsed, tensors=mapped)
    full, sliding = Full(kv_heads=2, head_dim=16), Sliding(window=8, kv_heads=2, head_dim=16)
    assert architecture.layers == (full, sliding, sliding, full, sliding)
    assert architecture.context_length == 2048
    assert architecture.extra_eos == ("</assistant>",)


def test_positions_of_each_row_equal_the_offset(tmp_path: Path) -> None:
    config = config_of("xs21")
    tensors = tensors_of(config)
    with load(write_checkpoint(tmp_path, config, tensors)) as session:
        ids = mx.array([prompt(), prompt()[::-1]], dtype=mx.int32)
        positions = mx.broadcast_to(mx.arange(LENGTH, dtype=mx.int32), (2, LENGTH))
        layers = [
            Full(kv_heads=2, head_dim=16)
            if kind == FULL
            else Sliding(window=8, kv_heads=2, head_dim=16)
            for kind in config["layer_types"]
        ]
        caches = build_caches(layers, mx.float32, batch=2)
        out = session.model.forward(StepInput(ids=ids, positions=positions), caches)
        both = np.array(session.model.head(out.hidden))
    for row, sequence in enumerate((prompt(), prompt()[::-1])):
        assert distance(both[row], forward(config, tensors, sequence)) < TOLERANCE


def test_embeddings_replace_the_lookup(tmp_path: Path) -> None:
    config = config_of("xs21")
    tensors = tensors_of(config)
    with load(write_checkpoint(tmp_path, config, tensors)) as session:
        ids = mx.array([prompt()], dtype=mx.int32)
        step = StepInput(ids=mx.zeros_like(ids), embeddings=session.model.embed(ids))
        hidden = session.model.forward(step, session.new_caches()).hidden
        ours = np.array(session.model.head(hidden))[0]
    assert distance(ours, forward(config, tensors, prompt())) < TOLERANCE
