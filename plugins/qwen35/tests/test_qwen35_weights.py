"""Key families, expert layouts, raw or converted, and the modules that stay unread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import tiny_qwen35 as tiny
from mlx.utils import tree_flatten
from published_qwen35 import (
    MODELS,
    TEXT_TENSORS,
    published_config,
    published_shapes,
    split_shapes,
)

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.checkpoint.quantization import plan_quantization
from engine_core.errors import CheckpointError, ConfigError, EngineError
from engine_core.family import Full, Recurrent, TensorInfo
from engine_core.kernels import KernelRegistry
from engine_core.plugins import Plugins
from engine_core.quantization import QuantizationPlan, QuantizationSpec
from engine_core.spec import SpecAnswers, find_owner, resolve_spec_answers
from engine_core.step import BuildContext

if TYPE_CHECKING:
    from collections.abc import Mapping

Shapes = dict[str, tuple[int, ...]]
MTP_KEYS = 15


def infos(shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, TensorInfo]:
    return {key: TensorInfo(shape=shape, dtype=dtype) for key, shape in shapes.items()}


def resolve(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> SpecAnswers:
    parsed = CheckpointConfig(config)
    plugins = Plugins.load()
    owner = find_owner(plugins, parsed, None)
    assert owner.family.name == "qwen35"
    return resolve_spec_answers(plugins, owner, parsed, infos(shapes), CheckpointConfig())


def parameters(answers: SpecAnswers) -> Shapes:
    """Shapes of the built model; its placeholders are never evaluated."""
    import mlx.core as mx

    context = BuildContext(
        compute_dtype=mx.float32, quantization=QuantizationPlan(), kernels=KernelRegistry()
    )
    model: Any = answers.architecture.build(context)
    flat: Any = tree_flatten(model.parameters())
    return {key: tuple(value.shape) for key, value in flat}


def unread(answers: SpecAnswers) -> set[str]:
    plans = [plan for plan in (answers.mtp, answers.media) if plan is not None]
    return {key for plan in plans for key in plan.expected}


def shapes_of(tensors: tiny.Tensors) -> Shapes:
    return {key: value.shape for key, value in tensors.items()}


# ------------------------------------------------------------------ published models


@pytest.mark.parametrize("name", MODELS)
def test_published_key_lists_are_consumed_exactly(name: str) -> None:
    shapes = published_shapes(name)
    text = [key for key in shapes if key.startswith((tiny.TEXT, "lm_head."))]
    assert len(text) == TEXT_TENSORS[name]
    answers = resolve(published_config(name), shapes)
    mapped = {key: info.shape for key, info in answers.weights.infos.items()}
    assert mapped == {
        **parameters(answers),
        **{key: mapped[key] for key in unread(answers)},
    }
    assert not answers.weights.dropped
    assert answers.norm_fold is not None
    folded = answers.norm_fold.keys
    assert len(folded) == 2 * len(answers.architecture.layers) + 1 + 2 * sum(
        isinstance(layer, Full) for layer in answers.architecture.layers
    )
    assert not any("linear_attn" in key for key in folded)


@pytest.mark.parametrize(("name", "mib"), [("0.8B", 18), ("4B", 48), ("27B", 144), ("35B-A3B", 60)])
def test_recurrent_state_has_the_published_size(name: str, mib: int) -> None:
    layers = resolve(published_config(name), published_shapes(name)).architecture.layers
    states = [layer.shapes[1] for layer in layers if isinstance(layer, Recurrent)]
    assert sum(4 * int(np.prod(shape)) for shape in states) == mib * 2**20
    assert all(layer.dtypes[1] == "float32" for layer in layers if isinstance(layer, Recurrent))


def test_one_sequence_of_experts_counts_785_tensors_in_the_first_sparse_release() -> None:
    mtp = [key for key in published_shapes("35B-A3B") if key.startswith("mtp.")]
    assert len(mtp) == 17 + 3 * 256


def test_declared_but_removed_module_is_noted() -> None:
    shapes = {k: v for k, v in published_shapes("0.8B").items() if not k.startswith("mtp.")}
    answers = resolve(published_config("0.8B"), shapes)
    assert answers.mtp is None
    assert "removed" in answers.architecture.notes[0]


# ------------------------------------------------------------------ key families


def layouts(text: tiny.Config) -> dict[str, Shapes]:
    tensors = tiny.tensors_of(text)
    return {
        "multimodal": shapes_of(tensors),
        "text only": shapes_of(tiny.text_only(tensors)),
        "an expert each": shapes_of(tiny.split_experts(tensors)),
        "text only, an expert each": shapes_of(tiny.text_only(tiny.split_experts(tensors))),
        "stacked": shapes_of(tiny.stack_experts(tensors)),
        "converted": shapes_of(tiny.converted(tensors)),
    }


@pytest.mark.parametrize("case", tiny.CASES)
def test_every_key_family_gives_the_same_parameters(case: str) -> None:
    text = tiny.text_config(case)
    config = tiny.whole_config(text)
    for name, shapes in layouts(text).items():
        answers = resolve(config, shapes)
        mapped = {key: info.shape for key, info in answers.weights.infos.items()}
        assert mapped == parameters(answers), name
        assert (answers.norm_fold is None) == (name == "converted"), name


def test_fused_experts_are_cut_between_gate_and_up() -> None:
    text = tiny.text_config("moe_tied")
    answers = resolve(tiny.whole_config(text), shapes_of(tiny.tensors_of(text)))
    block = "language_model.model.layers.0.mlp.switch_mlp."
    width = text["moe_intermediate_size"]
    gate, up = (answers.weights.targets[f"{block}{n}_proj.weight"] for n in ("gate", "up"))
    assert (gate.axis, gate.start, gate.stop) == (1, 0, width)
    assert (up.axis, up.start, up.stop) == (1, width, 2 * width)


def test_a_missing_expert_is_named() -> None:
    text = tiny.text_config("moe_tied")
    shapes = shapes_of(tiny.split_experts(tiny.tensors_of(text)))
    del shapes[f"{tiny.TEXT}layers.1.mlp.experts.4.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"experts\.4\.up_proj"):
        resolve(tiny.whole_config(text), shapes)


@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp.", "model.mtp."])
@pytest.mark.parametrize("layout", ["fused", "an expert each", "stacked"])
def test_mtp_module_is_recognised_under_every_prefix(prefix: str, layout: str) -> None:
    text = tiny.text_config("moe_untied")
    mtp = tiny.mtp_shapes(text)
    if layout == "an expert each":
        mtp = split_shapes(mtp)
    elif layout == "stacked":
        mtp = shapes_of(tiny.stack_experts(tiny.drawn(mtp)))
    renamed = {prefix + key.removeprefix("mtp."): shape for key, shape in mtp.items()}
    converted = prefix == "language_model.mtp."
    text_shapes = layouts(text)["converted" if converted else "multimodal"]
    answers = resolve(tiny.whole_config(text), {**text_shapes, **renamed})
    assert answers.mtp is not None
    assert answers.mtp.build is None
    assert answers.mtp.reason
    # The fold of the text tower follows its own layout, whatever stands beside it.
    assert (answers.norm_fold is None) == converted
    # A dense module without its 3, a router, 3 stacks, the shared expert's 3 and its gate.
    assert len(answers.mtp.expected) == MTP_KEYS - 3 + 1 + 3 + 3 + 1


@pytest.mark.parametrize("spelling", ["model.visual.", "model.language_model.visual."])
def test_vision_tower_is_recognised_and_left_unread(spelling: str) -> None:
    text = tiny.text_config("dense_tied")
    tower = {
        spelling + key.removeprefix("model.visual."): shape
        for key, shape in tiny.vision_shapes(tiny.VISION).items()
    }
    config = tiny.whole_config(text, vision_config=tiny.VISION)
    answers = resolve(config, {**layouts(text)["multimodal"], **tower})
    assert answers.media is not None
    assert answers.media.modalities == {"image"}
    assert len(answers.media.expected) == len(tower) == 9 + 12 * tiny.VISION["depth"]
    assert not set(answers.media.expected) & set(parameters(answers))


def test_converted_patch_weight_has_its_channels_last() -> None:
    text = tiny.text_config("dense_tied")
    tensors = tiny.tensors_of(text) | tiny.drawn(tiny.vision_shapes(tiny.VISION))
    config = tiny.whole_config(text, vision_config=tiny.VISION)
    answers = resolve(config, shapes_of(tiny.converted(tensors)))
    assert answers.media is not None
    expected = answers.media.expected["vision_tower.patch_embed.proj.weight"]
    assert expected.shape == (8, 2, 4, 4, 3)


@pytest.mark.parametrize(
    ("key", "shape", "code"),
    [
        ("mtp.fc.weight", (64, 64), "checkpoint.tensor_shape"),
        ("mtp.layers.0.self_attn.q_proj.weight", (128, 64), "checkpoint.tensor_shape"),
        ("mtp.norm.weight", None, "checkpoint.tensor_missing"),
        ("mtp.embed_tokens.weight", (160, 64), "checkpoint.tensor_extra"),
        ("mtp.layers.1.input_layernorm.weight", (64,), "checkpoint.tensor_extra"),
        ("model.visual.pos_embed.weight", (9, 8), "checkpoint.tensor_shape"),
        ("model.visual.merger.norm.bias", None, "checkpoint.tensor_missing"),
        ("model.visual.deepstack_merger_list.0.norm.bias", (8,), "checkpoint.tensor_extra"),
    ],
)
def test_unread_modules_are_checked_exactly(
    key: str, shape: tuple[int, ...] | None, code: str
) -> None:
    text = tiny.text_config("dense_tied")
    shapes = layouts(text)["multimodal"] | tiny.mtp_shapes(text) | tiny.vision_shapes(tiny.VISION)
    if shape is None:
        del shapes[key]
    else:
        shapes[key] = shape
    with pytest.raises(EngineError) as caught:
        resolve(tiny.whole_config(text, vision_config=tiny.VISION), shapes)
    assert caught.value.code == code


def test_towers_of_another_form_are_refused() -> None:
    text = tiny.text_config("dense_tied")
    shapes = layouts(text)["multimodal"] | tiny.vision_shapes(tiny.VISION)
    for change in ({"deepstack_visual_indexes": [5]}, {"out_hidden_size": 32}):
        config = tiny.whole_config(text, vision_config={**tiny.VISION, **change})
        with pytest.raises(ConfigError, match=next(iter(change))):
            resolve(config, shapes)


def test_tied_head_that_is_stored_anyway_is_dropped() -> None:
    text = tiny.text_config("dense_tied")
    shapes = {**layouts(text)["multimodal"], "lm_head.weight": (160, 64)}
    answers = resolve(tiny.whole_config(text), shapes)
    assert set(answers.weights.dropped) == {"lm_head.weight"}
    assert "language_model.lm_head.weight" not in parameters(answers)


# ------------------------------------------------------------------ raw or converted


def test_mtp_module_beside_converted_weights_folds_nothing() -> None:
    text = tiny.text_config("dense_tied")
    shapes = {**layouts(text)["converted"], **tiny.mtp_shapes(text)}
    assert resolve(tiny.whole_config(text), shapes).norm_fold is None


def move_kernel_axis(shapes: Shapes, only: str = "") -> Shapes:
    return {
        key: (shape[0], shape[2], shape[1]) if "conv1d" in key and only in key else shape
        for key, shape in shapes.items()
    }


@pytest.mark.parametrize("layout", ["multimodal", "converted"])
def test_prefix_against_convolution_is_refused(layout: str) -> None:
    text = tiny.text_config("dense_tied")
    with pytest.raises(CheckpointError) as caught:
        resolve(tiny.whole_config(text), move_kernel_axis(layouts(text)[layout]))
    assert caught.value.code == "checkpoint.layout"
    assert caught.value.hint


def test_convolutions_of_two_layouts_are_refused() -> None:
    text = tiny.text_config("dense_tied")
    mixed = move_kernel_axis(layouts(text)["multimodal"], only="layers.1.")
    with pytest.raises(CheckpointError) as caught:
        resolve(tiny.whole_config(text), mixed)
    assert caught.value.code == "checkpoint.layout"


def test_text_under_two_prefixes_is_refused() -> None:
    text = tiny.text_config("dense_tied")
    shapes = layouts(text)["multimodal"]
    moved = {
        key.replace(tiny.TEXT, "model.", 1) if ".layers.2." in key else key: shape
        for key, shape in shapes.items()
    }
    with pytest.raises(CheckpointError) as caught:
        resolve(tiny.whole_config(text), moved)
    assert caught.value.code == "checkpoint.layout"


def test_plain_prefix_follows_the_convolution() -> None:
    """Transformers' text-only saves and conversions of them share their keys."""
    text = tiny.text_config("dense_tied")
    plain = layouts(text)["text only"]
    assert resolve(tiny.flat_config(text), plain).norm_fold is not None
    assert resolve(tiny.flat_config(text), move_kernel_axis(plain)).norm_fold is None


