"""The gated delta rule and its convolution against NumPy float64, written from the formulas."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine_core.kernels import KernelRegistry
from engine_core.nn import gated_delta
from engine_core.nn.activations import computes_on_cpu
from engine_core.nn.conv import CausalConv, conv_history
from engine_core.nn.gated_delta import GatedDeltaRule, delta_rule_step, normalize_heads
from engine_core.nn.gated_delta_chunks import CHUNK_ROWS, chunked_delta_rule

Arrays = dict[str, np.ndarray]
# A GPU rounds the operands of its products to 10 bits.
TOLERANCE = 2e-6 if computes_on_cpu() else 1e-2


def draw(
    length: int,
    *,
    heads: tuple[int, int] = (2, 6),
    dims: tuple[int, int] = (16, 24),
    batch: int = 1,
) -> Arrays:
    generator = np.random.Generator(np.random.PCG64(length))
    keys, values = heads
    key_dim, value_dim = dims
    shape = (batch, length)
    return {
        "queries": generator.standard_normal((*shape, keys, key_dim)),
        "keys": generator.standard_normal((*shape, keys, key_dim)),
        "values": generator.standard_normal((*shape, values, value_dim)),
        "log_decay": -generator.exponential(0.4, (*shape, values)),
        "beta": generator.uniform(0, 1, (*shape, values)),
        "state": generator.standard_normal((batch, values, value_dim, key_dim)) * 0.3,
    }


def reference(inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Row by row in float64."""

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)

    values = inputs["values"]
    group = values.shape[2] // inputs["keys"].shape[2]
    keys = np.repeat(unit(inputs["keys"]), group, axis=2)
    queries = np.repeat(unit(inputs["queries"]), group, axis=2) / np.sqrt(keys.shape[-1])
    state, rows = inputs["state"], []
    for row in range(values.shape[1]):
        state = state * np.exp(inputs["log_decay"][:, row])[..., None, None]
        error = values[:, row] - np.einsum("bhvk,bhk->bhv", state, keys[:, row])
        error = error * inputs["beta"][:, row][..., None]
        state = state + error[..., None] * keys[:, row][:, :, None]
        rows.append(np.einsum("bhvk,bhk->bhv", state, queries[:, row]))
    return np.stack(rows, axis=1), state


def prepared(inputs: Arrays) -> list[mx.array]:
    arrays = {name: mx.array(value.astype(np.float32)) for name, value in inputs.items()}
    queries, keys = normalize_heads(mx.concatenate([arrays["queries"], arrays["keys"]], axis=-2))
    names = ("values", "log_decay", "beta", "state")
    return [queries, keys, *(arrays[name] for name in names)]


def check(got: tuple[mx.array, ...], want: tuple[np.ndarray, ...]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == mx.float32
        assert mine.shape == theirs.shape
        assert np.abs(np.array(mine) - theirs).max() < TOLERANCE * max(1, np.abs(theirs).max())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 31, 64, 130])
def test_chunks_equal_rows(length: int) -> None:
    inputs = draw(length)
    check(chunked_delta_rule(*prepared(inputs)), reference(inputs))


@pytest.mark.parametrize("chunk", [4, 8, 16, 32, 64])
def test_chunk_size_changes_nothing(chunk: int) -> None:
    inputs = draw(100)
    check(chunked_delta_rule(*prepared(inputs), chunk=chunk), reference(inputs))


ENDS = pytest.mark.parametrize(
    "ends", [(20,), (1, 20), (6, 20), (7, 20), (14, 20), (19, 20), (3, 4, 12, 19, 20)]
)


def states_after(inputs: Arrays, ends: tuple[int, ...]) -> list[np.ndarray]:
    """What the reference gives when it is fed only the first rows."""
    return [
        reference({n: x if n == "state" else x[:, :end] for n, x in inputs.items()})[1]
        for end in ends
    ]


