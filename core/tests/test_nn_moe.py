"""Sparse blocks against NumPy float64, expert by expert."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine_core.nn import quantize_module
from engine_core.nn.moe import (
    ORDER_FROM,
    ExpertLinear,
    GatedExperts,
    QuantizedExpertLinear,
    softmax_top_k,
)
from engine_core.quantization import QuantizationPlan, QuantizationSpec
from engine_core.testing.reference import dequantize, silu, softmax

HIDDEN, WIDTH, EXPERTS = 64, 32, 7


def block(seed: int = 0) -> tuple[GatedExperts, dict[str, np.ndarray]]:
    generator = np.random.Generator(np.random.PCG64(seed))
    weights = {
        "gate_proj": generator.standard_normal((EXPERTS, WIDTH, HIDDEN)) * 0.2,
        "up_proj": generator.standard_normal((EXPERTS, WIDTH, HIDDEN)) * 0.2,
        "down_proj": generator.standard_normal((EXPERTS, HIDDEN, WIDTH)) * 0.2,
    }
    experts = GatedExperts(HIDDEN, WIDTH, EXPERTS)
    for name, value in weights.items():
        experts[name].weight = mx.array(value.astype(np.float32))
    return experts, weights


def routed(
    x: np.ndarray, weights: dict[str, np.ndarray], chosen: np.ndarray, shares: np.ndarray
) -> np.ndarray:
    """Token by token, expert by expert."""
    out = np.zeros_like(x)
    for place in np.ndindex(*x.shape[:2]):
        for expert, share in zip(chosen[place], shares[place], strict=True):
            gate = silu(weights["gate_proj"][expert] @ x[place])
            up = weights["up_proj"][expert] @ x[place]
            out[place] += share * (weights["down_proj"][expert] @ (gate * up))
    return out


@pytest.mark.parametrize(
    ("batch", "length", "count"), [(1, 1, 2), (1, 40, 3), (2, 33, 1), (3, 5, 7)]
)
def test_experts_equal_float64(batch: int, length: int, count: int) -> None:
    """Sizes on both sides of the border from which assignments are ordered."""
    experts, weights = block()
    generator = np.random.Generator(np.random.PCG64(length))
    x = generator.standard_normal((batch, length, HIDDEN))
    scores = generator.standard_normal((batch, length, EXPERTS))
    chosen = np.argsort(scores, axis=-1)[..., :count]
    shares = generator.uniform(0, 1, chosen.shape)
    got = experts(
        mx.array(x.astype(np.float32)), mx.array(chosen), mx.array(shares.astype(np.float32))
    )
    assert np.abs(np.array(got) - routed(x, weights, chosen, shares)).max() < 1e-5


def test_unused_experts_and_one_crowded_expert_are_served() -> None:
    experts, weights = block()
    length = ORDER_FROM + 3
    x = np.random.Generator(np.random.PCG64(1)).standard_normal((1, length, HIDDEN))
    chosen = np.full((1, length, 1), EXPERTS - 1)
    shares = np.ones(chosen.shape)
    got = experts(mx.array(x.astype(np.float32)), mx.array(chosen), mx.array(shares))
    assert np.abs(np.array(got) - routed(x, weights, chosen, shares)).max() < 1e-5


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_router_chooses_the_largest_and_renormalises_in_float32(dtype: mx.Dtype) -> None:
    logits = mx.random.normal((2, 9, 12), key=mx.random.key(3)).astype(dtype)
    experts, weights = softmax_top_k(logits, 4)
    assert weights.dtype == mx.float32
    probabilities = softmax(np.array(logits.astype(mx.float32), np.float64))
    for place in np.ndindex(2, 9):
        want = np.sort(probabilities[place])[-4:]
        order = np.argsort(np.array(weights)[place])
        assert set(np.array(experts)[place]) <= set(range(12))
        assert np.allclose(probabilities[place][np.array(experts)[place][order]], want)
        assert np.allclose(np.array(weights)[place][order], want / want.sum(), atol=1e-6)


def test_huge_logits_do_not_overflow() -> None:
    experts, weights = softmax_top_k(mx.array([[[3e38, -3e38, 3e38, 0.0]]]), 2)
    assert set(np.array(experts)[0, 0]) == {0, 2}
    assert np.allclose(np.array(weights), 0.5)


def test_choosing_every_expert_gives_the_whole_softmax() -> None:
    logits = mx.random.normal((1, 3, 5), key=mx.random.key(4))
    experts, weights = softmax_top_k(logits, 5)
    got = np.take_along_axis(np.array(weights), np.argsort(np.array(experts), axis=-1), axis=-1)
    assert np.allclose(got, softmax(np.array(logits, np.float64)), atol=1e-6)


def test_half_precision_works_where_the_device_multiplies_float32_only() -> None:
    experts, weights = block()
    for name in weights:
        experts[name].weight = experts[name].weight.astype(mx.bfloat16)
    x = mx.random.normal((1, 5, HIDDEN), key=mx.random.key(5)).astype(mx.bfloat16)
    chosen, shares = softmax_top_k(mx.random.normal((1, 5, EXPERTS), key=mx.random.key(6)), 2)
    got = experts(x, chosen, shares)
    assert got.dtype == mx.bfloat16
    wide = np.array(x.astype(mx.float32), np.float64)
    want = routed(wide, weights, np.array(chosen), np.array(shares))
    assert np.abs(np.array(got.astype(mx.float32)) - want).max() < 0.03 * np.abs(want).max()


@pytest.mark.parametrize(
    "spec",
    [
        QuantizationSpec("affine", 4, 32),
        QuantizationSpec("affine", 8, 32),
        QuantizationSpec("mxfp4", 4, 32),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [3, 50])
def test_packed_experts_equal_their_unpacked_values(spec: QuantizationSpec, length: int) -> None:
    experts, weights = block()
    quantize_module(experts, QuantizationPlan(dict.fromkeys(weights, spec)))
    unpacked = {}
    for name, value in weights.items():
        layer = experts[name]
        assert isinstance(layer, QuantizedExpertLinear)
        assert layer.spec == spec
        packed = mx.quantize(
            mx.array(value.astype(np.float32)),
            group_size=spec.group_size,
            bits=spec.bits,
            mode=spec.mode,
        )
        for part, array in zip(("weight", "scales", "biases"), packed, strict=False):
            assert layer[part].shape == array.shape
            assert layer[part].dtype == array.dtype
            layer[part] = array
        unpacked[name] = np.stack(
            [
                dequantize(
                    *(np.array(part)[index] for part in packed),
                    mode=spec.mode,
                    bits=spec.bits,
                    group_size=spec.group_size,
                )
                for index in range(EXPERTS)
            ]
        )
    x = mx.random.normal((1, length, HIDDEN), key=mx.random.key(8))
    chosen, shares = softmax_top_k(mx.random.normal((1, length, EXPERTS), key=mx.random.key(9)), 2)
    want = routed(np.array(x, np.float64), unpacked, np.array(chosen), np.array(shares))
    assert np.abs(np.array(experts(x, chosen, shares)) - want).max() < 1e-5
    half = experts(x.astype(mx.bfloat16), chosen, shares)
    assert half.dtype == mx.bfloat16
    difference = np.abs(np.array(half.astype(mx.float32)) - want).max()
    assert difference < 0.03 * np.abs(want).max()


def test_packed_form_keeps_the_sizes() -> None:
    packed = ExpertLinear(3, 64, 8).to_quantized(QuantizationSpec("affine", 4, 32))
    assert packed.weight.shape == (3, 8, 8)
    assert packed.scales.shape == packed.biases.shape == (3, 8, 2)
