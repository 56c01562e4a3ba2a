"""From the rewards of a group to the advantages of its trajectories.

A group is the rollouts of one seed of one environment. A trajectory with an error is the infrastructure's fault and is not in its group; a
group of which two or more are left goes on. A group with one reward only says nothing about what to do and is dropped, so that it does not
count in the loss's denominator either.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from rl.trajectory import StopReason, Trajectory

# Rewards closer than this are one reward: sums of checks differ in their last bits.
_SAME_REWARD = 1e-6


@dataclasses.dataclass(frozen=True)
class Advantages:
    """`values` [n] float32, 0 where a trajectory is not kept; `kept` [n] bool; `metrics`: counts of groups and of errors by kind."""

    values: np.ndarray
    kept: np.ndarray
    metrics: dict[str, float]


def group_advantages(
    trajectories: Sequence[Trajectory],
    *,
    divide_by_std: bool = True,
    epsilon: float = 1e-4,
    min_group: int = 2,
    reward: Callable[[Trajectory], float] | None = None,
) -> Advantages:
    """`(r - mean_g) / (std_g + epsilon)` per trajectory, or `r - mean_g` (GRPO, arXiv 2402.03300; without std: arXiv 2503.20783).

    The standard deviation is that of the population. Groups with fewer than `min_group` (at least 2) trajectories left are dropped.
    `reward` takes the place of the environment's own; it is asked of trajectories without an error, and may be any finite number.
    """
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    errors: Counter[str] = Counter()
    for index, trajectory in enumerate(trajectories):
        members = groups[trajectory.environment, trajectory.group]
        if trajectory.error is None:
            members.append(index)
        else:
            errors[str(trajectory.error.get("kind", "unknown"))] += 1
    values = np.zeros(len(trajectories), np.float32)
    kept = np.zeros(len(trajectories), bool)
    small = constant = 0
    for members in groups.values():
        if len(members) < min_group:
            small += 1
            continue
        rewards = np.array([reward(trajectories[i]) if reward else trajectories[i].reward for i in members], np.float64)
        if np.ptp(rewards) < _SAME_REWARD:
            constant += 1
            continue
        centred = rewards - rewards.mean()
        values[members] = centred / (rewards.std() + epsilon) if divide_by_std else centred
        kept[members] = True
    metrics = {
        "groups": len(groups),
        "groups_constant": constant,
        "groups_too_small": small,
        "constant_share": constant / max(len(groups), 1),
        "trajectories_kept": int(kept.sum()),
    }
    return Advantages(values, kept, metrics | {f"errors/{kind}": count for kind, count in sorted(errors.items())})


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Reward and success by environment, turns, sampled tokens, tool errors and truncations of the trajectories without an error.

    Where some saw a hint, their share, and success with and without.
    """
    scored = [t for t in trajectories if t.error is None]
    if not scored:
        return {}
    by_environment: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in scored:
        by_environment[trajectory.environment].append(trajectory)

    def mean(values):
        return float(np.mean(list(values)))

    truncated = {StopReason.MAX_TOKENS, StopReason.CONTEXT, StopReason.MAX_TURNS}
    metrics = {
        "reward": mean(t.reward for t in scored),
        "success": mean(t.success for t in scored),
        "truncated": mean(t.stop_reason in truncated for t in scored),
        "invalid_action": mean(t.stop_reason == StopReason.INVALID_ACTION for t in scored),
        "turns": mean(sum(m.get("role") == "assistant" for m in t.messages) for t in scored),
        "tool_errors": mean(t.metrics.get("tool_errors", 0.0) for t in scored),
        "sampled_tokens": mean(0 if t.loss_mask is None else t.loss_mask.sum() for t in scored),
    }
    hinted = [t for t in scored if t.hint is not None]
    if hinted:
        metrics |= {"hinted_share": len(hinted) / len(scored), "hinted_success": mean(t.success for t in hinted)}
    if 0 < len(hinted) < len(scored):
        metrics["unhinted_success"] = mean(t.success for t in scored if t.hint is None)
    for name, members in sorted(by_environment.items()):
        metrics[f"reward/{name}"] = mean(t.reward for t in members)
        metrics[f"success/{name}"] = mean(t.success for t in members)
    return metrics
