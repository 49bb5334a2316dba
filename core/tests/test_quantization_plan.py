"""Quantization records and the plan for a checkpoint, from config and shapes alone."""

from __future__ import annotations

import pytest

from engine_core.checkpoint.config import CheckpointConfig
from engine_core.checkpoint.quantization import plan_quantization
from engine_core.errors import CheckpointError, ConfigError
from engine_core.quantization import MODES, QuantizationPlan, QuantizationSpec
from engine_core.weight_plan import Drop, Rename, Split, TensorInfo, WeightPlan

FP_SCALES = "U8"


def layer(path, bits=4, group_size=64, width=256, rows=(8,), scales="F16", biases=True):
    """Facts of one packed layer, counted by hand: rows of width * bits / 32 words."""
    words, groups = width * bits // 32, width // group_size
    infos = {
        f"{path}.weight": TensorInfo((*rows, words), "U32"),
        f"{path}.scales": TensorInfo((*rows, groups), scales),
    }
    if biases:
        infos[f"{path}.biases"] = TensorInfo((*rows, groups), scales)
    return infos


def plan(infos, quantization=None, rules=(), name="quantization", widths=None):
    config = CheckpointConfig({} if quantization is None else {name: quantization})
    return plan_quantization(config, WeightPlan(rules), infos, widths=widths)


ALL = [
    (mode.name, bits, group_size)
    for mode in MODES.values()
    for bits in mode.bits
    for group_size in mode.group_sizes
]


@pytest.mark.parametrize(("mode", "bits", "group_size"), ALL)
@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_every_mode_of_the_config_is_planned(mode, bits, group_size, name) -> None:
    affine = mode == "affine"
    infos = layer("a", bits, group_size, scales="BF16" if affine else FP_SCALES, biases=affine)
    setting = {"group_size": group_size, "bits": bits, "mode": mode}
    found = plan(infos, setting, name=name)
    assert found.layers == {"a": QuantizationSpec(mode, bits, group_size)}


@pytest.mark.parametrize(("mode", "bits", "group_size"), ALL)
def test_layer_without_config_is_inferred_from_its_width(mode, bits, group_size) -> None:
    affine = mode == "affine"
    infos = layer("a", bits, group_size, scales="F32" if affine else FP_SCALES, biases=affine)
    found = plan(infos, widths={"a": 256})
    assert found.get("a") == QuantizationSpec(mode, bits, group_size)


