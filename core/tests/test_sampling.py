"""Filters, penalties and draws against float64 NumPy written from their definitions."""

import math

import mlx.core as mx
import numpy as np
import pytest

from engine_core.decode import sampling
from engine_core.decode.choice import TokenChooser
from engine_core.decode.logprobs import measure_logprobs
from engine_core.decode.processors import LogitAdjuster, run_user_processors
from engine_core.decode.sampling import Sampler, SamplingOptions, leading_candidates, step_key
from engine_core.errors import CallbackError, InvalidRequest


def softmax64(row):
    shifted = np.exp(row - row.max())
    return shifted / shifted.sum()


def reference_distribution(row, options, *, xtc_applies=False):
    """The distribution of the next token, from the definitions, in float64."""
    row = np.asarray(row, dtype=np.float64)
    alive = np.isfinite(row)
    if options.top_p < 1.0:
        probabilities = softmax64(row)
        order = np.argsort(-row, kind="stable")
        mass = 0.0
        threshold = -math.inf
        for token in order:
            threshold = row[token]
            mass += probabilities[token]
            if mass >= options.top_p:
                break
        alive &= row >= threshold
    if options.min_p > 0.0:
        kept = row >= row.max() + math.log(options.min_p)
        kept |= row >= np.sort(row)[::-1][min(options.min_tokens_to_keep, row.size) - 1]
        alive &= kept
    if xtc_applies:
        masked = np.where(alive, row, -math.inf)
        probabilities = softmax64(masked)
        above = probabilities > options.xtc_threshold
        if above.any():
            removed = masked > masked[above].min()
            removed[list(options.xtc_protected)] = False
            alive &= ~removed
    if options.top_k and options.top_k < alive.sum():
        alive &= row >= np.sort(row[alive])[::-1][options.top_k - 1]
    weights = np.zeros_like(row)
    scaled = (row[alive] - row[alive].max()) / options.temperature
    weights[alive] = np.exp(scaled)
    return weights / weights.sum()


def draw_many(row, options, count, start=0):
    sampler = Sampler(options)
    array = mx.array(row, dtype=mx.float32)
    draws = []
    for ordinal in range(start, start + count):
        while True:
            draw = sampler.draw(array, ordinal)
            if draw.is_covered is None or draw.is_covered.item():
                break
            sampler.widen()
        draws.append(draw.token)
    return np.array(mx.concatenate(draws))


