"""The driver, over a stand-in for ToolSandbox. `test_target.py` runs it over the real one, where that is installed."""

import importlib.util
import json
import pathlib
import sys
import threading
import time

import pytest

DRIVER = pathlib.Path(__file__).parents[4] / "trace_jax" / "benchmarks" / "toolsandbox" / "driver.py"


@pytest.fixture
def driver(monkeypatch, tmp_path):
    monkeypatch.setenv("TQDM_DISABLE", "1")  # as the driver does for good
    spec = importlib.util.spec_from_file_location("fake_tool_sandbox", pathlib.Path(__file__).with_name("fake_tool_sandbox.py"))
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)
    fake.install(monkeypatch, tmp_path)
    return _load(DRIVER, "toolsandbox_driver")


def _load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Stopped(BaseException):
    pass


class Script:
    """Says the given turns and keeps what it was told."""

    Stopped = Stopped

    def __init__(self, agent, user=()):
        self.turns = {"agent": iter(agent), "user": iter(user)}
        self.heard = []

    def __call__(self, speaker, system, messages, tools):
        self.heard.append((speaker, system, json.loads(json.dumps(messages)), [t["function"]["name"] for t in tools]))
        turn = next(self.turns[speaker])
        if turn is None:
            raise Stopped
        return turn


def says(text):
    return {"role": "assistant", "content": text, "tool_calls": []}


def calls(name, key="call_a1", **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"id": key, "name": name, "arguments": arguments}]}


GOOD = (calls("set_lamp", on=True), says("The lamp is on"))
END = calls("end_conversation", "call_e")


def test_a_scenario_is_played_and_graded_by_the_benchmarks_own_roles(driver):
    script = Script(GOOD, [END])
    result = driver.run_episode({"user": "base"}, "lamp", 0, script)
    assert (result["reward"], result["stop_reason"], result["error"]) == (1.0, "done", None)
    assert result["graded"]["milestone_mapping"] == {"0": [8, 1.0], "1": [7, 1.0]}
    assert "database_update" not in json.dumps(result)


def test_each_speaker_hears_only_what_is_new_to_it_and_a_system_message_later_on_is_a_users(driver):
    script = Script([says("Which?"), says("Sure?"), *GOOD], [says("The big one"), says("Yes"), END])
    assert driver.run_episode({"user": "base"}, "lamp", 0, script)["reward"] == 1.0
    agent = [h for h in script.heard if h[0] == "agent"]
    user = [h for h in script.heard if h[0] == "user"]
    assert agent[0] == ("agent", "Be brief.", [{"role": "user", "content": "Light, please"}], ["set_lamp"])
    assert [h[2] for h in agent[1:3]] == [[{"role": "user", "content": "The big one"}], [{"role": "user", "content": "Yes"}]]
    assert agent[3][2] == [{"role": "tool", "content": "None", "tool_call_id": "call_a1"}]
    assert user[0][1] == "You are a user. Example:"
    assert user[0][2] == [
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "You want light."},
        {"role": "assistant", "content": "Light, please"},
        {"role": "user", "content": "Which?"},
    ]
    assert user[1][2] == [{"role": "user", "content": "Sure?"}] and user[1][3] == ["end_conversation"]


def test_a_user_whose_call_fails_hears_its_result(driver):
    script = Script([says("Done"), says("Done")], [calls("end_conversation", "call_u", why="bored"), END])
    assert driver.run_episode({"user": "base"}, "lamp", 0, script)["stop_reason"] == "done"
    assert script.heard[2][2] == [{"role": "tool", "content": "TypeError: unexpected argument", "tool_call_id": "call_u"}]


def test_a_scripted_user_ends_the_conversation_by_its_farewell(driver):
    result = driver.run_episode({"user": "base"}, "lamp", 0, Script([says("")], [says("###STOP###")]))
    assert (result["reward"], result["stop_reason"]) == (0.0, "done")


