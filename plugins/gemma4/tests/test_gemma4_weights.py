"""Key lists of every published size, consumed exactly; layouts, strays and packed checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from published_gemma4 import (
    CONFIGS,
    TOTALS,
    converted,
    keys_of,
    listed_per_layer,
    read_listing,
)
from tiny_gemma4 import AUDIO, DENSE, MOE, PLAIN, UNIFIED, VISION, multimodal, prompt, tensors_of

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.checkpoint.quantization import plan_quantization
from engine_core.errors import CheckpointError
from engine_core.family import TensorInfo
from engine_core.kernels import KernelRegistry
from engine_core.plugins import Plugins
from engine_core.quantization import QuantizationPlan, QuantizationSpec
from engine_core.spec import resolve_spec_answers
from engine_core.step import BuildContext
from engine_core.testing.checkpoints import write_checkpoint
from engine_core.testing.conformance import load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine_core.spec import SpecAnswers

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "config_shapes"
TOLERANCE = 2e-5


def answers_of(config: dict[str, Any], shapes: Shapes) -> SpecAnswers:
    parsed = CheckpointConfig(config)
    plugins = Plugins.load()
    owner = plugins.resolve_owner(config["model_type"], (), None)
    tensors = {key: TensorInfo(shape, "BF16") for key, shape in shapes.items()}
    return resolve_spec_answers(plugins, owner, parsed, tensors, CheckpointConfig())


def parameters_of(answers: SpecAnswers) -> Shapes:
    """Parameters of the model; nothing is allocated, because nothing is evaluated."""
    context = BuildContext(
        compute_dtype=mx.bfloat16, quantization=QuantizationPlan(), kernels=KernelRegistry()
    )
    model: Any = answers.architecture.build(context)
    flat: Any = tree_flatten(model.parameters())
    return {key: tuple(value.shape) for key, value in flat}


def assert_consumed(config: dict[str, Any], shapes: Shapes) -> None:
    """Every key is a parameter, or an expected tensor of a tower; each with its exact shape."""
    answers = answers_of(config, shapes)
    mapped = {key: info.shape for key, info in answers.weights.infos.items()}
    parameters = parameters_of(answers)
    assert answers.media is not None
    towers = {key: info.shape for key, info in answers.media.expected.items()}
    assert not parameters.keys() & towers.keys()
    assert parameters | towers == mapped
    assert not answers.weights.dropped
    assert answers.norm_fold is None
    assert not answers.architecture.notes


@pytest.mark.parametrize("size", CONFIGS)
def test_published_keys_are_consumed_exactly(size: str) -> None:
    config = CONFIGS[size]
    shapes = keys_of(config)
    if size in TOTALS:
        assert sum(math.prod(shape) for shape in shapes.values()) == TOTALS[size]
    assert_consumed(config, shapes)
    assert_consumed(config, converted(shapes))
    newer = config | {"text_config": listed_per_layer(config["text_config"])}
    assert_consumed(newer, shapes)


@pytest.mark.shared
@pytest.mark.parametrize("size", CONFIGS)
def test_listing_of_real_shapes_is_consumed_exactly(size: str) -> None:
    """The listings hold names as transformers has them in memory."""
    if not SHARED.is_dir():
        # The generated list of the test above stands for it.
        return
    config = CONFIGS[size]
    listed = read_listing(SHARED / f"gemma4-{size}.txt", config["text_config"]["layer_types"])
    assert_consumed(config, listed)
    stored = {
        key.replace("embed_vision.multimodal_embedder", "embed_vision").replace(
            "embed_vision.p", "vision_embedder.p"
        ): shape
        for key, shape in listed.items()
    }
    assert stored == keys_of(config)


def test_caches_and_media_of_the_published_sizes() -> None:
    found = {}
    for size, config in CONFIGS.items():
        answers = answers_of(config, keys_of(config))
        layers = answers.architecture.layers
        owners = [layer for layer in layers if hasattr(layer, "kv_heads")]
        donors = sorted({layer.donor for layer in layers if hasattr(layer, "donor")})
        assert answers.media is not None
        found[size] = (len(layers), len(owners), donors, sorted(answers.media.modalities))
    assert found == {
        "E2B": (35, 15, [13, 14], ["audio", "image"]),
        "E4B": (42, 24, [22, 23], ["audio", "image"]),
        "26B-A4B": (30, 30, [], ["image"]),
        "31B": (60, 60, [], ["image"]),
        "12B-unified": (48, 48, [], ["audio", "image"]),
    }


def test_real_26b_quantized_repository_is_planned_as_published() -> None:
    """297 modules in 4 bits, 30 router projections in 8, and a vision tower left dense."""
    config = CONFIGS["26B-A4B"]
    shapes = converted(keys_of(config))
    infos = {key: TensorInfo(shape, "BF16") for key, shape in packed_26b(shapes).items()}
    infos = {
        key: TensorInfo(info.shape, "U32")
        if key.endswith(".weight") and key.removesuffix("weight") + "scales" in infos
        else info
        for key, info in infos.items()
    }
    spec = {"bits": 4, "group_size": 64, "mode": "affine"}
    overrides = {
        f"language_model.model.layers.{index}.router.proj": {"bits": 8, "group_size": 64}
        for index in range(30)
    }
    config = config | {"quantization": spec | overrides}
    plugins = Plugins.load()
    owner = plugins.resolve_owner("gemma4", (), None)
    parsed = CheckpointConfig(config)
    answers = resolve_spec_answers(plugins, owner, parsed, infos, CheckpointConfig())
    plan = plan_quantization(parsed, answers.weight_plan, answers.weights.infos)
    assert not plan.notes
    packed = {key for key in infos if key.endswith(".scales")}
    assert len(packed) == 327
    bits = [layer.bits for layer in plan.layers.values()]
    assert bits.count(8) == 30
    assert all(path.endswith("router.proj") == (s.bits == 8) for path, s in plan.layers.items())
    assert answers.media is not None
    tower = [key for key in answers.media.expected if key.startswith("vision_tower.")]
    assert len(tower) == 355
    mapped = {key: info.shape for key, info in answers.weights.infos.items()}
    for key, info in answers.media.expected.items():
        assert mapped[key] == info.shape
    parameters = parameters_of(answers)
    dense = {key for key in mapped if key.endswith(("scales", "biases"))}
    assert set(parameters) | set(answers.media.expected) == set(mapped) - (
        dense - set(answers.media.expected)
    )


def packed_26b(shapes: Shapes) -> Shapes:
    result: Shapes = {}
    for key, shape in shapes.items():
        stem = key.removesuffix(".weight")
        kind = stem.rsplit(".", 1)[-1]
        if kind == "gate_up_proj" and "experts" in key:
            half = (shape[0], shape[1] // 2, shape[2])
            experts = key.replace("experts.gate_up_proj", "experts.switch_glu.")
            parts = {f"{experts}gate_proj": half, f"{experts}up_proj": half}
        elif kind == "down_proj" and "experts" in key:
            parts = {key.replace("experts.", "experts.switch_glu."): shape}
        elif kind in ("embed_tokens", "embedding_projection") or (
            kind.endswith("proj") and not key.startswith("vision_tower")
        ):
            parts = {stem: shape}
        else:
            result[key] = shape
            continue
        for path, (*rows, width) in parts.items():
            bits = 8 if path.endswith("router.proj") else 4
            result[f"{path}.weight"] = (*rows, width * bits // 32)
            result[f"{path}.scales"] = result[f"{path}.biases"] = (*rows, width // 64)
    return result


# ---------------------------------------------------------------- numbers in every layout


def checked(path: Path, expected: np.ndarray, **options: Any) -> None:
    with load(path, **options) as session:
        assert np.abs(session.score(prompt()) - expected).max() < TOLERANCE


def logits_of(path: Path, config: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    with load(write_checkpoint(path, config, tensors)) as session:
        return session.score(prompt())


PREFIXES: dict[str, Callable[[str], str]] = {
    "base model": lambda key: key.removeprefix("model."),
    "hub": lambda key: key.replace("model.", "model.language_model.", 1),
    "converted": lambda key: f"language_model.{key}",
    "without inner level": lambda key: key.replace("model.", "language_model.", 1),
}


@pytest.mark.parametrize("spelling", PREFIXES)
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_every_prefix_gives_the_same_logits(
    config: dict[str, Any], spelling: str, tmp_path: Path
) -> None:
    tensors = tensors_of(config)
    expected = logits_of(tmp_path / "plain", config, tensors)
    renamed = {PREFIXES[spelling](key): value for key, value in tensors.items()}
    checked(write_checkpoint(tmp_path / "renamed", config, renamed), expected)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_stray_keys_and_values_of_shared_layers_are_dropped(packed: bool, tmp_path: Path) -> None:
    tensors = tensors_of(DENSE)
    expected = logits_of(tmp_path / "plain", DENSE, tensors)
    stray: dict[str, Any] = {}
    for index, rows in ((5, 32), (9, 64)):
        block = f"model.layers.{index}.self_attn."
        stray[f"{block}k_norm.weight"] = np.full(rows // 2, np.nan, np.float32)
        for name in ("k_proj", "v_proj"):
            if packed:
                stray[f"{block}{name}.weight"] = np.zeros((rows, 8), np.uint32)
                stray[f"{block}{name}.scales"] = np.zeros((rows, 1), np.float32)
                stray[f"{block}{name}.biases"] = np.zeros((rows, 1), np.float32)
            else:
                stray[f"{block}{name}.weight"] = np.full((rows, 72), np.nan, np.float32)
    config = DENSE
    if packed:
        override = {"model.layers.5.self_attn.k_proj": {"bits": 8, "group_size": 64}}
        config = DENSE | {"quantization": {"bits": 4, "group_size": 64} | override}
    path = write_checkpoint(tmp_path / "stray", config, tensors | stray)
    checked(path, expected)
    with load(path) as session:
        assert not any("override" in note for note in session.info.notes)


def test_a_head_of_its_own_is_used(tmp_path: Path) -> None:
    tensors = tensors_of(PLAIN)
    head = tensors["model.embed_tokens.weight"][::-1].copy()
    expected = logits_of(tmp_path / "tied", PLAIN, tensors)[:, ::-1]
    checked(write_checkpoint(tmp_path / "own", PLAIN, tensors | {"lm_head.weight": head}), expected)


def test_an_untied_checkpoint_without_head_is_refused(tmp_path: Path) -> None:
    config = PLAIN | {"tie_word_embeddings": False}
    path = write_checkpoint(tmp_path, config, tensors_of(config))
    with pytest.raises(CheckpointError, match="lm_head"), load(path):
        pass


def zeros(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    return {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}


def tower_arrays(config: dict[str, Any]) -> Arrays:
    sized = {**config, "text_config": DENSE | {"global_head_dim": 32}}
    shapes = keys_of(sized)
    return zeros({key: shape for key, shape in shapes.items() if "language_model" not in key})


@pytest.mark.parametrize("layout", ["hub", "converted"])
def test_multimodal_checkpoint_loads_as_text(layout: str, tmp_path: Path) -> None:
    """Towers are recognised, checked by shape and never read."""
    tensors = tensors_of(DENSE)
    expected = logits_of(tmp_path / "text", DENSE, tensors)
    whole = multimodal(DENSE, vision_config=VISION, audio_config=AUDIO)
    keys: Arrays = {PREFIXES[layout](key): value for key, value in tensors.items()}
    towers = tower_arrays(whole)
    if layout == "converted":
        towers = zeros(converted({key: value.shape for key, value in towers.items()}))
    path = write_checkpoint(tmp_path / "whole", whole, keys | towers)
    checked(path, expected)
    for key, value in towers.items():
        if key.endswith(("per_dim_scale", "layer0.conv.weight", "0.mlp.up_proj.input_max")):
            wrong = {**towers, key: np.zeros((*value.shape, 2), np.float32)}
            path = write_checkpoint(tmp_path / "wrong", whole, keys | wrong)
            with pytest.raises(CheckpointError) as caught, load(path):
                pass
            assert key.rsplit(".", 1)[-1] in str(caught.value)
    first = next(iter(towers))
    path = write_checkpoint(
        tmp_path / "less", whole, keys | {k: v for k, v in towers.items() if k != first}
    )
    with pytest.raises(CheckpointError) as caught, load(path):
        pass
    assert caught.value.code == "checkpoint.tensor_missing"


def test_towers_that_a_converter_left_out_are_not_missed(tmp_path: Path) -> None:
    tensors = tensors_of(DENSE)
    expected = logits_of(tmp_path / "text", DENSE, tensors)
    whole = multimodal(DENSE, vision_config=VISION, audio_config=AUDIO)
    checked(write_checkpoint(tmp_path / "whole", whole, tensors), expected)


# ---------------------------------------------------------------- packed checkpoints


def pack(
    tensors: Mapping[str, np.ndarray], choose: Callable[[str], QuantizationSpec | None]
) -> tuple[Arrays, Arrays]:
    """Pack tensors, and unpack them again with NumPy for the dense twin."""
    from engine_core.testing.reference import dequantize

    packed: Arrays = {}
    dense: Arrays = {}
    for key, value in tensors.items():
        path = key.removesuffix(".weight")
        spec = choose(path)
        if spec is None:
            packed[key] = dense[key] = value
            continue
        words, scales, biases = (
            np.array(part)
            for part in mx.quantize(mx.array(value), group_size=spec.group_size, bits=spec.bits)
        )
        packed |= {f"{path}.weight": words, f"{path}.scales": scales, f"{path}.biases": biases}
        words, scales, biases = (
            part.reshape(-1, part.shape[-1]) for part in (words, scales, biases)
        )
        rows = dequantize(
            words, scales, biases, mode="affine", bits=spec.bits, group_size=spec.group_size
        )
        dense[key] = rows.reshape(value.shape).astype(np.float32)
    return packed, dense


def split_experts(tensors: Mapping[str, np.ndarray]) -> Arrays:
    """Experts as MLX converters lay them out."""
    result: Arrays = {}
    for key, value in tensors.items():
        if key.endswith("experts.gate_up_proj"):
            stem = key.replace("experts.gate_up_proj", "experts.switch_glu.")
            gate, up = np.split(value, 2, axis=1)
            result |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif key.endswith("experts.down_proj"):
            result[key.replace("experts.", "experts.switch_glu.") + ".weight"] = value
        else:
            result[key] = value
    return result


def join_experts(tensors: Mapping[str, np.ndarray]) -> Arrays:
    """The inverse of ``split_experts``."""
    result: Arrays = {}
    for key, value in tensors.items():
        if key.endswith("switch_glu.gate_proj.weight"):
            up = tensors[key.replace("gate_proj", "up_proj")]
            name = key.replace("switch_glu.gate_proj.weight", "gate_up_proj")
            result[name] = np.concatenate([value, up], axis=1)
        elif key.endswith("switch_glu.down_proj.weight"):
            result[key.replace("switch_glu.down_proj.weight", "down_proj")] = value
        elif not key.endswith("switch_glu.up_proj.weight"):
            result[key] = value
    return result


FOUR, EIGHT = QuantizationSpec("affine", 4, 32), QuantizationSpec("affine", 8, 32)
PACKED_MOE = MOE | {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}


def all_projections(path: str) -> QuantizationSpec | None:
    if path.endswith("router.proj"):
        return EIGHT
    return FOUR if path.endswith(("proj", "embed_tokens")) else None


def mixed_recipe(path: str) -> QuantizationSpec | None:
    """Gate and up of one layer packed differently, a down projection left dense."""
    if path.endswith(("1.mlp.up_proj", "2.experts.switch_glu.up_proj", "embed_tokens")):
        return EIGHT
    return None if path.endswith("3.mlp.down_proj") else all_projections(path)


CONVERTED = "language_model.model."


@pytest.mark.parametrize(
    ("policy", "recipe", "root"),
    [
        ("keep", all_projections, CONVERTED),
        ("keep", all_projections, "model."),
        ("keep", all_projections, "model.language_model."),
        ("keep", mixed_recipe, CONVERTED),
        ("dequantize", all_projections, CONVERTED),
        ("dequantize", mixed_recipe, "model."),
    ],
)
def test_converted_packed_moe_equals_the_dense_original_layout(
    policy: str, recipe: Any, root: str, tmp_path: Path
) -> None:
    packed, dense = pack(split_experts(tensors_of(PACKED_MOE)), recipe)
    expected = logits_of(tmp_path / "dense", PACKED_MOE, join_experts(dense))
    overrides: dict[str, Any] = {}
    for key in split_experts(tensors_of(PACKED_MOE)):
        path, spec = key.removesuffix(".weight"), recipe(key.removesuffix(".weight"))
        if spec == EIGHT:
            overrides[path.replace("model.", root, 1)] = {"bits": 8, "group_size": 32}
        elif spec is None and path.endswith("proj"):
            overrides[path.replace("model.", root, 1)] = False
    quantization = {"bits": 4, "group_size": 32, "mode": "affine", **overrides}
    config = PACKED_MOE | {"quantization": quantization, "quantization_config": quantization}
    renamed = {key.replace("model.", root, 1): value for key, value in packed.items()}
    path = write_checkpoint(tmp_path / "packed", config, renamed)
    # Summed in another order; the unpacked weights are the same numbers.
    with load(path, quantized_weights=policy) as session:
        assert np.abs(session.score(prompt()) - expected).max() < 2e-4
        assert not any("override" in note for note in session.info.notes)


def test_override_of_fused_experts_fans_out() -> None:
    answers = answers_of(
        {**MOE, "quantization": {"bits": 4, "group_size": 32}},
        {key: value.shape for key, value in tensors_of(MOE).items()},
    )
    paths = answers.weight_plan.map_path
    assert paths("model.layers.0.experts.gate_up_proj") == (
        "language_model.model.layers.0.experts.gate_proj",
        "language_model.model.layers.0.experts.up_proj",
    )
    assert paths("model.layers.0.experts.switch_glu.down_proj") == (
        "language_model.model.layers.0.experts.down_proj",
    )
    shared = answers_of(DENSE, {key: value.shape for key, value in tensors_of(DENSE).items()})
    assert shared.weight_plan.map_path("model.layers.7.self_attn.v_proj") == ()


# ---------------------------------------------------------------- where mlx-lm 0.32.2 fails


@pytest.mark.parametrize("config", [DENSE, MOE, PLAIN], ids=["dense", "moe", "plain"])
def test_per_layer_config_gives_what_the_older_fields_give(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """It ignores ``per_layer_config``, so that saves of transformers 5.15 and later do not load."""
    tensors = tensors_of(config)
    older = {key: value for key, value in config.items() if key != "per_layer_config"}
    older |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    expected = logits_of(tmp_path / "newer", config, tensors)
    checked(write_checkpoint(tmp_path / "older", older, tensors), expected)


def test_fields_left_out_are_off_in_the_unified_model(tmp_path: Path) -> None:
    """It fills them with another size's values, and misses tensors that nobody wrote."""
    whole = multimodal(
        UNIFIED,
        vision_config={"mm_embed_dim": 64, "mm_posemb_size": 32, "patch_size": 4},
        audio_config={"audio_embed_dim": 20},
    )
    tensors = tensors_of(UNIFIED)
    expected = logits_of(tmp_path / "text", UNIFIED, tensors)
    shapes = keys_of(
        {**whole, "text_config": UNIFIED | {"global_head_dim": 32, "num_global_key_value_heads": 1}}
    )
    embedders = zeros({key: shape for key, shape in shapes.items() if "language" not in key})
    hub = {PREFIXES["hub"](key): value for key, value in tensors.items()}
    checked(write_checkpoint(tmp_path / "whole", whole, hub | embedders), expected)


@pytest.mark.parametrize("top", [{}, {"vocab_size": 262_144}], ids=["absent", "another"])
def test_vocabulary_of_the_text_section_counts(top: dict[str, Any], tmp_path: Path) -> None:
    """It overwrites the text section's vocabulary with a top-level default."""
    tensors = tensors_of(PLAIN)
    expected = logits_of(tmp_path / "text", PLAIN, tensors)
    whole = multimodal(PLAIN, **top)
    hub = {PREFIXES["hub"](key): value for key, value in tensors.items()}
    checked(write_checkpoint(tmp_path / "whole", whole, hub), expected)
