"""Rotary positions against NumPy float64."""

import mlx.core as mx
import numpy as np
import pytest

from engine_core.errors import ModelError
from engine_core.nn import Rope
from engine_core.rope_spec import (
    BandScaling,
    DynamicScaling,
    LinearScaling,
    RopeSpec,
    YarnScaling,
)
from engine_core.testing import reference

D = 32
BAND = {"factor": 8.0, "low": 1.0, "high": 4.0, "original": 64}
CASES = {
    "plain": (RopeSpec(head_dim=D), reference.default_frequencies(D, 1e4), 1.0),
    "theta": (RopeSpec(head_dim=D, theta=5e5), reference.default_frequencies(D, 5e5), 1.0),
    "partial": (
        RopeSpec(head_dim=D, partial_rotary_factor=0.25),
        reference.default_frequencies(D // 4, 1e4),
        1.0,
    ),
    "proportional": (
        RopeSpec(head_dim=D, theta=1e6, partial_rotary_factor=0.25, proportional=True),
        # The exponent counts over the whole head; a quarter of its 16 pairs turns.
        np.where(np.arange(D // 2) < 4, reference.default_frequencies(D, 1e6), 0.0),
        1.0,
    ),
    "proportional_linear": (
        RopeSpec(
            head_dim=D,
            partial_rotary_factor=0.5,
            proportional=True,
            scaling=LinearScaling(factor=2.0),
        ),
        np.where(np.arange(D // 2) < 8, reference.default_frequencies(D, 1e4) / 2, 0.0),
        1.0,
    ),
    "linear": (
        RopeSpec(head_dim=D, scaling=LinearScaling(factor=4.0)),
        reference.linear_frequencies(D, 1e4, 4.0),
        1.0,
    ),
    "band": (
        RopeSpec(
            head_dim=D,
            theta=5e5,
            scaling=BandScaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
            ),
        ),
        reference.band_frequencies(D, 5e5, **BAND),
        1.0,
    ),
    "dynamic": (
        RopeSpec(head_dim=D, scaling=DynamicScaling(limit=600)),
        reference.default_frequencies(D, 1e4),
        1.0,
    ),
    "yarn": (
        RopeSpec(head_dim=D, scaling=YarnScaling(factor=8.0, original_context=32)),
        reference.yarn_frequencies(D, 1e4, factor=8.0, original=32),
        reference.yarn_amplitude(8.0),
    ),
    "yarn_untruncated_partial": (
        RopeSpec(
            head_dim=D,
            partial_rotary_factor=0.5,
            scaling=YarnScaling(
                factor=16.0,
                original_context=4096,
                beta_fast=64.0,
                beta_slow=2.0,
                truncate=False,
                attention_factor=1.25,
            ),
        ),
        reference.yarn_frequencies(
            D // 2, 1e4, factor=16.0, original=4096, beta_fast=64.0, beta_slow=2.0, truncate=False
        ),
        1.25,
    ),
    "yarn_empty_ramp": (
        RopeSpec(head_dim=D, scaling=YarnScaling(factor=2.0, original_context=2)),
        reference.yarn_frequencies(D, 1e4, factor=2.0, original=2),
        reference.yarn_amplitude(2.0),
    ),
    "yarn_mscale": (
        RopeSpec(
            head_dim=D,
            scaling=YarnScaling(factor=8.0, original_context=32, mscale=0.7, mscale_all_dim=1.0),
        ),
        reference.yarn_frequencies(D, 1e4, factor=8.0, original=32),
        reference.yarn_amplitude(8.0, mscale=0.7, mscale_all_dim=1.0),
    ),
}
EVERY_CASE = pytest.mark.parametrize("name", CASES)
X = np.random.default_rng(1).normal(size=(2, 3, 5, D)).astype(np.float32)


@pytest.fixture(autouse=True, params=["processor", "gpu"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of a layer, wherever the tests run: MLX's fused functions run on any device."""
    monkeypatch.setattr("engine_core.nn.rope.computes_on_cpu", lambda: request.param == "processor")


def expected(name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    _, frequencies, amplitude = CASES[name]
    rows = [
        reference.rotate(x[b].swapaxes(0, 1), positions[b], frequencies, amplitude)
        for b in range(len(x))
    ]
    return np.stack(rows).swapaxes(1, 2)


@EVERY_CASE
def test_frequencies_equal_formula(name: str) -> None:
    spec, frequencies, amplitude = CASES[name]
    np.testing.assert_allclose(spec.frequencies(), frequencies, rtol=1e-12)
    assert spec.attention_factor == pytest.approx(amplitude, rel=1e-12)


@EVERY_CASE
@pytest.mark.parametrize("offset", [0, 7, 500])
def test_rope_offset_equals_formula(name: str, offset: int) -> None:
    positions = np.tile(np.arange(offset, offset + 5), (2, 1))
    out = np.array(Rope(CASES[name][0])(mx.array(X), offset))
    assert np.abs(out - expected(name, X, positions)).max() < 2e-4


@EVERY_CASE
def test_rope_positions_of_each_row_equal_formula(name: str) -> None:
    positions = np.array([[0, 9, 2, 2, 40], [100, 3, 4, 17, 5]], np.int32)
    out = np.array(Rope(CASES[name][0])(mx.array(X), mx.array(positions)))
    assert np.abs(out - expected(name, X, positions)).max() < 1e-4


@EVERY_CASE
def test_rope_one_row_a_sequence_equals_formula(name: str) -> None:
    positions = np.array([[11], [222]], np.int32)
    out = np.array(Rope(CASES[name][0])(mx.array(X[:, :, :1]), mx.array(positions)))
    assert np.abs(out - expected(name, X[:, :, :1], positions)).max() < 1e-4


def test_rope_follows_positions_that_are_changed_in_place() -> None:
    rope, positions = Rope(CASES["plain"][0]), mx.array([[0, 9, 2, 2, 40], [9, 3, 4, 17, 5]])
    rope(mx.array(X), positions)
    positions += 30
    out = np.array(rope(mx.array(X), positions))
    assert np.abs(out - expected("plain", X, np.array(positions))).max() < 1e-4


def test_rope_keeps_half_precision_and_has_no_parameters() -> None:
    rope = Rope(CASES["yarn"][0])
    assert rope(mx.array(X).astype(mx.bfloat16)).dtype == mx.bfloat16
    assert rope.parameters() == {}


@pytest.mark.parametrize("shape", [(2, 4), (3, 2, 5), (5,)])
def test_rope_positions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        Rope(CASES["plain"][0])(mx.array(X), mx.zeros(shape, mx.int32))
    assert caught.value.code == "model.positions"


def test_rope_dynamic_beyond_limit_is_refused() -> None:
    rope = Rope(RopeSpec(head_dim=D, scaling=DynamicScaling(limit=9)))
    rope(mx.array(X), 4)
    with pytest.raises(ModelError) as caught:
        rope(mx.array(X), 5)
    assert caught.value.code == "model.rope_limit"


@pytest.mark.parametrize(
    "build",
    [
        lambda: RopeSpec(head_dim=5),
        lambda: RopeSpec(head_dim=8, partial_rotary_factor=0.1),
        lambda: RopeSpec(head_dim=8, partial_rotary_factor=1.5),
        lambda: RopeSpec(head_dim=8, theta=1.0),
        lambda: RopeSpec(head_dim=8, theta=float("nan")),
        lambda: LinearScaling(factor=0.0),
        lambda: LinearScaling(factor=True),
        lambda: YarnScaling(factor=2.0, original_context=-1),
        lambda: BandScaling(
            factor=2.0, low_freq_factor=4.0, high_freq_factor=4.0, original_context=8
        ),
    ],
)
def test_rope_spec_unusable_values_are_refused(build) -> None:
    with pytest.raises(ValueError, match="rope"):
        build()
