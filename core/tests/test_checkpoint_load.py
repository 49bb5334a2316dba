"""Loading a model: what its parameters become, and what does not fit it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from engine_core.checkpoint import load as load_module
from engine_core.checkpoint.load import choose_compute_dtype, load_model
from engine_core.checkpoint.reader import read_checkpoint
from engine_core.errors import ConfigError, EngineError, InvalidRequest, PluginError
from engine_core.family import Architecture, Full, MediaPlan, MtpPlan, NormFold
from engine_core.kernels import KernelRegistry
from engine_core.nn import Embedding, Linear, Module, RMSNorm
from engine_core.quantization import MODES, QuantizationSpec
from engine_core.spec import SpecAnswers
from engine_core.testing.checkpoints import bfloat16, write_checkpoint
from engine_core.weight_plan import Concat, Drop, Rename, TensorInfo, WeightPlan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RANDOM = np.random.default_rng(11)
VOCAB, HIDDEN, INNER = 24, 256, 128


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


class Block(Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = Linear(HIDDEN, INNER)
        self.down = Linear(INNER, HIDDEN)
        self.norm = RMSNorm(HIDDEN, eps=1e-6)


class Tiny(Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(VOCAB, HIDDEN)
        self.layers = [Block(), Block()]
        self.bias = mx.zeros((3,))


def dense_tensors() -> dict[str, np.ndarray]:
    tensors = {"model.embedding.weight": normal(VOCAB, HIDDEN), "model.bias": normal(3)}
    for number in range(2):
        tensors |= {
            f"model.layers.{number}.up.weight": normal(INNER, HIDDEN),
            f"model.layers.{number}.down.weight": normal(HIDDEN, INNER),
            f"model.layers.{number}.norm.weight": normal(HIDDEN),
        }
    return tensors


TENSORS = dense_tensors()
RULES = (Rename("model.", ""), Drop("vision."))


def answer(checkpoint, rules=RULES, *, fold=None, keep=(), mtp=None, media=None, built=None):
    plan = WeightPlan(rules)

    def build(context):
        if built is not None:
            built.append(context)
        return Tiny()

    return SpecAnswers(
        weight_plan=plan,
        weights=plan.resolve(checkpoint.tensors),
        norm_fold=fold,
        architecture=Architecture(
            build=build,
            layers=(),
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            context_length=16,
            keep_float32=frozenset(keep),
        ),
        mtp=mtp,
        media=media,
    )


def load(path: Path, rules=RULES, *, dtype=mx.float32, policy="auto", budget=None, **answers):
    with read_checkpoint(path) as checkpoint:
        return load_model(
            checkpoint,
            answer(checkpoint, rules, **answers),
            kernels=KernelRegistry(),
            compute_dtype=dtype,
            quantized_weights=policy,
            memory_budget=budget,
        )


def parameters(loaded) -> dict[str, mx.array]:
    return dict(tree_flatten(loaded.model.parameters()))


def save(tmp_path: Path, tensors: Mapping | None = None, config=None, **options) -> Path:
    return write_checkpoint(
        tmp_path / "c", config or {}, TENSORS if tensors is None else tensors, **options
    )


def pack(tensors, choose) -> dict[str, np.ndarray]:
    """Pack matrices with MLX's own quantizer; ``choose`` gives a spec or ``None`` by key."""
    result = {}
    for key, tensor in tensors.items():
        spec = choose(key)
        if tensor.ndim != 2 or spec is None:
            result[key] = tensor
            continue
        words, scales, *biases = mx.quantize(
            mx.array(tensor), group_size=spec.group_size, bits=spec.bits, mode=spec.mode
        )
        stem = key.removesuffix("weight")
        result[key] = np.array(words)
        for name, value in zip(("scales", "biases"), (scales, *biases), strict=False):
            result[stem + name] = np.array(value)
    return result


# ------------------------------------------------------------------ dense


