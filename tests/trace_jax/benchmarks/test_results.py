"""The table of formats, and the pooling of files of any format."""

import types

import pytest

from rl.trajectory import Trajectory
from trace_jax.benchmarks import results
from trace_jax.benchmarks.results import read_results
from trace_jax.errors import InputError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs of a benchmark whose format knows verdicts, or conversations where a file says so."""

    def read(path):
        said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": path.read_text()}] if path.read_text() else []
        for reward in (0.4, 0.95):
            yield Trajectory(id="a#0", environment="bench", task_id=f"task {reward}", reward=reward, messages=said)

    form = types.SimpleNamespace(recognises=lambda path: path.suffix == ".run", read=read)
    monkeypatch.setattr(results, "FORMATS", (*results.FORMATS, form))
    files = [tmp_path / f"{number}.run" for number in (1, 2)]
    for file in files:
        file.write_text("")
    return files


def test_equal_verdicts_of_several_runs_are_further_trials(runs):
    assert [(t.task_id, t.trial) for t in read_results(runs)] == [("task 0.4", 0), ("task 0.95", 0), ("task 0.4", 1), ("task 0.95", 1)]


def test_equal_conversations_in_two_files_are_one_run_given_twice(runs):
    for file in runs:
        file.write_text("Hello.")
    with pytest.raises(InputError, match=r"2\.run: all of its conversations are also in .*1\.run; give each result file once"):
        read_results(runs)


def test_the_reward_from_which_on_a_trajectory_is_a_success_can_be_given(runs):
    assert [t.success for t in read_results(runs[:1], success=0.9)] == [False, True]
    assert [t.success for t in read_results(runs[:1])] == [False, False]
