"""Rounds: what is asked of the steps in each, what is shared, when it ends, and that an interrupted round is played on."""

import contextlib
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest

from model import Gate, load_gate
from rl.engines.protocol import Policy
from tests import gcs
from tests.trace_jax import example_run, tiny
from tests.trace_jax.test_run import differences, start, wait_for
from trace_jax import cli, rounds
from trace_jax.compose import choose
from trace_jax.config import load_config
from trace_jax.diagnose.select import diagnosed_policy, read_known
from trace_jax.errors import InputError
from trace_jax.rounds import improve, plan_round, plan_rounds, read_rounds, tell_rounds
from trace_jax.run import run
from trace_jax.runtime import plan
from trace_jax.spent import write_spent
from trace_jax.workdir import Workdir

GATE = Gate(jnp.zeros((2, 4, 2)), jnp.zeros((2, 2)))


class Steps:
    """The steps of a run in files alone: a diagnosis finds what `lacks` says for its round, and every environment but `useless` is
    usable."""

    def __init__(self, monkeypatch, lacks: dict[int, list[str]], useless=()):
        self.lacks, self.useless, self.asked = lacks, useless, []
        names = "find_policy roll_out_train_split diagnose_workdir synthesize_all train_adapter compose evaluate_all".split()
        for name in names:
            monkeypatch.setattr(rounds, name, getattr(self, name))
        monkeypatch.setattr(rounds, "load_mixture", lambda _, capabilities: types.SimpleNamespace(capabilities=tuple(capabilities)))
        monkeypatch.setattr(rounds, "gate_of", lambda *_: GATE)

    def find_policy(self, runtime, name, mixture):
        return Policy(name=name, gate=GATE)

    def roll_out_train_split(self, runtime, policy, *, earlier):
        self.asked.append(("rollouts", policy.name, earlier))
        runtime.workdir.write_shard(policy.name, "train", 0, [example_run.trajectory(n) for n in range(5)])

    def diagnose_workdir(self, runtime):
        workdir = runtime.workdir
        if not workdir.exists("diagnosis/selected_capabilities.json"):
            assert diagnosed_policy(workdir) == "previous"
            known, number = read_known(workdir), int(workdir.place().rpartition("/")[2])
            found = self.lacks.get(number, [])
            self.asked.append(("diagnose", number, [entry["skill"] for entry in known]))
            rows = [{"capability": c, "passes_consistency": True} for c in found]
            workdir.write_json("diagnosis/figures.json", {"capabilities": rows})
            new = [entry(c) for c in found if c not in [e["skill"] for e in known]]
            workdir.write_json("diagnosis/selected_capabilities.json", known + new)

    def synthesize_all(self, runtime, only):
        self.asked.append(("synthesize", *only))
        found = {c: {"usable": c not in self.useless, "reasons": []} for c in only}
        for c in only:
            runtime.workdir.write_json(f"environments/{c}/calibration.json", found[c])
        return found

    def train_adapter(self, runtime, capability):
        if not runtime.workdir.exists(f"adapters/{capability}/summary.json"):
            self.asked.append(("train", capability))
            runtime.workdir.write_json(f"adapters/{capability}/summary.json", {})

    def compose(self, runtime, capabilities, previous):
        assert previous is GATE
        write_composed(runtime.workdir, capabilities)
        return runtime.workdir.read_json("gate/routing.json")

    def evaluate_all(self, runtime, capabilities, policies, leaks):
        self.asked.append(("evaluate", *policies))
        write_evaluation(runtime.workdir, len(capabilities))


def entry(capability):
    numbers = dict.fromkeys(("mean_cov", "std_cov", "mean_delta", "std_delta"), 0.5)
    rest = {"n_runs_passed": 9, "n_runs_total": 10, "passes_consistency": True, "example_failed_cases": [], "status": "PENDING"}
    return {"skill": capability, "description": "", **numbers, **rest}


