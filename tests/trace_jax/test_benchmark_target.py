"""A benchmark as the target of a run: two domains of a driver that is made up."""

import pathlib

import numpy as np
import pytest

from envs.builtin import load_builtin, target_tools
from envs.harness import Program, Target
from rl import task_router
from rl.trajectory import Trajectory
from tests.trace_jax import tiny
from trace_jax.baselines.grpo_target import target_tasks
from trace_jax.config import BenchmarkSection, Config, RolloutSection
from trace_jax.errors import InputError, Unfinished
from trace_jax.evaluate.command import do_nothing, evaluate, heldout_tasks
from trace_jax.policies import BASE, load_mixture, routed_tasks
from trace_jax.rollout import roll_out_train_split
from trace_jax.runtime import runtime as runtime_module
from trace_jax.synthesize.admission import sandbox_faults

DRIVER = pathlib.Path(__file__).parents[1] / "envs" / "harness" / "fake_driver.py"
LIBRARY = {"one": "tau2_airline", "two": "tau2_retail"}
COMMON = "tool_calling_precision"


class Domain(Target):
    speaks_user = True

    def __init__(self, pool, name):
        program = Program(DRIVER, {"user": "base"})
        description = pool.describe(program)
        description["tasks"] = [t for t in description["tasks"] if t["id"] in ("talk", "slow", "outage", "pid")]
        super().__init__(f"fake/{name}", program, description, 10)
        self.target, self.tools, self.farewell = LIBRARY[name], target_tools(LIBRARY[name]), "bye"

    def checks(self, task_id, graded, messages):
        return {}


@pytest.fixture
def bench(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(runtime_module, "live_targets", lambda config, pool: tuple(Domain(pool, name) for name in LIBRARY))
    with tiny.open_tiny(tmp_path, checkpoint, benchmark__name="tau2", benchmark__timeout="20") as runtime:
        yield runtime


def test_the_tasks_of_all_domains_are_pooled_and_their_splits_kept(bench):
    assert [t.id for t in heldout_tasks(bench)] == ["one:talk#0", "two:talk#0"]  # all that there are, fewer than asked for
    train = bench.target_tasks("train", 2)
    assert [t.task_id for t in train] == [f"{d}:{name}" for d in LIBRARY for name in ("outage", "slow", "pid") for _ in range(2)]
    assert len({t.knobs["seed"] for t in train}) == len(train) and bench.target_tasks("train", 2) == train
    trained = [task for iteration in range(4) for task in target_tasks(bench, iteration)]  # of 2 groups of 4, over 6 tasks
    assert {t.split for t in trained} == {"training"} and len({t.id for t in trained}) == len(trained) == 32
    assert {t.task_id for t in trained[:24]} == {t.task_id for t in train}


def test_rollouts_of_a_benchmark_go_into_the_workdir(bench):
    found = roll_out_train_split(bench)
    assert [(t.environment, t.task_id, t.error and t.error["kind"]) for t in found[:3]] == [
        ("fake/one", "one:outage", "user"),
        ("fake/one", "one:outage", "user"),
        ("fake/one", "one:slow", None),
    ]
    assert {str(t.stop_reason) for t in found if not t.error} <= {"max_turns", "max_tokens", "context", "invalid_action"}
    assert "pool" not in bench.__dict__  # no sandbox is needed for it
    again = roll_out_train_split(bench)
    assert [t.to_json() for t in again] == [t.to_json() for t in found]
    with pytest.raises(Unfinished, match="all 2 rollouts .* the first by user: the simulator is away; mend what the benchmark needs"):
        bench.roll_out(BASE, "base", "training", 0, bench.target_tasks("train", 2)[:2])


def test_a_policy_its_floor_and_the_router_on_a_benchmark(bench):
    assert set(evaluate(bench, "base", None)["tasks"]) == {"one:talk", "two:talk"}
    floor = do_nothing(bench)
    assert floor["tasks"] == {"one:talk": {"trials": 1, "successes": 1}, "two:talk": {"trials": 1, "successes": 1}}

    tiny.store_adapters(bench, COMMON)
    width = bench.model.config.hidden_size
    router = task_router.TaskRouter(np.zeros((width, 1), np.float32), np.zeros(1, np.float32), np.zeros(width), np.ones(width))
    tasks = bench.target_tasks("heldout", 1)
    starts = bench.starts(tasks)
    assert all(start.system == "You are an agent." and start.messages[0]["content"].startswith("hello") for start in starts)
    assert {t.policy for t in routed_tasks(bench, router, load_mixture(bench, [COMMON]), tasks)} == {f"adapter:{COMMON}"}


def test_a_capability_gets_the_environment_of_the_domain_that_fails_more(bench):
    assert bench.target_of(COMMON).target == "tau2_airline"  # nothing is known yet
    bench.workdir.write_shard(
        "base",
        "train",
        0,
        [Trajectory(id=f"{n}", environment=f"fake/{d}", task_id="x", reward=0.0) for n, d in enumerate(["one", "two", "two"])],
    )
    assert bench.target_of(COMMON).target == "tau2_retail"
    for name in LIBRARY.values():
        package = load_builtin(COMMON, name)
        assert bench.target_of(COMMON, package).target == name
        assert sandbox_faults(bench, package) == []  # its tools are those of its own domain
    assert bench.first_sight(bench.target).messages == []


def test_a_benchmark_that_is_not_installed_is_bad_input(tmp_path, checkpoint):
    python = "/no/python"
    with tiny.open_tiny(tmp_path, checkpoint, benchmark__name="tau2", benchmark__python=python) as runtime:
        with pytest.raises(InputError, match="benchmark.name.*/no/python cannot be started"):
            runtime.targets  # noqa: B018


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (BenchmarkSection(name="tau2", domains=()), "benchmark.domains"),
        (BenchmarkSection(name="tau2", domains=("mock", "mock")), "benchmark.domains"),
        (BenchmarkSection(name="tau2", user="endpoint"), "benchmark.user_model"),
        (BenchmarkSection(name="tau2"), "benchmark.user"),
    ],
)
def test_what_does_not_fit_together_is_refused(section, field):
    rollout = RolloutSection(engine="sgl_jax") if field == "benchmark.user" else RolloutSection()
    with pytest.raises(InputError, match=f"'{field}'"):
        Config(benchmark=section, rollout=rollout).validate()
