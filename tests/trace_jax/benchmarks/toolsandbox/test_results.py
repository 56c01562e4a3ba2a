"""Run folders in ToolSandbox's form, written here, and two whole ones where they are at hand."""

import copy
import json
import os
import pathlib

import pytest

from rl.trajectory import StopReason
from trace_jax.benchmarks.toolsandbox import categories, results, splits
from trace_jax.benchmarks.toolsandbox.milestones import checks
from trace_jax.errors import InputError

SHARED = pathlib.Path(os.environ.get("TRACE_JAX_DATA", pathlib.Path(__file__).parents[5] / "shared" / "data")) / "toolsandbox"
SYSTEM = {"role": "system", "content": "Ask where a request is unclear."}


def constraint(database, kind, rows, **measures):
    return {
        "database_namespace": database,
        "snapshot_constraint": kind,
        "target_dataframe": rows,
        "column_similarity_measure": measures,
    }


GUARD = constraint("CONTACT", "guardrail_similarity", None)


def matched(index, similarity, *constraints, kind="milestone"):
    return {
        f"{kind}_index": index,
        kind: {"snapshot_constraints": [*constraints, GUARD]},
        f"{kind}_similarity": similarity,
    }


def called(name, key="call_1", **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"id": key, "function": {"name": name, "arguments": json.dumps(arguments)}}]}


def wifi(tool="set_wifi_status", on=False, similarity=1.0):
    """The conversation of the scenario wifi_off."""
    state = constraint("SETTING", "snapshot_similarity", [{"wifi": False}])
    words = constraint("SANDBOX", "snapshot_similarity", [{"sender": "AGENT", "recipient": "USER", "content": "Wifi is off now"}])
    result = {"role": "tool", "name": tool, "tool_call_id": "call_1", "content": "None"}
    return [
        SYSTEM,
        {"role": "user", "content": "No wifi, please"},
        called(tool, on=on),
        {**result, "tool_details": {"milestone_matches": [matched(0, similarity, state)], "database_update": {}}},
        {"role": "assistant", "content": "Off", "assistant_details": {"milestone_matches": [matched(1, 0.8, words)]}},
    ]


def row(name, similarity=1.0, **more):
    return {
        "name": name,
        "categories": [],
        "traceback": None,
        "exception_type": None,
        "similarity": similarity,
        "turn_count": 3,
        "milestone_mapping": {"0": [17, similarity], "1": [18, 0.8]},
        "minefield_mapping": {},
        **more,
    }


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "agent_small-model_user_big-model_2026"

    def write(*scenarios, summary=None):
        rows = []
        for entry, conversation in scenarios:
            rows.append(entry)
            (folder / "trajectories" / entry["name"]).mkdir(parents=True)
            if conversation is not None:
                (folder / "trajectories" / entry["name"] / "conversation.json").write_text(json.dumps(conversation))
        folder.mkdir(exist_ok=True)
        (folder / "result_summary.json").write_text(json.dumps(summary or {"per_scenario_results": rows, "git_sha": None}))
        return folder

    return write


def test_a_run_is_recognised_by_its_summary(run, tmp_path):
    folder = run((row("wifi_off"), wifi()))
    assert results.recognises(folder) and results.recognises(folder / "result_summary.json")
    assert not results.recognises(tmp_path) and not results.recognises(folder / "trajectories" / "wifi_off" / "conversation.json")
    assert [t.id for t in results.read(folder)] == [t.id for t in results.read(folder / "result_summary.json")] == ["wifi_off#0"]


def test_reward_is_the_similarity_and_success_starts_at_a_threshold(run):
    folder = run((row("wifi_off", 0.9), wifi()))
    (strict,), (lenient,) = results.read(folder), results.read(folder, success=0.9)
    assert (strict.reward, strict.success, lenient.success) == (0.9, False, True)
    assert strict.policy["name"] == "small-model" and strict.stop_reason is StopReason.DONE
    assert not strict.checks["milestone:1"]["passed"]


def test_variants_share_the_group_and_the_split_of_their_base(run):
    name = "wifi_off_3_distraction_tools_tool_name_scrambled"
    plain, renamed = results.read(run((row("wifi_off"), wifi()), (row(name), wifi("setting_8"))))
    assert plain.group == renamed.group == "wifi_off" and plain.split == renamed.split == splits.split_of("wifi_off")
    assert renamed.checks["action:0"]["expected"] == {"name": "setting_8", "arguments": {"on": False}, "kind": "write"}
    assert renamed.checks["action:0"]["passed"] and renamed.checks["action:0"]["message_index"] == 2