@pytest.mark.parametrize("shards", [1, 3])
def test_dense_checkpoint_fills_every_parameter(tmp_path: Path, shards: int) -> None:
    path = save(tmp_path, shards=shards)
    loaded = load(path)
    found = parameters(loaded)
    assert found.keys() == {key.removeprefix("model.") for key in TENSORS}
    for key, array in found.items():
        assert array.dtype == mx.float32
        assert np.array_equal(np.array(array), TENSORS[f"model.{key}"])
    assert loaded.quantization.layers == {}
    assert loaded.digests == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.glob("*.safetensors")
    }


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_floating_tensors_get_the_compute_dtype_but_kept_ones(tmp_path: Path, dtype) -> None:
    stored = {key: bfloat16(tensor) for key, tensor in TENSORS.items()}
    found = parameters(load(save(tmp_path, stored), dtype=dtype, keep={"bias"}))
    assert found["bias"].dtype == mx.float32
    assert {array.dtype for key, array in found.items() if key != "bias"} == {dtype}
    rounded = mx.array(TENSORS["model.bias"]).astype(mx.bfloat16).astype(mx.float32)
    assert mx.array_equal(found["bias"], rounded)


def test_norm_fold_is_added_once_in_float32(tmp_path: Path) -> None:
    """A delta that vanishes beside 1 in bfloat16 must survive in a float32 model."""
    tensors = dict(TENSORS)
    delta = np.full(HIDDEN, 2.0**-12, np.float32)
    tensors["model.layers.0.norm.weight"] = bfloat16(delta)
    fold = NormFold(keys=frozenset({"layers.0.norm.weight"}))
    found = parameters(load(save(tmp_path, tensors), fold=fold))
    assert np.array_equal(np.array(found["layers.0.norm.weight"]), delta + np.float32(1))
    expected = TENSORS["model.layers.1.norm.weight"]
    assert np.array_equal(np.array(found["layers.1.norm.weight"]), expected)


def test_every_parameter_is_evaluated_when_the_load_returns(tmp_path: Path) -> None:
    path = save(tmp_path)
    loaded = load(path)
    (path / "model.safetensors").write_bytes(b"")
    for key, array in parameters(loaded).items():
        assert np.array_equal(np.array(array), TENSORS[f"model.{key}"])


def test_progress_reaches_the_total_and_what_it_raises_ends_the_load(tmp_path: Path) -> None:
    calls = []
    with read_checkpoint(save(tmp_path)) as checkpoint:
        options = {"kernels": KernelRegistry(), "compute_dtype": mx.float32}
        load_model(
            checkpoint,
            answer(checkpoint),
            on_progress=lambda done, total: calls.append((done, total)),
            **options,
        )
        assert calls[-1][0] == calls[-1][1] > 0
        with pytest.raises(ZeroDivisionError):
            load_model(
                checkpoint, answer(checkpoint), on_progress=lambda done, total: 1 // 0, **options
            )


def test_optional_modules_are_checked_and_left_unread(tmp_path: Path, monkeypatch) -> None:
    tensors = TENSORS | {"mtp.w": normal(4, 2), "tower.w": normal(5)}
    path = save(tmp_path, tensors)
    mtp = MtpPlan(expected={"mtp.w": TensorInfo((4, 2), "F32")})
    media = MediaPlan(expected={"tower.w": TensorInfo((5,), "F32")})
    assert "mtp.w" not in parameters(load(path, mtp=mtp, media=media))
    for broken in (
        {"mtp": MtpPlan(expected={"mtp.w": TensorInfo((2, 4), "F32")}), "media": media},
        {"mtp": mtp, "media": MediaPlan(expected={"tower.w": TensorInfo((6,), "F32")})},
        {"mtp": mtp, "media": MediaPlan(expected={"tower.v": TensorInfo((5,), "F32")})},
    ):
        with pytest.raises(EngineError, match=r"mtp|tower"):
            load(path, **broken)
    reason = MtpPlan(expected={"mtp.w": TensorInfo((9,), "F32")}, reason="not certified")
    load(path, mtp=reason, media=media)


# ------------------------------------------------------------------ packed

