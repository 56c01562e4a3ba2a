"""Tasks of the evaluation that had a part in making what is evaluated."""

import json
import os
import pathlib

import pytest
import zstandard
from rich.console import Console

from rl.trajectory import Trajectory
from trace_jax.errors import InputError
from trace_jax.evaluate.hygiene import find_leaks, of_test_splits, task_key, test_splits, told, used_tasks, warn_of_test_splits, write_mined
from trace_jax.stores import open_store
from trace_jax.workdir import Workdir

test_splits.__test__ = False
ROOT = pathlib.Path(__file__).parents[3]
DOMAINS = pathlib.Path(os.environ.get("TRACE_JAX_DATA", ROOT.parent / "shared" / "data")) / "tau2" / "domains"


def trajectory(environment: str, task: str, split: str = "") -> Trajectory:
    return Trajectory(id=f'{task}"\\#0', environment=environment, task_id=task, split=split, reward=1.0, success=True)


@pytest.fixture
def workdir(tmp_path):
    with Workdir(open_store(tmp_path)) as workdir:
        yield workdir


def test_a_task_has_one_name_whatever_stands_before_its_id():
    assert task_key("desk", "desk:17") == ("desk", "17")
    assert task_key("tau2/airline", "airline:2") == task_key("tau2/airline", "2") == ("tau2/airline", "2")
    assert task_key("tau2/retail", "2") != task_key("tau2/airline", "2")
    assert task_key("tau2/telecom", "[mms_issue]a|b[PERSONA:None]")[1] == "[mms_issue]a|b[PERSONA:None]"


def test_every_shard_counts_but_those_of_the_evaluation(workdir):
    workdir.write_shard("base", "train", 0, [trajectory("desk", "desk:1"), trajectory("desk", "desk:1"), trajectory("desk", "desk:2")])
    workdir.write_shard("base", "train", 1, [trajectory("desk", 'desk:"\\ü')])
    workdir.write_shard("adapter:x", "training", 0, [trajectory("desk_x", "desk_x:7")])
    workdir.write_shard("base", "heldout", 0, [trajectory("desk", "desk:9")])
    assert used_tasks(workdir) == {
        "rollouts/base/train": {("desk", "1"), ("desk", "2"), ("desk", '"\\ü')},
        "rollouts/adapter-x/training": {("desk_x", "7")},
    }


def test_a_leak_names_who_saw_which_tasks(workdir):
    workdir.write_shard("base", "train", 0, [trajectory("desk", f"desk:{i}") for i in (10, 9, 3)])
    workdir.write_shard("gepa", "training", 0, [trajectory("desk", "desk:9")])
    workdir.write_shard("adapter:x", "validation", 0, [trajectory("desk", "desk:10"), trajectory("desk_x", "desk_x:9")])
    leaks = find_leaks(used_tasks(workdir), [("desk", "9"), ("desk", "10"), ("desk", "11")])
    assert leaks == [
        {"purpose": "selection", "where": "rollouts/adapter-x/validation", "tasks": ["10"]},
        {"purpose": "mining", "where": "rollouts/base/train", "tasks": ["9", "10"]},
        {"purpose": "training", "where": "rollouts/gepa/training", "tasks": ["9"]},
    ]
    assert told(leaks[1]) == "mining saw 2 of the evaluated tasks (rollouts/base/train): 9, 10"
    assert find_leaks(used_tasks(workdir), [("desk_y", "9")]) == []


def test_result_files_that_were_mined_are_remembered(workdir):
    write_mined(workdir, [trajectory("tau2/airline", "2"), trajectory("tau2/airline", "airline:3")], ["a.json"])
    assert used_tasks(workdir) == {"diagnosis": {("tau2/airline", "2"), ("tau2/airline", "3")}}
    write_mined(workdir, [trajectory("tau2/airline", "2", "test"), trajectory("tau2/airline", "3", "train")], ["a.json"])
    assert used_tasks(workdir) == {"diagnosis": {("tau2/airline", "3")}}  # the diagnosis leaves the others out
    write_mined(workdir, [trajectory("desk", "desk:1")])
    assert used_tasks(workdir) == {}  # those are the rollouts of the base


def test_a_damaged_shard_is_named(workdir):
    path = workdir.log("rollouts/base/train/00000.jsonl.zst")
    for data in (b"no zstandard", zstandard.compress(b'{"task_id":"1"}\n')):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"00000\.jsonl\.zst: .*roll out again"):
            used_tasks(workdir)


def test_tasks_of_the_official_test_splits_are_known():
    assert {name: len(ids) for name, ids in test_splits().items()} == {"tau2/airline": 20, "tau2/retail": 40, "tau2/telecom": 40}
    some = [trajectory("tau2/airline", task) for task in ("2", "10", "0", "2")] + [trajectory("desk", "2")]
    assert of_test_splits(some).keys() == {"tau2/airline"} and "0" not in of_test_splits(some)["tau2/airline"]
    console = Console(record=True, width=200)
    warn_of_test_splits([trajectory("tau2/airline", "2")], console)
    assert "LEAK: this mines 1 of the 20 tasks of the official test split of tau2/airline: 2;" in console.export_text()
    if not DOMAINS.is_dir():
        pytest.skip("the splits of tau2-bench are not at hand")
    for domain, file in (("airline", "split_tasks"), ("retail", "split_tasks"), ("telecom", "split_tasks.nofull")):
        assert test_splits()[f"tau2/{domain}"] == set(json.loads((DOMAINS / domain / f"{file}.json").read_text())["test"])
