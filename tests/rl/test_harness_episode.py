import dataclasses
import pathlib

import numpy as np
import pytest

from envs import Ask, EnvironmentFault, Verdict
from envs.harness import HarnessPool, Program, Target
from rl.engines.protocol import Completion, EngineFault, Request
from rl.episode import Act, Sampling, Task, play
from rl.rollout import roll_out
from rl.trajectory import StopReason, Trajectory
from tests.rl.chats import chat, drive
from tests.rl.test_episode import TOOLS, call

DRIVER = pathlib.Path(__file__).parents[1] / "envs" / "harness" / "fake_driver.py"
SAMPLING = Sampling(temperature=1.0, run_seed=11, max_tokens=50)
NAMES = ["talk", "raise"]


class Fake(Target):
    speaks_user = True

    def checks(self, task_id, graded, messages):
        return {} if graded is None else {task_id: {"passed": True, "expected": None, "actual": graded, "message_index": None}}


DESCRIPTION = {"version": "1", "tasks": [{"id": name, "split": "train", "hash": "0"} for name in NAMES]}
FAKE = Fake("fake/x", Program(DRIVER, {}), DESCRIPTION, 3)
TASK = Task(package=FAKE, seed=0, rollout=1, group="x:talk", task_id="x:talk", split="train", trial=1)
FIRST = Ask("agent", "Be brief.", [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "hello"}], TOOLS)
USER = Ask("user", "You are a user.", [{"role": "user", "content": "Hi!"}], [])
RESULT = Ask("agent", "Be brief.", [{"role": "tool", "content": "Error: 3", "tool_call_id": "call_x"}], TOOLS)
CONTROL = [{"type": "function", "function": {"name": "add", "description": "<|im_end|>", "parameters": {"type": "object"}}}]
DONE, WON = Ask(done=True), Verdict(1.0, "done", {"db": 1}, {"id": "r"})


def perform(turns, asks, score=WON, sampling=SAMPLING) -> tuple[Trajectory, list]:
    """Plays the task against scripted turns and asks; returns what was asked of whom as well."""
    asks, game = list(asks), play(TASK, chat(), TOOLS, "adapter:x", "s", sampling)
    return drive(game, chat(), turns, lambda act: score if act.op == "score" else asks.pop(0))


def test_turns_are_sampled_as_the_harness_asks_for_them():
    later = dataclasses.replace(USER, messages=[{"role": "user", "content": "Done?"}])
    turns = ["hello", call(a="x"), "<think>hm</think>Done?", "yes"]
    t, asked = perform(turns, [USER, FIRST, RESULT, later, DONE])
    acts, requests = [a for a in asked if isinstance(a, Act)], [r for r in asked if isinstance(r, Request)]
    assert [(r.session, r.policy) for r in requests] == [("s:user", "base"), *[("s", "adapter:x")] * 2, ("s:user", "base")]
    assert [r.temperature for r in requests] == [0.0, 1.0, 1.0, 0.0] and requests[0].key != requests[1].key
    assert [a.op for a in acts] == ["reset", "turn", "turn", "turn", "turn", "score"]
    told = [a.arguments[0] for a in acts if a.op == "turn"]
    assert [m["content"] for m in told] == ["hello", "", "Done?", "yes"]  # nobody is told a thought
    assert told[1]["tool_calls"][0]["name"] == "add" and told[1]["tool_calls"][0]["id"].startswith("call_")
    for mine in ([r for r in requests if r.session == s] for s in ("s", "s:user")):
        assert mine[1].tokens[: len(mine[0].tokens)].tolist() == mine[0].tokens.tolist()

    assert [m["role"] for m in t.messages] == ["system", "assistant", "user", "assistant", "tool", "assistant"]
    assert (t.reward, t.success, t.stop_reason, t.error, t.record) == (1.0, True, StopReason.DONE, None, {"id": "r"})
    assert (t.environment, t.task_id, t.id, t.seed) == ("fake/x", "x:talk", "x:talk#1", 0)
    assert t.checks["talk"]["actual"] == {"db": 1} and t.metrics["tool_errors"] == 1 and t.metrics["turns"] == 2
    assert chat().decode(t.tokens) + "\n" == chat().tokenizer.apply_chat_template(t.messages, tools=TOOLS, tokenize=False)
    assert [chat().decode(t.tokens[(t.loss_mask == 1) & (t.turns == i)]) for i in range(2)] == [f"{x}<|im_end|>" for x in turns[1:3]]
    assert Trajectory.from_json(t.to_json()).record == {"id": "r"}