def test_messages_are_the_agents_with_arguments_as_dictionaries(run):
    conversation = wifi()
    conversation[3]["content"] = "TypeError: missing a required argument: 'on'"
    (t,) = results.read(run((row("wifi_off"), conversation)))
    assert t.messages[2]["tool_calls"] == [{"id": "call_1", "name": "set_wifi_status", "arguments": {"on": False}}]
    assert t.messages[3] == {"role": "tool", "tool_call_id": "call_1", "content": conversation[3]["content"], "error": True}
    assert t.messages[4] == {"role": "assistant", "content": "Off"}


def test_a_conversation_that_ends_without_words_of_the_agent_was_cut_off(run):
    (t,) = results.read(run((row("wifi_off", 0.0), [*wifi()[:2], called("get_wifi_status")])))
    assert t.stop_reason is StopReason.MAX_TURNS


def test_the_nearest_call_stands_beside_the_expected_one():
    found = checks(row("wifi_off", 0.0), wifi(on=True, similarity=0.0), results.messages_of(wifi(on=True)))
    assert found["action:0"] == {
        "passed": False,
        "expected": {"name": "set_wifi_status", "arguments": {"on": False}, "kind": "write"},
        "actual": {"name": "set_wifi_status", "arguments": {"on": True}},
        "message_index": 2,
    }
    assert found["milestone:1"] == {"passed": False, "expected": "Wifi is off now", "actual": "Off", "message_index": 4}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            constraint("CONTACT", "addition_similarity", [{"name": "Ann", "phone_number": "+12", "relationship": None}]),
            {"name": "add_contact", "arguments": {"name": "Ann", "phone_number": "+12"}, "kind": "write"},
        ),
        (
            constraint("MESSAGING", "addition_similarity", [{"recipient_phone_number": "+12", "content": "Hi", "sender_person_id": "x"}]),
            {"name": "send_message_with_phone_number", "arguments": {"phone_number": "+12", "content": "Hi"}, "kind": "write"},
        ),
        (
            constraint("REMINDER", "removal_similarity", [{"reminder_id": "r1"}]),
            {"name": "remove_reminder", "arguments": {"reminder_id": "r1"}, "kind": "write"},
        ),
        (
            constraint("SANDBOX", "snapshot_similarity", [{"tool_trace": '{"tool_name": "search_contacts", "arguments": {"name": "A"}}'}]),
            {"name": "search_contacts", "arguments": {"name": "A"}, "kind": "read"},
        ),
        (
            constraint("SANDBOX", "snapshot_similarity", [{"tool_trace": '[{"tool_name": "unit_conversion"}, {"tool_name": "other"}]'}]),
            {"name": "unit_conversion", "arguments": {}, "kind": "read"},
        ),
    ],
)
def test_states_and_traces_say_which_call_was_expected(given, expected):
    conversation = [SYSTEM, {"role": "user", "content": "Go", "user_details": {"milestone_matches": [matched(0, 0.0, given)]}}]
    found = checks(row("wifi_off", 0.0, milestone_mapping={}), conversation, results.messages_of(conversation))
    assert found == {"action:0": {"passed": False, "expected": expected, "actual": None, "message_index": None}}


def test_words_that_must_occur_literally_are_to_be_communicated():
    words = constraint("SANDBOX", "snapshot_similarity", [{"content": "+12"}], content="column_contains_similarity")
    said = {"role": "assistant", "content": "It is +12", "assistant_details": {"milestone_matches": [matched(0, 1.0, words)]}}
    found = checks(row("wifi_off", milestone_mapping={}), [SYSTEM, said], results.messages_of([SYSTEM, said]))
    assert found == {"communicate:0": {"passed": True, "expected": "+12", "actual": "It is +12", "message_index": 1}}


def test_a_minefield_is_passed_where_it_was_not_touched():
    mine = constraint("SANDBOX", "snapshot_similarity", [{"content": "search_lat_lon"}])
    for similarity, passed in ((0.0, True), (1.0, False)):
        call = called("search_lat_lon") | {"assistant_details": {"minefield_matches": [matched(0, similarity, mine, kind="minefield")]}}
        found = checks(row("wifi_off", milestone_mapping={}), [SYSTEM, call], results.messages_of([SYSTEM, call]))
        assert found["minefield:0"]["passed"] is passed and found["minefield:0"]["message_index"] == (None if passed else 1)


