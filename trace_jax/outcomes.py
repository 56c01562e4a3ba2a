"""Success of a batch of trajectories: rate, interval, pass^k. A rollout that infrastructure failed is left out and counted."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np

from rl.trajectory import Trajectory
from trace_jax.statistics import bootstrap_mean, wilson


def success_rate(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """{rate, interval, n, errors}: Wilson's 95 % interval, or the bootstrap over tasks where a task has several trials."""
    scored = [t for t in trajectories if t.error is None]
    success = np.array([t.success for t in scored], float)
    tasks = [t.task_id for t in scored]
    if len(set(tasks)) == len(tasks):
        interval = [float(x) for x in wilson(int(success.sum()), len(success))]
    else:
        interval = list(bootstrap_mean(success, np.array(tasks)))
    rate = float(success.mean()) if len(success) else 0.0
    return {"rate": rate, "interval": interval, "n": len(scored), "errors": len(trajectories) - len(scored)}


def rate_line(name: str, found: dict[str, Any]) -> str:
    """What commands print of a policy; `found` is of `success_rate`."""
    low, high = found["interval"]
    return f"{name:<40} {found['rate']:.3f} [{low:.3f}, {high:.3f}]  n = {found['n']}"


def pass_hat(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """pass^k, the chance that k trials of a task all succeed: the mean of C(s, k) / C(n, k) over tasks of s successes in n trials.

    Source: tau-bench, arXiv 2406.12045. k goes up to the smallest number of trials.
    """
    most = min((trials for trials, _ in counts), default=0)
    return {str(k): float(np.mean([comb(s, k) / comb(n, k) for n, s in counts])) for k in range(1, most + 1)}
