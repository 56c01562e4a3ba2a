import dataclasses

import numpy as np
import pytest

from rl.trajectory import Trajectory
from trace_jax.evaluate.outcomes import above_floor, count_tasks, cut_off, free_tasks, overall_success, pass_hat, rate_line, success_rate
from trace_jax.evaluate.statistics import bootstrap_mean, wilson


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


def test_how_episodes_ended_is_said_where_most_were_cut_off():
    def ended(**counts: int) -> str:
        found = [trajectory(0, error=True)] * 9
        for reason, n in counts.items():
            found += [dataclasses.replace(trajectory(1), stop_reason=reason)] * n
        return cut_off(found)

    assert ended(context=12) == "12 of 12 ended with context: raise rollout.context in a new --workdir"
    assert ended(done=2, max_turns=1, context=1) == "" == ended()
    said = ended(done=1, max_tokens=1, invalid_action=3).split("; ")
    assert said[0].startswith("3 of 5 ended with invalid_action: ") and said[1].startswith(
        "1 of 5 ended with max_tokens: raise rollout.max_t"
    )


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


def test_several_trials_have_the_bootstrap_over_tasks():
    random = np.random.default_rng(2)
    found = [trajectory(task, random.random() < 0.1 + 0.08 * task, trial=trial) for task in range(10) for trial in range(4)]
    success, tasks = np.array([t.success for t in found], float), np.array([t.task_id for t in found])
    assert success_rate(found)["interval"] == pytest.approx(bootstrap_mean(success, tasks))


def test_trials_that_all_end_alike_say_no_more_than_as_many_tasks():
    found = success_rate([trajectory(task, trial=trial) for task in range(10) for trial in range(4)])
    assert found["rate"] == 0.0 and found["interval"] == pytest.approx([float(x) for x in wilson(0, 10)])


def test_errors_are_shown_as_failures_too():
    found = overall_success([trajectory(0, success=True), trajectory(1), trajectory(2, error=True), trajectory(2, trial=1, success=True)])
    assert (found["rate"], found["n"], found["errors"]) == (2 / 3, 3, 1)
    assert (found["errors_as_failures"]["rate"], found["errors_as_failures"]["n"]) == (0.5, 4)
    assert rate_line("base", found).endswith("(1 errors; 0.500 with these as failures)")
    assert "errors_as_failures" not in overall_success([trajectory(0)])


def test_tasks_that_doing_nothing_solves_are_left_out_above_the_floor():
    tasks = {"a": {"trials": 2, "successes": 2}, "b": {"trials": 2, "successes": 1}, "c": {"trials": 2, "successes": 0}}
    floor = {"a": {"trials": 1, "successes": 1}, "b": {"trials": 1, "successes": 0}}
    assert free_tasks(floor) == ["a"]
    found = above_floor(tasks, free_tasks(floor))
    assert (found["rate"], found["n"]) == (0.25, 4)


def test_pass_hat_is_tau2s():
    metrics = pytest.importorskip("tau2.metrics.agent_metrics")
    random = np.random.default_rng(3)
    found = [trajectory(task, random.random() < 0.6, trial=trial) for task in range(12) for trial in range(4)]
    counts = [(c["trials"], c["successes"]) for c in count_tasks(found).values()]
    for k in (1, 2, 3, 4):
        oracle = np.mean([metrics.pass_hat_k(n, s, k) for n, s in counts])
        assert pass_hat(counts)[str(k)] == pytest.approx(oracle, rel=1e-12)