@pytest.mark.parametrize("shape", [(160, 4), (160, 2, 4), (4, 1, 160)])
def test_convolution_of_neither_layout_is_refused(shape: tuple[int, ...]) -> None:
    text = tiny.text_config("dense_tied")
    shapes = {
        **layouts(text)["multimodal"],
        f"{tiny.TEXT}layers.0.linear_attn.conv1d.weight": shape,
    }
    with pytest.raises(CheckpointError) as caught:
        resolve(tiny.whole_config(text), shapes)
    assert caught.value.code == "checkpoint.tensor_shape"


def test_decay_parameters_keep_full_precision() -> None:
    text = tiny.text_config("irregular")
    architecture = resolve(tiny.whole_config(text), layouts(text)["multimodal"]).architecture
    linear = [i for i, kind in enumerate(text["layer_types"]) if kind == tiny.LINEAR]
    assert architecture.keep_float32 == {
        f"language_model.model.layers.{i}.linear_attn.{n}"
        for i in linear
        for n in ("A_log", "dt_bias")
    }


# ------------------------------------------------------------------ quantization overrides


@pytest.mark.parametrize(
    ("path", "mapped"),
    [
        ("language_model.model.layers.0.mlp.gate", "layers.0.mlp.gate"),
        ("model.language_model.layers.0.mlp.gate", "layers.0.mlp.gate"),
        ("model.layers.0.mlp.shared_expert_gate", "layers.0.mlp.shared_expert_gate"),
        ("model.layers.0.mlp.experts.down_proj", "layers.0.mlp.switch_mlp.down_proj"),
    ],
)
def test_overrides_are_mapped_as_tensors_are(path: str, mapped: str) -> None:
    text = tiny.text_config("moe_tied")
    plan = resolve(tiny.whole_config(text), layouts(text)["multimodal"]).weight_plan
    assert plan.map_path(path) == (f"language_model.model.{mapped}",)


