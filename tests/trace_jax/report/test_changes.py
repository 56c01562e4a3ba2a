"""Fixed and broken tasks stand beside each other, chosen by a rule that can be foretold."""

import dataclasses

import pytest

from tests.trace_jax.example_run import add_evaluation, held_out
from tests.trace_jax.report.pages import written
from trace_jax import report
from trace_jax.report import budgets, changes, results
from trace_jax.report.changes import Case, Trial


def evaluated(workdir, trials):
    """Base and composed on tasks; `trials`: policy to task to outcomes."""
    for policy, tasks in trials.items():
        numbered = [(task, n, won) for task, outcomes in tasks.items() for n, won in enumerate(outcomes)]
        found = [dataclasses.replace(held_out(int(task), won), id=f"desk:{task}#{n}", trial=n) for task, n, won in numbered]
        workdir.write_shard(policy, "heldout", 0, found)
        counts = {f"desk:{task}": {"trials": len(of), "successes": sum(of)} for task, of in tasks.items()}
        overall = {"rate": 0.5, "interval": [0.4, 0.6]}
        workdir.write_json(f"evaluation/{policy}.json", {"policy": policy, "split": "heldout", "tasks": counts, "overall": overall})
    read = report.WorkdirReader(workdir)
    return changes.changes(read, results.load_results(read))


def test_tasks_are_fixed_and_broken_by_the_majority_of_their_trials(workdir):
    found = evaluated(
        workdir,
        {
            "base": {"1": [0, 0, 1], "2": [1, 1, 0], "3": [1, 1, 1], "4": [0, 0, 0]},
            "composed": {"1": [1, 0, 1], "2": [0, 0, 1], "3": [1, 1, 1], "4": [0, 0, 0]},
        },
    )
    assert (found["fixed"]["tasks"], found["broken"]["tasks"]) == (["desk:1"], ["desk:2"])
    fixed, broken = found["fixed"]["pairs"][0], found["broken"]["pairs"][0]
    assert (fixed.base.id, fixed.composed.id) == ("desk:1#0", "desk:1#0")  # the first trial that tells the two apart
    assert (broken.base.id, broken.composed.id) == ("desk:2#0", "desk:2#0") and broken.base.success and not broken.composed.success
    assert fixed.shared == 4 and fixed.base.messages[:4] == fixed.composed.messages[:4]
    assert found["checks"] == [("communicate", 1, 1), ("db", 1, 1)]


def test_without_a_trial_of_one_number_others_are_set_beside_each_other(workdir):
    found = evaluated(workdir, {"base": {"1": [1, 0, 0]}, "composed": {"1": [1, 0, 0, 1, 1]}})
    assert [(pair.base.trial, pair.composed.trial) for pair in found["fixed"]["pairs"]] == [(1, 0)]


def test_every_combination_of_failing_checks_comes_up_and_short_conversations_first():
    def case(task, messages, *failing):
        trial = Trial(id=task, trial=0, success=False, messages=messages, failing=failing)
        return Case(task=task, base=trial, composed=trial, failing=failing)

    often = [case(f"a{n}", 9 - n, "db") for n in range(5)]
    order = changes.spread([*often, case("b", 90, "action", "db"), case("c", 5, "communicate")])
    assert [one.task for one in order] == ["a4", "b", "c", "a3", "a2", "a1", "a0"]


def test_what_fails_where_no_check_does_is_how_it_ended():
    lost = dataclasses.replace(held_out(5, False), checks={})
    assert changes.failing(lost) == ("ended with max turns",)
    assert changes.failing(held_out(4, False)) == ("communicate", "db")


def test_ids_of_calls_do_not_part_conversations():
    one, other = held_out(1, True).messages, held_out(1, False).messages
    other[2]["tool_calls"][0]["id"] = "another"
    assert changes.common_beginning(one, other) == 4 and changes.common_beginning(one, one) == 5


def test_the_page_shows_some_of_each_beside_each_other_and_lists_all(workdir):
    add_evaluation(workdir)
    page = written(workdir)
    said = page.said("changes")
    assert ("a", {"href": "#fixed"}) in page.tags and ("a", {"href": "#broken"}) in page.tags
    shown = [a for _, a in page.tags if a.get("class") == "pair"]
    kept = sum(1 for _, a in page.tags if a.get("class") == "side")
    assert 2 * len(shown) == kept and budgets.CASES < len(shown) <= 2 * budgets.CASES
    assert "Broken: " in said and "there are no conversations in this workdir" in said
    assert "the composed agent fails db" in said and "the base agent fails communicate, db" in said
    assert 'db failed at message 4: expected {"order": "pending"}, found {"order": "returned"}' in said
    assert "4 assistant It is pending, so it cannot be returned." in said and said.count("here they part") == kept


def test_without_rollouts_the_tasks_are_listed_alone(workdir):
    add_evaluation(workdir, n=30)
    for policy in ("base", "composed"):
        for file in workdir.local(f"rollouts/{policy}/heldout").iterdir():
            file.unlink()
    said = written(workdir).said("changes")
    assert said.count("Their conversations are not in this workdir.") == 2 and "desk:90000" in said


@pytest.mark.parametrize("budget", [0, 6000])
def test_conversations_beside_each_other_keep_to_their_budget(workdir, monkeypatch, budget):
    monkeypatch.setattr(budgets, "CHANGES", budget)
    add_evaluation(workdir, n=60)
    page = written(workdir)
    assert len([a for _, a in page.tags if a.get("class") == "pair"]) <= 8 * (budget > 0)
