"""What the evaluation found, beside each other on the page and in the terminal."""

import dataclasses
import re

import pytest
from rich.console import Console

from tests.trace_jax.example_run import CAPABILITIES, add_evaluation
from tests.trace_jax.report.pages import written
from trace_jax import report
from trace_jax.report import results, summary, table

RESULT = results.Result(**{field.name: None for field in dataclasses.fields(results.Result)})


def printed(workdir, width):
    console = Console(width=width, record=True, force_terminal=False)
    console.print(report.summary_table(workdir))
    return console.export_text()


def test_the_terminal_table_lists_all_policies_with_their_difference_to_the_base(whole):
    said = printed(whole[0], 120)
    lines = said.splitlines()
    names = [line.split()[0] for line in lines[2 : next(n for n, line in enumerate(lines) if line.startswith("Doing nothing"))]]
    adapters = [f"adapter:{name}" for name in CAPABILITIES]
    assert names == ["base", *adapters, "uniform", "constant", "router", "plain_gate", "composed", "grpo_target", "do_nothing"]
    assert re.search(r"\ncomposed +\d\d\.\d +\d\d\.\d to \d\d\.\d +\+\d\d\.\d \[\+\d\d\.\d, \+\d\d\.\d\] +6,001", said)
    assert "7,441 rollouts, 297,660 sampled tokens, 8 min 16 s" in " ".join(said.split())


def test_no_figure_of_the_terminal_table_is_cut_in_eighty_columns(whole):
    narrow, wide = printed(whole[0], 80), printed(whole[0], 200)
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80
    assert set(re.findall(r"\d+\.\d", wide)) == set(re.findall(r"\d+\.\d", narrow))


def test_a_long_name_goes_on_in_the_next_line_behind_an_underscore():
    console = Console(width=24, record=True, force_terminal=False)
    console.print(table.Name("adapter:tool_calling_precision"), table.Name("x" * 30))
    assert console.export_text().split() == ["adapter:tool_calling_", "precision", "x" * 24, "x" * 6]


def test_a_difference_is_paired_over_shared_tasks():
    def result(solved, *more):
        tasks = {str(n): {"trials": 1, "successes": int(n < solved)} for n in range(100)} | {
            name: {"trials": 1, "successes": 1} for name in more
        }
        return dataclasses.replace(RESULT, tasks=tasks)

    found = results.difference(result(60), result(40, "other"))
    low, high = found.interval
    assert found.difference == pytest.approx(0.2) and 0.1 < low < 0.2 < high < 0.3 and found.clear and len(found.fixed) == 20
    assert results.difference(result(60), dataclasses.replace(RESULT, tasks={})) is None


def change_evaluation(workdir, policy, change):
    data = workdir.read_json(f"evaluation/{policy}.json")
    workdir.write_json(f"evaluation/{policy}.json", change(data) or data)


def test_a_leak_is_a_red_banner_above_everything(workdir):
    add_evaluation(workdir, n=30)
    leak = {"purpose": "training", "where": "rollouts/gepa/training", "tasks": ["9000001", "<b>"]}
    change_evaluation(workdir, "composed", lambda data: data | {"leak": [leak]})
    page = written(workdir)
    assert ("p", {"class": "banner", "role": "alert"}) in page.tags
    assert "training saw 2 of the evaluated tasks (rollouts/gepa/training): 9000001, &lt;b&gt;" in page.source
    assert "These tasks are used for nothing else" not in page.source
    assert "LEAK: training saw 2 of the evaluated tasks" in " ".join(printed(workdir, 200).split())


def test_success_above_the_floor_is_shown_where_doing_nothing_solves_tasks(workdir):
    add_evaluation(workdir, n=30)
    free = [f"desk:{9_000_000 + n}" for n in range(10)]
    solved = lambda task: {"trials": 1, "successes": int(task in free)}  # noqa: E731
    change_evaluation(workdir, "do_nothing", lambda data: data | {"tasks": {task: solved(task) for task in data["tasks"]}})
    base = workdir.read_json("evaluation/base.json")["tasks"]
    rate = sum(counts["successes"] for task, counts in base.items() if task not in free) / 20
    found = results.load_results(report.WorkdirReader(workdir))
    assert found["base"].above_floor["rate"] == rate and found["base"].above_floor["n"] == 20
    page = written(workdir)
    assert "Doing nothing solves 10 tasks: desk:9000000, desk:9000001" in page.said("evaluation")
    assert f"on the other 20 tasks: base {100 * rate:.1f}" in page.said("summary").replace("\u00a0", " ")
    assert f"Doing nothing solves 10 tasks; on the others: base {100 * rate:.1f}" in " ".join(printed(workdir, 200).split())


def test_policies_that_were_graded_otherwise_are_not_set_beside_the_base(workdir):
    add_evaluation(workdir, n=30)
    change_evaluation(workdir, "base", lambda data: data | {"provenance": {"grader": "desk 1", "tasks": {}}})
    change_evaluation(workdir, "composed", lambda data: data | {"provenance": {"grader": "desk 2", "tasks": {}}})
    found = results.load_results(report.WorkdirReader(workdir))
    assert found["composed"].to_base is None and found["router"].to_base is not None
    assert "composed by grader 'desk 2'; evaluate both again" in written(workdir).said("evaluation")


def test_rollouts_that_infrastructure_failed_are_shown_as_failures_too(workdir):
    add_evaluation(workdir, n=30)
    failures = {"rate": 0.123, "interval": [0.1, 0.2], "n": 33}
    change_evaluation(workdir, "composed", lambda data: data["overall"].update(errors=3, errors_as_failures=failures))
    assert "3 failed by infrastructure, 12.3 % with these as failures" in written(workdir).said("evaluation").replace("\u00a0", " ")


def test_a_difference_of_nothing_is_not_said_to_be_chance():
    tasks = {str(n): {"trials": 1, "successes": n % 2} for n in range(30)}
    base = dataclasses.replace(RESULT, policy="base", rate=0.5, interval=(0.3, 0.7), tasks=tasks, split="heldout")
    composed = dataclasses.replace(base, policy="composed", to_base=results.difference(base, base))
    said = summary.sentences({"base": base, "composed": composed}, "desk", None, None, None)
    assert any(sentence.endswith("): no better and no worse than the base.") for sentence in said) and "chance" not in "".join(said)
