"""The forms that layers take on a processor, against NumPy float64."""

import math

import mlx.core as mx
import numpy as np
import pytest

import engine_core.nn.activations as activations
import engine_core.nn.attention as attention_module
import engine_core.nn.product as product_module
from engine_core.nn import (
    RMSNorm,
    attend,
    elementwise,
    gated,
    gelu_tanh,
    merge_heads,
    sigmoid,
    silu,
    softcap,
    split_heads,
)
from engine_core.nn.activations import computes_on_cpu
from engine_core.nn.module import Derived
from engine_core.nn.product import TransposedProduct
from engine_core.testing import reference

RNG = np.random.default_rng(11)
EXTREMES = np.array([-3e38, -1000, -104, -88, -20, -1, -1e-4, 0, 1e-4, 1, 20, 88, 1000, 3e38])


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


FORMULAS = {
    "sigmoid": (sigmoid, _sigmoid),
    "silu": (silu, lambda x: x * _sigmoid(x)),
    "gelu": (
        gelu_tanh,
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
    "softcap": (lambda x: softcap(x, 30.0), lambda x: 30 * np.tanh(x / 30)),
}


@pytest.fixture(params=["powers", "exponentials"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compute an exponential, whatever this processor is."""
    monkeypatch.setattr(activations, "_is_x86", lambda: request.param == "powers")
    monkeypatch.setattr(activations, "LEAST_ELEMENTS", 0)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_activations_equal_formula(name: str) -> None:
    function, formula = FORMULAS[name]
    x = np.concatenate([np.linspace(-30, 30, 4001), EXTREMES]).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = formula(x.astype(np.float64))
    got = np.array(function(mx.array(x)))
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=4e-6)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_activations_keep_dtype_and_show_nan(name: str) -> None:
    function, _ = FORMULAS[name]
    assert function(mx.ones((3,), mx.bfloat16)).dtype == mx.bfloat16
    assert np.isnan(np.array(function(mx.array([np.nan]))))


def test_gated_multiplies_the_activated_gate() -> None:
    gate, row = normal(3, 7), normal(3, 7)
    expected = reference.silu(np.float64(gate)) * row
    np.testing.assert_allclose(
        np.array(gated(silu)(mx.array(gate), mx.array(row))), expected, atol=1e-6
    )


def test_elementwise_compiles_nothing_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(mx, "compile", lambda *_, **__: refuse)
    assert elementwise(lambda x: x + 1)(mx.array(1)).item() == 2


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("block", [4, 16, 128])
@pytest.mark.parametrize("kind", ["none", "causal", "array"])
@pytest.mark.parametrize(("rows", "stored"), [(1, 1), (1, 9), (7, 7), (7, 20), (33, 40)])
def test_attend_in_blocks_equals_formula(
    monkeypatch: pytest.MonkeyPatch, block: int, kind: str, rows: int, stored: int
) -> None:
    monkeypatch.setattr(attention_module, "MOST_ROWS", block)
    monkeypatch.setattr(attention_module, "LEAST_ROWS", 1)
    queries, keys, values = normal(rows, 6, 8) * 3, normal(stored, 2, 8), normal(stored, 2, 5)
    mask = np.ones((rows, stored), bool)
    given = None
    if kind == "causal":
        mask, given = np.tril(mask, stored - rows), "causal"
    elif kind == "array":
        mask = RNG.random((rows, stored)) < 0.5
        mask[:, 0] = True
        given = mx.array(mask)
    out = attend(*(mx.array(x).swapaxes(0, 1)[None] for x in (queries, keys, values)), 0.4, given)
    expected = reference.attention(queries, keys, values, scale=0.4, mask=mask)
    np.testing.assert_allclose(np.array(out)[0].swapaxes(0, 1), expected, atol=3e-6)


def test_attend_survives_scores_far_apart() -> None:
    """Scores beyond the range of an exponential: only differences to the largest count."""
    queries = mx.full((1, 1, 1, 2), 300.0)
    keys = mx.array([[[[300.0, 300.0], [-300.0, -300.0], [300.0, 300.0]]]])
    values = mx.array([[[[1.0], [5.0], [3.0]]]])
    assert attend(queries, keys, values, 1.0, None).item() == 2.0


@pytest.mark.parametrize("batch", [1, 2])
def test_attend_bounds_the_scores_of_a_block(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = attention_module._attend_rows

    def spy(queries, keys, *rest):
        sizes.append(math.prod(queries.shape[:3]) * keys.shape[2])
        return plain(queries, keys, *rest)

    monkeypatch.setattr(attention_module, "_attend_rows", spy)
    monkeypatch.setattr(attention_module, "MOST_SCORES", batch * 4 * 1000 * 16)
    x = mx.zeros((batch, 4, 1000, 2))
    mx.eval(attend(x, x, x, 1.0, "causal"))
    assert len(sizes) == 63
    assert max(sizes) <= batch * 4 * 1000 * 16


def test_attend_over_many_keys_holds_no_more_than_some_blocks() -> None:
    """A processor works ahead: the scores of many blocks are in memory at once."""
    if not computes_on_cpu():
        pytest.skip("bounds what the processor's form holds")
    queries, keys = mx.array(normal(1, 8, 512, 8)), mx.array(normal(1, 1, 40_000, 8))
    mx.eval(queries, keys)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(attend(queries, keys, keys, 0.3, "causal"))
    assert mx.get_peak_memory() - before < 4 * 8 * 512 * 40_000


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_are_split_and_merged(rows: int, batch: int) -> None:
    x = normal(batch, rows, 12)
    split = split_heads(mx.array(x), 4)
    assert np.array_equal(np.array(split), x.reshape(batch, rows, 3, 4).swapaxes(1, 2))
    assert np.array_equal(np.array(merge_heads(split)), x)


@pytest.mark.parametrize("with_scale", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 48), (1, 2, 48), (2, 1, 48)])
def test_norm_of_one_row_equals_formula(with_scale: bool, shape: tuple[int, ...]) -> None:
    layer = RMSNorm(48, 1e-3, with_scale=with_scale)
    x, weight = normal(*shape) * 0.05, normal(48)
    if with_scale:
        layer.weight = mx.array(weight)
    wide = np.float64(x)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-3)
    expected = expected * (weight if with_scale else 1)
    np.testing.assert_allclose(np.array(layer(mx.array(x))), expected, atol=2e-6)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    report = product_module.backend_report()
    monkeypatch.setattr(product_module, "BLOCK_ELEMENTS", 8 * 24)
    monkeypatch.setattr(
        product_module,
        "backend_report",
        lambda: type(report)(device="cpu", mlx_version=report.mlx_version, blas="openblas 1"),
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("out_features", [8, 9, 16, 17, 23, 40, 53])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 1, 24), (1, 1, 1, 24), (1, 2, 24)])
def test_product_in_blocks_equals_the_whole(out_features: int, shape: tuple[int, ...]) -> None:
    weight, x = normal(out_features, 24), normal(*shape)
    product = TransposedProduct()
    for scale in (1, 2):  # another array object is another weight
        scaled = mx.array(weight) * scale
        expected = np.float64(x) @ np.float64(weight).T * scale
        for _ in range(2):
            got = np.array(product(mx.array(x), scaled))
            assert got.shape == expected.shape
            np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_copy_no_weight() -> None:
    weight = mx.array(normal(4096, 24))
    x = mx.array(normal(1, 24))
    mx.eval(weight, x)
    before = mx.get_active_memory()
    product = TransposedProduct()
    mx.eval(product(x, weight))
    assert mx.get_active_memory() - before < weight.nbytes // 4


def test_derived_values_follow_their_parameter() -> None:
    calls = []

    def double(parameter: mx.array) -> mx.array:
        calls.append(parameter)
        return parameter * 2

    derived = Derived(double)
    first, second = mx.array([1.0]), mx.array([5.0])
    assert [derived.of(first).item(), derived.of(first).item(), derived.of(second).item()] == [
        2.0,
        2.0,
        10.0,
    ]
    assert len(calls) == 2
