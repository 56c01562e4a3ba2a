"""Two labellers beside each other, and capabilities that say the same."""

import math

import pytest

from trace_jax.diagnose.aggregate import CODES, Run
from trace_jax.diagnose.agreement import agreement, majority, overlaps

NA, PRESENT, LACKING = CODES["na"], CODES["present"], CODES["lacking"]


def run(attempt, **codes):
    """A run from `capability=[code, ...]`, None for a gap; the ids are numbers."""
    count = len(next(iter(codes.values())))
    return Run(
        attempt,
        {f"{i}#0": True for i in range(count)},
        {c: {f"{i}#0": x for i, x in enumerate(row) if x is not None} for c, row in codes.items()},
    )


def test_the_label_of_a_trajectory_is_that_of_most_runs_and_a_tie_is_none():
    runs = [run(1, a=[LACKING, LACKING, NA, None]), run(2, a=[LACKING, NA, NA, None]), run(3, a=[PRESENT, None, PRESENT, PRESENT])]
    assert majority(runs) == {"a": {"0#0": LACKING, "2#0": NA, "3#0": PRESENT}}


def test_agreement_counts_pairs_that_both_labelled():
    first = [run(1, a=[LACKING, LACKING, PRESENT, NA], b=[NA] * 4)]
    second = [run(7, a=[LACKING, PRESENT, PRESENT, None], c=[NA] * 4)]
    (row,) = agreement(first, second)
    assert (row.capability, row.pairs, row.same, row.differ) == ("a", 3, pytest.approx(2 / 3), ("1#0",))
    assert row.counts == ((0, 0, 0), (0, 1, 0), (0, 1, 1))
    # by the formula: 3 units, values L4-1=3, P3: Do = 2/6, De = 18/30
    assert row.alpha == pytest.approx(1 - (2 / 6) / (18 / 30))


def test_nothing_in_common_is_not_a_number():
    (row,) = agreement([run(1, a=[LACKING, None])], [run(1, a=[None, NA])])
    assert row.pairs == 0 and math.isnan(row.same) and math.isnan(row.alpha)


def test_capabilities_that_lack_in_the_same_trajectories_are_shown():
    runs = [run(1, a=[LACKING] * 4 + [NA], b=[LACKING] * 4 + [PRESENT], c=[LACKING] * 2 + [NA] * 3, d=[NA] * 5, e=[NA] * 5)]
    assert overlaps(runs) == [("a", "b", 1.0)]
    runs.append(run(2, a=[LACKING] * 5, b=[LACKING] * 4 + [None], c=[NA] * 5, d=[NA] * 5, e=[NA] * 5))
    assert overlaps(runs) == [("a", "b", pytest.approx(8 / 9))]
