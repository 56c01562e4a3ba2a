import dataclasses
import json

import numpy as np
import pytest

from rl.trajectory import Trajectory
from trace_jax.config import SynthesisSection
from trace_jax.synthesize.calibrate import ERROR, calibrate, look_seeds, settled

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
    for name, figure in (("success_interval", 3 / 9), ("mean_interval", np.mean(rewards))):
        low, high = found[name]
        assert 0 <= low < figure < high < 1
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


def drawn(mean: float, seeds: int = 100, number: int = 0, correlation: float = 0.1, part: float = 0.0) -> list[Trajectory]:
    """16 rollouts a seed; a seed's chance of success is drawn from a beta law, failures earn `part` half of the time."""
    random = np.random.default_rng(number)
    scale = (1 - correlation) / correlation
    won = random.random((seeds, 16)) < random.beta(mean * scale, (1 - mean) * scale, seeds)[:, None]
    return rollouts(np.where(won, 1.0, part * random.integers(0, 2, won.shape)).tolist())


@pytest.mark.parametrize(
    "seeds, rollouts_each, looks",
    [(100, 16, [30, 60, 100]), (40, 8, [40]), (100, 8, [40, 80, 100]), (30, 16, [30]), (4, 2, [4])],  # the second is the quickstart's
)
def test_looks_double_and_the_first_is_not_too_early(seeds, rollouts_each, looks):
    bounds = dataclasses.replace(BOUNDS, calibration_seeds=seeds, calibration_rollouts=rollouts_each)
    assert look_seeds(bounds) == looks and look_seeds(dataclasses.replace(bounds, sequential=False)) == [seeds]


@pytest.mark.parametrize("mean, part, verdict", [(0.02, 0.0, "too_hard"), (0.95, 0.0, "too_easy"), (0.55, 0.9, "too_easy")])
def test_what_is_plainly_outside_is_known_at_the_first_look(mean, part, verdict):
    first = drawn(mean, 30, part=part)
    assert settled(first, BOUNDS) == verdict == calibrate(first, BOUNDS)["verdict"]


def test_what_is_plainly_inside_is_known_early_and_what_is_near_a_bound_is_not():
    assert settled(drawn(0.4, 30), BOUNDS) == "ok"
    for won in (3, 9):  # of 16, or one more: success 0.22 and 0.59
        assert settled(rollouts([[1.0] * won + [0.0] * (16 - won), [1.0] * (won + 1) + [0.0] * (15 - won)] * 30), BOUNDS) is None


def test_every_bound_must_be_certain():
    mixed = [[1.0] * 6 + [0.0] * 10, [1.0] * 8 + [0.0] * 8]
    assert settled(rollouts(mixed * 30), BOUNDS) == "ok"
    assert settled(rollouts([[1.0] * 16] * 8 + mixed[:1] * 52), BOUNDS) is None  # 13 % always solved
    assert settled(rollouts([[1.0] * 16] * 30 + [[0.0] * 15 + [1.0]] * 30), BOUNDS) == "too_easy"
    assert settled(rollouts([[0.0] * 16] * 30 + mixed * 15), BOUNDS) == "too_hard"
    assert settled(rollouts([[0.3] * 16] * 28 + mixed * 16), dataclasses.replace(BOUNDS, mean_low=0.1)) is None  # 47 % earn one reward only
    assert settled(rollouts(mixed * 30), dataclasses.replace(BOUNDS, min_std=0.5)) is None
    assert settled(rollouts([[None]]), BOUNDS) is None


def test_the_seeds_that_infrastructure_left_must_be_as_many_as_a_first_look_has():
    lost = [[None] * 16] * 29
    assert settled(rollouts([[1.0] * 16, *lost]), BOUNDS) is None
    assert settled(rollouts([[0.0] * 16, *lost[1:]] + [[0.0] * 16]), BOUNDS) is None
    assert settled(rollouts([[1.0] * 16] * 30 + lost), BOUNDS) == "too_easy"


def test_an_early_verdict_is_seldom_wrong():
    wrong = [settled(drawn(0.2, 30, number), BOUNDS) == "too_hard" for number in range(40)]  # at the bound: every other may be wrong
    assert np.mean(wrong) <= ERROR


def test_a_verdict_that_is_certain_is_that_of_the_point_estimates():
    found = [drawn(mean, 60, number) for number, mean in enumerate(np.linspace(0.05, 0.9, 10))]
    verdicts = [(settled(one, BOUNDS), calibrate(one, BOUNDS)["verdict"]) for one in found]
    assert all(certain in (None, verdict) for certain, verdict in verdicts) and sum(certain is not None for certain, _ in verdicts) > 5
