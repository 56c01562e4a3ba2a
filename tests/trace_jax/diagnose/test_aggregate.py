"""Figures against plain loops, and files that do not add up."""

import copy
import time

import numpy as np
import pytest

from trace_jax.diagnose.aggregate import CODES, LISTS, Run, aggregate, decode_run, encode_run
from trace_jax.errors import InputError


def random_run(attempt, rng, ids=40, capabilities=("a", "b"), drawn=None):
    names = [f"{n}#0" for n in range(ids)]
    names = names if drawn is None else sorted(str(i) for i in rng.choice(names, drawn, replace=False))
    failed = {i: int(i[:-2]) % 3 > 0 for i in names}
    return Run(attempt, failed, {c: {i: int(rng.integers(3)) for i in names} for c in capabilities})


@pytest.fixture
def runs():
    rng = np.random.default_rng(0)
    return [random_run(i, rng, drawn=32) for i in range(1, 11)]


def by_hand(run, capability):
    group = {(label, failed): 0 for label in CODES.values() for failed in (True, False)}
    for i, failed in run.failed.items():
        group[run.codes[capability][i], failed] += 1
    lf, pf, lp, pp = group[2, True], group[1, True], group[2, False], group[1, False]
    minus, plus = lf / (lf + pf) if lf + pf else 0.0, lp / (lp + pp) if lp + pp else 0.0
    return lf / sum(run.failed.values()), minus, plus


def test_figures_are_the_formulas_of_the_method(runs):
    for f in aggregate(runs, coverage=0.3, gap=0.0, min_runs=5):
        cov, minus, plus = np.array([by_hand(run, f.capability) for run in runs]).T
        np.testing.assert_allclose([f.mean_cov, f.std_cov], [cov.mean(), cov.std()])
        np.testing.assert_allclose([f.mean_delta, f.std_delta], [(minus - plus).mean(), (minus - plus).std()])
        np.testing.assert_allclose([f.er_minus, f.er_plus], [minus.mean(), plus.mean()])
        assert f.n_runs_passed == sum((cov >= 0.3) & (minus - plus >= 0.0))
        assert f.passes_consistency == (f.n_runs_passed >= 5) and f.n_runs_total == 10


def run_of(attempt, **lists):
    """A run with one capability, ids numbered."""
    ids, failed, codes = iter(range(100)), {}, {}
    for name, count in lists.items():
        label, _, end = name.partition("_")
        for _ in range(count):
            i = f"{next(ids)}#0"
            failed[i], codes[i] = end == "failed", CODES[label]
    return Run(attempt, failed, {"a": codes})


def test_a_threshold_that_is_met_exactly_passes():
    # coverage 1/10; gap 2/5 - 1/5
    run = run_of(1, lacking_failed=2, present_failed=3, na_failed=15, lacking_passed=1, present_passed=4)
    assert aggregate([run], coverage=0.10, gap=0.20, min_runs=1)[0].passes_consistency
    assert not aggregate([run], coverage=0.11, gap=0.20, min_runs=1)[0].passes_consistency
    assert not aggregate([run], coverage=0.10, gap=0.21, min_runs=1)[0].passes_consistency


def test_empty_denominators_count_as_zero():
    f = aggregate([run_of(1, na_failed=3, lacking_passed=1)], min_runs=1)[0]
    assert (f.mean_cov, f.er_minus, f.er_plus, f.mean_delta) == (0.0, 0.0, 1.0, -1.0)
    f = aggregate([run_of(1, na_passed=3)], min_runs=1)[0]
    assert (f.mean_cov, f.mean_delta) == (0.0, 0.0)


def test_a_pair_without_a_label_counts_nowhere_and_survives_its_file():
    whole = run_of(1, lacking_failed=2, present_failed=3, na_failed=5, lacking_passed=1, present_passed=9)
    whole.codes["b"] = dict(whole.codes["a"])
    without = Run(1, whole.failed, {"a": whole.codes["a"], "b": {i: c for i, c in whole.codes["b"].items() if i not in ("0#0", "19#0")}})
    found = {f.capability: f for f in aggregate([without], min_runs=1)}
    a, b = found["a"], found["b"]
    assert (a.mean_cov, a.er_minus, a.gap_share) == (0.2, 0.4, 0.0)
    assert (b.mean_cov, b.er_minus, b.er_plus, b.gap_share) == pytest.approx((1 / 9, 1 / 4, 1 / 9, 2 / 20))
    data = encode_run(without)
    assert data["gaps"] == {"b": {"failed": ["0#0"], "passed": ["19#0"]}} and "gaps" not in encode_run(whole)
    assert decode_run(data, "run_01.json") == without


@pytest.mark.parametrize(
    "gaps, words",
    [
        ({"c": {"failed": []}}, "capabilities of 'labels'"),
        ({"a": {"failed": ["0#0"]}}, "id '0#0' occurs twice"),
        ({"a": {"lost": []}}, "the lists failed, passed"),
        ({"a": {"failed": [1]}}, "gap_failed must be a list of ids"),
        ({"a": {"failed": ["9#9"]}}, "totals.total_failed is 1, the lists hold 2"),
    ],
)
def test_gaps_that_do_not_add_up_are_named(gaps, words):
    with pytest.raises(InputError, match=words):
        decode_run(encode_run(run_of(1, lacking_failed=1, present_passed=1)) | {"gaps": gaps}, "run_01.json")


def test_a_gap_from_fewer_than_five_applicable_passed_trajectories_is_marked():
    assert not aggregate([run_of(1, lacking_failed=9, present_passed=4, na_passed=50)], min_runs=1)[0].supported
    assert aggregate([run_of(1, lacking_failed=9, present_passed=5)], min_runs=1)[0].supported