def chi_square_bound(degrees):
    """A bound that a right sampler exceeds with probability about 1e-6 (Wilson-Hilferty)."""
    z = 4.75
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def check_distribution(row, options, expected, count=1000):
    tokens = draw_many(row, options, count)
    observed = np.bincount(tokens, minlength=len(expected))
    assert observed[expected == 0].sum() == 0
    likely = expected * count >= 5
    observed_cells = [*observed[likely], observed[~likely].sum()]
    expected_cells = [*(expected[likely] * count), expected[~likely].sum() * count]
    statistic = sum(
        (seen - wanted) ** 2 / wanted
        for seen, wanted in zip(observed_cells, expected_cells, strict=True)
        if wanted >= 1e-9
    )
    assert statistic < chi_square_bound(max(len(observed_cells) - 1, 1))


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 500},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 0.9, "min_tokens_to_keep": 4},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 7, "min_p": 0.05},
    {"temperature": 2.0, "top_p": 0.6, "min_p": 0.2, "min_tokens_to_keep": 3},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampler_small_vocabulary_follows_the_defined_distribution(case):
    row = np.random.default_rng(5).normal(size=24) * 2
    options = SamplingOptions(seed=11, **case)
    check_distribution(row, options, reference_distribution(row, options))


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"top_k": 4},
        {"top_p": 0.9},
        {"min_p": 0.02, "top_k": 3},
        {"xtc_protected": (0, 3)},
        {"top_k": 5, "xtc_protected": (0, 3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("probability", [1.0, 0.3])
def test_sampler_xtc_follows_the_defined_mixture(case, probability):
    row = np.log(np.array([0.3, 0.05, 0.22, 0.2, 0.09, 0.06, 0.04, 0.02, 0.015, 0.005]))
    options = SamplingOptions(
        temperature=1.0, seed=3, xtc_probability=probability, xtc_threshold=0.1, **case
    )
    expected = probability * reference_distribution(row, options, xtc_applies=True) + (
        1 - probability
    ) * reference_distribution(row, options)
    check_distribution(row, options, expected)


def test_sampler_xtc_no_token_above_the_threshold_removes_nothing():
    row = np.zeros(20)
    options = SamplingOptions(temperature=1.0, seed=3, xtc_probability=1.0, xtc_threshold=0.1)
    check_distribution(row, options, np.full(20, 1 / 20))


LARGE = [
    {"top_p": 0.9},
    {"top_p": 0.3, "min_p": 0.01},
    {"top_k": 40},
    {"top_k": 900},
    {"top_k": 1500},
    {"min_p": 0.05},
    {"min_p": 0.99, "min_tokens_to_keep": 300},
    {"top_p": 0.95, "top_k": 20, "min_p": 0.1},
    {"top_k": 30, "xtc_probability": 1.0, "xtc_threshold": 0.01, "xtc_protected": (3, 7)},
    {"top_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.001},
    {"top_p": 0.9, "top_k": 5, "xtc_probability": 1.0, "xtc_threshold": 0.0005},
]


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0, 9.0])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_sampler_large_vocabulary_keeps_exactly_the_defined_set(case, spread):
    options = SamplingOptions(temperature=1.5, seed=8, **case)
    row = (np.random.default_rng(21).normal(size=50_257) * spread).astype(np.float32)
    kept = np.flatnonzero(
        reference_distribution(row, options, xtc_applies=options.xtc_probability > 0)
    )
    differing = np.setxor1d(kept, observed_support(row, options))
    # Only a token whose cumulative mass float32 cannot tell from top_p may fall on either side.
    order = np.argsort(-row, kind="stable")
    mass = np.cumsum(softmax64(row.astype(np.float64))[order])
    ranks = np.flatnonzero(np.isin(order, differing))
    assert (np.abs(mass[ranks] - options.top_p) < 1e-5).all()


def observed_support(row, options):
    """The set a draw chooses from, read off the thresholds that the sampler hands to its pick."""
    seen = {}
    original = sampling._pick

    def pick(values, lower, temperature, uniform):
        seen["values"], seen["lower"] = np.array(values), float(lower.item())
        return original(values, lower, temperature, uniform)

    sampling._pick = pick
    try:
        sampler = Sampler(options)
        array = mx.array(row)
        while True:
            draw = sampler.draw(array, 0)
            if draw.is_covered is None or draw.is_covered.item():
                break
            sampler.widen()
        values = seen["values"]
        level = sampler._level
    finally:
        sampling._pick = original
    blocks = sampling.LEVELS[level] if level < len(sampling.LEVELS) else row.size
    _, ids, _ = leading_candidates(array, blocks)
    alive = (values >= seen["lower"]) & np.isfinite(values)
    return np.array(ids)[alive]


def test_sampler_more_candidates_draw_the_same_token():
    rng = np.random.default_rng(4)
    options = SamplingOptions(temperature=1.0, top_p=0.9, seed=5)
    for ordinal in range(12):
        row = mx.array((rng.normal(size=40_000) * 4).astype(np.float32))
        tokens = set()
        for level in range(3):
            sampler = Sampler(options)
            sampler._level = level
            draw = sampler.draw(row, ordinal)
            if draw.is_covered is None or draw.is_covered.item():
                tokens.add(int(draw.token.item()))
        assert len(tokens) == 1


def test_sampler_flat_row_is_not_covered_until_the_whole_row_is_sorted():
    sampler = Sampler(SamplingOptions(temperature=1.0, top_p=0.9, seed=1))
    row = mx.zeros((60_000,))
    first = sampler.draw(row, 0)
    assert not first.is_covered.item()
    sampler.widen()
    assert not sampler.draw(row, 0).is_covered.item()
    sampler.widen()
    assert sampler.draw(row, 0).is_covered is None


def test_sampler_after_wide_draws_tries_fewer_candidates_again():
    sampler = Sampler(SamplingOptions(temperature=1.0, top_p=0.9, seed=1))
    sampler.widen()
    row = mx.array(np.random.default_rng(0).normal(size=40_000).astype(np.float32) * 9)
    for ordinal in range(sampling.NARROW_AFTER + 1):
        sampler.draw(row, ordinal)
    assert sampler._level == 0


def test_sampler_ties_at_the_top_k_threshold_are_all_kept():
    row = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    options = SamplingOptions(temperature=1.0, top_k=2, seed=2)
    expected = reference_distribution(row, options)
    assert np.count_nonzero(expected) == 4
    check_distribution(row, options, expected)


def test_sampler_large_row_ties_outside_the_candidates_are_found():
    row = np.zeros(20_000)
    row[[11, 15_000]] = [2.0, 1.0]
    options = SamplingOptions(temperature=1.0, top_k=3, seed=2)
    sampler = Sampler(options)
    assert not sampler.draw(mx.array(row, dtype=mx.float32), 0).is_covered.item()
    assert observed_support(row.astype(np.float32), options).size == 20_000


def test_sampler_xtc_tokens_above_the_threshold_outside_the_candidates_are_found():
    row = np.full(20_000, -50.0)
    row[: 256 * 32 : 32] = 5.0
    row[-1] = 1.0
    options = SamplingOptions(
        temperature=1.0, top_k=3, seed=2, xtc_probability=1.0, xtc_threshold=1e-5
    )
    expected = np.flatnonzero(reference_distribution(row, options, xtc_applies=True))
    assert np.array_equal(observed_support(row.astype(np.float32), options), expected)


def test_sampler_temperature_near_zero_is_greedy():
    rng = np.random.default_rng(9)
    for extra in ({}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.01}):
        options = SamplingOptions(temperature=1e-6, seed=1, **extra)
        for ordinal in range(5):
            row = rng.normal(size=3000).astype(np.float32)
            assert draw_many(row, options, 1, start=ordinal)[0] == row.argmax()


