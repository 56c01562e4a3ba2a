"""Batches that are given up at a bad moment: while their policy goes to the engine, or waits behind another's."""

import contextlib
import threading
from concurrent.futures import CancelledError

import pytest

from rl.engines.protocol import Policy
from tests.rl.test_rollout_faults import Engine
from trace_jax.runtime.batches import Batches


class Slow(Engine):
    """Loads a policy when it is allowed to; its name is in `loaded` from the moment that it is asked to."""

    def __post_init__(self):
        super().__post_init__()
        self.loaded, self.asked, self.may, self.closed = [], threading.Semaphore(0), threading.Semaphore(0), False

    def load(self, policy):
        self.loaded.append(policy.name)
        self.asked.release()
        assert self.may.acquire(timeout=30)
        if self.closed:
            raise CancelledError

    def close(self):
        self.closed = True
        self.may.release()


@pytest.fixture
def engine():
    return Slow()


@pytest.fixture
def batches(runtime, engine):
    made = Batches(runtime.config, runtime.workdir, runtime.progress, lambda *_: (engine, runtime.pool, runtime.chat))
    with contextlib.closing(made):
        yield made


def begin(runtime, batches, index):
    return batches.begin(Policy(f"p{index}"), "p", "training", index, runtime.tasks(runtime.target, "training", 10 * index, 2, 2))


def test_batches_that_are_given_up_are_not_sampled_wherever_they_are(runtime, batches, engine):
    begun = [begin(runtime, batches, index) for index in range(3)]
    assert engine.asked.acquire(timeout=30)
    for batch in begun:  # the first is being loaded, the others wait
        batch.cancel()
    last = begin(runtime, batches, 3)
    engine.may.release(2)
    assert len(last.result()) == 4 and engine.loaded == ["p0", "p3"]
    assert {session.partition(":")[2].split(":")[1][:2] for session in engine.seen} <= {"30", "31"}
    for batch in begun:
        with pytest.raises(CancelledError):
            batch.result()
    assert runtime.workdir.shards("p", "training") == [3]


def test_closing_does_not_wait_for_an_engine_that_waits_for_its_servers(runtime, batches, engine):
    begun = [begin(runtime, batches, index) for index in range(2)]
    assert engine.asked.acquire(timeout=30)
    batches.close()
    assert engine.closed and engine.loaded == ["p0"] and not engine.open
    for batch in begun:
        with pytest.raises(CancelledError):
            batch.result()
    assert runtime.workdir.shards("p", "training") == []