def test_retained_first_by_mean_gap_and_ties_by_name(runs):
    gaps = [f.mean_delta for f in aggregate(runs)]
    assert gaps == sorted(gaps, reverse=True)


def test_intervals_hold_the_figure_and_narrow_with_more_trajectories():
    few, many = (aggregate([random_run(1, np.random.default_rng(1), ids=n)], min_runs=1)[0] for n in (30, 600))
    for f in (few, many):
        assert f.cov_interval[0] <= f.mean_cov <= f.cov_interval[1]
        assert f.gap_interval[0] <= f.mean_delta <= f.gap_interval[1]
    assert np.diff(many.gap_interval) < 0.4 * np.diff(few.gap_interval)


def test_runs_that_agree_have_alpha_one_and_the_lacking_failures_are_listed(runs):
    same = [Run(i, runs[0].failed, runs[0].codes) for i in range(1, 4)]
    f = aggregate(same, min_runs=1)[0]
    assert f.alpha == 1.0
    assert list(f.lacking) == sorted(i for i, c in runs[0].codes[f.capability].items() if c == 2 and runs[0].failed[i])
    assert aggregate(runs, min_runs=1)[0].alpha < 0.3


def test_a_run_goes_to_json_and_back(runs):
    data = encode_run(runs[0])
    assert set(data["labels"]["a"]) == set(LISTS) and sum(map(len, data["labels"]["a"].values())) == 32
    back = decode_run(data, "run_01.json", ["a", "b"])
    assert back.attempt == 1 and back.failed == runs[0].failed and back.codes == runs[0].codes


def test_a_published_run_loads():
    lists = {
        "lacking_failed": ["airline:2"],
        "present_failed": [],
        "na_failed": ["retail:7"],
        "lacking_passed": [],
        "present_passed": ["retail:0"],
        "na_passed": [],
    }
    run = decode_run({"attempt": 3, "totals": {"total_failed": 2, "total_passed": 1}, "labels": {"x": lists}}, "run_03.json")
    assert run.failed == {"airline:2": True, "retail:7": True, "retail:0": False}


def damage(data, how):
    lists = data["labels"]["b"]
    filled = next(name for name in LISTS if name.endswith("failed") and lists[name])
    if how == "twice":
        lists["na_passed"].append(lists[filled][0])
    elif how == "left out":
        lists[filled].pop()
    elif how == "outcome":
        lists["na_passed"].append(lists[filled].pop())
    elif how == "totals":
        data["totals"]["total_failed"] += 1
    elif how == "list missing":
        del lists["na_failed"]
    elif how == "list unknown":
        lists["unsure_failed"] = []
    elif how == "number":
        lists[filled][0] = 7
    elif how == "unknown":
        data["labels"]["c"] = data["labels"]["a"]
    elif how == "missing":
        del data["labels"]["b"]
    elif how == "attempt":
        data["attempt"] = "one"
    elif how == "no labels":
        data["labels"] = {}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("twice", r"run_01\.json: run 1, capability 'b': id '.*' occurs twice"),
        ("left out", r"run_01\.json: run 1, capability 'b': id '.*' is missing, additional or has another outcome than under 'a'"),
        ("outcome", r"run 1, capability 'b': id '.*' is missing, additional or has another outcome"),
        ("totals", r"run_01\.json: run 1: totals\.total_failed is \d+, the lists hold \d+"),
        ("list missing", r"run 1, capability 'b': needs exactly the lists"),
        ("list unknown", r"run 1, capability 'b': needs exactly the lists"),
        ("number", r"run 1, capability 'b': \w+_failed must be a list of ids"),
        ("unknown", r"run 1, capability 'c': not among the candidates"),
        ("missing", r"run 1, capability 'b': missing from the labels"),
        ("attempt", r"field 'attempt' is 'one'"),
        ("no labels", r"run 1: field 'labels' holds no capability"),
    ],
)
def test_a_run_that_does_not_add_up_is_named(runs, how, message):
    data = copy.deepcopy(encode_run(runs[0]))
    damage(data, how)
    with pytest.raises(InputError, match=message) as error:
        decode_run(data, "run_01.json", ["a", "b"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [None, [], {"attempt": 1}, {"attempt": 1, "totals": {}, "labels": []}])
def test_what_is_no_run_is_refused(data):
    with pytest.raises(InputError, match=r"run_01\.json: not a labelling run"):
        decode_run(data, "run_01.json")


def test_runs_that_do_not_fit_together_are_named(runs):
    with pytest.raises(InputError, match="no labelling runs"):
        aggregate([])
    with pytest.raises(InputError, match="attempt 1 is also that of one.json"):
        aggregate([runs[0], runs[0]], files=["one.json", "two.json"])
    with pytest.raises(InputError, match=r"two\.json: run 2, capability 'b': not in all runs"):
        aggregate([runs[0], Run(2, runs[1].failed, {"a": runs[1].codes["a"]})], files=["one.json", "two.json"])
    turned = Run(2, {i: not f for i, f in runs[0].failed.items()}, runs[0].codes)
    with pytest.raises(InputError, match=r"two\.json: run 2: id '.*' has another outcome"):
        aggregate([runs[0], turned], files=["one.json", "two.json"])


def test_a_million_labels_aggregate_within_seconds():
    rng = np.random.default_rng(0)
    data = [encode_run(random_run(i, rng, ids=1000, capabilities=[f"c{n}" for n in range(100)])) for i in range(1, 11)]
    start = time.process_time()
    figures = aggregate([decode_run(d, "run.json") for d in data])
    assert len(figures) == 100
    # five seconds is the bar for an idle machine; this counts the work of both cores
    assert time.process_time() - start < 10.0
