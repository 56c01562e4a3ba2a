import json
import os
import pathlib
import threading
import time

import pytest

from envs import Ask, EnvironmentFault, Verdict
from envs.harness import HarnessPool, Program, Target

DRIVER = pathlib.Path(__file__).with_name("fake_driver.py")
SAID = {"role": "assistant", "content": "hi", "tool_calls": []}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "name": "add", "arguments": {}}]}
BYE = {"role": "assistant", "content": "bye", "tool_calls": []}


class Fake(Target):
    def checks(self, task_id, graded, messages):
        return {}


def target(pool: HarnessPool, **settings) -> Fake:
    program = Program(DRIVER, settings, variables=("FAKE_KEY",))
    return Fake("fake", program, pool.describe(program), 10)


def open_task(pool, fake, name, seed=7):
    return pool.open(fake, next(task.number for task in fake.all_tasks if task.id == name), {"seed": seed})


@pytest.fixture(scope="module")
def pool():
    with HarnessPool(deadline_s=20.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def fake(pool):
    return target(pool)


def one(pool, episode, op="reset", *arguments):
    (answer,) = pool.batch([(episode, op, arguments)])
    return answer


def test_a_target_is_what_its_driver_says(pool, fake):
    assert [task.id for task in fake.tasks("heldout")] == ["talk"] and len(fake.tasks("train")) == len(fake.all_tasks) - 1
    assert pool.function(fake, "tools")[0]["function"]["name"] == "add"
    assert fake.digest == target(pool).digest and len(fake.digest) == 64


def test_a_conversation_goes_from_ask_to_ask_to_its_verdict(pool, fake):
    episode = open_task(pool, fake, "talk")
    assert one(pool, episode) == Ask("agent", "You are an agent.", [{"role": "user", "content": "hello 7"}], fake.tools)
    assert one(pool, episode, "turn", CALLED).messages == [{"role": "tool", "content": "3", "tool_call_id": "call_1"}]
    assert one(pool, episode, "turn", SAID) == Ask("user", "You are a user.", [{"role": "user", "content": "hi"}], [])
    assert one(pool, episode, "turn", BYE).done
    verdict = one(pool, episode, "score")
    assert verdict == Verdict(1.0, "done", {"turns": 2}, [CALLED, SAID])
    assert one(pool, episode, "score") is verdict


def test_episodes_are_answered_side_by_side(pool, fake):
    episodes = [open_task(pool, fake, name) for name in ("slow", "slow", "slow", "talk")]
    began = time.monotonic()
    assert all(isinstance(answer, Ask) for answer in pool.batch([(episode, "reset", ()) for episode in episodes]))
    assert time.monotonic() - began < 1.4
    assert len({episode.worker for episode in episodes}) == 4  # so that a rollout waits for each alone


def test_the_worker_sees_path_home_and_its_own_variables_only(monkeypatch):
    monkeypatch.setenv("FAKE_KEY", "sk-secret")
    with HarnessPool(deadline_s=20.0) as pool:
        seen = one(pool, open_task(pool, target(pool), "environment")).messages[0]["content"]
    names, folder, stdin = json.loads(seen)
    assert set(names) - {"LC_CTYPE"} == {"FAKE_KEY", "HOME", "PATH", "PYTHONHASHSEED"}  # Python itself sets the first
    assert "harness-" in folder and stdin == ""


def test_a_driver_that_raises_is_a_fault_of_that_episode(pool, fake, monkeypatch):
    bad, good = open_task(pool, fake, "raise"), open_task(pool, fake, "talk")
    fault, ask = pool.batch([(bad, "reset", ()), (good, "reset", ())])
    assert fault.kind == "exception" and str(fault).startswith("ValueError: a driver's own mistake") and isinstance(ask, Ask)
    assert one(pool, bad, "score") is fault


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("outage", "user", "is away"),
        ("nonsense", "reply", "reward from 0 to 1"),
        ("verdict", "reply", "an error {"),
        ("tools", "reply", '"function"'),
        ("flood", "crash", "larger than 1 MiB"),
        ("nested", "reply", "nested too deeply"),
        ("abyss", "crash", "not JSON with an id"),
    ],
)
def test_what_let_the_program_down_is_never_a_reward(pool, fake, name, kind, said, monkeypatch):
    monkeypatch.setattr("envs.harness.process.LARGEST", 1 << 20)
    fault = one(pool, open_task(pool, fake, name))
    assert fault.kind == kind and said in str(fault)


