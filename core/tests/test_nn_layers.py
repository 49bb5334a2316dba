"""Dense layers against NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest

from engine_core.nn import Embedding, GatedMLP, Linear, RMSNorm, arrange_weight, silu
from engine_core.nn import linear as linear_module
from engine_core.testing import reference

RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True, params=["processor", "gpu"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of a layer, wherever the tests run: MLX's fused functions run on any device."""
    monkeypatch.setattr(
        "engine_core.nn.norms.computes_on_cpu", lambda: request.param == "processor"
    )


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 24), (2, 3, 24), (24,)])
def test_linear_equals_product(bias: bool, shape: tuple[int, ...]) -> None:
    layer = Linear(24, 10, bias=bias)
    weight, offset, x = normal(10, 24), normal(10), normal(*shape)
    layer.weight = mx.array(weight)
    if bias:
        layer.bias = mx.array(offset)
    expected = np.float64(x) @ np.float64(weight).T + (offset if bias else 0)
    np.testing.assert_allclose(np.array(layer(mx.array(x))), expected, atol=1e-5)
    assert set(layer.parameters()) == ({"weight", "bias"} if bias else {"weight"})


@pytest.mark.parametrize("blas", ["bundled", "openblas 1"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (96, 4)])
def test_arrange_weight_keeps_shape_and_values(monkeypatch, blas, shape) -> None:
    report = linear_module.backend_report()
    monkeypatch.setattr(
        linear_module,
        "backend_report",
        lambda: type(report)(device=report.device, mlx_version=report.mlx_version, blas=blas),
    )
    weight = normal(*shape)
    arranged = arrange_weight(mx.array(weight))
    assert np.array_equal(np.array(arranged), weight)
    assert np.array_equal(np.array(arranged[1:3]), weight[1:3])


def test_arrange_weight_leaves_other_ranks_alone() -> None:
    stacked = mx.zeros((2, 3, 4))
    assert arrange_weight(stacked) is stacked


def test_placeholders_allocate_nothing() -> None:
    before = mx.get_active_memory()
    layer = Linear(1 << 15, 1 << 15)
    assert layer.weight.shape == (1 << 15, 1 << 15)
    assert mx.get_active_memory() - before < 1 << 20


def test_embedding_looks_up_and_projects() -> None:
    table = normal(12, 8)
    layer = Embedding(12, 8)
    layer.weight = mx.array(table)
    ids = np.array([[3, 0], [11, 3]], np.int32)
    assert np.array_equal(np.array(layer(mx.array(ids))), table[ids])
    hidden = normal(1, 3, 8)
    np.testing.assert_allclose(
        np.array(layer.as_linear(mx.array(hidden))), np.float64(hidden) @ table.T, atol=1e-5
    )


@pytest.mark.parametrize("with_scale", [True, False])
@pytest.mark.parametrize("size", [16, 4100])
def test_rms_norm_equals_formula(with_scale: bool, size: int) -> None:
    layer = RMSNorm(size, 1e-3, with_scale=with_scale)
    weight, x = normal(size), 1e-2 * normal(2, 3, size)
    if with_scale:
        layer.weight = mx.array(weight)
    expected = reference.rms_norm(x, weight if with_scale else None, 1e-3)
    np.testing.assert_allclose(np.array(layer(mx.array(x))), expected, rtol=1e-4, atol=1e-6)
    assert set(layer.parameters()) == ({"weight"} if with_scale else set())


def test_rms_norm_keeps_half_precision() -> None:
    assert RMSNorm(8, 1e-5, with_scale=False)(mx.ones((1, 8), mx.bfloat16)).dtype == mx.bfloat16


def test_silu_extreme_inputs_stay_finite() -> None:
    x = np.array([-1e4, -50.0, -1.0, 0.0, 1.0, 1e4], np.float32)
    np.testing.assert_allclose(
        np.array(silu(mx.array(x))), reference.silu(x), rtol=1e-5, atol=1e-20
    )


@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp_both_structures_equal_formula(bias: bool) -> None:
    gate, up, down, x = normal(20, 12), normal(20, 12), normal(12, 20), normal(1, 4, 12)
    biases = [0.3 * normal(n) if bias else np.zeros(n, np.float32) for n in (20, 20, 12)]
    double = [np.float64(a) for a in (gate, up, down, x[0], *biases)]
    gated = reference.silu(double[3] @ double[0].T + double[4])
    expected = (gated * (double[3] @ double[1].T + double[5])) @ double[2].T + double[6]
    separate = GatedMLP(12, 20, fused=False, bias=bias)
    joined = GatedMLP(12, 20, fused=True, bias=bias)
    separate.gate_proj.weight, separate.up_proj.weight = mx.array(gate), mx.array(up)
    joined.gate_up_proj.weight = mx.array(np.concatenate([gate, up]))
    for layer in (separate, joined):
        layer.down_proj.weight = mx.array(down)
    if bias:
        separate.gate_proj.bias, separate.up_proj.bias = map(mx.array, biases[:2])
        joined.gate_up_proj.bias = mx.array(np.concatenate(biases[:2]))
        separate.down_proj.bias = joined.down_proj.bias = mx.array(biases[2])
    for layer in (separate, joined):
        np.testing.assert_allclose(np.array(layer(mx.array(x)))[0], expected, rtol=1e-4, atol=1e-4)
    if not bias:
        assert np.allclose(expected, reference.swiglu(x[0], gate, up, down), atol=1e-12)