@ENDS
@pytest.mark.parametrize("chunk", [4, CHUNK_ROWS, 32])
def test_states_between_rows_are_those_of_the_first_rows(ends: tuple[int, ...], chunk: int) -> None:
    inputs = draw(20, batch=2)
    got = chunked_delta_rule(*prepared(inputs), ends=ends, chunk=chunk)
    check(got, (reference(inputs)[0], *states_after(inputs, ends)))


@ENDS
@pytest.mark.parametrize("is_cpu", [True, False])
def test_kernel_and_plain_operations_give_states_between_rows(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...], *, is_cpu: bool
) -> None:
    inputs = draw(20)
    rule = GatedDeltaRule(KernelRegistry(), key_heads=2, value_heads=6, key_dim=16, value_dim=24)
    arguments = prepared(inputs)
    monkeypatch.setattr(gated_delta, "computes_on_cpu", lambda: is_cpu)
    check(rule(*arguments, ends), (reference(inputs)[0], *states_after(inputs, ends)))


@pytest.mark.parametrize("batch", [1, 3])
def test_step_equals_row(batch: int) -> None:
    inputs = draw(1, batch=batch)
    check(delta_rule_step(*prepared(inputs)), reference(inputs))


def test_batch_rows_do_not_mix() -> None:
    inputs = draw(21, batch=2, heads=(3, 3), dims=(8, 8))
    check(chunked_delta_rule(*prepared(inputs)), reference(inputs))


def test_splitting_the_rows_changes_nothing() -> None:
    inputs = draw(70)
    whole = reference(inputs)
    queries, keys, values, log_decay, beta, state = prepared(inputs)
    rule = GatedDeltaRule(KernelRegistry(), key_heads=2, value_heads=6, key_dim=16, value_dim=24)
    rows, start = [], 0
    for size in (1, 7, 16, 1, 33, 12):
        part = slice(start, start + size)
        out, state = rule(
            queries[:, part],
            keys[:, part],
            values[:, part],
            log_decay[:, part],
            beta[:, part],
            state,
        )
        rows.append(out)
        start += size
    check((mx.concatenate(rows, axis=1), state), whole)


def test_equal_keys_without_decay_stay_exact() -> None:
    """A repeated token couples all rows of a chunk; a power series in them would cancel."""
    inputs = draw(64)
    inputs["keys"] = np.repeat(inputs["keys"][:, :1], 64, axis=1)
    inputs["log_decay"] = np.zeros_like(inputs["log_decay"])
    inputs["beta"] = np.ones_like(inputs["beta"])
    check(chunked_delta_rule(*prepared(inputs)), reference(inputs))


def test_strong_decay_gives_no_infinity() -> None:
    """Between distant rows the decay underflows; its inverse must never be formed."""
    inputs = draw(48)
    inputs["log_decay"] = np.full_like(inputs["log_decay"], -60.0)
    check(chunked_delta_rule(*prepared(inputs)), reference(inputs))


def test_zero_keys_are_normalised_without_division_by_zero() -> None:
    zeros = mx.zeros((1, 2, 1, 8))
    queries, keys = normalize_heads(mx.concatenate([zeros, zeros], axis=-2))
    assert not np.array(queries).any()
    assert not np.array(keys).any()


@pytest.mark.parametrize("size", [8, 128])
def test_normalisation_counts_eps_once_a_vector(size: int) -> None:
    """An eps added to the mean instead of the sum would be ``size`` times too large."""
    x = np.full((1, 1, 1, size), 1e-4)
    queries, keys = normalize_heads(mx.concatenate([mx.array(x, mx.float32)] * 2, axis=-2))
    unit = x / np.sqrt((x * x).sum() + 1e-6)
    assert np.allclose(np.array(keys), unit, rtol=1e-5)
    assert np.allclose(np.array(queries), unit / np.sqrt(size), rtol=1e-5)


