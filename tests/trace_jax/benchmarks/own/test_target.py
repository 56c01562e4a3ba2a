"""A driver of the user's own as a target, and everything that it can get wrong."""

import json
import pathlib

import pytest

from envs import EnvironmentFault
from envs.builtin import load_builtin
from envs.harness import HarnessPool
from envs.package import write_package
from trace_jax import certify
from trace_jax.benchmarks.live import live_targets
from trace_jax.benchmarks.own.target import make_targets
from trace_jax.config import BenchmarkSection, Config, RolloutSection
from trace_jax.errors import InputError

DRIVER = """
import json, os, sys, time
import helper

TOOL = {"type": "function", "function": {"name": "water", "description": "", "parameters": {"type": "object", "properties": {}}}}


def describe(settings):
    print("to be hidden")
    exec(settings.get("describing", ""))
    said = {"name": "greenhouse", "version": "1", "tasks": [{"id": f"t{n}"} for n in range(8)], "tools": [TOOL], "system": "Be kind."}
    return json.loads(json.dumps(said | settings.get("said", {})))


def run_episode(settings, task_id, seed, speak):
    exec(settings.get("playing", ""))
    turn = speak("agent", "Be kind.", [{"role": "user", "content": task_id}], [TOOL])
    while turn["tool_calls"] and "answers" in settings:
        turn = speak("agent", "", [eval(settings["answers"]) for call in turn["tool_calls"]], [TOOL])
    if settings.get("user"):
        speak("user", "You garden.", [{"role": "user", "content": turn["content"]}], [])
    checks = {"communicate:0": {"passed": False, "expected": helper.WORD}}
    return {"reward": 0.0, "stop_reason": "done", "graded": {"checks": checks}} | settings.get("end", {})
"""


@pytest.fixture(scope="module")
def pool():
    with HarnessPool(deadline_s=30.0) as pool:
        yield pool


@pytest.fixture
def config(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "helper.py").write_text("WORD = 'wet'\n")

    def make(engine="jax", **settings) -> Config:
        section = BenchmarkSection(name="own", driver=str(tmp_path / "driver.py"), settings=settings)
        return Config(benchmark=section, rollout=RolloutSection(engine=engine)).validate()

    return make


def test_a_target_is_what_its_driver_describes(pool, config):
    (target,) = live_targets(config(said={"max_turns": 7, "user": True, "farewell": "bye"}, user=True), pool)
    assert (target.name, target.target, target.grader, target.max_turns) == ("greenhouse", "greenhouse", "greenhouse 1", 7)
    assert (target.speaks_user, target.farewell, target.system) == (True, "bye", "Be kind.")
    assert target.tools[0]["function"]["name"] == "water"
    checks = target.checks("t0", {"checks": {"db": {"passed": True}}}, [])
    assert checks == {"db": {"passed": True, "expected": None, "actual": None, "message_index": None}}
    assert target.checks("t0", None, []) == {}
    with pytest.raises(EnvironmentFault, match=r"driver.py: run_episode of task 't0': graded: 'checks\['db'\]': must be"):
        target.checks("t0", {"checks": {"db": True}}, [])


def test_splits_are_the_driver_s_or_follow_from_the_ids(pool, config):
    (target,) = make_targets(config(said={"tasks": [{"id": "b", "split": "heldout"}, {"id": "a", "split": "train", "hash": "0a"}]}), pool)
    assert [[task.id for task in target.tasks(split)] for split in ("train", "heldout")] == [["a"], ["b"]]
    assert target.tasks("train")[0].hash == "0a" and len(target.tasks("heldout")[0].hash) == 64

    (few,) = make_targets(config(), pool)
    (more,) = make_targets(config(said={"tasks": [{"id": f"t{n}"} for n in range(40)]}), pool)
    split = {task.id: task.split for task in more.all_tasks}
    assert all(split[task.id] == task.split for task in few.all_tasks) and 10 < len(more.tasks("train")) < 30
    assert few.tasks("train")[0].hash != make_targets(config(said={"version": "2"}), pool)[0].tasks("train")[0].hash