def test_an_override_of_fused_experts_reaches_both_stacks() -> None:
    text = tiny.text_config("moe_tied")
    plan = resolve(tiny.whole_config(text), layouts(text)["multimodal"]).weight_plan
    block = "language_model.model.layers.1.mlp.switch_mlp."
    paths = plan.map_path("model.language_model.layers.1.mlp.experts.gate_up_proj")
    assert paths == (f"{block}gate_proj", f"{block}up_proj")


def test_router_overrides_of_a_conversion_are_honoured() -> None:
    text = tiny.text_config("moe_tied")
    converted = layouts(text)["converted"]
    packed: dict[str, TensorInfo] = {}
    for key, shape in converted.items():
        router = key.endswith((".mlp.gate.weight", ".mlp.shared_expert_gate.weight"))
        if not key.endswith(".weight") or len(shape) < 2 or shape[-1] % 64 or "conv1d" in key:
            packed[key] = TensorInfo(shape=shape, dtype="BF16")
            continue
        bits = 8 if router else 4
        packed[key] = TensorInfo(shape=(*shape[:-1], shape[-1] * bits // 32), dtype="U32")
        for part in ("scales", "biases"):
            path = f"{key.removesuffix('weight')}{part}"
            packed[path] = TensorInfo(shape=(*shape[:-1], shape[-1] // 64), dtype="BF16")
    override = {"group_size": 64, "bits": 8}
    quantization: dict[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}
    for index in range(text["num_hidden_layers"]):
        for name in ("gate", "shared_expert_gate"):
            quantization[f"language_model.model.layers.{index}.mlp.{name}"] = override
    config = CheckpointConfig({**tiny.whole_config(text), "quantization": quantization})
    plugins = Plugins.load()
    owner = find_owner(plugins, config, None)
    answers = resolve_spec_answers(plugins, owner, config, packed, CheckpointConfig())
    plan = plan_quantization(config, answers.weight_plan, answers.weights.infos)
    block = "language_model.model.layers.0.mlp."
    assert plan.get(f"{block}gate") == QuantizationSpec("affine", 8, 64)
    assert plan.get(f"{block}shared_expert_gate") == QuantizationSpec("affine", 8, 64)
    assert plan.get(f"{block}switch_mlp.up_proj") == QuantizationSpec("affine", 4, 64)
    assert plan.notes == ()


def test_packed_mtp_module_is_recognised() -> None:
    """Its rows are demanded; how its columns are packed is the quantization plan's matter."""
    text = tiny.text_config("dense_tied")
    mtp = infos(tiny.mtp_shapes(text))
    fc = mtp.pop("mtp.fc.weight")
    mtp["mtp.fc.weight"] = TensorInfo(shape=(64, 16), dtype="U32")
    mtp["mtp.fc.scales"] = mtp["mtp.fc.biases"] = attrs.evolve(fc, shape=(64, 2))
    shapes = {**infos(layouts(text)["converted"]), **mtp}
    config = CheckpointConfig(tiny.whole_config(text))
    plugins = Plugins.load()
    owner = find_owner(plugins, config, None)
    answers = resolve_spec_answers(plugins, owner, config, shapes, CheckpointConfig())
    assert answers.mtp is not None
    assert len(answers.mtp.expected) == MTP_KEYS + 2
    shapes["mtp.fc.scales"] = attrs.evolve(fc, shape=(32, 2))
    with pytest.raises(EngineError, match=r"mtp\.fc\.scales"):
        resolve_spec_answers(plugins, owner, config, shapes, CheckpointConfig())