def test_sampler_zero_temperature_takes_the_first_of_equal_maxima():
    sampler = Sampler(SamplingOptions(temperature=0.0, top_k=3))
    row = mx.array([0.0, 5.0, 1.0, 5.0])
    assert sampler.draw(row, 0).token.item() == 1
    assert sampler.draw(row.astype(mx.bfloat16), 0).token.item() == 1


@pytest.mark.parametrize("case", [{}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.001}], ids=str)
def test_sampler_excluded_ids_are_never_drawn(case):
    row = np.zeros(64)
    row[::2] = -np.inf
    tokens = draw_many(row, SamplingOptions(temperature=2.0, seed=6, **case), 400)
    assert (tokens % 2 == 1).all()


def test_sampler_few_possible_ids_in_a_large_row_are_covered():
    row = np.full(100_000, -np.inf)
    row[[5, 70_000]] = [0.0, 1.0]
    sampler = Sampler(SamplingOptions(temperature=1.0, top_k=40, seed=6))
    draw = sampler.draw(mx.array(row, dtype=mx.float32), 0)
    assert draw.is_covered.item()
    assert draw.token.item() in {5, 70_000}


def test_sampler_same_seed_and_ordinal_draws_the_same_and_others_differ():
    row = np.zeros(1000)
    first = draw_many(row, SamplingOptions(temperature=1.0, seed=7), 50)
    again = draw_many(row, SamplingOptions(temperature=1.0, seed=7), 50)
    other = draw_many(row, SamplingOptions(temperature=1.0, seed=8), 50)
    assert np.array_equal(first, again)
    assert (first != other).mean() > 0.9
    assert len(set(first.tolist())) > 40


def test_sampler_without_seed_draws_a_fresh_one():
    options = SamplingOptions(temperature=1.0)
    assert Sampler(options).seed != Sampler(options).seed
    assert 0 <= Sampler(options).seed < 2**64


def test_step_key_all_ordinals_and_extreme_seeds_are_distinct():
    keys = [
        tuple(np.array(step_key(seed, ordinal)))
        for seed in (0, 1, 2**63, 2**64 - 1)
        for ordinal in range(50)
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("size", [8192, 8193, 50_257])
def test_leading_candidates_hold_everything_above_the_outside_bound(size):
    row = np.random.default_rng(size).normal(size=size).astype(np.float32)
    values, ids, outside = leading_candidates(mx.array(row), 64)
    values, ids = np.array(values), np.array(ids)
    real = np.isfinite(values)
    assert np.array_equal(values[real], row[ids[real]])
    assert (np.diff(ids) > 0).all()
    rest = np.delete(row, ids[real])
    assert rest.max() <= outside.item()
    assert set(np.argsort(-row)[:64]) <= set(ids.tolist())


# Penalties.


def reference_adjust(row, options, prompt, generated):
    row = np.array(row, dtype=np.float64)
    for token, value in options.logit_bias.items():
        row[token] += value
    history = [*prompt, *generated]
    size = options.repetition_context_size
    if options.repetition_penalty != 1.0:
        for token in set(history if size is None else history[-size:]):
            if row[token] < 0:
                row[token] *= options.repetition_penalty
            else:
                row[token] /= options.repetition_penalty
    for token in set(generated):
        row[token] -= options.presence_penalty
        row[token] -= options.frequency_penalty * generated.count(token)
    return row


ADJUSTMENTS = [
    {"logit_bias": {3: 2.5, 0: -7.0}},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "repetition_context_size": 4},
    {"repetition_penalty": 1.3, "repetition_context_size": None},
    {"presence_penalty": 0.6},
    {"frequency_penalty": -0.4},
    {
        "logit_bias": {1: 1.0},
        "repetition_penalty": 1.2,
        "repetition_context_size": 3,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.25,
    },
]