def test_prefill_graph_grows_with_chunks_not_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums of products a chunk and one for all: 128 rows are no 128 steps."""
    calls = 0
    addmm = mx.addmm

    def counted(*arguments: Any, **options: Any) -> mx.array:
        nonlocal calls
        calls += 1
        return addmm(*arguments, **options)

    monkeypatch.setattr(mx, "addmm", counted)
    inputs = draw(128)
    rule = GatedDeltaRule(KernelRegistry(), key_heads=2, value_heads=6, key_dim=16, value_dim=24)
    check(rule(*prepared(inputs)), reference(inputs))
    assert calls == 2 * -(-128 // CHUNK_ROWS) + 1


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice that is made with Metal."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
def test_fused_kernel_is_believed_only_after_it_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, on this device: MLX's fused form and its plain double are compared."""
    kernels = KernelRegistry()
    rule = GatedDeltaRule(kernels, key_heads=2, value_heads=6, key_dim=16, value_dim=24)
    inputs = draw(20)
    got = rule._kernel(*prepared(inputs))
    check(got, reference(inputs))
    (report,) = kernels.report()
    assert (report.name, report.status) == ("gated_delta_update", "active")
    assert report.max_error is not None
    assert report.max_error < 1e-5

    def wrong(*arguments: mx.array) -> tuple[mx.array, mx.array]:
        out, state = gated_delta.plain_delta_rule(*arguments)
        return out * 1.01, state

    monkeypatch.setattr(gated_delta, "_fused_delta_rule", wrong)
    refused = KernelRegistry()
    rule = GatedDeltaRule(refused, key_heads=2, value_heads=6, key_dim=16, value_dim=24)
    check(rule._kernel(*prepared(inputs)), reference(inputs))
    assert refused.report()[0].status == "fallback"


def fused_with(fault: str) -> Any:
    """MLX's fused form with one fault."""

    def run(*arguments: mx.array) -> tuple[mx.array, mx.array]:
        queries, keys, values, log_decay, beta, state = arguments
        if fault == "no decay":
            log_decay = mx.zeros_like(log_decay)
        elif fault == "no first state":
            state = mx.zeros_like(state)
        elif fault == "heads interleaved":
            order = mx.arange(values.shape[2]).reshape(-1, keys.shape[2]).T.flatten()
            values = values[:, :, order]
        elif fault == "one row short":
            beta = mx.concatenate([beta[:, :-1], mx.zeros_like(beta[:, -1:])], axis=1)
        decay = mx.exp(log_decay)
        out, state = mx.fast.gated_delta_update(queries, keys, values, decay, beta, state)
        return out, state

    return run


def coarse(*arguments: mx.array) -> tuple[mx.array, mx.array]:
    """The plain form on a device whose products keep 10 bits."""
    rounded = [mx.view(mx.view(x, mx.uint32) & 0xFFFFE000, mx.float32) for x in arguments]
    return chunked_delta_rule(*rounded)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("none", "active"),
        ("no decay", "fallback"),
        ("no first state", "fallback"),
        ("heads interleaved", "fallback"),
        ("one row short", "fallback"),
    ],
)
def test_fused_kernel_is_judged_by_float64_on_a_device_that_rounds_products(
    monkeypatch: pytest.MonkeyPatch, fault: str, status: str
) -> None:
    """An exact kernel differs from coarse plain operations by more than a kernel may be off."""
    sizes = {"key_heads": 2, "value_heads": 6, "key_dim": 16, "value_dim": 24}
    inputs = gated_delta._check_inputs(*sizes.values())
    exact = fused_with("none")(*inputs)
    distance = max(
        float(mx.abs(mine - plain).max() / mx.abs(mine).max())
        for mine, plain in zip(exact, coarse(*inputs), strict=True)
    )
    assert 1e-4 < distance < 2e-3
    monkeypatch.setattr(gated_delta, "plain_delta_rule", coarse)
    monkeypatch.setattr(gated_delta, "_fused_delta_rule", fused_with(fault))
    kernels = KernelRegistry()
    GatedDeltaRule(kernels, **sizes)._kernel(*prepared(draw(20)))
    (report,) = kernels.report()
    assert report.status == status
    assert report.max_error is not None
    assert (report.max_error < 1e-5) is (fault == "none")


