"""Paired comparison of two policies, beside SciPy and brute force."""

import itertools

import numpy as np
import pytest
from scipy import stats

from trace_jax.errors import InputError
from trace_jax.evaluate.comparison import compare_paired, sign_flip


def counts(successes, trials=1):
    trials = np.broadcast_to(trials, len(successes))
    return {f"task-{i}": {"trials": int(n), "successes": int(s)} for i, (s, n) in enumerate(zip(successes, trials, strict=True))}


@pytest.mark.parametrize("fixed, broken, same", [(6, 3, 11), (0, 0, 4), (9, 0, 0), (0, 5, 2), (40, 21, 100), (1, 1, 0)])
def test_with_one_trial_a_task_it_is_mcnemars_exact_test(fixed, broken, same):
    a = counts([0] * fixed + [1] * broken + [1] * same)
    b = counts([1] * fixed + [0] * broken + [1] * same)
    found = compare_paired(a, b)
    assert (len(found.fixed), len(found.broken), found.higher, found.lower, found.test) == (fixed, broken, fixed, broken, "mcnemar")
    oracle = stats.binomtest(fixed, fixed + broken).pvalue if fixed + broken else 1.0
    assert found.p == pytest.approx(oracle, rel=1e-12)
    assert found.difference == pytest.approx((fixed - broken) / (fixed + broken + same))
    assert found.rates[1] - found.rates[0] == pytest.approx(found.difference)


@pytest.mark.parametrize("seed", range(4))
def test_with_several_trials_all_sign_flips_are_counted(seed):
    random = np.random.default_rng(seed)
    trials = random.integers(1, 5, (2, 10))
    successes = random.binomial(trials, [[0.3], [0.7]])
    found = compare_paired(counts(successes[0], trials[0]), counts(successes[1], trials[1]))
    change = successes[1] / trials[1] - successes[0] / trials[0]
    signs = np.array(list(itertools.product([-1, 1], repeat=10)))
    brute = np.mean(np.abs(signs @ change) >= abs(change.sum()) - 1e-9)
    assert found.test == "sign_flip" and found.p == pytest.approx(brute, rel=1e-12)
    oracle = stats.permutation_test(
        (successes[1] / trials[1], successes[0] / trials[0]),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        n_resamples=np.inf,
    )
    assert found.p == pytest.approx(oracle.pvalue, rel=1e-12)
    assert (found.higher, found.lower) == ((change > 0).sum(), (change < 0).sum())


def test_drawn_flips_agree_with_the_exact_law(monkeypatch):
    changes = np.random.default_rng(1).integers(-4, 6, 60)
    exact = sign_flip(changes)
    monkeypatch.setattr("trace_jax.evaluate.comparison._WORK", 0)
    assert 0.001 < exact < 0.5 and sign_flip(changes) == pytest.approx(exact, abs=0.01)


def test_a_task_is_solved_by_more_than_half_of_its_trials():
    a, b = counts([0, 2, 2, 4, 1], 4), counts([3, 3, 1, 2, 2], 4)
    found = compare_paired(a, b)
    assert found.fixed == ("task-0", "task-1") and found.broken == ("task-3",)
    assert (found.higher, found.lower) == (3, 2)  # 2 of 4 to 1 of 4 is less, and breaks nothing


def test_the_interval_is_that_of_the_mean_change_over_tasks():
    random = np.random.default_rng(5)
    a, b = random.binomial(4, 0.4, 80), random.binomial(4, 0.6, 80)
    found = compare_paired(counts(a, 4), counts(b, 4))
    oracle = stats.bootstrap(((b - a) / 4,), np.mean, method="percentile", n_resamples=4000, rng=0).confidence_interval
    assert found.interval == pytest.approx((oracle.low, oracle.high), abs=0.01) and found.clear


def test_pairing_uses_that_tasks_differ():
    """Two policies that differ on few tasks differ clearly where their own intervals overlap widely."""
    solved = np.arange(200) < 100
    better = solved | (np.arange(200) >= 190)
    found = compare_paired(counts(solved.astype(int)), counts(better.astype(int)))
    assert found.clear and found.interval[1] - found.interval[0] < 0.07


def test_tasks_that_only_one_has_are_named_or_left_out():
    a, b = counts([1, 0, 1]), counts([1, 1])
    b["other"] = {"trials": 1, "successes": 1}
    with pytest.raises(InputError, match=r"base and ours were not evaluated on the same tasks: only base has task-2; only ours has other"):
        compare_paired(a, b, names=("base", "ours"))
    found = compare_paired(a, b, intersect=True)
    assert found.tasks == 2 and found.left_out == ("other", "task-2") and found.fixed == ("task-1",)
    assert "2 tasks, 2 left out" in found.told()


def test_a_task_without_a_trial_is_one_that_is_not_there():
    a, b = counts([1, 0]), counts([1, 1])
    b["task-1"] = {"trials": 0, "successes": 0}
    with pytest.raises(InputError, match="only a has task-1"):
        compare_paired(a, b)
    assert compare_paired(a, b, intersect=True).tasks == 1
    with pytest.raises(InputError, match="no task in common"):
        compare_paired({}, b, intersect=True)


def test_a_line_says_all_of_it():
    a, b = counts([0] * 6 + [1] * 3 + [1] * 7 + [0] * 4), counts([1] * 6 + [0] * 3 + [1] * 7 + [0] * 4)
    assert compare_paired(a, b).told() == "+15.0 points [-15.0, +45.0], 6 fixed, 3 broken, p = 0.508 (exact McNemar), 20 tasks"
    assert compare_paired(a, b).to_json()["fixed"] == [f"task-{i}" for i in range(6)]