SPECS = [
    QuantizationSpec(mode.name, bits, group_size)
    for mode in MODES.values()
    for bits in mode.bits
    for group_size in mode.group_sizes
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.mode}-{s.bits}-{s.group_size}")
def test_packed_layers_are_kept_or_unpacked_alike(tmp_path: Path, spec) -> None:
    tensors = pack(TENSORS, lambda key: spec)
    config = {"quantization": {"mode": spec.mode, "bits": spec.bits, "group_size": spec.group_size}}
    path = save(tmp_path, tensors, config)
    kept, dense = load(path, policy="keep"), load(path, policy="dequantize")
    assert kept.quantization.get("layers.1.up") == spec
    assert dense.quantization.layers == {}
    packed, unpacked = parameters(kept), parameters(dense)
    assert packed["layers.0.up.weight"].dtype == mx.uint32
    scales = packed["layers.0.up.scales"]
    assert scales.dtype == (mx.float32 if spec.affine else mx.uint8)
    assert unpacked.keys() == {key.removeprefix("model.") for key in TENSORS}
    rows = mx.array(normal(3, HIDDEN))
    by_packed = np.array(kept.model.layers[0].up(rows))
    by_dense = np.array(rows) @ np.array(unpacked["layers.0.up.weight"]).T
    assert np.abs(by_packed - by_dense).max() < 2e-3
    table = np.array(unpacked["embedding.weight"])
    ids = mx.array([[0, 5, VOCAB - 1]])
    looked_up = np.array(kept.model.embedding(ids).astype(mx.float32))
    assert np.abs(looked_up - table[[0, 5, VOCAB - 1]]).max() < 1e-5
    # Unpacking is checked against the original matrix: the error of rounding, nothing else.
    original = TENSORS["model.layers.0.up.weight"]
    step = np.abs(original).max() * 2.0 ** (1 - spec.bits) + (0 if spec.affine else 1.0)
    assert np.abs(np.array(unpacked["layers.0.up.weight"]) - original).max() < step


def test_affine_unpacking_equals_the_formula(tmp_path: Path) -> None:
    """``value = q * scale + bias`` with q the 4-bit fields of each word, lowest first."""
    spec = QuantizationSpec("affine", 4, 64)
    tensors = pack(TENSORS, lambda key: spec)
    path = save(tmp_path, tensors, {"quantization": {"bits": 4, "group_size": 64}})
    found = np.array(parameters(load(path, policy="dequantize"))["layers.0.up.weight"])
    words = tensors["model.layers.0.up.weight"].astype(np.uint64)
    fields = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint64)) & 15
    values = fields.reshape(INNER, HIDDEN // 64, 64).astype(np.float64)
    scales = tensors["model.layers.0.up.scales"].astype(np.float64)[..., None]
    biases = tensors["model.layers.0.up.biases"].astype(np.float64)[..., None]
    expected = (values * scales + biases).reshape(INNER, HIDDEN)
    assert np.abs(found - expected).max() < 1e-6


def test_mixed_packing_with_overrides_and_dense_layers(tmp_path: Path) -> None:
    eight = QuantizationSpec("affine", 8, 32)
    four = QuantizationSpec("affine", 4, 64)

    def choose(key: str):
        if "layers.1" in key:
            return None
        return eight if "embedding" in key else four

    config = {
        "quantization_config": {
            "bits": 4,
            "group_size": 64,
            "model.embedding": {"bits": 8, "group_size": 32},
            "model.layers.1.up": False,
        }
    }
    path = save(tmp_path, pack(TENSORS, choose), config)
    loaded = load(path, policy="keep", dtype=mx.bfloat16)
    assert dict(loaded.quantization.layers) == {
        "embedding": eight,
        "layers.0.up": four,
        "layers.0.down": four,
    }
    found = parameters(loaded)
    assert found["layers.0.up.scales"].dtype == mx.bfloat16
    assert found["layers.0.up.weight"].dtype == mx.uint32
    assert found["layers.1.up.weight"].dtype == mx.bfloat16


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    "spec", [QuantizationSpec("affine", 4, 64), QuantizationSpec("mxfp4", 4, 32)], ids=str
)
def test_packed_embedding_gives_rows_in_the_compute_dtype(
    tmp_path: Path, spec: QuantizationSpec, dtype: mx.Dtype
) -> None:
    choice = {"bits": spec.bits, "group_size": spec.group_size, "mode": spec.mode}
    path = save(tmp_path, pack(TENSORS, lambda _: spec), {"quantization": choice})
    loaded = load(path, policy="keep", dtype=dtype)
    assert loaded.quantization.layers["embedding"] == spec
    assert loaded.model.embedding(mx.array([[0, 1]])).dtype == dtype


def test_layer_that_config_leaves_open_is_read_by_its_width(tmp_path: Path) -> None:
    """8 bits in groups of 32 look like 4 bits in groups of 64 until the width is known."""
    spec = QuantizationSpec("affine", 8, 32)
    built = []
    path = save(tmp_path, pack(TENSORS, lambda key: spec), {"quantization": {"bits": 4}})
    loaded = load(path, policy="keep", built=built)
    assert set(loaded.quantization.layers.values()) == {spec}
    assert len(built) == 1