def test_a_crash_takes_its_episodes_along_and_the_next_gets_a_new_worker(monkeypatch, capfd):
    monkeypatch.setenv("FAKE_KEY", "sk-secret")
    with HarnessPool(deadline_s=20.0) as pool:
        fake = target(pool)
        bystander, culprit = open_task(pool, fake, "talk"), open_task(pool, fake, "crash")
        assert isinstance(one(pool, bystander), Ask)
        refused = one(pool, open_task(pool, fake, "secret"))
        assert refused.kind == "reply" and "'content': ['***']" in str(refused)
        fault = one(pool, culprit)
        assert fault.kind == "crash" and "exit code 3" in str(fault) and "the last words ***" in str(fault)
        assert one(pool, bystander, "turn", SAID).kind == "crash"
        assert isinstance(one(pool, open_task(pool, fake, "talk")), Ask)
    printed = "".join(capfd.readouterr())
    assert "sk-secret" not in printed and "hidden" not in printed


def test_a_worker_that_hangs_gets_no_new_episodes_and_is_ended_with_its_last():
    with HarnessPool(deadline_s=0.4) as pool:
        pool.deadline_s = 20.0
        fake = target(pool)
        pool.deadline_s = 0.4
        beside = open_task(pool, fake, "pid")
        first = one(pool, beside).messages[0]["content"]
        assert one(pool, open_task(pool, fake, "hang")).kind == "deadline"
        assert one(pool, beside, "turn", SAID).speaker == "user"  # who runs beside it goes on
        pool.deadline_s = 20.0
        assert one(pool, open_task(pool, fake, "pid")).messages[0]["content"] != first
        assert one(pool, beside, "turn", BYE).done
        one(pool, open_task(pool, fake, "pid"))
        ended(int(first))


def test_an_episode_that_is_ended_early_may_be_graded_or_not(pool, fake):
    for name, verdict in (("graded", Verdict(0.0, "invalid_action", {"turns": 1})), ("talk", Verdict(0.0, ""))):
        episode = open_task(pool, fake, name)
        one(pool, episode)
        one(pool, episode, "turn", CALLED)
        assert one(pool, episode, "score") == verdict


def test_an_episode_that_was_dropped_is_told_to_stop(pool, tmp_path):
    fake = target(pool, file=str(tmp_path / "stopped"))
    episode = open_task(pool, fake, "talk")
    one(pool, episode)
    del episode
    for _ in range(200):
        if (tmp_path / "stopped").exists():
            return
        time.sleep(0.02)
    raise AssertionError("it was not told")


def test_a_closed_pool_leaves_no_process_and_no_thread():
    before = set(threading.enumerate())
    pool = HarnessPool(2, deadline_s=20.0)
    fake = target(pool)
    episodes = [open_task(pool, fake, "pid"), open_task(pool, fake, "pid")]
    pids = {int(ask.messages[0]["content"]) for ask in pool.batch([(e, "reset", ()) for e in episodes])}
    assert len(pids) == 2  # processes share the episodes
    waiting = open_task(pool, fake, "hang")
    answers = []
    thread = threading.Thread(target=lambda: answers.append(one(pool, waiting)))
    thread.start()
    time.sleep(0.1)
    pool.close()
    thread.join(10)
    assert answers[0].kind == "crash" and "closed" in str(answers[0])
    assert set(threading.enumerate()) <= before
    for pid in pids:
        ended(pid)
    assert one(pool, open_task(pool, fake, "talk")).kind == "crash"


def test_an_interpreter_that_is_not_there_is_named(pool):
    with pytest.raises(EnvironmentFault, match="/no/python cannot be started"):
        pool.describe(Program(DRIVER, {}, python="/no/python"))


def ended(pid: int) -> None:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")
