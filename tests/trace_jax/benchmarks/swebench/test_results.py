"""Files of mini-swe-agent, SWE-agent and the SWE-bench harness: excerpts of real ones, and files damaged in the ways that files are."""

import json
import os
import pathlib
import shutil

import pytest

from rl.trajectory import StopReason
from trace_jax.benchmarks.swebench import mini, reports, swe_agent
from trace_jax.benchmarks.swebench.predictions import write_predictions
from trace_jax.errors import InputError

ROOT = pathlib.Path(__file__).parents[4]
DATA = ROOT / "tests" / "data" / "swebench"
RUN, REPORT, LOGS, FORMATS = DATA / "excerpt", DATA / "reports" / "deepseek__deepseek-chat.excerpt.json", DATA / "logs", DATA / "formats"
SHARED = pathlib.Path(os.environ.get("TRACE_JAX_DATA", ROOT.parent / "shared" / "data")) / "swebench"
RESOLVED, UNRESOLVED = "sqlfluff__sqlfluff-2419", "pylint-dev__astroid-1978"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no folder {SHARED} with whole runs")


def read_by(reader, path, report=None):
    assert reader.recognises(path)
    return {t.task_id: t for t in reader.read(path, report)}


def counts(trajectories):
    """(resolved, failed, errors)"""
    found = list(trajectories)
    errors = sum(t.error is not None for t in found)
    resolved = sum(t.success for t in found)
    return resolved, len(found) - errors - resolved, errors


@pytest.fixture
def trajectory():
    return json.loads((RUN / RESOLVED / f"{RESOLVED}.traj.json").read_text())


@pytest.fixture
def run(tmp_path):
    """A copy of the excerpt's run with its report and log tree, to be damaged."""
    shutil.copytree(DATA, tmp_path / "data")
    return tmp_path / "data" / "excerpt"