@pytest.mark.usefixtures("no_cuda")
def test_missing_fused_kernel_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mx.fast, "gated_delta_update")
    kernels = KernelRegistry()
    rule = GatedDeltaRule(kernels, key_heads=2, value_heads=6, key_dim=16, value_dim=24)
    inputs = draw(9)
    check(rule._kernel(*prepared(inputs)), reference(inputs))
    assert "gated_delta_update" in kernels.report()[0].reason


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("length", [1, 2, 37, 300])
@pytest.mark.parametrize(("heads", "dims"), [((2, 6), (32, 16)), ((4, 4), (128, 128))])
def test_cuda_kernel_equals_rows(
    length: int, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    inputs = draw(length, batch=2, heads=heads, dims=dims)
    kernels = KernelRegistry()
    rule = GatedDeltaRule(
        kernels, key_heads=heads[0], value_heads=heads[1], key_dim=dims[0], value_dim=dims[1]
    )
    got = rule(*prepared(inputs))
    assert [report.status for report in kernels.report()] == ["active"]
    for mine, exact in zip(got, reference(inputs), strict=True):
        assert np.abs(np.array(mine) - exact).max() < 1e-5 * max(1, np.abs(exact).max())


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "fits"),
    [(128, 128, True), (64, 16, True), (32, 48, True), (48, 64, False), (64, 24, False)],
)
def test_cuda_kernel_serves_heads_that_divide_evenly(
    monkeypatch: pytest.MonkeyPatch, key_dim: int, value_dim: int, fits: bool
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    rule = GatedDeltaRule(
        KernelRegistry(), key_heads=1, value_heads=1, key_dim=key_dim, value_dim=value_dim
    )
    assert (rule._kernel is gated_delta.plain_delta_rule) is not fits


# ------------------------------------------------------------------ convolution


@pytest.mark.parametrize(("length", "kernel"), [(1, 4), (2, 4), (9, 2), (12, 4)])
def test_convolution_sees_itself_and_the_rows_before(length: int, kernel: int) -> None:
    generator = np.random.Generator(np.random.PCG64(length))
    rows = generator.standard_normal((2, kernel - 1 + length, 5))
    taps = generator.standard_normal((5, kernel, 1))
    conv = CausalConv(5, kernel)
    conv.weight = mx.array(taps.astype(np.float32))
    out = np.array(conv(mx.array(rows.astype(np.float32))))
    want = np.stack(
        [(rows[:, t : t + kernel] * taps[:, :, 0].T).sum(axis=1) for t in range(length)], axis=1
    )
    assert np.abs(out - want).max() < 1e-6
    direct = mx.conv1d(mx.array(rows.astype(np.float32)), conv.weight, groups=5)
    assert np.abs(np.array(direct) - want).max() < 1e-6


def test_history_is_the_last_rows_or_those_before_the_padding() -> None:
    rows = mx.arange(2 * 8 * 3).reshape(2, 8, 3)
    assert mx.array_equal(conv_history(rows, 3, 5), rows[:, 5:])
    ragged = conv_history(rows, 3, 5, mx.array([5, 2]))
    assert mx.array_equal(ragged[0], rows[0, 5:])
    assert mx.array_equal(ragged[1], rows[1, 2:5])
    assert mx.array_equal(conv_history(rows, 3, 2), rows[:, 2:5])
    inside = conv_history(rows, 3, 3, mx.array([5, 2]))
    assert mx.array_equal(inside[0], rows[0, 3:6])
    assert mx.array_equal(inside[1], rows[1, 2:5])
