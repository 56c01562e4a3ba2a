import numpy as np
import pytest

from tests.trace_jax import tiny
from trace_jax.baselines.grpo_target import target_tasks, train_on_target
from trace_jax.evaluate import outcomes
from trace_jax.runtime import HELDOUT_TASKS


@pytest.fixture
def runtime(tmp_path, checkpoint):
    with tiny.open_tiny(tmp_path, checkpoint, target__train_tasks="5", train__groups="2") as runtime:
        yield runtime


def test_every_pass_takes_each_train_task_once_in_a_new_order(runtime):
    seeds = [t.seed for iteration in range(5) for t in target_tasks(runtime, iteration) if t.rollout % 4 == 0]
    assert sorted(seeds[:5]) == sorted(seeds[5:]) == list(range(5)) and seeds[:5] != seeds[5:]


def test_a_task_that_comes_again_is_explored_with_other_random_numbers(runtime):
    tasks = [t for iteration in range(10) for t in target_tasks(runtime, iteration)]
    assert len({(t.seed, t.rollout) for t in tasks}) == len(tasks)
    assert target_tasks(runtime, 3) == target_tasks(runtime, 3)


def test_the_baseline_spends_its_budget_on_train_tasks_and_goes_on_where_it_stopped(runtime, tmp_path, checkpoint, monkeypatch):
    with runtime.stage("baseline"):
        found = train_on_target(runtime, 8 * 6 + 5)
    workdir = runtime.workdir
    assert found["training_rollouts"] == 48 and found == workdir.read_json("evaluation/grpo_target.json")
    curve = workdir.read_json("evaluation/grpo_target_curve.json")
    assert curve["rollouts"] == [8, 16, 24, 32, 40, 48] and curve["rate"][-1] == found["overall"]["rate"]
    spent = workdir.read_json("spent.json")["stages"]
    assert spent["baseline"]["rollouts"] == 48 and spent["evaluate"]["rollouts"] == 6 * 6
    assert {t.seed for t in workdir.read_shards("grpo_target", "training")} <= set(range(5))
    assert {t.seed for t in workdir.read_shards("grpo_target", "heldout")} == set(range(HELDOUT_TASKS, HELDOUT_TASKS + 6))
    assert [row["step"] for row in workdir.read_jsonl("baselines/grpo_target/metrics.jsonl")] == list(range(6))

    (tmp_path / "again").mkdir()
    with tiny.open_tiny(tmp_path / "again", checkpoint, target__train_tasks="5", train__groups="2") as second:
        summarise = outcomes.success_rate
        calls = []

        def stop_at_the_fourth_point(*args):
            calls.append(args)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return summarise(*args)

        monkeypatch.setattr("trace_jax.baselines.training.success_rate", stop_at_the_fourth_point)
        with pytest.raises(KeyboardInterrupt):
            train_on_target(second, 53)
        assert train_on_target(second, 53) == found
        np.testing.assert_equal(second.workdir.read_json("evaluation/grpo_target_curve.json"), curve)
        for split in ("training", "heldout"):
            folders = [list(w.read_shards("grpo_target", split)) for w in (workdir, second.workdir)]
            assert [t.to_json() for t in folders[0]] == [t.to_json() for t in folders[1]]