def write_composed(workdir, capabilities):
    slots = ["base", *capabilities]
    for slot in ["base", *(f"adapter:{c}" for c in capabilities)]:
        for c in capabilities:
            for kind in ("gate", "selection"):
                if not workdir.shards(slot, f"{kind}-{c}"):
                    workdir.write_shard(slot, f"{kind}-{c}", 0, [example_run.trajectory(1)])
    for c in capabilities:
        if not workdir.shards("previous", f"selection-{c}"):
            workdir.write_shard("previous", f"selection-{c}", 0, [example_run.trajectory(1)])
        workdir.write_shard("gate", f"selection-{c}", 0, [example_run.trajectory(1)])
    workdir.write_json("gate/routing.json", {"slots": slots, "composed": "gate", "kept": True})


def write_evaluation(workdir, solved):
    tasks = {f"desk:{n}": {"trials": 1, "successes": int(n < solved)} for n in range(8)}
    overall = example_run.rate(solved, 8)
    found = {"policy": "composed", "split": "heldout", "temperature": 0.7, "rollouts": 8, "tasks": tasks, "overall": overall}
    workdir.write_json("evaluation/composed.json", found)


@pytest.fixture
def first(request, tmp_path, checkpoint, monkeypatch):
    """A runtime after round 1, which retained `a` and `b` and could use `a`; nothing of it computes. Its workdir is a folder, or in a
    bucket."""
    with tiny.open_tiny(tmp_path, checkpoint) as runtime, contextlib.ExitStack() as stack:
        if getattr(request, "param", "folder") == "bucket":
            url = stack.enter_context(gcs.server())
            for name, value in gcs.SETTINGS.items():
                monkeypatch.setenv(name, value.format(url))
            runtime.workdir = stack.enter_context(Workdir.open(f"{gcs.Bucket().url}/runs/one", runtime.config))
        parts = ("pool", "model", "local_model", "chat", "engine", "jax_engine", "targets")
        runtime.__dict__.update({part: types.SimpleNamespace(close=lambda: None) for part in parts})
        workdir = runtime.workdir
        workdir.write_json("diagnosis/selected_capabilities.json", [entry("a"), entry("b")])
        workdir.write_json("environments/a/calibration.json", {"usable": True})
        workdir.write_json("environments/b/calibration.json", {"usable": False})
        workdir.write_json("adapters/a/summary.json", {})
        workdir.write_json("agreement.json", {"mean": 0.0})
        write_composed(workdir, ["a"])
        write_evaluation(workdir, 2)
        write_spent(workdir)
        runtime.plan(runtime.stages | plan_rounds(runtime.config, 4))
        monkeypatch.setattr(rounds, "write_report", lambda _: None)
        yield runtime


def test_a_round_works_on_what_the_last_agent_lacks_and_has_no_adapter_for(first, monkeypatch):
    steps = Steps(monkeypatch, {2: ["a", "c", "b"], 3: ["d"]}, useless=["d"])
    environments = improve(first, 4)
    trials = first.config.diagnosis.trials
    assert steps.asked == [
        ("rollouts", "previous", trials),
        ("diagnose", 2, ["a"]),
        ("synthesize", "c"),  # of b the library's environment was of no use before
        ("train", "c"),
        ("evaluate", "composed"),
        ("rollouts", "previous", 2 * trials),
        ("diagnose", 3, ["a", "c"]),
        ("synthesize", "d"),
    ]
    assert [found.keys() for _, found in environments] == [{"c"}, {"d"}] and environments[1][0].place().endswith("/rounds/3")
    one, two, three = read_rounds(first.workdir)
    assert (one["new"], one["unusable"], one["capabilities"]) == (["a"], ["b"], ["a"])
    assert (two["new"], two["still_lacking"], two["unusable"], two["workdir"]) == (["c"], ["a"], ["b"], "rounds/2")
    assert two["capabilities"] == ["a", "c"] and two["rate"] == 2 / 8 and two["paired"]["difference"] == 0.0
    assert (three["new"], three["unusable"], three["workdir"]) == ([], ["d"], "rounds/2")
    assert three["rate"] == two["rate"] and three["rollouts"] == 5


