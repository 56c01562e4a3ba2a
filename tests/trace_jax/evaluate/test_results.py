"""Result files of other tools, side by side: the real ones where they are at hand, an excerpt elsewhere."""

import json
import os
import pathlib

import pytest
from rich.console import Console

from rl.trajectory import Trajectory
from trace_jax.errors import InputError
from trace_jax.evaluate.results import compare_runs, name_files, print_results

ROOT = pathlib.Path(__file__).parents[3]
EXCERPT = ROOT / "tests/data/tau2/gpt-4o_airline_excerpt.json"
RESULTS = pathlib.Path(os.environ.get("TRACE_JAX_DATA", ROOT.parent / "shared" / "data")) / "tau2" / "results"
WRITE = {"name": "cancel_reservation", "arguments": {"reservation_id": "A"}, "kind": "write"}
needs_shared = pytest.mark.skipif(not RESULTS.is_dir(), reason="the real result files are not here; set TRACE_JAX_DATA to their folder")


def run(outcomes: dict[str, bool | None], environment="tau2/airline", expected=WRITE, **checks) -> list[Trajectory]:
    action = {"action:0": {"passed": True, "expected": expected, "actual": None, "message_index": None}}
    return [
        Trajectory(
            id=f"{task}#0",
            environment=environment,
            task_id=task,
            reward=None if success is None else float(success),
            success=bool(success),
            error={"kind": "infrastructure_error", "message": ""} if success is None else None,
            checks=action | {name: {"passed": False, "expected": x, "actual": None, "message_index": None} for name, x in checks.items()},
        )
        for task, success in outcomes.items()
    ]


def test_tasks_that_infrastructure_failed_are_left_out_and_others_refused():
    a, b = run({"1": False, "2": True, "3": None}), run({"1": True, "2": True, "3": True})
    found = compare_runs(a, b)
    assert (found.fixed, found.tasks, found.left_out) == (("1",), 2, ("3",))
    more = run({"1": True, "2": True, "3": True, "4": True})
    with pytest.raises(InputError, match="only b has 4; --intersect compares on those that both have"):
        compare_runs(a, more)
    assert compare_runs(a, more, intersect=True).tasks == 2


def test_other_definitions_of_a_task_are_not_compared():
    a = run({"1": True, "2": True})
    assert compare_runs(a, run({"1": True, "2": True}, expected=WRITE | {"kind": "read", "required": True})).tasks == 2
    with pytest.raises(InputError, match="graded on other definitions of 2 tasks: 1, 2; grade both files by one release"):
        compare_runs(a, run({"1": True, "2": True}, expected=WRITE | {"arguments": {"reservation_id": "B"}}))
    with pytest.raises(InputError, match="other definitions"):
        compare_runs(a, run({"1": True, "2": True}, **{"action:1": WRITE}))
    # a trajectory that was cut off lacks the checks that its grader did not come to
    assert compare_runs(a, run({"1": True, "2": True}, **{"assertion:0": "the line is up"})).tasks == 2
    with pytest.raises(InputError, match="a is of tau2/airline, b of tau2/retail"):
        compare_runs(a, run({"1": True}, environment="tau2/retail"))


def test_files_are_called_by_their_names_where_these_differ():
    assert name_files(["x/a.json", "x/b.json"]) == ["a", "b"]
    assert name_files(["x/results.json", "y/results.json"]) == ["x/results.json", "y/results.json"]
    with pytest.raises(InputError, match="a.json is given twice"):
        name_files(["a.json", "a.json"])


def test_a_file_beside_one_that_was_regraded(tmp_path, capsys):
    data = json.loads(EXCERPT.read_text())
    for simulation in data["simulations"][:2]:
        simulation["reward_info"]["reward"] = 1.0 - simulation["reward_info"]["reward"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data))
    print_results([str(EXCERPT), str(other)], Console())
    said = capsys.readouterr().out.splitlines()
    rates = [float(line.split()[1]) for line in said[:2]]
    assert [line.split()[0] for line in said[:2]] == [EXCERPT.stem, "other"] and all(0 <= rate <= 1 for rate in rates)
    assert any(line.startswith(f"other to {EXCERPT.stem}: ") for line in said)


def test_a_run_is_not_compared_with_its_copy_or_a_part_of_it(tmp_path):
    data = json.loads(EXCERPT.read_text())
    copy = tmp_path / "copy.json"
    for kept in (len(data["simulations"]), 2):
        copy.write_text(json.dumps(data | {"simulations": data["simulations"][:kept]}))
        with pytest.raises(InputError, match=f"all conversations of copy are also in {EXCERPT.stem}; give the files of different runs"):
            print_results([str(EXCERPT), str(copy)], Console(), intersect=True)


@needs_shared
def test_fine_tuning_fixed_six_tasks_and_broke_three(capsys):
    files = [str(RESULTS / f"{name}_airline_test20_1trial.json") for name in ("gpt-4.1", "gpt-4.1-sft")]
    print_results(files, Console())
    said = capsys.readouterr().out
    assert "6 fixed, 3 broken, p = 0.508 (exact McNemar), 20 tasks" in said
    assert "fixed: 2, 24, 26, 37, 44, 48" in said and "broken: 18, 29, 45" in said
    assert "doing nothing solves at least 6 tasks: 6, 13, 26, 31, 45, 48; on the others:" in said