def test_milestones_of_which_only_the_verdict_knows_are_kept():
    found = checks(row("wifi_off", 0.5, milestone_mapping={"0": [3, 1.0], "1": [4, 0.0]}), [], [])
    assert [(name, c["passed"]) for name, c in found.items()] == [("milestone:0", True), ("milestone:1", False)]


# --- exceptions ---


def failed(exception, text="", frames='File "roles/openai_api_agent.py", line 9'):
    return row(
        "wifi_off",
        0,
        exception_type=exception,
        traceback=f"Traceback (most recent call last):\n  {frames}\n{exception}: {text}\n",
        milestone_mapping={},
        turn_count=30,
    )


@pytest.mark.parametrize("exception", ["KeyError", "JSONDecodeError", "AssertionError", "SyntaxError", "BadRequestError"])
def test_an_exception_that_the_agent_caused_is_its_failure_with_similarity_0(run, exception):
    (t,) = results.read(run((failed(exception, "no tool dim_lamp"), None)))
    assert (t.reward, t.success, t.error, t.stop_reason) == (0.0, False, None, StopReason.INVALID_ACTION)
    assert t.checks["exception"]["actual"] == f"{exception}: no tool dim_lamp" and t.messages == []


@pytest.mark.parametrize(
    ("exception", "frames"),
    [
        ("APIConnectionError", "x"),
        ("RateLimitError", "x"),
        ("ReadTimeout", "x"),
        ("RetryError", "x"),
        ("KeyError", 'File "/site-packages/tool_sandbox/roles/openai_api_user.py", line 120, in respond'),
    ],
)
def test_an_outage_of_an_api_or_of_the_user_simulator_is_an_error(run, exception, frames):
    (t,) = results.read(run((failed(exception, "Incorrect key sk-proj1234567890abcd", frames), None)))
    assert t.reward is None and t.error["kind"] == exception and t.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "sk-proj" not in json.dumps(t.to_json())


def test_what_had_been_said_before_an_exception_comes_from_the_execution_context(run):
    folder = run((failed("KeyError"), None))
    head = {"sender": None, "recipient": None, "content": None}
    code = "call_1_parameters = {'on': False}\ncall_1_response = set_wifi_status(**call_1_parameters)\nprint(repr(call_1_response))"
    call = {"sender": "AGENT", "recipient": "EXECUTION_ENVIRONMENT", "content": code, "openai_function_name": "setting_8"}
    rows = [
        {"sender": "SYSTEM", "recipient": "EXECUTION_ENVIRONMENT", "content": "import json"},
        {"sender": "SYSTEM", "recipient": "AGENT", "content": "Be brief"},
        {"sender": "USER", "recipient": "AGENT", "content": "an example", "visible_to": ["USER"]},
        {"sender": "USER", "recipient": "AGENT", "content": "No wifi"},
        call,
        {**call, "content": code.replace("call_1", "call_2")},
        {"sender": "EXECUTION_ENVIRONMENT", "recipient": "AGENT", "content": "None", "openai_tool_call_id": "call_1"},
        {
            "sender": "EXECUTION_ENVIRONMENT",
            "recipient": "AGENT",
            "content": "no",
            "openai_tool_call_id": "call_2",
            "tool_call_exception": "no",
        },
        {"sender": "AGENT", "recipient": "USER", "content": "Hm"},
    ]
    context = {"_dbs": {"SANDBOX": [head, *rows]}}
    (folder / "trajectories" / "wifi_off" / "execution_context.json").write_text(json.dumps(context))
    (t,) = results.read(folder)
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    wanted = [{"id": f"call_{i}", "name": "setting_8", "arguments": {"on": False}} for i in (1, 2)]
    assert t.messages[2]["tool_calls"] == wanted and t.messages[4]["error"] is True


# --- damaged runs ---


def test_a_file_that_is_cut_short_or_missing_is_named_in_one_line(run):
    folder = run((row("wifi_off"), wifi()))
    conversation = folder / "trajectories" / "wifi_off" / "conversation.json"
    conversation.write_text(conversation.read_text()[:-30])
    with pytest.raises(InputError, match=r"conversation\.json: not valid JSON at line 1.*cut short") as error:
        list(results.read(folder))
    assert "\n" not in str(error.value)
    conversation.unlink()
    with pytest.raises(InputError, match=r"conversation\.json: no such file; copy the whole folder"):
        list(results.read(folder))