@pytest.mark.parametrize("case", ADJUSTMENTS, ids=str)
@pytest.mark.parametrize("prompt", [[], [4], [1, 2, 2, 5, 3, 1, 0, 6]], ids=len)
def test_adjuster_each_step_matches_the_formula(case, prompt):
    options = SamplingOptions(**case)
    adjuster = LogitAdjuster(options, 9)
    assert adjuster.is_active
    rng = np.random.default_rng(1)
    seen = adjuster.start(prompt)
    generated = []
    for token in [2, 2, 8, 5, 2, 0, 8, 1]:
        row = rng.normal(size=9).astype(np.float32) * 3
        adjusted = adjuster.adjust(mx.array(row), seen)
        expected = reference_adjust(row, options, prompt, generated)
        np.testing.assert_allclose(np.array(adjusted), expected, rtol=1e-5, atol=1e-5)
        seen = adjuster.push(seen, mx.array([token]))
        generated.append(token)


def test_adjuster_push_leaves_the_earlier_state_as_it_was():
    options = SamplingOptions(repetition_penalty=2.0, frequency_penalty=1.0)
    adjuster = LogitAdjuster(options, 5)
    before = adjuster.start([1])
    adjuster.push(before, mx.array([3, 3, 4]))
    adjusted = np.array(adjuster.adjust(mx.ones((5,)), before))
    np.testing.assert_allclose(adjusted, [1, 0.5, 1, 1, 1])


def test_adjuster_without_options_is_inactive():
    assert not LogitAdjuster(SamplingOptions(), 5).is_active


def test_adjuster_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(InvalidRequest) as caught:
        LogitAdjuster(SamplingOptions(logit_bias={5: 1.0}), 5)
    assert caught.value.code == "request.logit_bias"


def test_user_processors_run_in_order_with_the_tokens_so_far():
    calls = []

    def double(token_ids, row):
        calls.append(tuple(token_ids))
        return row * 2

    row = run_user_processors([double, lambda _, row: row + 1], (4, 5), mx.array([1.0, 2.0]))
    assert row.tolist() == [3.0, 5.0]
    assert calls == [(4, 5)]


@pytest.mark.parametrize(
    "processor",
    [
        lambda _, row: None,
        lambda _, row: np.array(row),
        lambda _, row: row[:1],
        lambda _, row: 1 / 0,
    ],
)
def test_user_processors_unusable_result_is_a_callback_error(processor):
    with pytest.raises(CallbackError) as caught:
        run_user_processors([processor], (), mx.array([1.0, 2.0]))
    assert caught.value.code == "callback.logits_processor"


def test_chooser_padded_rows_and_masked_ids_are_never_chosen():
    mask = mx.array([0.0, -math.inf, 0.0, 0.0, 0.0, 0.0])
    for temperature in (0.0, 1.0):
        chooser = TokenChooser(
            SamplingOptions(temperature=temperature, seed=1),
            prompt=[],
            rows=4,
            mask=mask,
            top_logprobs=None,
        )
        row = mx.array([0.0, 50.0, 1.0, 0.0, 90.0, 99.0])
        tokens = {
            int(chooser.choose(row, chooser.start(), ordinal).token.item()) for ordinal in range(30)
        }
        assert tokens <= {0, 2, 3}


# Log-probabilities.


@pytest.mark.parametrize("size", [7, 20_000])
def test_logprobs_are_the_log_softmax_of_the_row(size):
    row = np.random.default_rng(2).normal(size=size).astype(np.float32) * 3
    expected = np.log(softmax64(row.astype(np.float64)))
    lazy = measure_logprobs(mx.array(row), mx.array([4]), 5)
    result = lazy.read(4)
    assert result.token_id == 4
    assert result.logprob == pytest.approx(expected[4], abs=2e-5)
    order = np.argsort(-expected, kind="stable")[:5]
    assert [token for token, _ in result.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in result.top], expected[order], atol=2e-5)


def test_logprobs_no_alternatives_asked_gives_none():
    result = measure_logprobs(mx.array([0.0, 1.0]), mx.array([1]), 0).read(1)
    assert result.top == ()
    assert result.logprob == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-6)


def test_logprobs_ties_are_listed_by_lower_id_and_padded_rows_are_not():
    row = mx.array([1.0, 2.0, 2.0, 0.0, 9.0])
    result = measure_logprobs(row, mx.array([1]), 3, vocab_size=4).read(1)
    assert [token for token, _ in result.top] == [1, 2, 0]
    expected = np.log(softmax64(np.array([1.0, 2.0, 2.0, 0.0, 9.0])))
    assert result.logprob == pytest.approx(expected[1], abs=1e-5)
