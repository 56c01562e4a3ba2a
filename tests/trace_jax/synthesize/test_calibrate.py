import json

import numpy as np
import pytest

from rl.trajectory import Trajectory
from trace_jax.config import SynthesisSection
from trace_jax.synthesize.calibrate import calibrate

BOUNDS = SynthesisSection()


def rollouts(groups: list[list[float | None]]) -> list[Trajectory]:
    """Rewards by seed; None is a failure of infrastructure, and 1.0 is success."""
    return [
        Trajectory(
            id=f"{seed}#{i}",
            environment="e",
            task_id=str(seed),
            seed=seed,
            reward=reward,
            success=reward == 1.0,
            error=None if reward is not None else {"kind": "crash", "message": ""},
        )
        for seed, rewards in enumerate(groups)
        for i, reward in enumerate(rewards)
    ]


def test_the_figures_are_those_of_the_published_format():
    groups = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.3, 0.3], [0.0, None]]
    found = calibrate(rollouts(groups), BOUNDS)
    rewards = [r for group in groups for r in group if r is not None]
    assert (found["n_rollouts"], found["n_errors"]) == (9, 1)
    assert found["mean_reward"] == pytest.approx(np.mean(rewards)) and found["std_reward"] == pytest.approx(np.std(rewards))
    assert found["success_rate"] == pytest.approx(3 / 9)
    assert found["zero_rate"] == pytest.approx(4 / 9) and found["partial_rate"] == pytest.approx(2 / 9)
    assert found["groups_all_perfect"] == pytest.approx(0.2)
    assert found["groups_all_zero"] == pytest.approx(0.4)  # a seed that earns a part is none of these
    assert found["groups_mixed"] == pytest.approx(0.4) and found["constant_share"] == pytest.approx(0.8)
    assert found["per_seed"] == {"0": 1.0, "1": 0.0, "2": 0.5, "3": 0.0, "4": 0.0}
    low, high = found["success_interval"]
    assert 0 < low < 3 / 9 < high < 1
    json.dumps(found, allow_nan=False)


def test_a_base_in_between_is_ok():
    found = calibrate(rollouts([[1.0, 0.0, 0.0, 1.0, 0.0]] * 20), BOUNDS)
    assert found["verdict"] == "ok" and found["reasons"] == []


@pytest.mark.parametrize(
    "groups, verdict, reason",
    [
        ([[1.0, 1.0, 1.0, 0.0]] * 10, "too_easy", "success_rate 0.750 is above 0.6"),
        ([[0.0] * 9 + [1.0]] * 10, "too_hard", "success_rate 0.100 is below 0.2"),
        ([[1.0, 1.0]] * 3 + [[0.0, 1.0]] * 4 + [[0.0, 0.3]] * 3, "too_easy", "0.30 of the seeds are always solved, more than 0.2"),
        ([[0.0, 0.0]] * 3 + [[1.0, 0.0]] * 7, "too_hard", "0.30 of the seeds never earn anything, more than 0.2"),
        ([[0.3, 0.3]] * 6 + [[1.0, 0.0]] * 4, "too_hard", "0.60 of the seeds earn one reward only, more than 0.5"),
    ],
)
def test_each_bound_that_does_not_hold_is_named(groups, verdict, reason):
    found = calibrate(rollouts(groups), BOUNDS)
    assert found["verdict"] == verdict and reason in found["reasons"]


def test_nothing_scored_is_not_ok():
    assert calibrate(rollouts([[None, None]]), BOUNDS)["verdict"] == "too_hard"
