"""Two policies on the same tasks: which tasks the second fixes and breaks, how much it gains, and whether that may be chance.

Tasks differ far more in difficulty than policies do in skill, so figures are paired: a task is set beside itself. Trials of one task are
not independent, so the task is what is drawn and what is flipped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trace_jax.errors import InputError
from trace_jax.evaluate.statistics import bootstrap_mean
from trace_jax.evaluate.task_names import some

_WORK = 100_000_000  # steps of the exact test, half a second; above, drawn flips
_DRAWS = 20_000

Tasks = Mapping[str, Mapping[str, int]]  # id to {"trials", "successes"}, as in evaluation/<policy>.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What changes from policy a to policy b. A rate is a mean over tasks of the share of successful trials.

    Attributes:
      tasks: how many both have.
      rates: of a and b on these tasks.
      difference: of b to a; `interval` is its 95 % percentile bootstrap over tasks. Where no task differs it is [0, 0] and says nothing.
      fixed, broken: tasks that only b solves, and that only a solves. To solve a task is to succeed in more than half of its trials.
      higher, lower: tasks whose share of successes rises and falls; with one trial a task, as many as are fixed and broken.
      p: two-sided, of no difference; `test` is "mcnemar" (exact, one trial a task) or "sign_flip".
      left_out: tasks that only one has.
    """

    tasks: int
    rates: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    fixed: tuple[str, ...]
    broken: tuple[str, ...]
    higher: int
    lower: int
    test: str
    p: float
    left_out: tuple[str, ...] = ()

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.interval[0] > 0 or self.interval[1] < 0

    def to_json(self) -> dict[str, Any]:
        """All attributes."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}

    def told(self) -> str:
        """One line: `+15.0 points [-10.0, +40.0], 6 fixed, 3 broken, p = 0.508 (exact McNemar), 20 tasks`."""
        test = {"mcnemar": "exact McNemar", "sign_flip": "sign flips over tasks"}[self.test]
        low, high = self.interval
        tasks = f"{self.tasks} tasks" + (f", {len(self.left_out)} left out" if self.left_out else "")
        return (
            f"{100 * self.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}], "
            f"{len(self.fixed)} fixed, {len(self.broken)} broken, p = {self.p:.3g} ({test}), {tasks}"
        )


def compare_paired(
    a: Tasks, b: Tasks, *, names: tuple[str, str] = ("a", "b"), intersect: bool = False, fix: str = "evaluate both on the same tasks"
) -> Comparison:
    """What changes from a to b on the tasks that both have.

    Args:
      names: of the two, for the message.
      intersect: leave out tasks that only one has, instead of refusing. A task without a trial counts as one that is not there.
      fix: ends the message.

    Raises:
      InputError: no task in common, or tasks that only one has.
    """
    a, b = ({task: counts for task, counts in tasks.items() if counts["trials"]} for tasks in (a, b))
    shared, alone = [task for task in a if task in b], sorted(a.keys() ^ b.keys())
    if alone and not intersect:
        only = "; ".join(
            f"only {name} has {some(sorted(mine.keys() - other.keys()))}"
            for name, mine, other in ((names[0], a, b), (names[1], b, a))
            if mine.keys() - other.keys()
        )
        raise InputError(f"{names[0]} and {names[1]} were not evaluated on the same tasks: {only}; {fix}")
    if not shared:
        raise InputError(f"{names[0]} and {names[1]} have no task in common that was scored; evaluate both on the same tasks")
    counts = np.array([[(x[t]["successes"], x[t]["trials"]) for t in shared] for x in (a, b)])  # [2, N, 2]
    shares = counts[..., 0] / counts[..., 1]
    solved = 2 * counts[..., 0] > counts[..., 1]
    change = shares[1] - shares[0]
    once = bool((counts[..., 1] == 1).all())
    return Comparison(
        tasks=len(shared),
        rates=(float(shares[0].mean()), float(shares[1].mean())),
        difference=float(change.mean()),
        interval=bootstrap_mean(change),
        fixed=tuple(t for t, (before, after) in zip(shared, solved.T, strict=True) if after and not before),
        broken=tuple(t for t, (before, after) in zip(shared, solved.T, strict=True) if before and not after),
        higher=int((change > 0).sum()),
        lower=int((change < 0).sum()),
        test="mcnemar" if once else "sign_flip",
        p=sign_flip(_integers(counts)),
        left_out=tuple(alone),
    )


def _integers(counts: np.ndarray) -> np.ndarray:
    """The changes of the shares [N] as integers over one denominator, so that sums are compared exactly."""
    denominator = math.lcm(*(int(n) for n in np.unique(counts[..., 1])))
    scaled = counts[..., 0] * (denominator // counts[..., 1])
    change = scaled[1] - scaled[0]
    return change // max(math.gcd(*(int(c) for c in np.unique(change))), 1)


def sign_flip(changes: np.ndarray, seed: int = 0) -> float:
    """The p-value of the two-sided paired test by sign flips: P(|sum of ±changes| >= |sum of changes|), each sign as likely as the other.

    The distribution is exact, by adding one task after the other; with changes of -1, 0 and 1 this is McNemar's exact test, that is the
    binomial test of the changed tasks. Where the sums have too many values the flips are drawn, and the p-value is that of Davison and
    Hinkley (1997), (1 + hits) / (1 + draws).

    Args:
      changes: [N] integers.
    """
    observed, sizes = abs(int(changes.sum())), np.abs(changes[changes != 0]).astype(np.int64)
    total = int(sizes.sum())
    if total * len(sizes) > _WORK:
        random, hits = np.random.default_rng(seed), 0
        for _ in range(_DRAWS // 1000):
            signs = random.integers(0, 2, (1000, len(sizes)), dtype=np.int8) * 2 - 1
            hits += int((np.abs(signs @ sizes) >= observed).sum())
        return (1 + hits) / (1 + _DRAWS)
    law, reached = np.zeros(total + 1), 0  # of the sum of those sizes whose sign is plus
    law[0] = 1.0
    for size in sizes:
        law[: reached + size + 1] *= 0.5
        law[size : reached + size + 1] += law[: reached + 1].copy()
        reached += int(size)
    return float(min(1.0, law[np.abs(2 * np.arange(total + 1) - total) >= observed].sum()))
