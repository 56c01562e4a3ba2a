"""Is an environment learnable by the base agent? Neither solved already nor out of reach, and with something to compare within a group.

Bounds are those of the method: mean reward and success rate in [0.2, 0.6], standard deviation at least 0.05, at most a fifth of the seeds
always solved, at most a fifth without any reward, at most half with one reward only. The point estimate must be inside; the interval is
stored beside it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.trajectory import Trajectory
from trace_jax.config import SynthesisSection
from trace_jax.statistics import wilson


def calibrate(trajectories: Sequence[Trajectory], bounds: SynthesisSection) -> dict[str, Any]:
    """The distribution of the base agent's rewards, and what it says.

    Args:
      trajectories: several rollouts of each seed; those with an error do not count.

    Returns:
      The keys of the method's `reward_distribution`, `success_interval`, `per_seed`, `stop_reasons`, `reasons` (bounds that do not hold)
      and `verdict`: "ok", "too_easy" or "too_hard".
    """
    scored = [t for t in trajectories if t.error is None]
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in scored:
        groups[trajectory.seed].append(trajectory)
    rewards = np.array([t.reward for t in scored], np.float64)
    success = np.array([t.success for t in scored], bool)
    per_seed = {str(seed): float(np.mean([t.success for t in members])) for seed, members in sorted(groups.items())}
    perfect = float(np.mean([share == 1.0 for share in per_seed.values()])) if per_seed else 0.0
    zero = float(np.mean([all(t.reward <= 0 for t in members) for members in groups.values()])) if groups else 1.0
    constant = float(np.mean([np.ptp([t.reward for t in members]) < 1e-6 for members in groups.values()])) if groups else 1.0
    found = {
        "n_rollouts": len(scored),
        "n_errors": len(trajectories) - len(scored),
        "mean_reward": float(rewards.mean()) if len(scored) else 0.0,
        "std_reward": float(rewards.std()) if len(scored) else 0.0,
        "success_rate": float(success.mean()) if len(scored) else 0.0,
        "success_interval": [float(x) for x in wilson(int(success.sum()), len(scored))],
        "zero_rate": float(np.mean(rewards <= 0)) if len(scored) else 0.0,
        "partial_rate": float(np.mean((rewards > 0) & ~success)) if len(scored) else 0.0,
        "groups_all_perfect": perfect,
        "groups_all_zero": zero,
        "groups_mixed": 1.0 - perfect - zero,
        "constant_share": constant,
        "per_seed": per_seed,
        "stop_reasons": dict(sorted(Counter(t.stop_reason.value for t in trajectories).items())),
    }
    easy, hard, other = [], [], []
    for name in ("mean_reward", "success_rate"):
        if found[name] > bounds.mean_high:
            easy.append(f"{name} {found[name]:.3f} is above {bounds.mean_high}")
        if found[name] < bounds.mean_low:
            hard.append(f"{name} {found[name]:.3f} is below {bounds.mean_low}")
    if perfect > bounds.max_all_success:
        easy.append(f"{perfect:.2f} of the seeds are always solved, more than {bounds.max_all_success}")
    if zero > bounds.max_all_zero:
        hard.append(f"{zero:.2f} of the seeds never earn anything, more than {bounds.max_all_zero}")
    if found["std_reward"] < bounds.min_std:
        other.append(f"std_reward {found['std_reward']:.3f} is below {bounds.min_std}")
    if constant > bounds.max_constant:
        other.append(f"{constant:.2f} of the seeds earn one reward only, more than {bounds.max_constant}")
    verdict = "too_easy" if easy else "too_hard" if hard or other else "ok"
    return found | {"verdict": verdict, "reasons": easy + hard + other}