BAD = {"name": "water", "description": "", "parameters": {"type": "object", "properties": {"bed": {"enum": 3}}}}
TWICE = [{"id": "a", "split": "train"}, {"id": "a", "split": "heldout"}]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"describing": "raise KeyError('beds')"}, r"describe: KeyError: 'beds' \(driver.py, line 10\)"),
        (
            {"describing": "import no_such_module"},
            "describe: ModuleNotFoundError.*; install it, put it beside the driver, or",
        ),
        ({"describing": "os._exit(3)"}, "describe: the worker ended with exit code 3"),
        ({"said": {"max_turn": 3}}, "describe: unknown field 'max_turn', did you mean 'max_turns'"),
        ({"said": {"version": 1}}, "describe: version = 1 must be a text"),
        ({"said": {"max_turns": True}}, "describe: max_turns = True must be a whole number"),
        ({"said": {"max_turns": 0}}, "max_turns = 0 must be at least 1"),
        ({"said": {"name": "My House"}}, "name = 'My House' must be snake_case"),
        ({"said": {"tools": [{"name": "water"}]}}, 'describe: tools: TOOLS must hold .*"function"'),
        ({"said": {"tasks": ["a"]}}, r"tasks\[0\]: must be"),
        ({"said": {"tasks": TWICE}}, r"tasks\[1\]: id 'a' is there twice"),
        ({"said": {"tasks": [TWICE[0], {"id": "b"}]}}, r"tasks\[1\]: give all tasks a split, or none"),
        ({"said": {"tasks": [{"id": "a", "split": "test"}]}}, "split = 'test' must be 'train' or 'heldout'"),
        ({"said": {"tasks": TWICE[:1]}}, 'none of 1 is of the split heldout; give some "split": "train" or "heldout"'),
        ({"said": {"tasks": [{"id": "a"}]}}, "tasks: none of 1 is of the split .*; give some a split, or give more tasks"),
        (
            {"playing": "raise ValueError('dry')"},
            "run_episode of .*, tried with an agent that does nothing: ValueError: dry .*line 16",
        ),
        ({"end": {"reward": 2}}, "run_episode of task .*: run_episode must return a reward from 0 to 1"),
        ({"end": {"stop_reason": "bored"}}, "run_episode of task .*: stop_reason = 'bored' must be one of done, max_turns"),
        ({"end": {"graded": []}}, r"run_episode of task .*: graded: \[\] must be"),
        ({"end": {"graded": {"checks": {"db": 1}}}}, r"graded: 'checks\['db'\]': must be"),
        ({"playing": "speak('agent', 'Hi', 'text', [])"}, "run_episode of task .*: speak must be given"),
        (
            {"answers": "{'role': 'tool', 'content': 'wet', 'tool_call_id': call['name']}"},
            r"tried with an agent that calls each tool once: speak was given 0 answers to the call water\(\{\}\), whose id was 'call_0'; .*"
            r"\['water'\]; give one",
        ),
        ({"answers": "{'role': 'user', 'content': 'wet'}"}, r"0 answers to the call water\(\{\}\).* tool messages are \[\]"),
        ({"answers": "call['litres']"}, r"an agent that calls each tool once: KeyError: 'litres' \(driver.py, line \d+"),
        ({"answers": "{'role': 'tool', 'content': 3}"}, "calls each tool once: speak must be given messages"),
        ({"answers": "None", "said": {"tools": [{"type": "function", "function": BAD}]}}, "describe: tools: "),
    ],
)
def test_what_a_driver_gets_wrong_is_one_error_before_any_weight_loads(pool, config, settings, said):
    with pytest.raises(InputError, match=rf"driver\.py: .*{said}"):
        live_targets(config(**settings), pool)


def test_a_driver_that_answers_its_tools_is_none_of_these(pool, config):
    answers = "{'role': 'tool', 'content': str(call['arguments']), 'tool_call_id': call['id']}"
    parameters = {"type": "object", "properties": {"bed": {"type": "string"}, "litres": {"type": "integer"}}, "required": ["bed"]}
    tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": parameters}} for name in ("water", "dry")]
    assert make_targets(config(answers=answers, said={"tools": tools}), pool)
    assert make_targets(config(answers=answers, said={"tools": tools, "max_turns": 1}), pool)
    assert make_targets(config(answers="1 / 0", said={"tools": []}), pool)  # none is called


def test_a_driver_that_hangs_lacks_a_function_or_never_ends(pool, config, tmp_path):
    with HarnessPool(deadline_s=3.0) as impatient:
        with pytest.raises(InputError, match="run_episode of task .* no answer within 3 s; see where it hangs, or allow"):
            make_targets(config(playing="time.sleep(4)"), impatient)
    endless = "while True: speak('agent', 'Hi', [{'role': 'user', 'content': 'and?'}], [])"
    make_targets(config(playing=endless, said={"max_turns": 3, "tools": []}), pool)  # is ended like any agent out of turns
    other = tmp_path / "other.py"
    other.write_text("def describe(settings):\n    return {}\n")
    for driver, said in (
        (str(other), "other.py: describe: AttributeError: the driver has no function run_episode; define it"),
        ("no/driver.py", "config field 'benchmark.driver': .*no/driver.py: no such file"),
    ):
        with pytest.raises(InputError, match=said):
            make_targets(Config(benchmark=BenchmarkSection(name="own", driver=driver)), pool)


def test_an_outage_is_not_the_driver_s_fault(pool, config):
    assert make_targets(config(end={"reward": None, "error": {"kind": "user", "message": "away"}}), pool)
    with pytest.raises(InputError, match="user: true needs base and adapter side by side"):
        make_targets(config(said={"user": True}, engine="sgl_jax"), pool)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (BenchmarkSection(name="own"), "benchmark.driver"),
        (BenchmarkSection(name="tau2", driver="driver.py"), "benchmark.driver"),
        (BenchmarkSection(name="own", driver="x.py", settings={"url": "https://me:secret@host"}), "benchmark.settings"),
    ],
)
def test_fields_that_do_not_fit_together(section, field):
    with pytest.raises(InputError, match=f"'{field}'"):
        Config(benchmark=section).validate()


def test_a_certificate_compares_tools_with_the_driver_s(pool, config, tmp_path):
    package = load_builtin("tool_calling_precision")
    mine = write_package(tmp_path / "mine", package.meta | {"target": "greenhouse"}, package.source)
    assert certify._target_tools(config(), mine, None)[0]["function"]["name"] == "water"
    with pytest.raises(InputError, match="mine/package.json: target = 'greenhouse' must be 'shed', the target of --config"):
        certify._target_tools(config(said={"name": "shed"}), mine, None)


def test_a_config_keeps_the_settings(config):
    made = config(beds=3)
    assert Config.from_json(json.loads(json.dumps(made.to_json())), "x") == made
    assert pathlib.Path(made.benchmark.driver).name == "driver.py"