def save(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def report_of(path, resolved=(), unresolved=(), **more):
    submitted = [*resolved, *unresolved, *(name for names in more.values() for name in names if isinstance(names, list))]
    ids = {"resolved_ids": list(resolved), "unresolved_ids": list(unresolved), "submitted_ids": sorted(set(submitted))}
    return save(path, {"total_instances": 500, "resolved_instances": len(resolved)} | ids | more)


@needs_shared
@pytest.mark.parametrize(
    ("reader", "path", "expected"),
    [
        (mini, "deepseek_chat_dev", (4, 5, 0)),
        (reports, "reports/deepseek__deepseek-chat.deepseek_chat_dev.json", (8, 15, 0)),
        (reports, "reports/deepseek__deepseek-chat.deepseek_chat_dev_rerun.json", (8, 15, 0)),
        (reports, "reports/deepseek__deepseek-chat.deepseek_lite_dev_noparallel.json", (5, 18, 0)),
        (reports, "deepseek_chat_dev_rerun", (8, 15, 0)),
        (reports, "deepseek_lite_dev_noparallel/preds.json", (5, 18, 0)),
        (reports, "logs", (8, 15, 0)),
    ],
)
def test_whole_runs_import_with_their_counts(reader, path, expected):
    assert counts(read_by(reader, SHARED / path).values()) == expected


@needs_shared
def test_three_runs_over_the_same_instances_differ_as_published():
    names = ("deepseek_chat_dev", "deepseek_chat_dev_rerun", "deepseek_lite_dev_noparallel")
    runs = [read_by(reports, SHARED / "reports" / f"deepseek__deepseek-chat.{name}.json") for name in names]
    assert runs[0].keys() == runs[1].keys() == runs[2].keys()
    times = [sum(run[name].success for run in runs) for name in runs[0]]
    assert (times.count(3), times.count(0)) == (5, 14)  # always and never; mixed: 4


@needs_shared
def test_one_of_each_format_imports_once_its_outcome_is_told(tmp_path):
    for file in sorted((SHARED / "formats").rglob("*.traj*")):
        reader = mini if file.name.endswith(".traj.json") else swe_agent
        if "demonstrations" in file.name:
            with pytest.raises(InputError, match="a demonstration"):
                list(reader.read(file))
            continue
        told = report_of(tmp_path / "m.r.json", [file.name.removesuffix(".traj.json").removesuffix(".traj")])
        (t,) = read_by(reader, file, told).values()
        assert t.success != ("RepeatedFormatError" in file.name) and t.error is None and len(t.messages) > 6


def test_a_run_is_joined_with_its_report_and_the_tests_of_its_log_tree():
    found = read_by(mini, RUN)
    assert counts(found.values()) == (1, 1, 0) and found[RESOLVED].success
    t = found[UNRESOLVED]
    assert t.id == f"{UNRESOLVED}#0" and t.policy["name"] == "deepseek/deepseek-chat" and t.stop_reason is StopReason.DONE
    failed = {name: c for name, c in t.checks.items() if name.startswith("test:") and not c["passed"]}
    assert failed and all(c["actual"] == "failure" for c in failed.values())
    assert t.metrics["fail_to_pass"] == 0.0 and 0 < t.metrics["pass_to_pass"] <= 1.0
    assert found[RESOLVED].metrics["fail_to_pass"] == 1.0
    assert [m["role"] for m in t.messages[:4]] == ["system", "user", "assistant", "tool"]
    assert t.messages[2]["tool_calls"][0]["name"] == "bash" and "command" in t.messages[2]["tool_calls"][0]["arguments"]
    assert t.messages[3]["tool_call_id"] == t.messages[2]["tool_calls"][0]["id"]
    assert t.messages[-1]["role"] == "assistant"  # what mini adds at the end is no message of the conversation


def test_both_denominators_are_said():
    assert reports.load_report(REPORT).rates() == "1 of 2 submitted (50.0%), of 23 in the data set (4.3%)"
    t = read_by(mini, RUN)[RESOLVED]
    assert (t.metrics["submitted_instances"], t.metrics["dataset_instances"]) == (2.0, 23.0)


def test_without_a_report_the_outcome_is_unknown(run):
    shutil.rmtree(run.parent / "logs")
    shutil.rmtree(run.parent / "reports")
    with pytest.raises(
        InputError, match="whether .* is unknown, for there is no report of the harness; grade its predictions with `swebench"
    ):
        list(mini.read(run))
    assert counts(mini.read(run, REPORT)) == (1, 1, 0)
    assert counts(mini.read(run, LOGS)) == (1, 1, 0)


def test_a_log_tree_alone_tells_the_outcome(run):
    shutil.rmtree(run.parent / "reports")
    assert counts(mini.read(run)) == (1, 1, 0)
    assert counts(read_by(reports, run.parent / "logs").values()) == (1, 1, 0)
    one = next((run.parent / "logs").rglob("report.json"))
    assert sum(counts(read_by(reports, one).values())) == 1


def test_instances_that_the_harness_gave_up_fail_or_are_errors_by_their_log(run):
    model = run.parent / "logs" / "run_evaluation" / "excerpt" / "deepseek__deepseek-chat"
    for name, log in (("a__a-1", ">>>>> Patch Apply Failed:\nerror"), ("b__b-2", "Cannot connect to the Docker daemon")):
        (model / name).mkdir()
        (model / name / "run_instance.log").write_text(log)
    found = read_by(reports, model.parent)
    assert counts(found.values()) == (1, 2, 1) and found["b__b-2"].error["kind"] == "infra_failure"


def test_report_and_tree_that_contradict_each_other_are_refused(run):
    report_of(run.parent / "reports" / REPORT.name, [UNRESOLVED], [RESOLVED])
    with pytest.raises(InputError, match="they are of different runs"):
        list(mini.read(run))


def test_two_reports_in_a_folder_are_refused_and_the_runs_own_is_preferred(run):
    for name in ("m.a.json", "m.b.json"):
        shutil.copy(REPORT, run / name)
    with pytest.raises(InputError, match=r"m\.a\.json and m\.b\.json are both reports"):
        list(mini.read(run))
    shutil.copy(REPORT, run)
    assert counts(mini.read(run)) == (1, 1, 0)


def test_an_instance_that_the_report_does_not_know_is_named(tmp_path):
    told = report_of(tmp_path / "m.r.json", [RESOLVED])
    with pytest.raises(InputError, match=f"says nothing of {UNRESOLVED}"):
        list(mini.read(RUN, told))


def test_outcomes_of_a_report_beyond_resolved(tmp_path):
    path = report_of(
        tmp_path / "m.r.json",
        ["a"],
        ["b", "e"],
        empty_patch_ids=["c"],
        error_ids=["d"],
        infra_failure_ids=["e"],
        failure_reasons={"e": "out_of_memory"},
    )
    found = read_by(reports, path)
    assert counts(found.values()) == (1, 3, 1)
    assert found["e"].error == {"kind": "infra_failure", "message": "out_of_memory"} and found["e"].reward is None
    assert found["c"].checks["patch"]["message_index"] is None
    assert found["c"].checks["patch"]["passed"] is found["d"].checks["patch"]["passed"] is False


def test_a_turn_that_could_not_be_read_is_a_turn():
    (t,) = read_by(mini, FORMATS / "format_error.traj.json").values()  # no patch: needs no report
    assert t.stop_reason is StopReason.INVALID_ACTION and t.reward == 0.0 and not t.checks["patch"]["passed"]
    roles = [m["role"] for m in t.messages]
    assert roles[-6:] == ["assistant", "user"] * 3 and t.metrics["turns"] == 4.0
    assert t.messages[-2] == {"role": "assistant", "content": "I forgot the tool call"}


def test_a_call_that_is_not_json_is_kept_as_it_was(run, trajectory):
    bad = {"tool_calls": [{"id": "x", "function": {"name": "bash", "arguments": "{'command'"}}], "content": None}
    complaint = {
        "role": "user",
        "content": "Tool call error",
        "extra": {"interrupt_type": "FormatError", "response": {"choices": [{"message": bad}]}},
    }
    trajectory["messages"].insert(2, complaint)
    save(run / RESOLVED / f"{RESOLVED}.traj.json", trajectory)
    t = read_by(mini, run)[RESOLVED]
    assert t.messages[2]["tool_calls"] == [{"id": "x", "name": "bash", "arguments": {"malformed": "{'command'"}}]
    assert t.messages[3] == {"role": "user", "content": "Tool call error"}


@pytest.mark.parametrize(
    ("status", "stop"), [("LimitsExceeded", "max_turns"), ("TimeExceeded", "max_turns"), ("ContextWindowExceededError", "context")]
)
def test_a_run_without_a_patch_failed(run, trajectory, status, stop):
    trajectory["info"] |= {"exit_status": status, "submission": ""}
    save(run / RESOLVED / f"{RESOLVED}.traj.json", trajectory)
    t = read_by(mini, run)[RESOLVED]
    assert (t.reward, t.success, t.error, t.stop_reason) == (0.0, False, None, stop)
    assert t.checks["patch"] == {"passed": False, "expected": "a patch that applies", "actual": "", "message_index": 9}


@pytest.mark.parametrize("status", ["InternalServerError", "Timeout", "", None])
def test_an_end_that_is_not_the_agents_is_counted_and_not_its_failure(run, trajectory, status):
    trajectory["info"] |= {"exit_status": status, "submission": "", "exception_str": "key sk-12345678901234 refused"}
    save(run / RESOLVED / f"{RESOLVED}.traj.json", trajectory)
    found = read_by(mini, run)
    assert counts(found.values()) == (0, 1, 1)
    t = found[RESOLVED]
    assert t.error["kind"] == (status or "interrupted") and t.reward is None and "sk-1" not in t.error["message"]


def test_settings_of_the_model_are_not_copied(run, trajectory):
    trajectory["info"]["config"]["model"]["model_kwargs"] = {"api_key": "geheim", "extra_headers": {"Authorization": "geheim"}}
    save(run / RESOLVED / f"{RESOLVED}.traj.json", trajectory)
    assert "geheim" not in json.dumps([t.to_json() for t in mini.read(run)])


def test_commands_in_blocks_become_calls(tmp_path):
    (t,) = read_by(mini, FORMATS / "old_list.traj.json", report_of(tmp_path / "m.r.json", ["old_list"])).values()
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert t.messages[2]["tool_calls"][0]["arguments"]["command"].startswith("cat /Users") and "```" not in t.messages[2]["content"]
    assert t.success and t.checks["patch"]["actual"].startswith("diff --git")


def test_both_generations_of_swe_agent(tmp_path):
    names = ["pydicom__pydicom-1458", "marshmallow-code__marshmallow-1867"]
    found = read_by(swe_agent, FORMATS, report_of(tmp_path / "m.r.json", names[1:], names[:1]))
    old, new = (found[name] for name in names)
    assert counts(found.values()) == (1, 1, 0) and new.success
    assert "DEMONSTRATION" not in json.dumps(old.messages)
    assert old.messages[2]["tool_calls"][0] == {"id": "", "name": "bash", "arguments": {"command": "create reproduce_bug.py"}}
    assert old.messages[3]["role"] == "tool"
    assert new.messages[2]["tool_calls"][0]["arguments"] == {"command": "ls -F"}
    assert new.messages[3]["tool_call_id"] == new.messages[2]["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("status", "submission", "stop", "error"),
    [
        ("submitted (exit_cost)", "diff", "max_turns", None),
        ("exit_context", "", "context", None),
        ("exit_format", "", "invalid_action", None),
        ("exit_environment_error", "", "environment_error", "exit_environment_error"),
        (None, "", "environment_error", "interrupted"),
    ],
)
def test_how_swe_agent_ended(tmp_path, status, submission, stop, error):
    data = json.loads((FORMATS / "pydicom__pydicom-1458.traj").read_text())
    data["info"] = {"exit_status": status, "submission": submission}
    name = "pydicom__pydicom-1458"
    path = save(tmp_path / name / f"{name}.traj", data)
    (t,) = read_by(swe_agent, path, report_of(tmp_path / "m.r.json", [], [name])).values()
    assert t.stop_reason == stop and (t.error and t.error["kind"]) == error


def test_damaged_files_are_named(run):
    file = run / RESOLVED / f"{RESOLVED}.traj.json"
    whole = file.read_text()
    file.write_text(whole[:1000])
    with pytest.raises(InputError, match=rf"{file.name}: not valid JSON at line \d+"):
        list(mini.read(run))
    for damaged in ([], {"info": {}}, {"info": 3, "messages": []}, {"info": {}, "messages": [{"content": "x"}]}):
        save(file, damaged)
        with pytest.raises(InputError, match="not a trajectory of mini-swe-agent"):
            list(mini.read(run))


def test_reports_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(InputError, match="was submitted but has no outcome"):
        reports.load_report(report_of(tmp_path / "a.json", ["a"], more_ids=["b"]))
    with pytest.raises(InputError, match="is both resolved and unresolved"):
        reports.load_report(report_of(tmp_path / "a.json", ["a"], ["a"]))
    with pytest.raises(InputError, match="'resolved_ids'"):
        reports.load_report(save(tmp_path / "a.json", {"resolved_instances": 3}))


@pytest.mark.parametrize("name", ["out.json", "out.jsonl"])
def test_predictions_are_read_again_and_by_the_harness(tmp_path, name):
    found = read_by(mini, RUN)
    assert write_predictions(found.values(), tmp_path / name) == 2
    told = read_by(reports, tmp_path / name, REPORT)
    assert counts(told.values()) == (1, 1, 0)
    assert {k: t.checks["patch"]["actual"] for k, t in told.items()} == {k: t.checks["patch"]["actual"] for k, t in found.items()}
    harness = pytest.importorskip("swebench.harness.utils")
    rows = harness.get_predictions_from_file(str(tmp_path / name), "unused", "test")
    assert {r["instance_id"]: r["model_patch"] for r in rows} == {k: t.checks["patch"]["actual"] for k, t in found.items()}


def test_predictions_need_a_patch_each_and_one_trial(tmp_path):
    found = list(mini.read(RUN))
    with pytest.raises(InputError, match="several trials"):
        write_predictions([*found, found[0]], tmp_path / "p.json")
    with pytest.raises(InputError, match="no patch"):
        write_predictions(reports.read(REPORT), tmp_path / "p.json")
    with pytest.raises(InputError, match=r"\.json or \.jsonl"):
        write_predictions(found, tmp_path / "p.txt")