def test_each_round_s_rollouts_and_seconds_are_its_own(first, monkeypatch):
    before = first.workdir.read_json("spent.json")
    Steps(monkeypatch, {2: ["c"]})
    improve(first, 2)
    assert write_spent(first.workdir) == before
    spent = first.workdir.read_json("rounds/2/spent.json")
    assert spent["stages"]["rollouts"]["rollouts"] == 5 and {"train", "compose", "evaluate"} <= spent["stages"].keys()
    # of nine cells of the table, and as many of the selection, five are new; of the last agent one, and the gate on two
    assert spent["stages"]["compose"]["rollouts"] == 4 + 4 + 1 + 2


@pytest.mark.parametrize("first", ["folder", "bucket"], indirect=True)
def test_what_earlier_rounds_made_is_seen_by_all_later_ones(first, monkeypatch):
    Steps(monkeypatch, {2: ["c"], 3: ["d"]})
    improve(first, 3)
    assert len(read_rounds(first.workdir)) == 3
    place = first.workdir.place()
    first.workdir.close()
    with Workdir.open(f"{place}/rounds/3", lock=False) as inner:  # by itself
        assert inner.read_json("gate/routing.json")["slots"] == ["base", "a", "c", "d"]
        assert inner.config == first.config and inner.exists("agreement.json")
        for name, where in (("a", ""), ("c", "rounds/2/"), ("d", "rounds/3/")):
            assert inner.place(f"adapters/{name}/summary.json") == f"{place}/{where}adapters/{name}/summary.json"
            assert inner.exists(f"adapters/{name}/summary.json") and inner.exists(f"environments/{name}/calibration.json")
        assert inner.place("rollouts/adapter-c/gate-a") == f"{place}/rounds/2/rollouts/adapter-c/gate-a"
        assert inner.place("rollouts/previous/selection-a") == f"{place}/rounds/2/rollouts/gate/selection-a"
        assert inner.place("rollouts/base/gate-a") == f"{place}/rollouts/base/gate-a"
        assert inner.place("rollouts/base/gate-d") == f"{place}/rounds/3/rollouts/base/gate-d"


def test_a_round_without_anything_new_is_the_last(first, monkeypatch):
    steps = Steps(monkeypatch, {2: ["a"]})
    assert [found for _, found in improve(first, 4)] == [{}]
    assert [asked[0] for asked in steps.asked] == ["rollouts", "diagnose"]
    assert not [name for name in first.stages if name.startswith(("round 3", "round 4"))]
    lines = tell_rounds(first.workdir)
    assert lines[0].startswith("round 1, 1 capabilities") and "new: a" in lines[1]
    assert lines[-2] == "round 2: nothing new was retained that an environment could be made for; the agent is that of ."
    assert lines[-1] == "  still lacking, with an adapter of an earlier round: a"


