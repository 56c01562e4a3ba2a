"""ToolSandbox as a target: which scenarios it plays, and, where TRACE_JAX_TOOLSANDBOX_PYTHON names a Python that has it, the real one."""

import os
import types

import pytest

from trace_jax.benchmarks.toolsandbox import splits

harness = pytest.importorskip("envs.harness")
from trace_jax.benchmarks.toolsandbox.target import DRIVER, ToolSandboxTarget, make_targets  # noqa: E402


def program(python=""):
    return harness.Program(DRIVER, {"user": "base"}, python)


PYTHON = os.environ.get("TRACE_JAX_TOOLSANDBOX_PYTHON", "")


@pytest.fixture
def description():
    names = [name + variant for name in splits.scenarios() for variant in splits.VARIANTS]
    return {"version": "0.0.1+abc", "tasks": [{"id": name, "split": "", "hash": name} for name in names]}


def test_the_published_scenarios_that_need_no_network_are_played(description):
    target = ToolSandboxTarget(program(), description)
    assert target.name == "toolsandbox" and target.grader == "tool_sandbox 0.0.1+abc" and target.speaks_user
    train, heldout = target.tasks("train"), target.tasks("heldout")
    assert (len(train), len(heldout)) == (52, 39)
    assert not {splits.family(t.id) for t in train} & {splits.family(t.id) for t in heldout}
    assert [t.number for t in target.all_tasks] == list(range(91))


def test_variants_and_scenarios_on_the_network_are_taken_in_where_asked_for(description):
    everything = ToolSandboxTarget(program(), description, variants=splits.VARIANTS, offline=False)
    assert len(everything.all_tasks) == 1032
    assert everything.digest != ToolSandboxTarget(program(), description).digest


def test_doing_nothing_earns_the_floor(description):
    target = ToolSandboxTarget(program(), description)
    assert sum(target.floor(t.id) for t in target.all_tasks) == 16.0


def section(**changes):
    benchmark = dict(python="", user="base", user_model="", user_temperature=0.0) | changes
    return types.SimpleNamespace(benchmark=types.SimpleNamespace(**benchmark), diagnosis=types.SimpleNamespace(success=0.9))


class Describes:
    """A pool that knows the description."""

    def __init__(self, description):
        self._description = description

    def describe(self, program):
        return self._description


def test_scenarios_on_the_network_are_played_where_its_key_is_set(monkeypatch, description):
    monkeypatch.delenv("RAPID_API_KEY", raising=False)
    (target,) = make_targets(section(), Describes(description))
    assert len(target.all_tasks) == 91 and target.similarity == 0.9
    monkeypatch.setenv("RAPID_API_KEY", "key")
    (target,) = make_targets(section(), Describes(description))
    assert len(target.all_tasks) == 129


def test_the_worker_is_given_the_keys_of_an_endpoint_only_where_it_simulates_the_user(description):
    (base,) = make_targets(section(), Describes(description))
    assert base.speaks_user and "OPENAI_API_KEY" not in base.program.variables
    (other,) = make_targets(section(python="python3.11", user="endpoint", user_model="big"), Describes(description))
    assert other.program.settings == {"user": "endpoint", "user_model": "big", "user_temperature": 0.0}
    assert not other.speaks_user and "OPENAI_API_KEY" in other.program.variables and other.program.python == "python3.11"


def test_an_episode_without_a_verdict_has_no_checks(description):
    assert ToolSandboxTarget(program(), description).checks("wifi_off", None, []) == {}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="ToolSandbox is not here; set TRACE_JAX_TOOLSANDBOX_PYTHON to a Python that has it")
def test_the_real_benchmark_is_played_in_a_worker():
    def call(name, key, **arguments):
        return {"role": "assistant", "content": "", "tool_calls": [{"id": key, "name": name, "arguments": arguments}]}

    def say(text):
        return {"role": "assistant", "content": text, "tool_calls": []}

    scripts = {
        "wifi_off": ([call("set_wifi_status", "call_1", on=False), say("Wifi is turned off")], 1.0, "done"),
        "cellular_off": ([call("set_cellular_service_status", "call_1", on=True), say("Wifi is turned off")], None, "done"),
        "get_wifi": ([call("dim_lamp", "call_1")], 0.0, "invalid_action"),
        "find_days_till_holiday_insufficient_information": ([say("")], 1.0, "done"),
    }
    with harness.HarnessPool() as pool:
        runs = program(PYTHON)
        description = pool.describe(runs)
        assert {t["id"] for t in description["tasks"]} >= set(splits.scenarios())
        target = ToolSandboxTarget(runs, description)
        numbers = {t.id: t.number for t in target.all_tasks}
        episodes = {name: pool.open(target, numbers[name]) for name in scripts}
        turns = {name: list(script) for name, (script, *_) in scripts.items()}
        messages = {name: [] for name in scripts}
        asks = dict(zip(scripts, pool.batch([(e, "reset", ()) for e in episodes.values()]), strict=True))
        while asks := {name: ask for name, ask in asks.items() if not ask.done}:
            said = {}
            for name, ask in asks.items():
                if ask.speaker == "user":
                    said[name] = call("end_conversation", "call_e")
                    continue
                said[name] = turns[name].pop(0)
                system = [] if messages[name] else [{"role": "system", "content": ask.system}]
                messages[name] += [*system, *ask.messages, said[name]]
            asks = dict(zip(said, pool.batch([(episodes[name], "turn", (turn,)) for name, turn in said.items()]), strict=True))
        for (name, (_, reward, stop)), verdict in zip(
            scripts.items(), pool.batch([(e, "score", ()) for e in episodes.values()]), strict=True
        ):
            assert verdict.stop_reason == stop and reward in (None, verdict.reward)
            found = target.checks(name, verdict.graded, messages[name])
            assert all(c["passed"] for c in found.values()) == (verdict.reward == 1.0)
    assert target.floor("find_days_till_holiday_insufficient_information") == 1.0
