"""Success of a batch of trajectories: rate, interval, pass^k. A rollout that infrastructure failed is left out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

from rl.trajectory import StopReason, Trajectory
from trace_jax.evaluate.statistics import bootstrap_mean, clustered_wilson, wilson


def count_tasks(trajectories: Sequence[Trajectory], errors_fail: bool = False) -> dict[str, dict[str, int]]:
    """{task: {"trials", "successes"}}, of the tasks that have a trial that was scored.

    Args:
      errors_fail: a rollout that infrastructure failed counts as a trial without success, instead of not at all.
    """
    tasks: dict[str, dict[str, int]] = {}
    for t in trajectories:
        if t.error is None or errors_fail:
            counts = tasks.setdefault(t.task_id, {"trials": 0, "successes": 0})
            counts["trials"] += 1
            counts["successes"] += int(t.error is None and t.success)
    return tasks


def rate_of(tasks: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """{rate, interval, n} of such counts: Wilson's 95 % interval, or the bootstrap over tasks where a task has several trials.

    Where all trials end alike the bootstrap has no width; then it is Wilson's, with as many trials as there are tasks.
    """
    trials = np.array([counts["trials"] for counts in tasks.values()], int)
    successes = np.array([counts["successes"] for counts in tasks.values()], int)
    n, won = int(trials.sum()), int(successes.sum())
    if n == len(trials):
        interval = wilson(won, n)
    else:
        values = np.repeat(np.tile([1.0, 0.0], len(tasks)), np.stack([successes, trials - successes], 1).ravel())
        interval = (bootstrap_mean if 0 < won < n else clustered_wilson)(values, np.repeat(np.array(list(tasks)), trials))
    return {"rate": won / n if n else 0.0, "interval": [float(x) for x in interval], "n": n}


def success_rate(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """{rate, interval, n, errors}, see `rate_of`."""
    found = rate_of(count_tasks(trajectories))
    return found | {"errors": len(trajectories) - found["n"]}


def overall_success(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """`success_rate` with `pass_hat`; where infrastructure failed rollouts, the same with these as failures under `errors_as_failures`.

    Benchmarks leave such rollouts out silently. Both are shown, since what broke may have been the agent's doing.
    """

    def figures(errors_fail: bool) -> dict[str, Any]:
        tasks = count_tasks(trajectories, errors_fail)
        return rate_of(tasks) | {"pass_hat": pass_hat([(c["trials"], c["successes"]) for c in tasks.values()])}

    found = figures(False)
    errors = len(trajectories) - found["n"]
    return found | {"errors": errors} | ({"errors_as_failures": figures(True)} if errors else {})


def above_floor(tasks: Mapping[str, Mapping[str, int]], free: Collection[str]) -> dict[str, Any]:
    """`rate_of` on the tasks where doing nothing fails, that is without those in `free`."""
    return rate_of({task: counts for task, counts in tasks.items() if task not in free})


def free_tasks(floor: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The tasks that an agent which does nothing solves in more than half of its trials; `floor` are its counts."""
    return [task for task, counts in floor.items() if 2 * counts["successes"] > counts["trials"]]


def rate_line(name: str, found: dict[str, Any]) -> str:
    """What commands print of a policy; `found` is of `success_rate` or `overall_success`."""
    low, high = found["interval"]
    line = f"{name:<40} {found['rate']:.3f} [{low:.3f}, {high:.3f}]  n = {found['n']}"
    passed = "".join(f"  pass^{k} {x:.3f}" for k, x in found.get("pass_hat", {}).items() if k != "1")
    failed = found.get("errors_as_failures")
    return line + passed + (f"  ({found['errors']} errors; {failed['rate']:.3f} with these as failures)" if failed else "")


_REMEDIES = {
    StopReason.MAX_TURNS: "raise rollout.max_turns in a new --workdir, if the tasks need more",
    StopReason.MAX_TOKENS: "raise rollout.max_tokens in a new --workdir",
    StopReason.CONTEXT: "raise rollout.context in a new --workdir",
    StopReason.INVALID_ACTION: "calls that nobody can read, see trace-jax view",
}


def cut_off(trajectories: Sequence[Trajectory]) -> str:
    """Where most episodes were cut off, how they ended and what can be done, most frequent first; else nothing."""
    ended = Counter(t.stop_reason for t in trajectories if t.error is None)
    if 2 * ended[StopReason.DONE] >= ended.total():
        return ""
    cut = ((reason, n) for reason, n in ended.most_common() if reason != StopReason.DONE)
    return "; ".join(
        f"{n} of {ended.total()} ended with {reason.value}: {_REMEDIES.get(reason, 'see trace-jax view')}" for reason, n in cut
    )


def pass_hat(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """pass^k, the chance that k trials of a task all succeed: the mean of C(s, k) / C(n, k) over tasks of s successes in n trials.

    Source: tau-bench, arXiv 2406.12045. k goes up to the smallest number of trials.
    """
    most = min((trials for trials, _ in counts), default=0)
    return {str(k): float(np.mean([comb(s, k) / comb(n, k) for n, s in counts])) for k in range(1, most + 1)}
