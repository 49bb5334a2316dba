"""Packed layers against a bit-by-bit reading of the format."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from engine_core.errors import ModelError
from engine_core.nn import (
    Embedding,
    GatedMLP,
    Linear,
    Module,
    QuantizedEmbedding,
    QuantizedLinear,
    RMSNorm,
    dequantize,
    module_at,
    quantize_module,
    quantized,
    replace_module,
)
from engine_core.quantization import QuantizationPlan, QuantizationSpec
from engine_core.testing import reference

SPECS = [
    QuantizationSpec("affine", bits, group)
    for bits, group in ((2, 32), (3, 64), (4, 32), (4, 128), (5, 32), (6, 64), (8, 32))
]
SPECS += [
    QuantizationSpec("mxfp4", 4, 32),
    QuantizationSpec("mxfp8", 8, 32),
    QuantizationSpec("nvfp4", 4, 16),
]
ROWS, WIDTH = 24, 128
EVERY_MODE = pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.mode}-{s.bits}-{s.group_size}"
)


def random_packed(spec: QuantizationSpec):
    """Random words and scales: no quantizer is involved, so every code occurs."""
    generator = np.random.default_rng(spec.bits * 1000 + spec.group_size)
    words = generator.integers(0, 2**32, (ROWS, spec.words(WIDTH)), dtype=np.uint32)
    groups = (ROWS, WIDTH // spec.group_size)
    if spec.affine:
        return words, *(generator.normal(size=groups).astype(np.float32) for _ in range(2))
    if spec.mode == "nvfp4":
        # 127 is NaN in e4m3; scales are positive.
        return words, generator.integers(0, 127, groups, dtype=np.uint8), None
    if spec.mode == "mxfp8":
        codes = words.view(np.uint8)
        codes[(codes & 127) == 127] = 0
    return words, generator.integers(118, 132, groups, dtype=np.uint8), None


def as_float64(spec: QuantizationSpec, words, scales, biases):
    return reference.dequantize(
        words, scales, biases, mode=spec.mode, bits=spec.bits, group_size=spec.group_size
    )


def fill(layer, words, scales, biases):
    layer.weight, layer.scales = mx.array(words), mx.array(scales)
    if biases is not None:
        layer.biases = mx.array(biases)
    return layer


@EVERY_MODE
def test_dequantize_every_mode_equals_the_format(spec: QuantizationSpec) -> None:
    words, scales, biases = random_packed(spec)
    packed = [None if a is None else mx.array(a) for a in (words, scales, biases)]
    unpacked = np.array(dequantize(*packed, spec, mx.float32))
    expected = as_float64(spec, words, scales, biases)
    assert unpacked.shape == (ROWS, WIDTH)
    np.testing.assert_allclose(unpacked, expected, rtol=1e-6, atol=1e-6)


def test_dequantize_half_precision_scales_are_not_rounded_again() -> None:
    spec = QuantizationSpec("affine", 4, 32)
    words, scales, biases = random_packed(spec)
    halves = [array.astype(np.float16) for array in (scales, biases)]
    unpacked = dequantize(mx.array(words), *map(mx.array, halves), spec, mx.float32)
    np.testing.assert_allclose(np.array(unpacked), as_float64(spec, words, *halves), rtol=1e-6)


@EVERY_MODE
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (2, 4)])
def test_quantized_linear_equals_product_with_unpacked_weight(spec, shape) -> None:
    words, scales, biases = random_packed(spec)
    layer = Linear(WIDTH, ROWS, bias=True).to_quantized(spec)
    assert isinstance(layer, QuantizedLinear)
    assert layer.spec == spec
    fill(layer, words, scales, biases)
    bias = np.random.default_rng(2).normal(size=ROWS)
    layer.bias = mx.array(bias.astype(np.float32))
    x = np.random.default_rng(1).normal(size=(*shape, WIDTH)).astype(np.float32)
    expected = np.float64(x) @ as_float64(spec, words, scales, biases).T + bias
    out = np.array(layer(mx.array(x)))
    assert out.shape == (*shape, ROWS)
    assert np.abs(out - expected).max() < 1e-5 * np.abs(expected).max()


@EVERY_MODE
def test_quantized_embedding_looks_up_and_projects(spec: QuantizationSpec) -> None:
    words, scales, biases = random_packed(spec)
    layer = Embedding(ROWS, WIDTH).to_quantized(spec)
    assert isinstance(layer, QuantizedEmbedding)
    fill(layer, words, scales, biases)
    table = as_float64(spec, words, scales, biases)
    ids = np.array([[0, 5, ROWS - 1], [5, 1, 2]], np.int32)
    np.testing.assert_allclose(np.array(layer(mx.array(ids))), table[ids], rtol=1e-6, atol=1e-6)
    hidden = np.random.default_rng(3).normal(size=(1, 2, WIDTH)).astype(np.float32)
    scores = np.float64(hidden) @ table.T
    out = np.array(layer.as_linear(mx.array(hidden)))
    assert np.abs(out - scores).max() < 1e-5 * np.abs(scores).max()


DTYPES = pytest.mark.parametrize(
    ("dtype", "rounding"), [(mx.float32, 1e-5), (mx.bfloat16, 8e-3), (mx.float16, 1e-3)]
)


@EVERY_MODE
@DTYPES
@pytest.mark.parametrize("unpacks_from", [None, 1], ids=["packed", "unpacked"])
def test_products_keep_the_dtype_of_their_input(
    spec, dtype, rounding, unpacks_from, monkeypatch
) -> None:
    """Packed or unpacked in blocks of 5 of the 24 rows, on a CPU rounded only at the end."""
    monkeypatch.setattr(quantized, "unpacks_from", lambda _: unpacks_from)
    monkeypatch.setattr(quantized, "CPU_BLOCK_BYTES", 5 * WIDTH * 4)
    words, scales, biases = random_packed(spec)
    linear = fill(Linear(WIDTH, ROWS).to_quantized(spec), words, scales, biases)
    table = fill(Embedding(ROWS, WIDTH).to_quantized(spec), words, scales, biases)
    x = mx.array(np.random.default_rng(4).normal(size=(2, 3, WIDTH))).astype(dtype)
    exact = np.array(x.astype(mx.float32)).astype(np.float64)
    expected = exact @ as_float64(spec, words, scales, biases).T
    for product in (linear, table.as_linear):
        out = product(x)
        assert out.dtype == dtype
        assert out.shape == (2, 3, ROWS)
        found = np.array(out.astype(mx.float32))
        assert np.abs(found - expected).max() < rounding * np.abs(expected).max()


@pytest.mark.parametrize(
    ("spec", "fast", "cuda"),
    [
        (QuantizationSpec("affine", 2, 64), 8, 128),
        (QuantizationSpec("affine", 3, 64), 32, 128),
        (QuantizationSpec("affine", 4, 64), 8, 128),
        (QuantizationSpec("affine", 5, 64), 32, 128),
        (QuantizationSpec("affine", 6, 64), 32, 128),
        (QuantizationSpec("affine", 8, 64), 8, 128),
        (QuantizationSpec("mxfp4", 4, 32), 32, None),
        (QuantizationSpec("mxfp8", 8, 32), 8, None),
        (QuantizationSpec("nvfp4", 4, 16), 32, None),
    ],
    ids=lambda spec: f"{spec.mode}-{spec.bits}" if isinstance(spec, QuantizationSpec) else None,
)
def test_rows_from_which_a_weight_is_unpacked(spec, fast, cuda, monkeypatch) -> None:
    def on(device, *, blas="bundled", has_cuda=False):
        monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=device))
        monkeypatch.setattr(quantized, "backend_report", lambda: SimpleNamespace(blas=blas))
        monkeypatch.setattr(mx.cuda, "is_available", lambda: has_cuda)
        return quantized.unpacks_from(spec)

    assert on(mx.DeviceType.cpu, blas="openblas 0.3.34") == fast
    assert on(mx.DeviceType.cpu, has_cuda=True) is None
    assert on(mx.DeviceType.gpu, has_cuda=True) == cuda
    assert on(mx.DeviceType.gpu, blas="openblas 0.3.34") is None


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((1, 1), []), ((1, 7), []), ((7, 1), []), ((1, 8), [24]), ((4, 2), [24]), ((9,), [24])],
)
def test_weight_is_unpacked_for_many_rows_only(shape, blocks, monkeypatch) -> None:
    spec = QuantizationSpec("affine", 4, 32)
    monkeypatch.setattr(quantized, "unpacks_from", lambda _: 8)
    assert unpacked_blocks(spec, shape, monkeypatch) == blocks


def test_no_more_than_a_block_of_a_large_weight_is_unpacked_at_once(monkeypatch) -> None:
    spec = QuantizationSpec("affine", 4, 32)
    monkeypatch.setattr(quantized, "unpacks_from", lambda _: 8)
    monkeypatch.setattr(quantized, "CPU_BLOCK_BYTES", 10 * WIDTH * 4)
    assert unpacked_blocks(spec, (1, 8), monkeypatch) == [10, 10, 4]


def unpacked_blocks(spec: QuantizationSpec, shape, monkeypatch) -> list[int]:
    """Rows of each part of the weight that one product unpacks."""
    blocks: list[int] = []
    dequantize_words = mx.dequantize

    def counted(weight, *arguments, **options):
        blocks.append(weight.shape[0])
        return dequantize_words(weight, *arguments, **options)

    layer = fill(Linear(WIDTH, ROWS).to_quantized(spec), *random_packed(spec))
    monkeypatch.setattr(mx, "dequantize", counted)
    layer(mx.ones((*shape, WIDTH)))
    return blocks


@EVERY_MODE
@DTYPES
def test_packed_table_gives_rows_in_the_compute_dtype(spec, dtype, rounding) -> None:
    """Scales of one byte do not say it; a float32 row would raise all that follows to float32."""
    tree = Tree()
    tree.table = Embedding(ROWS, WIDTH)
    quantize_module(tree, QuantizationPlan({"table": spec}), dtype)
    words, scales, biases = random_packed(spec)
    fill(tree.table, words, scales, biases)
    rows = tree.table(mx.array([[0, 5, ROWS - 1]]))
    assert rows.dtype == dtype
    expected = as_float64(spec, words, scales, biases)[[0, 5, ROWS - 1]]
    found = np.array(rows.astype(mx.float32))[0]
    assert np.abs(found - expected).max() < rounding * np.abs(expected).max()


@EVERY_MODE
def test_packed_placeholders_have_the_stored_shapes(spec: QuantizationSpec) -> None:
    layer = Linear(WIDTH, ROWS).to_quantized(spec)
    words, scales, biases = random_packed(spec)
    shapes = {"weight": words.shape, "scales": scales.shape}
    if biases is not None:
        shapes["biases"] = biases.shape
    assert {name: array.shape for name, array in layer.parameters().items()} == shapes


class Tree(Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(8, 64)
        self.layers = [GatedMLP(64, 96, fused=fused) for fused in (False, True)]
        self.norm = RMSNorm(64, 1e-5)


def test_quantize_module_replaces_named_layers_only() -> None:
    tree = Tree()
    spec = QuantizationSpec("affine", 4, 32)
    quantize_module(tree, QuantizationPlan({"table": spec, "layers.1.down_proj": spec}))
    assert isinstance(tree.table, QuantizedEmbedding)
    assert isinstance(tree.layers[1].down_proj, QuantizedLinear)
    assert isinstance(tree.layers[0].down_proj, Linear)
    assert "layers.1.down_proj.scales" in dict(flatten(tree))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("norm", "model.not_quantizable"),
        ("layers.2.down_proj", "model.no_layer"),
        ("layers.x", "model.no_layer"),
        ("table.weight", "model.no_layer"),
        ("missing", "model.no_layer"),
    ],
)
def test_quantize_module_unusable_path_is_refused(path: str, code: str) -> None:
    plan = QuantizationPlan({path: QuantizationSpec("affine", 4, 32)})
    with pytest.raises(ModelError) as caught:
        quantize_module(Tree(), plan)
    assert caught.value.code == code


def test_replace_module_in_a_list_keeps_the_other_paths() -> None:
    tree = Tree()
    before = {key for key, _ in flatten(tree)}
    replacement = GatedMLP(64, 96, fused=False)
    replace_module(tree, "layers.0", replacement)
    assert module_at(tree, "layers.0") is replacement
    assert {key for key, _ in flatten(tree)} == before


def flatten(module: Module):
    from mlx.utils import tree_flatten

    return tree_flatten(module.parameters())