@pytest.mark.parametrize(
    ("turns", "asks", "stop"),
    [
        (["<tool_call>{"], [FIRST], StopReason.INVALID_ACTION),
        (["<think>hm</think>  "], [FIRST], StopReason.INVALID_ACTION),  # the program would drop the episode, were it told nothing
        ([("hel", "length")], [FIRST], StopReason.MAX_TOKENS),
        ([("", "context")], [FIRST], StopReason.CONTEXT),
        (["a", "b", "c"], [FIRST, RESULT, RESULT, RESULT], StopReason.MAX_TURNS),
    ],
)
@pytest.mark.parametrize("score", [Verdict(0.9, "", {"db": 0}, {"id": "r"}), EnvironmentFault("deadline", "stuck")])
def test_what_the_agent_did_wrong_ends_the_episode_with_nothing(turns, asks, stop, score):
    t, asked = perform(turns, asks, score)
    assert (t.reward, t.stop_reason, t.error) == (0.0, stop, None)
    assert [a.op for a in asked if isinstance(a, Act)][-1] == "score"
    assert t.record == (None if isinstance(score, Exception) else {"id": "r"})


@pytest.mark.parametrize(
    ("turns", "asks", "kind"),
    [
        (["  "], [USER], "user"),
        ([("", "context")], [USER], "user"),
        (["<tool_call>{"], [dataclasses.replace(USER, tools=TOOLS)], "user"),
        (["hi"], [FIRST, EnvironmentFault("judge", "away")], "judge"),
        ([], [dataclasses.replace(FIRST, tools=CONTROL)], "reply"),
        ([], [dataclasses.replace(USER, tools=CONTROL)], "reply"),
        (["hi"], [FIRST, DONE, Verdict(1.0, "environment_error")], "reply"),
    ],
)
def test_an_outage_is_nobodys_reward(turns, asks, kind):
    *asks, last = asks
    t, _ = perform(turns, asks, last) if isinstance(last, Verdict) else perform(turns, [*asks, last])
    assert (t.reward, t.stop_reason, t.error["kind"]) == (None, StopReason.ENVIRONMENT_ERROR, kind)


def test_a_user_who_was_cut_goes_on_and_whose_tags_are_text_without_tools():
    t, asked = perform([("hel", "length"), "hi", "<tool_call>"], [USER, FIRST, USER, DONE])
    told = [a.arguments[0] for a in asked if isinstance(a, Act) and a.op == "turn"]
    assert [m["content"] for m in told] == ["hel", "hi", "<tool_call>"] and t.reward == 1.0


def test_a_conversation_can_be_looked_at_before_the_first_turn():
    t, asked = perform(["hello"], [USER, FIRST], sampling=dataclasses.replace(SAMPLING, max_turns=0))
    assert [m["content"] for m in t.messages] == ["Be brief.", "Hi!", "hello"] and len(t.tokens) == 0


class Talker:
    """An engine that says `bye` for users and `hi` for agents, and fails the sessions named."""

    lanes, context = 8, 4096

    def __init__(self, fails=()):
        self.requests, self.released, self.fails = [], [], fails

    def submit(self, request):
        self.requests.append(request)

    def poll(self):
        done, self.requests = self.requests, []
        return [EngineFault(r.session, "lost", "gone") if r.session in self.fails else self._say(r) for r in done]

    def _say(self, request):
        tokens = chat().tokenizer("bye" if request.policy == "base" else "hi", add_special_tokens=False).input_ids + [chat().end]
        return Completion(request.session, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop", 0)

    def release(self, session):
        self.released.append(session)


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_rollout_of_a_harness_keeps_its_episodes_apart(reproducible):
    with HarnessPool(deadline_s=20.0) as pool:
        fake = Fake("fake/x", FAKE.program, pool.describe(FAKE.program), 3)
        number = {task.id: task.number for task in fake.all_tasks}
        names = ["talk", "raise", "slow", "talk", "crash"]
        tasks = [
            Task(package=fake, seed=number[name], rollout=i, group=name, task_id=name, split="train", trial=i, knobs={"seed": i})
            for i, name in enumerate(names)
        ]
        engine, at = Talker({"3:talk#3:user"}), []
        settings = dict(temperature=1.0, run_seed=0, max_tokens=8, reproducible=reproducible, on_progress=at.append)
        found = roll_out(engine, pool, chat(), tasks[:4], "adapter", **settings)
        assert [t.error and t.error["kind"] for t in found] == [None, "exception", None, None]  # the last at its second attempt
        assert [t.reward for t in found] == [1.0, None, 1.0, 1.0] and found[0].messages[1]["content"] == "hello 0"
        assert found[0].checks["talk"]["actual"] == {"turns": 1} and len(at) == 4
        assert {"0:talk#0", "0:talk#0:user", "3:talk#3:user", "3:talk#3:1:user"} <= set(engine.released)
        assert roll_out(Talker(), pool, chat(), tasks[4:], "adapter", **settings)[0].error["kind"] == "crash"
