"""Do two labellers say the same, and do two capabilities say the same thing twice?

Two diagnoses of the same trajectories are compared by the label that most runs of each gave a trajectory: rules beside an LLM, a blinded
analyst beside one that saw the outcomes, two models. A tie is no label.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from trace_jax.diagnose.aggregate import CODES, Run
from trace_jax.evaluate.statistics import krippendorff_alpha

COINCIDE = 0.8  # share of common LACKING labels from which on two capabilities are shown as one


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far two labellers agree on one capability.

    Attributes:
      pairs: trajectories that both labelled.
      same: share of them with one label, NaN where there are none.
      alpha: Krippendorff's alpha of the two, NaN where it is undefined.
      counts: [3][3], rows the first labeller's NA, PRESENT, LACKING, columns the second's.
      differ: ids with two labels, sorted.
    """

    capability: str
    pairs: int
    same: float
    alpha: float
    counts: tuple[tuple[int, ...], ...]
    differ: tuple[str, ...]


def majority(runs: Sequence[Run]) -> dict[str, dict[str, int]]:
    """Capability to id to the code that most of the runs gave; ids without any, or with a tie, are left out."""
    votes: dict[str, dict[str, collections.Counter[int]]] = {}
    for run in runs:
        for capability, codes in run.codes.items():
            mine = votes.setdefault(capability, {})
            for identifier, code in codes.items():
                mine.setdefault(identifier, collections.Counter())[code] += 1
    found: dict[str, dict[str, int]] = {}
    for capability, mine in votes.items():
        ranked = {identifier: count.most_common(2) for identifier, count in mine.items()}
        found[capability] = {i: top[0][0] for i, top in ranked.items() if len(top) == 1 or top[0][1] > top[1][1]}
    return found


def agreement(first: Sequence[Run], second: Sequence[Run]) -> list[Agreement]:
    """The agreement on every capability that both have, in the order of the first."""
    one, other = majority(first), majority(second)
    rows = []
    for capability in (c for c in one if c in other):
        ids = sorted(one[capability].keys() & other[capability].keys())
        codes = np.array([[labels[capability][i] for i in ids] for labels in (one, other)], int).reshape(2, len(ids))
        counts = np.zeros((len(CODES), len(CODES)), int)
        np.add.at(counts, (codes[0], codes[1]), 1)
        rows.append(
            Agreement(
                capability=capability,
                pairs=len(ids),
                same=float((codes[0] == codes[1]).mean()) if ids else float("nan"),
                alpha=float(krippendorff_alpha(codes, len(CODES))),
                counts=tuple(tuple(int(n) for n in row) for row in counts),
                differ=tuple(i for i, a, b in zip(ids, *codes, strict=True) if a != b),
            )
        )
    return rows


def overlaps(runs: Sequence[Run]) -> list[tuple[str, str, float]]:
    """Pairs of capabilities whose LACKING labels coincide: common ones over all of either, where that is COINCIDE or more."""
    lacking: dict[str, set[tuple[int, str]]] = {}
    for run in runs:
        for capability, codes in run.codes.items():
            lacking.setdefault(capability, set()).update((run.attempt, i) for i, code in codes.items() if code == CODES["lacking"])
    pairs = ((a, b, len(lacking[a] & lacking[b]), len(lacking[a] | lacking[b])) for a, b in itertools.combinations(lacking, 2))
    return [(a, b, common / either) for a, b, common, either in pairs if either and common / either >= COINCIDE]
