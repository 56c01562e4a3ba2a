"""Is an environment learnable by the base agent? Neither solved already nor out of reach, and with something to compare within a group.

Bounds are those of the method: mean reward and success rate in [0.2, 0.6], standard deviation at least 0.05, at most a fifth of the seeds
always solved, at most a fifth without any reward, at most half with one reward only. The point estimate must be inside; the interval is
stored beside it.

Rollouts are looked at several times, after ever more seeds, and end as soon as `settled` knows the verdict. The intervals of a look are
wide enough to be right at all looks at once (repeated confidence intervals, Jennison and Turnbull 1989, with Bonferroni's correction): the
chance that an early verdict contradicts what infinitely many rollouts would say is at most ERROR. An environment is wrongly refused if any
of five figures is wrongly found outside, so these share it; it is wrongly accepted only if the one that is outside is wrongly found inside.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from rl.trajectory import Trajectory
from trace_jax.config import SynthesisSection
from trace_jax.evaluate.statistics import bootstrap_mean, clustered_wilson, wilson

ERROR = 0.05  # of an early verdict
_CLAIMS = 5  # success, mean reward, and three shares of seeds: each may refuse an environment
_FIRST_SEEDS, _FIRST_ROLLOUTS = 30, 320  # no look before: of fewer seeds no share is certain, and smaller batches leave lanes empty
_DRAWS = 10_000  # of the bootstrap: 50 lie beyond each end of an interval at two early looks

OK, TOO_EASY, TOO_HARD = "ok", "too_easy", "too_hard"


def look_seeds(bounds: SynthesisSection) -> list[int]:
    """How many seeds have been rolled out at each look; they double, and the last look is at all."""
    looks, seeds = [], max(_FIRST_SEEDS, -(-_FIRST_ROLLOUTS // bounds.calibration_rollouts))
    while bounds.sequential and seeds < bounds.calibration_seeds:
        looks.append(seeds)
        seeds *= 2
    return [*looks, bounds.calibration_seeds]


def settled(trajectories: Sequence[Trajectory], bounds: SynthesisSection) -> str | None:
    """The verdict, if it will stay what it is at every later look; else None."""
    scored = [t for t in trajectories if t.error is None]
    groups = _groups(scored)
    if len(groups) < min(_FIRST_SEEDS, bounds.calibration_seeds):  # infrastructure failed the others
        return None
    early = max(len(look_seeds(bounds)) - 1, 1)
    tail = ERROR / (_CLAIMS * early)  # beyond one end of one interval
    z = NormalDist().inv_cdf(1 - tail)
    rewards, success = np.array([t.reward for t in scored], float), np.array([t.success for t in scored], float)
    seeds = np.array([t.seed for t in scored])

    def share(kind: Sequence[bool]) -> tuple[float, float]:
        low, high = wilson(sum(kind), len(kind), z)
        return float(low), float(high)

    levels = [clustered_wilson(success, seeds, z), bootstrap_mean(rewards, seeds, _DRAWS, confidence=1 - 2 * tail)]
    easy = [_below(interval, bounds.mean_high) for interval in levels]
    easy.append(_below(share([_perfect(g) for g in groups.values()]), bounds.max_all_success))
    hard = [_above(interval, bounds.mean_low) for interval in levels]
    hard.append(_below(share([_zero(g) for g in groups.values()]), bounds.max_all_zero))
    hard.append(_below(share([_constant(g) for g in groups.values()]), bounds.max_constant))
    if False in easy:
        return TOO_EASY
    if None in easy:
        return None
    if False in hard:
        return TOO_HARD
    return None if None in hard or rewards.std() < bounds.min_std else OK


def calibrate(trajectories: Sequence[Trajectory], bounds: SynthesisSection) -> dict[str, Any]:
    """The distribution of the base agent's rewards, and what it says.

    Args:
      trajectories: several rollouts of each seed; those with an error do not count.

    Returns:
      The keys of the method's `reward_distribution`, `success_interval` and `mean_interval` (95 %, by seeds), `per_seed`, `stop_reasons`,
      `reasons` (bounds that do not hold) and `verdict`: "ok", "too_easy" or "too_hard".
    """
    scored = [t for t in trajectories if t.error is None]
    groups = _groups(scored)
    rewards = np.array([t.reward for t in scored], np.float64)
    success = np.array([t.success for t in scored], bool)
    seeds = np.array([t.seed for t in scored])
    per_seed = {str(seed): float(np.mean([t.success for t in members])) for seed, members in sorted(groups.items())}
    perfect = float(np.mean([_perfect(g) for g in groups.values()])) if groups else 0.0
    zero = float(np.mean([_zero(g) for g in groups.values()])) if groups else 1.0
    constant = float(np.mean([_constant(g) for g in groups.values()])) if groups else 1.0
    found = {
        "n_rollouts": len(scored),
        "n_errors": len(trajectories) - len(scored),
        "mean_reward": float(rewards.mean()) if len(scored) else 0.0,
        "mean_interval": list(bootstrap_mean(rewards, seeds)) if len(scored) else [0.0, 1.0],
        "std_reward": float(rewards.std()) if len(scored) else 0.0,
        "success_rate": float(success.mean()) if len(scored) else 0.0,
        "success_interval": list(clustered_wilson(success, seeds)),
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
    verdict = TOO_EASY if easy else TOO_HARD if hard or other else OK
    return found | {"verdict": verdict, "reasons": easy + hard + other}


def _groups(scored: Sequence[Trajectory]) -> dict[int, list[Trajectory]]:
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in scored:
        groups[trajectory.seed].append(trajectory)
    return groups


def _perfect(group: Sequence[Trajectory]) -> bool:
    return all(t.success for t in group)


def _zero(group: Sequence[Trajectory]) -> bool:
    return all(t.reward <= 0 for t in group)


def _constant(group: Sequence[Trajectory]) -> bool:
    return bool(np.ptp([t.reward for t in group]) < 1e-6)


def _below(interval: tuple[float, float], bound: float) -> bool | None:
    """Whether a figure of this interval is at most `bound`; None where the interval does not tell."""
    return True if interval[1] <= bound else False if interval[0] > bound else None


def _above(interval: tuple[float, float], bound: float) -> bool | None:
    """Whether it is at least `bound`."""
    return True if interval[0] >= bound else False if interval[1] < bound else None