@pytest.mark.parametrize("summary", [[], {"a": 1}, {"per_scenario_results": []}, {"per_scenario_results": 3}])
def test_a_summary_without_results_is_refused(run, summary):
    with pytest.raises(InputError, match="per_scenario_results' is missing or empty"):
        list(results.read(run(summary=summary or [1])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"similarity": 1.5}, "similarity: 1.5 is not a number"),
        ({"similarity": None}, "similarity: None is not a number"),
        ({"name": "../wifi_off"}, "is no name of a scenario"),
        ({"turn_count": None}, "not in the form that ToolSandbox writes"),
        ({"milestone_mapping": {"0": 3}}, "not in the form that ToolSandbox writes"),
    ],
)
def test_a_field_of_another_form_is_named(run, change, message):
    folder = run((row("wifi_off"), wifi()))
    data = json.loads((folder / "result_summary.json").read_text())
    data["per_scenario_results"][0] |= change
    (folder / "result_summary.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=rf"per_scenario_results\[0\].*{message}"):
        list(results.read(folder))


def test_a_scenario_that_is_listed_twice_is_refused(run):
    folder = run((row("wifi_off"), wifi()))
    data = json.loads((folder / "result_summary.json").read_text())
    data["per_scenario_results"] *= 2
    (folder / "result_summary.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"results\[1\]: scenario 'wifi_off' is in the file twice"):
        list(results.read(folder))


# --- means by category ---


def test_scrambled_variants_do_not_count_as_three_distraction_tools(run):
    names = ["wifi_off", "wifi_off_3_distraction_tools", "wifi_off_3_distraction_tools_arg_type_scrambled"]
    table = categories.aggregate(
        results.read(run(*((row(name, reward), wifi()) for name, reward in zip(names, (1.0, 0.5, 0.0), strict=True))))
    )
    assert table["THREE_DISTRACTION_TOOLS"].similarity == 0.5 and table["THREE_DISTRACTION_TOOLS"].scenarios == 1
    assert table["ARG_TYPE_SCRAMBLED"].similarity == 0.0 and table["NO_DISTRACTION_TOOLS"].perfect == 1
    assert table["ALL_CATEGORIES"] == table["SINGLE_TOOL_CALL"] == categories.Row(3, 0.5, 1, 3.0)


def test_an_outage_counts_in_no_mean(run):
    lost = failed("APIConnectionError") | {"name": "cellular_off"}
    table = categories.aggregate(results.read(run((row("wifi_off"), wifi()), (lost, None))))
    assert table["ALL_CATEGORIES"].scenarios == 1 and table["ALL_CATEGORIES"].similarity == 1.0


# --- whole runs, where they are at hand ---

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real result files are not here; set TRACE_JAX_DATA to their folder")
RUNS = {
    "agent_scripted-golden_user_scripted-user": ({1.0: 48}, 0),
    "agent_scripted-weak_user_scripted-user": ({1.0: 13, 0.5: 21, 0.0: 14}, 6),
}


@needs_shared
@pytest.mark.parametrize("name", RUNS)
def test_real_runs_import_as_their_summary_says(name):
    trajectories = list(results.read(SHARED / name))
    summary = json.loads((SHARED / name / "result_summary.json").read_text())
    wanted, exceptions = RUNS[name]
    assert len(trajectories) == 48 and all(t.error is None for t in trajectories)
    assert {reward: sum(t.reward == reward for t in trajectories) for reward in wanted} == wanted
    assert [t.reward for t in trajectories] == [r["similarity"] for r in summary["per_scenario_results"]]
    assert sum("exception" in t.checks for t in trajectories) == exceptions
    failures = [t for t in trajectories if not t.success]
    assert all(any(not c["passed"] for c in t.checks.values()) for t in failures)
    assert all(c["passed"] for t in trajectories if t.success for c in t.checks.values())


@needs_shared
@pytest.mark.parametrize("name", RUNS)
def test_means_by_category_are_those_of_the_real_runs(name):
    table = categories.aggregate(results.read(SHARED / name))
    recorded = copy.deepcopy(json.loads((SHARED / name / "result_summary.json").read_text())["category_aggregated_results"])
    # These two files count scrambled variants there, against ToolSandbox's own rule: 36 scenarios, not 12.
    del recorded["THREE_DISTRACTION_TOOLS"]
    assert table["THREE_DISTRACTION_TOOLS"].scenarios == 12
    for category, means in recorded.items():
        assert table[category].similarity == pytest.approx(means["similarity"], abs=1e-12)
        assert table[category].turn_count == pytest.approx(means["turn_count"], abs=1e-12)