def test_packed_parts_may_be_joined_by_the_plan(tmp_path: Path) -> None:
    spec = QuantizationSpec("affine", 4, 32)
    tensors = pack(TENSORS, lambda key: spec)
    split = {}
    for key, tensor in tensors.items():
        if "layers.0.up." in key:
            split[key.replace("up", "up_a")] = tensor[:100]
            split[key.replace("up", "up_b")] = tensor[100:]
        else:
            split[key] = tensor
    rules = [Rename("model.", "")]
    for part in ("weight", "scales", "biases"):
        names = [f"layers.0.up_{half}.{part}" for half in "ab"]
        rules.append(Concat(tuple(names), f"layers.0.up.{part}"))
    config = {
        "quantization": {
            "bits": 8,
            "group_size": 64,
            **{
                key.removesuffix(".weight"): {"bits": 4, "group_size": 32}
                for key in split
                if key.endswith(".weight") and "norm" not in key
            },
        }
    }
    path = save(tmp_path, split, config)
    for policy in ("keep", "dequantize"):
        joined = parameters(load(path, rules, policy=policy))
        whole = parameters(
            load(
                write_checkpoint(
                    tmp_path / "w", {"quantization": {"bits": 4, "group_size": 32}}, tensors
                ),
                policy=policy,
            )
        )
        for key, array in whole.items():
            assert mx.array_equal(array, joined[key])


def test_auto_policy_follows_device_and_budget(tmp_path: Path, monkeypatch) -> None:
    spec = QuantizationSpec("affine", 4, 64)
    tensors = pack(TENSORS, lambda key: spec)
    path = save(tmp_path, tensors, {"quantization": {"bits": 4, "group_size": 64}})
    needed = 4 * sum(tensor.size for tensor in TENSORS.values())
    for cpu, budget, unpacked in (
        (True, needed, True),
        (True, needed - 1, False),
        (False, needed, False),
        (True, None, True),
    ):
        monkeypatch.setattr(load_module, "computes_on_cpu", lambda cpu=cpu: cpu)
        loaded = load(path, budget=budget)
        assert (not loaded.quantization.layers) == unpacked
        assert bool(loaded.notes) == (cpu is True)
    with pytest.raises(InvalidRequest):
        load(path, policy="sometimes")


def test_compute_dtype_is_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu(monkeypatch) -> None:
    infos = {
        "big": TensorInfo((100, 100), "BF16"),
        "norm": TensorInfo((100,), "F32"),
        "packed": TensorInfo((1000, 1000), "U32"),
    }
    monkeypatch.setattr(load_module, "computes_on_cpu", lambda: True)
    assert choose_compute_dtype("auto", infos) == mx.float32
    monkeypatch.setattr(load_module, "computes_on_cpu", lambda: False)
    assert choose_compute_dtype("auto", infos) == mx.bfloat16
    assert choose_compute_dtype("auto", {"w": TensorInfo((1,), "F64")}) == mx.float32
    assert choose_compute_dtype("float16", infos) == mx.float16
    with pytest.raises(InvalidRequest) as caught:
        choose_compute_dtype("int8", infos)
    assert caught.value.code == "request.compute_dtype"


# ------------------------------------------------------------------ what does not fit


def without(key: str):
    return {name: tensor for name, tensor in TENSORS.items() if name != key}


FOUR = QuantizationSpec("affine", 4, 64)
PACKED = pack(TENSORS, lambda key: FOUR)
UP = "model.layers.0.up"

