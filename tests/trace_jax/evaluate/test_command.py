import jax
import pytest

from envs import EnvironmentFault
from model import init_gate, save_gate
from rl.trajectory import Trajectory
from tests.trace_jax import tiny
from trace_jax import rollout
from trace_jax.errors import InputError
from trace_jax.evaluate import command as evaluation
from trace_jax.evaluate.command import (
    compare_evaluations,
    do_nothing,
    evaluate,
    heldout_tasks,
    note_leaks,
    print_floor,
    summarise,
    write_examples,
)
from trace_jax.evaluate.comparison import compare_paired
from trace_jax.policies import load_mixture
from trace_jax.runtime import HELDOUT_TASKS

ONE, TWO = "tool_calling_precision", "precondition_verification"


def trajectory(task: str, trial: int, success: bool | None) -> Trajectory:
    error = {"kind": "crash", "message": ""} if success is None else None
    reward = None if success is None else float(success)
    return Trajectory(
        id=f"{task}#{trial}", environment="desk", task_id=task, trial=trial, reward=reward, success=bool(success), error=error
    )


def test_the_file_counts_trials_by_task_and_leaves_failed_infrastructure_out():
    outcomes = {"a": [True, False], "b": [True, None], "c": [None, None]}
    found = summarise("router", "heldout", [trajectory(t, i, x) for t, xs in outcomes.items() for i, x in enumerate(xs)], 0.7)
    assert (found["policy"], found["split"], found["temperature"], found["rollouts"]) == ("router", "heldout", 0.7, 6)
    assert found["tasks"] == {"a": {"trials": 2, "successes": 1}, "b": {"trials": 1, "successes": 1}}
    assert found["overall"]["rate"] == pytest.approx(2 / 3) and found["overall"]["errors"] == 3
    assert found["overall"]["pass_hat"] == {"1": 0.75}
    assert found["errors"] == {"b": 1, "c": 2} and found["overall"]["errors_as_failures"]["rate"] == pytest.approx(2 / 6)


def test_all_policies_face_the_same_heldout_tasks(tmp_path, checkpoint):
    with tiny.open_tiny(tmp_path, checkpoint, evaluation__trials="2") as runtime:
        tasks = heldout_tasks(runtime)
        assert [(t.seed, t.trial, t.split) for t in tasks] == [(HELDOUT_TASKS + s, r, "heldout") for s in range(6) for r in range(2)]
        assert {t.package.name for t in tasks} == {"desk"}


def test_a_policy_is_evaluated_once(runtime, monkeypatch):
    found = evaluate(runtime, "base", None)
    assert found["tasks"] == {f"desk:{HELDOUT_TASKS + i}": {"trials": 1, "successes": 0} for i in range(6)}
    assert found == runtime.workdir.read_json("evaluation/base.json")
    monkeypatch.setattr(runtime, "roll_out", lambda *_: pytest.fail("sampled again"))
    assert evaluate(runtime, "base", None) == found


def test_an_adapters_file_has_no_colon(runtime):
    tiny.store_adapters(runtime, ONE)
    evaluate(runtime, f"adapter:{ONE}", load_mixture(runtime, [ONE]))
    assert runtime.workdir.exists(f"evaluation/adapter-{ONE}.json")


def test_a_policy_that_is_not_there_yet_is_bad_input(runtime):
    for name in ("router", "composed", "uniform"):
        with pytest.raises(InputError, match=f"--policy={name}: no such policy"):
            evaluate(runtime, name, None)
    tiny.store_adapters(runtime, ONE)
    with pytest.raises(InputError, match=r"gate/routing\.json: no such file"):
        evaluate(runtime, "router", load_mixture(runtime, [ONE]))
    assert runtime.workdir.list("evaluation") == []


def test_the_floor_is_zero_and_needs_no_model(runtime, monkeypatch):
    floor = do_nothing(runtime)
    assert floor["overall"]["rate"] == 0.0 and floor["overall"]["n"] == 6 and floor["temperature"] is None
    assert "model" not in runtime.__dict__
    monkeypatch.setattr(evaluation, "play", lambda *_, **__: pytest.fail("played again"))
    assert do_nothing(runtime) == floor


def test_a_fault_of_the_environment_is_no_failure_of_the_floor(runtime, monkeypatch):
    play = evaluation.play

    def faulty(*args, **options):
        plays = play(*args, **options)
        plays[0].fault, plays[0].scores = EnvironmentFault("crash", "gone"), []
        return plays

    monkeypatch.setattr(evaluation, "play", faulty)
    overall = do_nothing(runtime)["overall"]
    assert (overall["n"], overall["errors"]) == (5, 1)


@pytest.mark.parametrize("kept", [True, False])
def test_examples_show_the_slot_of_every_token(runtime, kept):
    tiny.store_adapters(runtime, ONE, TWO)
    mixture = load_mixture(runtime, [ONE, TWO])
    gate = init_gate(runtime.model.config, 3, 0.0, jax.random.key(1))
    save_gate(gate, runtime.workdir.local("gate/gate.safetensors"))
    routing = {"slots": list(mixture.slots), "kept": kept, "composed": "gate" if kept else f"adapter:{ONE}"}
    runtime.workdir.write_json("gate/routing.json", routing)
    evaluate(runtime, "composed", mixture)
    write_examples(runtime, mixture)
    assert runtime.workdir.exists("gate/examples.jsonl.zst") == kept
    if kept:
        pieces = runtime.workdir.read_json("gate/pieces.json")
        assert len(pieces) == runtime.model.config.vocab_size and "all done." in pieces


