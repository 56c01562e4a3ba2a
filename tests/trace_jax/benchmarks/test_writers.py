"""Rollouts of a workdir in the formats of the benchmarks that they are of."""

import dataclasses
import pathlib

import pytest

from rl.trajectory import Trajectory
from trace_jax import export
from trace_jax.benchmarks.results import read_results
from trace_jax.benchmarks.tau2.results import read
from trace_jax.benchmarks.writers import numbered_on
from trace_jax.cli import Arguments, main
from trace_jax.config import load_config
from trace_jax.errors import InputError
from trace_jax.workdir import Workdir

DATA = pathlib.Path(__file__).parents[3] / "tests" / "data" / "tau2"


@pytest.fixture
def rolled_out(tmp_path):
    """A workdir with rollouts of two domains of tau2, one of them an outage."""
    found = [t for name in ("v1.0.1_mock_folder", "gpt-4o_airline_excerpt.json") for t in read(DATA / name, records=True)]
    fault = {"kind": "user", "message": "the user simulator is gone"}
    found[0] = dataclasses.replace(found[0], reward=None, success=False, stop_reason="environment_error", error=fault, record=None)
    with Workdir.open(tmp_path / "run", load_config("quickstart")) as workdir:
        workdir.write_shard("adapter:one", "heldout", 0, found)
    return tmp_path / "run", found


def test_rollouts_of_tau2_are_written_one_file_a_domain(rolled_out, tmp_path, capsys):
    run, found = rolled_out
    words = ["export", f"--workdir={run}", "--what=results", "--policy=adapter:one", "--split=heldout", f"--out={tmp_path / 'out'}"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'out' / 'mock.json'}: 3 simulations; 1 outages left out",
        f"{tmp_path / 'out' / 'airline.json'}: 12 simulations",
    ]
    again = read_results([tmp_path / "out" / "mock.json", tmp_path / "out" / "airline.json"])
    assert [(t.task_id, t.trial, t.reward, t.messages) for t in again] == [(t.task_id, t.trial, t.reward, t.messages) for t in found[1:]]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"policy": ("adapter:one",)}, "give one --policy=P and its --split"),
        ({"policy": ("base", "adapter:one"), "split": "heldout"}, "give one --policy=P"),
        ({"policy": ("base",), "split": "heldout"}, "no rollouts of base on the split heldout"),
        ({"policy": ("other",), "split": "heldout"}, "desk is no benchmark with a result format of its own"),
    ],
)
def test_what_cannot_be_written_is_refused(fields, says, rolled_out, tmp_path):
    with Workdir.open(rolled_out[0]) as workdir:
        workdir.write_shard("other", "heldout", 0, [Trajectory(id="desk:0#0", environment="desk", task_id="desk:0", reward=0.0)])
        arguments = Arguments(command="export", config=load_config("quickstart"), workdir=workdir, what="results", **fields)
        with pytest.raises(InputError, match=says):
            export.main(dataclasses.replace(arguments, out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_trials_of_later_batches_are_numbered_on():
    batch = [Trajectory(id=f"a#{n}", environment="tau2/mock", task_id="a", trial=n, reward=0.0) for n in (0, 1)]
    assert [t.trial for t in numbered_on([*batch, *batch])] == [0, 1, 2, 3]
