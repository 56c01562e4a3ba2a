"""Intervals and agreement against published values and plain loops."""

import numpy as np
import pytest

from trace_jax.evaluate.statistics import (
    bootstrap_mean,
    bootstrap_weights,
    clustered_wilson,
    krippendorff_alpha,
    percentile_interval,
    wilson,
)


def test_wilson_gives_the_textbook_interval():
    low, high = wilson(np.array([5, 0, 10]), 10)
    np.testing.assert_allclose(low, [0.2366, 0.0, 0.7225], atol=1e-4)
    np.testing.assert_allclose(high, [0.7634, 0.2775, 1.0], atol=1e-4)


def test_wilson_of_no_trials_says_nothing():
    assert [float(x) for x in wilson(0, 0)] == [0.0, 1.0]


def test_wilson_refuses_more_successes_than_trials():
    with pytest.raises(ValueError, match="successes"):
        wilson(3, 2)


def test_wilson_covers_the_true_rate_about_95_percent_of_the_time():
    successes = np.random.default_rng(0).binomial(40, 0.3, 4000)
    low, high = wilson(successes, 40)
    assert 0.93 < np.mean((low <= 0.3) & (0.3 <= high)) < 0.97


def test_bootstrap_draws_whole_clusters():
    clusters = np.array(["a", "b", "a", "c", "b"])
    weights = bootstrap_weights(clusters, 50, seed=3)
    assert weights.shape == (50, 5)
    assert np.array_equal(weights[:, 0], weights[:, 2]) and np.array_equal(weights[:, 1], weights[:, 4])
    assert np.array_equal(weights[:, 0] + weights[:, 1] + weights[:, 3], np.full(50, 3))
    assert np.array_equal(weights, bootstrap_weights(clusters, 50, seed=3))


def test_bootstrap_of_a_mean_matches_the_normal_interval_of_many_values():
    values = np.random.default_rng(1).normal(2.0, 1.0, 400)
    low, high = bootstrap_mean(values, draws=4000, seed=0)
    half = 1.96 * values.std() / 20
    np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=0.015)


def test_clusters_widen_the_interval_of_repeated_values():
    values = np.repeat(np.random.default_rng(2).normal(size=30), 10)
    plain = np.subtract(*bootstrap_mean(values)[::-1])
    clustered = np.subtract(*bootstrap_mean(values, np.repeat(np.arange(30), 10))[::-1])
    assert clustered > 2.5 * plain


def test_wilson_of_clusters_lies_between_that_of_the_units_and_that_of_the_clusters():
    random = np.random.default_rng(0)
    seeds = np.repeat(np.arange(50), 8)
    alone = (random.random(400) < 0.4).astype(float)
    np.testing.assert_allclose(clustered_wilson(alone, seeds), wilson(int(alone.sum()), 400), atol=0.01)
    same = np.repeat(random.random(50) < 0.4, 8).astype(float)  # a seed is solved always or never
    np.testing.assert_allclose(clustered_wilson(same, seeds), wilson(int(same[::8].sum()), 50), atol=0.01)
    np.testing.assert_allclose(clustered_wilson(np.zeros(400), seeds), wilson(0, 50), atol=1e-12)  # nothing says how alike units are
    assert clustered_wilson([], []) == (0.0, 1.0)


def test_wilson_of_clusters_covers():
    random = np.random.default_rng(0)
    chances = random.beta(0.4 * 4, 0.6 * 4, (600, 30))  # correlation 0.2 within a seed
    units = (random.random((600, 30, 8)) < chances[..., None]).astype(float).reshape(600, -1)
    found = [clustered_wilson(one, np.repeat(np.arange(30), 8)) for one in units]
    assert 0.92 < np.mean([low <= 0.4 <= high for low, high in found]) < 0.98


def test_percentile_interval_leaves_empty_samples_out():
    low, high = percentile_interval(np.array([np.nan, 1.0, 1.0]))
    assert (low, high) == (1.0, 1.0)


# Krippendorff (2011), data C and D of "Computing Krippendorff's Alpha-Reliability": four coders, twelve units, nominal alpha .743
_PUBLISHED = """
1 2 3 3 2 1 4 1 2 . . .
1 2 3 3 2 2 4 1 2 5 . 3
. 3 3 3 2 3 4 2 2 5 1 .
1 2 3 3 2 4 4 1 2 5 1 .
"""


def test_krippendorff_alpha_gives_the_published_value():
    codes = np.array([[-1 if x == "." else int(x) - 1 for x in line.split()] for line in _PUBLISHED.strip().splitlines()])
    assert krippendorff_alpha(codes, 5) == pytest.approx(0.743, abs=5e-4)


def test_krippendorff_alpha_is_one_for_agreement_about_zero_for_chance_and_undefined_for_one_category():
    rng = np.random.default_rng(0)
    same = np.repeat(rng.integers(0, 3, (1, 500)), 4, 0)
    alphas = krippendorff_alpha(np.stack([same, rng.integers(0, 3, (4, 500)), np.zeros((4, 500), int)]), 3)
    assert alphas[0] == 1.0
    assert abs(alphas[1]) < 0.05
    assert np.isnan(alphas[2])


def test_krippendorff_alpha_is_undefined_where_no_unit_has_two_codes():
    assert np.isnan(krippendorff_alpha(np.array([[0, -1], [-1, 1]]), 2))