def test_evaluate_and_rollout_print_a_line_for_each_policy(runtime, capsys):
    tiny.store_adapters(runtime, ONE)
    evaluation.main(tiny.arguments(runtime, "evaluate", policy=("base", f"adapter:{ONE}")))
    printed = capsys.readouterr().out.splitlines()
    assert "  4 of 6 ended with max_turns: raise rollout.max_turns in a new --workdir, if the tasks need more" in printed
    lines = [line for line in printed if not line.startswith("  ")]
    assert [line.split()[0] for line in lines] == ["base", f"adapter:{ONE}", "do_nothing", f"adapter:{ONE}"] and lines[0].endswith("n = 6")
    comparison = compare_paired(*(runtime.workdir.read_json(f"evaluation/{name}.json")["tasks"] for name in ("base", f"adapter-{ONE}")))
    assert lines[-1] == f"adapter:{ONE} to base: {comparison.told()}"
    assert runtime.workdir.read_json(f"evaluation/adapter-{ONE}.json")["paired"] == {"to": "base", **comparison.to_json()}
    rollout.main(tiny.arguments(runtime, "rollout", policy=("base", "uniform"), split="train"))
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")] == ["24", "24"]
    rollout.main(tiny.arguments(runtime, "rollout", policy=("base",), split="heldout"))
    assert capsys.readouterr().out.splitlines() == printed[:2]
    # the target's train split is apart from what adapters are trained on
    assert runtime.workdir.shards("uniform", "train") == [0]
    with pytest.raises(InputError, match="--policy=router: rolls out on --split=heldout only"):
        rollout.main(tiny.arguments(runtime, "rollout", policy=("router",), split="train"))


def evaluation_of(policy: str, outcomes: dict[str, list[bool | None]], **record) -> dict:
    found = summarise(policy, "heldout", [trajectory(t, i, x) for t, xs in outcomes.items() for i, x in enumerate(xs)], 0.7)
    return found | {"provenance": {"grader": "desk 1", "tasks": {task: f"hash of {task}" for task in outcomes}}} | record


def test_a_task_that_infrastructure_failed_for_one_policy_is_left_out_for_both():
    base = evaluation_of("base", {"a": [False], "b": [None], "c": [True]})
    ours = evaluation_of("composed", {"a": [True], "b": [True], "c": [True]})
    found = compare_evaluations(base, ours)
    assert (found.tasks, found.fixed, found.broken) == (2, ("a",), ())
    with pytest.raises(InputError, match="only composed has d"):
        compare_evaluations(base, evaluation_of("composed", {"a": [True], "b": [True], "c": [True], "d": [True]}))


@pytest.mark.parametrize(
    "record, said",
    [
        ({"split": "train"}, "on split 'heldout', composed on split 'train'"),
        ({"provenance": {"grader": "desk 2", "tasks": {}}}, "by grader 'desk 1', composed by grader 'desk 2'"),
        ({"provenance": {"grader": "desk 1", "tasks": {"a": "mended"}}}, "graded on other definitions of 1 tasks: a"),
    ],
)
def test_other_tasks_or_another_grader_are_not_compared(record, said):
    base = evaluation_of("base", {"a": [False], "b": [True]})
    with pytest.raises(InputError, match=f"{said}.*; remove evaluation/base.json and rollouts/base/heldout, and run trace-jax evaluate"):
        compare_evaluations(base, evaluation_of("composed", {"a": [True], "b": [True]}, **record))


def test_what_was_found_on_other_tasks_is_not_taken_for_an_evaluation(runtime):
    found = evaluate(runtime, "base", None)
    assert found["provenance"]["tasks"].keys() == found["tasks"].keys() and found["provenance"]["grader"].startswith("desk ")
    found["provenance"]["tasks"][f"desk:{HELDOUT_TASKS}"] = "mended"
    runtime.workdir.write_json("evaluation/base.json", found)
    with pytest.raises(
        InputError, match="base.json and the target as it is now were graded on other definitions of 1 tasks.*--policy=base"
    ):
        evaluate(runtime, "base", None)


def test_a_leak_is_noted_in_the_files_and_goes_with_its_cause(runtime):
    results = {"base": evaluate(runtime, "base", None)}
    assert note_leaks(runtime, results) == [] and "leak" not in runtime.workdir.read_json("evaluation/base.json")
    seen = [f"desk:{HELDOUT_TASKS + i}" for i in (4, 2)]
    runtime.workdir.write_shard("gepa", "training", 0, [trajectory(task, 0, True) for task in seen])
    leak = {"purpose": "training", "where": "rollouts/gepa/training", "tasks": [str(HELDOUT_TASKS + 2), str(HELDOUT_TASKS + 4)]}
    assert note_leaks(runtime, results) == [leak] == runtime.workdir.read_json("evaluation/base.json")["leak"]
    runtime.workdir.local("rollouts/gepa/training/00000.jsonl.zst").unlink()
    assert note_leaks(runtime, results) == [] == runtime.workdir.read_json("evaluation/base.json")["leak"]


def test_where_doing_nothing_is_rewarded_the_others_are_shown_apart(capsys):
    floor = evaluation_of("do_nothing", {"a": [True], "b": [False], "c": [False]})
    print_floor(floor, {"base": evaluation_of("base", {"a": [True], "b": [True], "c": [False]})})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "doing nothing solves 1 of 3 tasks: a; on the others:" and lines[2].split()[:2] == ["base", "0.500"]
    print_floor(evaluation_of("do_nothing", {"b": [False]}), {})
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_evaluate_takes_policies_of_a_workdir_or_result_files(runtime):
    for fields, said in (
        ({"policy": ("base",), "results": ("a.json",)}, "--results compares files, without --workdir and --policy"),
        ({"policy": ()}, "give --workdir=DIR --policy=P,... or --results=FILE,..."),
    ):
        with pytest.raises(InputError, match=said):
            evaluation.main(tiny.arguments(runtime, "evaluate", **fields))
