import numpy as np
import pytest

from rl.trajectory import Trajectory
from trace_jax.outcomes import pass_hat, rate_line, success_rate
from trace_jax.statistics import wilson


def trajectory(task: int, success: bool = False, error: bool = False, trial: int = 0) -> Trajectory:
    outcome = {"error": {"kind": "crash", "message": ""}} if error else {"reward": float(success), "success": success}
    return Trajectory(id=f"{task}#{trial}", environment="desk", task_id=str(task), trial=trial, **outcome)


def test_one_trial_a_task_has_wilsons_interval():
    found = success_rate([trajectory(i, success=i < 3) for i in range(10)])
    assert found == {"rate": 0.3, "interval": [float(x) for x in wilson(3, 10)], "n": 10, "errors": 0}


def test_trials_of_one_task_are_not_independent():
    alike = [trajectory(task, success=task < 5, trial=trial) for task in range(10) for trial in range(8)]
    low, high = success_rate(alike)["interval"]
    wilson_low, wilson_high = wilson(40, 80)
    assert high - low > 1.5 * (wilson_high - wilson_low)  # eight equal trials say no more than one


def test_what_infrastructure_failed_is_left_out_and_counted():
    found = success_rate([trajectory(0, success=True), trajectory(1), trajectory(2, error=True)])
    assert (found["rate"], found["n"], found["errors"]) == (0.5, 2, 1)


def test_nothing_scored_is_no_success_and_no_certainty():
    assert success_rate([trajectory(0, error=True)]) == {"rate": 0.0, "interval": [0.0, 1.0], "n": 0, "errors": 1}


def test_pass_hat_is_the_chance_that_k_drawn_trials_all_succeed():
    random = np.random.default_rng(0)
    counts = [(4, 3), (5, 1), (4, 4)]
    found = pass_hat(counts)
    assert list(found) == ["1", "2", "3", "4"]
    for k in (1, 2, 3):
        trials = [np.arange(n) < s for n, s in counts]
        drawn = [[random.permutation(t)[:k].all() for t in trials] for _ in range(4000)]
        assert found[str(k)] == pytest.approx(np.mean(drawn), abs=0.02)
    assert pass_hat([]) == {}


def test_a_line_holds_name_rate_interval_and_count():
    assert rate_line("base", {"rate": 0.25, "interval": [0.1, 0.4], "n": 8}).split() == [
        "base",
        "0.250",
        "[0.100,",
        "0.400]",
        "n",
        "=",
        "8",
    ]