def test_an_unknown_tool_ends_the_scenario_with_nothing_and_its_milestones_are_known(driver):
    result = driver.run_episode({"user": "base"}, "lamp", 0, Script([GOOD[0], calls("dim_lamp")]))
    assert (result["reward"], result["stop_reason"], result["error"]) == (0.0, "invalid_action", None)
    graded = result["graded"]
    assert graded["exception_type"] == "KeyError" and "dim_lamp" in graded["exception"] and graded["turn_count"] == 8
    (matches,) = [m["tool_details"]["milestone_matches"] for m in graded["conversation"] if "tool_details" in m]
    assert [(m["milestone_index"], m["milestone_similarity"]) for m in matches] == [(0, 0.0), (1, 0.0)]


def test_a_conversation_that_never_ends_is_cut_off(driver):
    result = driver.run_episode({"user": "base"}, "lamp", 0, Script([says("Hm")] * 9, [says("Well?")] * 9))
    assert (result["reward"], result["stop_reason"]) == (0.0, "max_turns")


def test_arguments_that_are_no_json_are_the_agents_failure(driver):
    result = driver.run_episode({"user": "base"}, "lamp", 0, Script([calls("set_lamp", on=float("nan"))]))
    assert (result["reward"], result["stop_reason"]) == (0.0, "invalid_action")


def test_more_parallel_calls_than_can_be_tried_in_every_order_are_the_agents_failure(driver):
    many = {"role": "assistant", "content": "", "tool_calls": [GOOD[0]["tool_calls"][0] | {"id": f"call_{i}"} for i in range(6)]}
    result = driver.run_episode({"user": "base"}, "lamp", 0, Script([many]))
    assert result["reward"] == 0.0 and "6 parallel calls" in result["graded"]["exception"]


@pytest.mark.parametrize(
    ("settings", "user", "kind", "message"),
    [
        ({"user": "base"}, [calls("hang_up")], "user_simulator", "KeyError"),
        ({"user": "base"}, [calls("end_conversation", "call-1")], "protocol", "no identifier: 'call-1'"),
        ({"user": "endpoint", "user_model": "m", "user_temperature": 0.0}, [], "user_simulator", "RuntimeError (HTTP 503)"),
    ],
)
def test_what_the_agent_did_not_cause_is_an_outage_and_says_no_secret(driver, settings, user, kind, message):
    result = driver.run_episode(settings, "lamp", 0, Script([says("Hm")], user))
    assert result["reward"] is None and result["error"]["kind"] == kind and message in result["error"]["message"]
    assert "sk-" not in json.dumps(result)


def test_a_stop_of_the_host_goes_through_and_leaves_the_next_episode_free(driver):
    with pytest.raises(Stopped):
        driver.run_episode({"user": "base"}, "lamp", 0, Script([None]))
    assert driver.run_episode({"user": "base"}, "lamp", 0, Script(GOOD, [END]))["reward"] == 1.0


def test_an_unknown_scenario_is_named(driver):
    with pytest.raises(KeyError, match="no scenario 'candle'"):
        driver.run_episode({"user": "base"}, "candle", 0, Script([]))


def test_episodes_of_one_process_wait_for_their_turns_side_by_side(driver):
    together = threading.Barrier(4, timeout=10)

    class Together(Script):
        def __call__(self, *told):
            together.wait()  # breaks unless all four wait for a turn at once
            return super().__call__(*told)

    rewards = {}

    def play(i):
        turns = GOOD if i % 2 else (calls("set_lamp", on=False), says("The lamp is on"))
        rewards[i] = driver.run_episode({"user": "base"}, "lamp", 0, Together(turns, [END]))["reward"]

    threads = [threading.Thread(target=play, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert rewards == {0: 0.5, 1: 1.0, 2: 0.5, 3: 1.0}


def test_tasks_are_described_with_hashes_that_do_not_change_from_call_to_call(driver):
    first, again = driver.describe({}), driver.describe({})
    assert first == again and first["version"].startswith("0.0.0+")
    (task,) = first["tasks"]
    assert (task["id"], task["split"], task["milestones"], len(task["hash"])) == ("lamp", "", 2, 64)


def test_scenarios_are_built_again_after_an_hour(driver, monkeypatch):
    driver.describe({})
    first = driver._scenarios()
    assert driver._scenarios() is first
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 4000)
    assert driver._scenarios() is not first


def test_the_driver_imports_only_the_benchmark_and_the_standard_library():
    lines = [line.split()[1].partition(".")[0] for line in DRIVER.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert {name for name in lines if name not in sys.stdlib_module_names} == {"tool_sandbox", "openai"}