def test_mode_table_is_the_one_mlx_quantizes_with() -> None:
    mx = pytest.importorskip("mlx.core")
    weight = mx.zeros((2, 256))
    for mode, bits, group_size in ALL:
        words, scales, *biases = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
        spec = QuantizationSpec(mode, bits, group_size)
        assert words.shape == (2, spec.words(256))
        assert spec.width(words.shape[-1]) == 256
        assert scales.shape == (2, 256 // group_size)
        assert bool(biases) == spec.affine


def test_dense_checkpoint_has_an_empty_plan() -> None:
    infos = {"a.weight": TensorInfo((8, 256), "BF16")}
    assert plan(infos) == QuantizationPlan()
    assert plan(infos, {"group_size": 64, "bits": 4}) == QuantizationPlan()


def test_overrides_win_over_the_default_and_lack_of_mode_means_affine() -> None:
    infos = {
        **layer("a", 4, 32, scales=FP_SCALES, biases=False),
        **layer("gate", 8, 64),
        "dense.weight": TensorInfo((8, 256), "BF16"),
    }
    setting = {
        "mode": "mxfp4",
        "group_size": 32,
        "bits": 4,
        "gate": {"group_size": 64, "bits": 8},
        "dense": False,
        "a": True,
    }
    found = plan(infos, setting)
    assert found.layers == {
        "a": QuantizationSpec("mxfp4", 4, 32),
        "gate": QuantizationSpec("affine", 8, 64),
    }


def test_overrides_go_through_the_weight_plan_and_fan_out() -> None:
    rules = (
        Rename("model.", ""),
        Drop("vision."),
        Split("qkv.weight", ("q.weight", "k.weight"), (4, 4)),
        Split("qkv.scales", ("q.scales", "k.scales"), (4, 4)),
        Split("qkv.biases", ("q.biases", "k.biases"), (4, 4)),
    )
    stored = layer("model.qkv", 8, 32)
    weight_plan = WeightPlan(rules)
    config = CheckpointConfig(
        {
            "quantization": {
                "bits": 4,
                "group_size": 64,
                "model.qkv": {"bits": 8, "group_size": 32},
                "vision.a": {"bits": 8},
            }
        }
    )
    found = plan_quantization(config, weight_plan, weight_plan.resolve(stored).infos)
    spec = QuantizationSpec("affine", 8, 32)
    assert found.layers == {"q": spec, "k": spec}
    assert found.notes == ()


def test_two_spellings_of_one_override_must_agree() -> None:
    setting = {"model.a": {"bits": 8}, "a": {"bits": 4}}
    with pytest.raises(ConfigError, match="must agree"):
        plan(layer("a"), setting, (Rename("model.", ""),))
    setting["a"] = {"bits": 8}
    found = plan(layer("a", 8), setting, (Rename("model.", ""),))
    assert found.get("a") == QuantizationSpec("affine", 8, 64)


def test_override_that_matches_nothing_is_a_note() -> None:
    found = plan(layer("a"), {"bits": 4, "group_size": 64, "typo": {"bits": 8}})
    assert len(found.notes) == 1
    assert "'typo'" in found.notes[0]


def test_layer_beside_a_default_that_does_not_fit_is_inferred() -> None:
    infos = {**layer("a", 4, 64), **layer("b", 6, 64)}
    found = plan(infos, {"bits": 4, "group_size": 64})
    assert found.get("b") == QuantizationSpec("affine", 6, 64)


def test_ambiguous_shapes_are_settled_by_the_width() -> None:
    # 4 bits in groups of 64 and 8 bits in groups of 32 give the same words a group.
    infos = layer("a", 8, 32)
    setting = {"bits": 4, "group_size": 64}
    assert plan(infos, setting).get("a") == QuantizationSpec("affine", 4, 64)
    assert plan(infos, setting, widths={"a": 256}).get("a") == QuantizationSpec("affine", 8, 32)


def test_expert_stacks_keep_their_leading_axis() -> None:
    infos = layer("experts.up", 4, 32, rows=(5, 8))
    assert plan(infos, {"bits": 4, "group_size": 32}).get("experts.up").group_size == 32


def broken(change):
    infos = layer("a")
    for key, value in change.items():
        if value is None:
            del infos[key]
        else:
            infos[key] = TensorInfo(*value)
    return infos


@pytest.mark.parametrize(
    ("infos", "setting", "widths", "tensor"),
    [
        (layer("a"), {"a": {"bits": 8, "group_size": 64}}, None, "a.weight"),
        (layer("a"), {"a": {"bits": 4, "group_size": 64}}, {"a": 512}, "a.weight"),
        (layer("a"), {"bits": 4, "group_size": 64}, {"a": 264}, "a.weight"),
        (layer("a"), {"a": False}, None, "a.scales"),
        (layer("a"), {"a": {"mode": "mxfp8"}}, None, "a.weight"),
        (broken({"a.weight": None}), None, None, "a.weight"),
        (broken({"a.weight": ((8, 32), "BF16")}), None, None, "a.weight"),
        (broken({"a.weight": ((8,), "U32")}), None, None, "a.weight"),
        (broken({"a.weight": ((8, 31), "U32")}), None, None, "a.weight"),
        (broken({"a.scales": ((7, 4), "F16")}), None, None, "a.scales"),
        (broken({"a.scales": ((8, 4, 1), "F16")}), None, None, "a.scales"),
        (broken({"a.scales": ((8, 4), "I32")}), None, None, "a.scales"),
        (broken({"a.scales": None, "a.biases": None}), None, None, "a.scales"),
        (broken({"a.scales": ((8, 4), "U8")}), None, None, "a.biases"),
        (broken({"a.biases": None}), None, None, "a.biases"),
        (broken({"a.biases": ((8, 3), "F16")}), None, None, "a.biases"),
        (broken({"a.biases": ((8, 4), "U8")}), None, None, "a.biases"),
        (
            broken(
                {
                    "a.weight": ((8, 0), "U32"),
                    "a.scales": ((8, 0), "F16"),
                    "a.biases": ((8, 0), "F16"),
                }
            ),
            None,
            None,
            "a.weight",
        ),
    ],
)
def test_contradiction_names_the_tensor(infos, setting, widths, tensor) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan(infos, setting, widths=widths)
    assert caught.value.code == "checkpoint.quantization"
    assert f"'{tensor}'" in str(caught.value)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "compressed-tensors", "", 7, []])
@pytest.mark.parametrize("nested", [False, True])
def test_foreign_method_is_refused_by_name(method, nested) -> None:
    entry = {"quantization_config": {"quant_method": method, "bits": 4}}
    config = CheckpointConfig({"text_config": entry} if nested else entry)
    with pytest.raises(ConfigError) as caught:
        plan_quantization(config, WeightPlan(), layer("a"))
    assert caught.value.code == "config.quant_method"
    assert repr(str(method)) in str(caught.value)
    assert caught.value.hint


def test_own_entry_wins_over_a_foreign_leftover() -> None:
    config = CheckpointConfig(
        {
            "quantization": {"bits": 4, "group_size": 64},
            "quantization_config": {"quant_method": "fp8"},
        }
    )
    assert plan_quantization(config, WeightPlan(), layer("a")).get("a") == QuantizationSpec()


@pytest.mark.parametrize(
    "setting",
    [
        [],
        {"bits": 7},
        {"bits": "4"},
        {"bits": True},
        {"group_size": 16},
        {"mode": "int8"},
        {"mode": 4},
        {"mode": "mxfp4", "bits": 8},
        {"a": {"bits": 4, "extra": 1}},
        {"a": [4, 64]},
        {"a": {"bits": 4.5}},
        {"x" * 1025: {"bits": 4}},
        {f"p{n}": False for n in range(65_537)},
    ],
)
def test_malformed_entry_is_a_config_error(setting) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: quantization"):
        plan(layer("a"), setting)


def test_plan_is_frozen_and_compares_by_value() -> None:
    layers = {"a": QuantizationSpec()}
    first = QuantizationPlan(layers)
    layers["b"] = QuantizationSpec()
    assert first == QuantizationPlan({"a": QuantizationSpec("affine", 4, 64)})
    assert first.get("b") is None
    with pytest.raises(TypeError):
        first.layers["c"] = QuantizationSpec()