@pytest.mark.parametrize("where", ["diagnose_workdir", "synthesize_all", "train_adapter", "compose", "evaluate_all"])
def test_an_interrupted_round_is_played_on(first, monkeypatch, where):
    steps = Steps(monkeypatch, {2: ["c"], 3: ["d"]})
    with monkeypatch.context() as patch:
        step, calls = getattr(steps, where), []

        def interrupted(*arguments, **keywords):
            calls.append(None)
            if len(calls) == 2:  # in the third round
                raise KeyboardInterrupt
            return step(*arguments, **keywords)

        patch.setattr(rounds, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            improve(first, 3)
    assert [one["round"] for one in read_rounds(first.workdir)] == [1, 2]
    improve(first, 3)
    assert [one["new"] for one in read_rounds(first.workdir)] == [["a"], ["c"], ["d"]]
    assert steps.asked.count(("train", "c")) == 1 == steps.asked.count(("diagnose", 2, ["a"]))


def test_fewer_rounds_than_there_are_change_nothing(first, monkeypatch):
    Steps(monkeypatch, {2: ["c"], 3: ["d"]})
    improve(first, 3)
    before = first.workdir.read_bytes("rounds.json")
    steps = Steps(monkeypatch, {})
    assert improve(first, 1) == [] and steps.asked == []
    improve(first, 2)
    assert first.workdir.read_bytes("rounds.json") == before


def test_the_run_is_not_begun_in_a_round_of_it(first, monkeypatch):
    Steps(monkeypatch, {2: ["c"]})
    improve(first, 2)
    inner = first.workdir.within("rounds/2")
    with first.within(inner) as part, pytest.raises(InputError, match="rounds/2: a later round of a run; give the --workdir of the run"):
        run(part)


def test_the_plan_of_a_round_leaves_out_what_is_shared():
    config = load_config("quickstart")
    stages = plan_round(config, 2, old=3, new=1)
    whole, gate, seeds = plan(config, 4)["compose"], config.gate, config.train.selection_seeds
    cells = [(slot, env) for slot in range(4) for env in range(3)]  # base and three adapters on three environments
    tried = sum(gate.successes if slot == env + 1 else gate.table_seeds for slot, env in cells)
    assert stages["round 2 compose"] == whole - tried - len(cells) * seeds + seeds
    assert list(plan_rounds(config, 3)) == [f"round {k} {name}" for k in (2, 3) for name in plan(config)]
    assert plan_rounds(config, 1) == {}


@pytest.mark.parametrize(
    ("rates", "composed"),
    [
        ({"adapter:a": 0.5, "adapter:b": 0.5, "gate": 0.6}, "gate"),
        ({"adapter:a": 0.4, "adapter:b": 0.5, "gate": 0.5}, "adapter:b"),
        ({"adapter:a": 0.5, "gate": 0.6, "previous": 0.6}, "previous"),
        ({"adapter:a": 0.5, "gate": 0.4, "previous": 0.5}, "previous"),
        ({"adapter:a": 0.7, "gate": 0.6, "previous": 0.5}, "adapter:a"),
        ({"adapter:a": 0.5, "gate": 0.7, "previous": 0.6, "uniform": 0.9}, "gate"),
    ],
)
def test_the_agent_changes_only_for_a_better_one(rates, composed):
    assert choose({name: {"rate": rate} for name, rate in rates.items()}) == composed


@pytest.mark.slow
def test_two_rounds_that_are_killed_end_as_those_that_nothing_disturbed(checkpoint, tmp_path):
    """Everything for real, by an agent that learns nothing: three capabilities in the first round, the fourth in the second."""
    config = tiny.write_config(tmp_path / "config.py", checkpoint)
    reference, workdir, flags = tmp_path / "reference", tmp_path / "run", ["--config.diagnosis.most=3", "--rounds=2"]
    assert cli.main(["run", f"--config={config}", f"--workdir={reference}", *flags]) == 0
    one, two = json.loads((reference / "rounds.json").read_text())["rounds"]
    assert len(one["new"]) == 3 and len(two["new"]) == 1 and two["capabilities"] == one["new"] + two["new"]
    old, new = (load_gate(reference / folder / "gate/gate.safetensors") for folder in ("", "rounds/2"))
    assert new.bias.shape[-1] == old.bias.shape[-1] + 1
    grown = load_gate(reference / "rounds/2/gate/previous_gate.safetensors")
    assert one["composed"] != "gate" or np.array_equal(grown.kernel[..., :-1], old.kernel)
    for count in (1, 5, 12):
        process = start(config, workdir, *flags)
        wait_for(process, workdir / "rounds/2", count)
        process.kill()
        process.communicate()
    assert start(config, workdir, *flags).wait(timeout=900) == 0
    assert differences(workdir, reference) == []


@pytest.mark.slow
def test_a_second_round_makes_the_quickstart_s_agent_better(tmp_path):
    """Two capabilities in the first round; the second finds others, and does better on the held-out tasks."""
    flags = ["--config.diagnosis.most=2", "--config.evaluation.policies=base,composed", "--config.evaluation.tasks=200", "--rounds=2"]
    assert cli.main(["run", "--config=quickstart", f"--workdir={tmp_path / 'run'}", *flags]) == 0
    one, two = json.loads((tmp_path / "run/rounds.json").read_text())["rounds"]
    assert len(one["new"]) == 2 and two["new"] and not set(two["new"]) & set(one["new"])
    assert two["rate"] > one["rate"] + 0.05 and two["paired"]["difference"] > 0