MISFITS = {
    "missing": (without(f"{UP}.weight"), {}, "checkpoint.tensor_missing", "layers.0.up.weight"),
    "extra": (
        TENSORS | {"model.more.weight": normal(2)},
        {},
        "checkpoint.tensor_extra",
        "model.safetensors: tensor 'model.more.weight'",
    ),
    "misshapen": (
        TENSORS | {f"{UP}.weight": normal(INNER, HIDDEN + 1)},
        {},
        "checkpoint.tensor_shape",
        f"model.safetensors: tensor '{UP}.weight'",
    ),
    "other rank": (
        TENSORS | {"model.bias": normal(3, 1)},
        {},
        "checkpoint.tensor_shape",
        "'model.bias'",
    ),
    "integers": (
        TENSORS | {f"{UP}.weight": np.zeros((INNER, HIDDEN), np.int32)},
        {},
        "checkpoint.tensor_dtype",
        f"'{UP}.weight'",
    ),
    "eight-bit floats": (
        TENSORS | {f"{UP}.weight": ("F8_E4M3", (INNER, HIDDEN), bytes(INNER * HIDDEN))},
        {},
        "checkpoint.tensor_dtype",
        f"'{UP}.weight'",
    ),
    "two spellings": (
        TENSORS | {"bias": normal(3)},
        {},
        "checkpoint.tensor_collision",
        "'model.bias'",
    ),
    "packed contradiction": (
        PACKED,
        {"quantization": {"bits": 4, "group_size": 64, UP: {"bits": 8, "group_size": 64}}},
        "checkpoint.quantization",
        "'layers.0.up.weight'",
    ),
    "packed rows": (
        PACKED | {f"{UP}.{p}": PACKED[f"{UP}.{p}"][1:] for p in ("weight", "scales", "biases")},
        {"quantization": {"bits": 4, "group_size": 64}},
        "checkpoint.tensor_shape",
        f"model.safetensors: tensor '{UP}.weight'",
    ),
    "packed norm": (
        {key: value for key, value in PACKED.items() if "layers.0.norm" not in key}
        | {
            "model.layers.0.norm.weight": np.zeros((1, HIDDEN // 8), np.uint32),
            "model.layers.0.norm.scales": np.ones((1, HIDDEN // 64), np.float32),
            "model.layers.0.norm.biases": np.ones((1, HIDDEN // 64), np.float32),
        },
        {"quantization": {"bits": 4, "group_size": 64}},
        "checkpoint.tensor_shape",
        "'model.layers.0.norm.",
    ),
    "scales without weight": (
        TENSORS | {f"{UP}.scales": normal(INNER, 4)},
        {},
        "checkpoint.quantization",
        "'layers.0.up.weight'",
    ),
    "foreign method": (
        TENSORS,
        {"quantization_config": {"quant_method": "fp8"}},
        "config.quant_method",
        "'fp8'",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("policy", ["keep", "dequantize"])
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, policy: str) -> None:
    tensors, config, code, part = MISFITS[name]
    with pytest.raises(EngineError) as caught:
        load(save(tmp_path, tensors, config), policy=policy)
    assert caught.value.code == code
    assert part in str(caught.value)
    assert caught.value.hint


def test_misfit_is_found_before_any_payload_is_read(tmp_path: Path, monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        msg = "a payload was read"
        raise AssertionError(msg)

    monkeypatch.setattr(load_module, "materialise", refuse)
    for tensors, config, code, _ in MISFITS.values():
        with pytest.raises(EngineError) as caught:
            load(save(tmp_path, tensors, config))
        assert caught.value.code == code


def test_headers_plan_and_quantization_are_checked_without_mlx(tmp_path, monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        msg = "MLX was used"
        raise AssertionError(msg)

    foreign = {"quantization_config": {"quant_method": "awq"}}
    path = save(tmp_path, PACKED, foreign)
    for name in ("array", "zeros", "ones", "full", "load", "eval", "dequantize"):
        monkeypatch.setattr(mx, name, refuse)
    with pytest.raises(ConfigError):
        load(path)


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (ZeroDivisionError("no"), "ZeroDivisionError"),
        (SystemExit(3), "SystemExit"),
        (None, "NoneType"),
        (object(), "object"),
    ],
)
def test_build_that_raises_or_makes_no_model_is_a_plugin_error(
    tmp_path: Path, outcome, shown
) -> None:
    def build(_):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    with read_checkpoint(save(tmp_path)) as checkpoint:
        answers = answer(checkpoint)
        answers = attrs.evolve(
            answers, architecture=attrs.evolve(answers.architecture, build=build)
        )
        with pytest.raises(PluginError, match=shown) as caught:
            load_model(checkpoint, answers, kernels=KernelRegistry(), compute_dtype=mx.float32)
    assert caught.value.code == "plugin.build"


def test_architecture_takes_layers_once_and_only_a_callable_build() -> None:
    layer = Full(kv_heads=1, head_dim=8)
    sizes = {"vocab_size": 4, "hidden_size": 4, "context_length": 4}
    made = Architecture(build=len, layers=(one for one in [layer]), **sizes)
    assert made.layers == (layer,)
    with pytest.raises(TypeError):
        Architecture(build=3, layers=(layer,), **sizes)
