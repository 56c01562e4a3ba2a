"""What slow environments, failing engines, deadlines and interruptions do to a batch of rollouts."""

import collections
import dataclasses
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from envs import Pool, parse_package
from rl.engines.protocol import Completion, EngineFault
from rl.rollout import Rollout, Task, roll_out
from rl.trajectory import StopReason
from tests.rl import chats
from tests.rl.test_rollout import META, OPTIONS, SOURCE, pool, tasks  # noqa: F401

SLOW = parse_package(META | {"name": "slow"}, SOURCE)


class SlowPool(Pool):
    """Its slow environments answer after 0.2 s; a worker that hosts one is busy as long."""

    def batch(self, requests):
        time.sleep(0.2 * any(episode.package is SLOW and op == "respond" for episode, op, _ in requests))
        return super().batch(requests)


@dataclasses.dataclass
class Engine:
    """Answers every request with a turn of one token after `polls` calls; `faults`: by session, what comes instead, each once."""

    faults: dict[str, EngineFault] = dataclasses.field(default_factory=dict)
    polls: int = 1
    lanes: int = 64
    context: int = 1000
    hangs: frozenset[str] = frozenset()

    def __post_init__(self):
        self.waiting, self.calls, self.open, self.seen = {}, 0, set(), []

    def submit(self, request):
        self.open.add(request.session)
        self.seen.append(request.session)
        self.waiting[request.session] = self.calls + self.polls

    def poll(self):
        self.calls += 1
        time.sleep(0.002)
        done = [s for s, due in self.waiting.items() if due <= self.calls and s not in self.hangs]
        for session in done:
            del self.waiting[session]
        end = np.array([chats.chat().end], np.int32)
        return [self.faults.pop(s, None) or Completion(s, end, np.zeros(1, np.float32), "stop", 3) for s in done]

    def release(self, session):
        self.open.discard(session)
        self.waiting.pop(session, None)


def slow(seeds) -> list[Task]:
    return [dataclasses.replace(task, package=SLOW) for task in tasks(seeds, rollouts=1)]


@pytest.fixture(scope="module")
def four():
    with SlowPool(workers=4) as p:
        yield p


def test_a_slow_environment_holds_up_its_own_episode_alone(four):
    roll_out(Engine(), four, chats.chat(), tasks(rollouts=1), "p", reproducible=False, **OPTIONS)  # the workers have started
    mixed = slow((2,)) + tasks((0,), rollouts=40)
    when = []
    rollout = Rollout(
        Engine(), four, chats.chat(), mixed, "p", reproducible=False, on_progress=lambda n: when.append(time.monotonic()), **OPTIONS
    )
    groups = [group[0].environment for group in rollout.groups()]
    assert groups == ["talk", "slow"]  # in the order in which they ended, and not of the tasks
    assert when[-1] - when[-2] > 0.3  # three answers of 0.2 s each, while 40 others began and ended


def test_environments_of_several_workers_answer_side_by_side(four):
    began = time.monotonic()
    found = roll_out(Engine(), four, chats.chat(), slow((0, 3, 6, 9)), "p", reproducible=False, **OPTIONS)
    assert time.monotonic() - began < 4 * 0.2 * 0.9 and all(t.error is None for t in found)


def test_a_reproducible_rollout_asks_the_engine_in_one_order_whatever_the_workers_do(four):
    seen = []
    for _ in range(2):
        engine = Engine(lanes=5)
        roll_out(engine, four, chats.chat(), slow((0, 1)) + tasks((0, 1, 2, 4)), "p", **OPTIONS)
        seen.append(engine.seen)
    assert seen[0] == seen[1] and len(seen[0]) > 14


def test_more_episodes_than_lanes_may_be_in_flight(pool):  # noqa: F811
    engine, most = Engine(lanes=2, polls=3), 0
    submit = engine.submit

    def count(request):
        nonlocal most
        submit(request)
        most = max(most, len(engine.open))

    engine.submit = count
    roll_out(engine, pool, chats.chat(), tasks((0,), rollouts=30), "p", in_flight=12, **OPTIONS)
    assert most == 12 and not engine.open


@pytest.mark.parametrize("kind", ["timeout", "lost", "server", "garbage", "aborted", "version"])
def test_what_the_engine_failed_is_played_again_and_given_up_by_type(pool, kind):  # noqa: F811
    names = ["0:talk:1#0", "1:talk:1#1", "1:talk:1#1:1"]  # the second fails twice
    engine = Engine({name: EngineFault(name, kind, "gone") for name in names})
    found = roll_out(engine, pool, chats.chat(), tasks((1,)), "p", **OPTIONS)
    assert found[0].error is None and found[0].reward > 0 and found[2].error is None
    assert found[1].error == {"kind": f"engine_{kind}", "message": "gone"} and found[1].stop_reason == StopReason.ENGINE_ERROR
    assert found[1].reward is None and not engine.open
    engine = Engine({names[0]: EngineFault(names[0], kind, "gone")})
    assert roll_out(engine, pool, chats.chat(), tasks((1,)), "p", retries=0, **OPTIONS)[0].error["kind"] == f"engine_{kind}"


def test_past_its_deadline_an_episode_is_a_failure_of_whom_it_waits_for(four):
    engine = Engine(hangs=frozenset({"1:talk:0#0"}))
    batch = slow((2,)) + tasks((0,), rollouts=1) + tasks((4,), rollouts=1)
    found = roll_out(engine, four, chats.chat(), batch, "p", reproducible=False, deadline_s=0.15, retries=0, **OPTIONS)
    assert [t.error and t.error["kind"] for t in found] == ["deadline", "engine_timeout", None]
    assert [t.stop_reason for t in found[:2]] == [StopReason.ENVIRONMENT_ERROR, StopReason.ENGINE_ERROR]
    assert not engine.open and not engine.waiting


def test_a_batch_that_is_given_up_leaves_no_session_and_no_thread(four):
    engine = Engine(hangs=frozenset({"0:talk:0#0"}))
    rollout = Rollout(engine, four, chats.chat(), tasks((0, 1), rollouts=2) + slow((2,)), "p", reproducible=False, **OPTIONS)
    groups = rollout.groups()
    assert {t.group for t in next(groups)} == {"1"}
    groups.close()
    assert not engine.open and not rollout._thread.is_alive()


def test_groups_come_whole_with_the_trajectories_of_result(pool):  # noqa: F811
    found = list(Rollout(Engine(lanes=4), pool, chats.chat(), tasks(), "p", **OPTIONS).groups())
    assert collections.Counter(t.group for group in found for t in group) == {str(s): 3 for s in (0, 1, 2, 4, 5)}
    assert all([t.trial for t in group] == [0, 1, 2] for group in found)


def test_a_batch_that_is_cancelled_again_and_again_leaves_the_engine_to_one_thread(four):
    engine, calls = Engine(hangs=frozenset({"0:talk:0#0"})), []
    polling, released = threading.Event(), []

    def poll():
        calls.append(1)
        polling.set()
        time.sleep(0.3)
        calls.pop()
        return Engine.poll(engine)

    engine.poll, engine.release = poll, lambda session: (released.append(len(calls)), Engine.release(engine, session))
    rollout = Rollout(engine, four, chats.chat(), tasks((0,), rollouts=2) + slow((2,)), "p", reproducible=False, **OPTIONS)
    polling.wait()
    cancelling = [threading.Thread(target=rollout.cancel) for _ in range(5)]
    for thread in cancelling:
        thread.start()
        time.sleep(0.02)
    with pytest.raises(CancelledError):  # and no list with gaps
        rollout.result()
    for thread in cancelling:
        thread.join()
    assert released and not any(released) and not engine.open and not rollout._thread.is_alive()


def test_a_batch_that_is_cancelled_before_it_began_samples_nothing(pool):  # noqa: F811
    engine = Engine()
    rollout = Rollout(engine, pool, chats.chat(), tasks(), "p", **OPTIONS)
    rollout.cancel()
    with pytest.raises(CancelledError):
        rollout.result()
    assert not engine.open


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("where", ["progress", "progress of a failed episode", "poll", "submit", "pool", "closed pool"])
def test_what_is_nobodys_fault_ends_the_batch_and_is_raised(reproducible, where):
    def fail(*_):
        raise RuntimeError("broken")

    failed = {f"{i}:talk:{i // 3}#{i % 3}": EngineFault("", "lost", "gone") for i in range(6)} if "failed" in where else {}
    failed = {name: EngineFault(name, fault.kind, "gone") for name, fault in failed.items()}
    engine, options = Engine(failed), {"on_progress": fail} if "progress" in where else {}
    if where in ("poll", "submit"):
        setattr(engine, where, fail)
    with Pool(workers=1) as own:
        batch = own.batch

        def break_pool(requests):
            if any(op == "respond" for _, op, _ in requests):
                own.close() if where == "closed pool" else fail()
            return batch(requests)

        if "pool" in where:
            own.batch = break_pool
        rollout = Rollout(engine, own, chats.chat(), tasks((0, 1)), "p", reproducible=reproducible, retries=0, **OPTIONS, **options)
        with pytest.raises(ValueError if where == "closed pool" else RuntimeError, match="broken|closed"):
            rollout.result()
    assert not engine.open and not rollout._thread.is_alive()
