"""What becomes of a package, against a base whose skill is scripted: how often it succeeds depends on the knobs and on hints alone."""

import dataclasses
import json

import numpy as np
import pytest

from envs import EnvironmentFault, parse_package
from envs.builtin import load_builtin
from rl.trajectory import Trajectory
from tests.trace_jax import tiny
from trace_jax.agents.templates import Templates
from trace_jax.errors import InputError
from trace_jax.synthesize import synthesize_all
from trace_jax.synthesize.admission import admit
from trace_jax.synthesize.author import _distribution

ONE = "structured_data_reasoning"
BOUNDS = {
    "synthesis__calibration_seeds": "40", "synthesis__calibration_rollouts": "16", "synthesis__mean_low": "0.2",
    "synthesis__mean_high": "0.6", "synthesis__max_all_success": "0.2", "synthesis__max_all_zero": "0.2", "synthesis__max_constant": "0.5",
    "train__group_size": "8",
}  # fmt: skip


class Base:
    """In the place of the engine. `skill(knobs, hinted)` is the chance of success; `sampled` the batches that had to be sampled."""

    def __init__(self, runtime, monkeypatch, skill):
        self.runtime, self.skill, self.sampled = runtime, skill, []
        monkeypatch.setattr(runtime, "roll_out", self.roll_out)

    def roll_out(self, policy, folder, split, index, tasks):
        workdir = self.runtime.workdir
        if index in workdir.shards(folder, split):
            return list(workdir.read_shards(folder, split, [index]))
        self.sampled.append((split, index, len(tasks)))
        found = [self.play(task) for task in tasks]
        workdir.write_shard(folder, split, index, found)
        return found

    def play(self, task):
        chance = self.skill(task.package.resolve_knobs(task.knobs), task.hint is not None)
        random = np.random.default_rng([task.seed, task.rollout])
        won = bool(random.random() < chance)
        return Trajectory(
            id=task.id, environment=task.package.name, task_id=task.task_id, split=task.split, seed=task.seed, group=task.group,
            trial=task.trial, reward=float(won), success=won,
        )  # fmt: skip


def certificate(runtime, package):
    """In the place of a real one, which takes a second."""
    return {"passed": True, "reasons": [], "digest": package.digest}


@pytest.fixture
def begin(tmp_path, checkpoint, monkeypatch):
    """A runtime with a scripted base; the certificate is a real one only if it is asked for."""
    made = []

    def begin(skill, certify=False, **overrides):
        if not certify:
            monkeypatch.setattr("trace_jax.synthesize.admission.certified", certificate)
        runtime = tiny.open_tiny(tmp_path, checkpoint, **BOUNDS | overrides)
        made.append(runtime)
        tiny.retain(runtime, ONE)
        return runtime, Base(runtime, monkeypatch, skill)

    yield begin
    for runtime in made:
        runtime.close()
        runtime.workdir.close()


def more_records_are_harder(knobs, hinted):
    return {3: 0.8, 4: 0.75, 5: 0.5, 6: 0.3}[knobs["records"]]


def test_an_environment_that_is_in_order_is_stored_as_it_is(begin):
    runtime, base = begin(lambda knobs, hinted: 0.4)
    assert synthesize_all(runtime)[ONE]["usable"]
    found = runtime.calibration(ONE)
    assert found["verdict"] == "ok" and found["search"] == [] and found["hint_ratio"] == 0.0 and "hinted" not in found
    assert found["looks"] == [{"seeds": 30, "rollouts": 480, "certain": "ok"}] and found["stopped"] and found["spent"] == 480
    assert base.sampled == [(f"calibration-{ONE}", 0, 480)]  # 40 seeds would have been 640
    assert runtime.environment(ONE).digest == load_builtin(ONE).digest
    low, high = found["mean_interval"]
    assert low < found["mean_reward"] < high


def test_without_early_verdicts_all_seeds_are_rolled_out(begin):
    runtime, base = begin(lambda knobs, hinted: 0.4, synthesis__sequential="false")
    found = admit(runtime, load_builtin(ONE), "calibration-x").calibration
    assert base.sampled == [("calibration-x", 0, 640)] and not found["stopped"] and len(found["per_seed"]) == 40


def test_knobs_are_searched_and_become_the_defaults_of_a_package_that_is_certified_again(begin):
    runtime, base = begin(more_records_are_harder, certify=True)
    assert synthesize_all(runtime)[ONE]["usable"]
    found, package = runtime.calibration(ONE), runtime.environment(ONE)
    assert found["harder"] == {"records": "max", "returnable": None}
    assert found["verdict"] == "ok" and found["knobs"] == package.resolve_knobs() == {"records": 5, "returnable": 0.2}
    assert [(one["knobs"]["records"], one["verdict"]) for one in found["search"]] == [(4, "too_easy"), (5, "ok")]
    assert all(low < one["success_rate"] < high for one in found["search"] for low, high in [one["success_interval"]])
    certificate = runtime.workdir.read_json(f"environments/{ONE}/certificate.json")
    assert certificate["passed"] and certificate["digest"] == package.digest != load_builtin(ONE).digest
    assert found["spent"] == sum(count for _, _, count in base.sampled) > found["n_rollouts"]
    stored = json.loads(runtime.workdir.read_bytes(f"environments/{ONE}/package.json"))
    assert stored["knobs"]["records"] == {"default": 5, "min": 3, "max": 6}


def test_an_interrupted_search_goes_on_from_its_shards_to_the_same_end(begin, monkeypatch):
    runtime, base = begin(more_records_are_harder)
    whole, batches = admit(runtime, load_builtin(ONE), "calibration-x").calibration, list(base.sampled)
    for split, index, _ in batches[2:]:  # as if it had ended before
        manifest = f"rollouts/base/{split}/manifest.json"
        shards = runtime.workdir.read_json(manifest)["shards"]
        runtime.workdir.write_json(manifest, {"shards": {name: one for name, one in shards.items() if int(name) != index}})
    base.sampled.clear()
    assert admit(runtime, load_builtin(ONE), "calibration-x").calibration == whole and base.sampled == batches[2:]


def test_without_probes_nothing_is_searched(begin):
    runtime, base = begin(more_records_are_harder, synthesis__probes="0")
    found = synthesize_all(runtime)[ONE]
    assert not found["usable"] and found["verdict"] == "too_easy" and len(base.sampled) == 1
    with pytest.raises(InputError, match="no usable environment"):
        runtime.usable()


def test_what_the_package_says_of_its_knobs_is_not_measured(begin):
    runtime, base = begin(more_records_are_harder)
    meta = load_builtin(ONE).meta
    meta["knobs"]["records"]["harder"], meta["knobs"]["returnable"]["harder"] = "max", "min"
    found = admit(runtime, parse_package(meta, load_builtin(ONE).source), "calibration-x")
    assert found.calibration["harder"] == {"records": "max", "returnable": "min"} and found.package.knobs["records"].harder == "max"
    assert found.calibration["knobs"] == {"records": 5, "returnable": 0.1} and not any("-end" in split for split, _, _ in base.sampled)


def test_where_no_setting_is_right_the_best_is_kept_with_its_verdict(begin):
    runtime, base = begin(lambda knobs, hinted: {3: 0.95, 4: 0.9, 5: 0.8, 6: 0.7}[knobs["records"]])
    found = admit(runtime, load_builtin(ONE), "calibration-x")
    assert found.calibration["verdict"] == "too_easy" and found.package.knobs["records"].default == 6 and found.reasons
    assert not found.calibration["usable"] and len(found.calibration["search"]) == 3
    shown = _distribution(found.calibration)
    told = Templates().render("environment_mutation", round=1, rounds=5, reasons=found.reasons, earlier=[], **shown)
    assert 'Measured at the knobs `{"records": 6, "returnable": 0.2}`' in told
    assert '- `{"records": 5, "returnable": 0.2}`: success rate 0.8' in told


def test_a_setting_that_is_not_certified_is_passed_over(begin, monkeypatch):
    runtime, _ = begin(more_records_are_harder)

    def failing(runtime, package):
        failed = package.knobs["records"].default == 5
        return certificate(runtime, package) | {"passed": not failed, "reasons": ["spam: mean reward 1.000"] * failed}

    monkeypatch.setattr("trace_jax.synthesize.admission.certified", failing)
    found = admit(runtime, load_builtin(ONE), "calibration-x")
    assert found.package.digest == found.certificate["digest"] == load_builtin(ONE).digest and found.calibration["verdict"] == "too_easy"
    assert [one["note"] for one in found.calibration["search"]] == ["", "not certified: spam: mean reward 1.000"]


def too_hard(base, hinted):
    return lambda knobs, hint: hinted if hint else base


@pytest.mark.parametrize("helped, ratio, note", [(0.7, 0.25, ""), (0.3, 0.5, "tells too little"), (0.95, 0.25, "tells too much")])
def test_hints_are_measured_before_they_are_used(begin, helped, ratio, note):
    runtime, base = begin(too_hard(0.13, helped), synthesis__max_all_zero="0.5", synthesis__max_constant="0.6")
    found = admit(runtime, load_builtin(ONE), "calibration-x").calibration
    hinted = found["hinted"]
    assert found["usable"] and found["verdict"] == "too_hard" and hinted["band"] == [0.6, 0.8] and note in hinted["note"]
    assert abs(hinted["success_rate"] - helped) < 0.13 and bool(note) == bool(hinted["note"])
    assert found["hint_ratio"] == pytest.approx(ratio, abs=0.11) and 0.25 <= found["hint_ratio"] <= 0.5
    assert base.sampled[-1] == ("calibration-x-hinted", 0, 128) and found["spent"] == sum(count for _, _, count in base.sampled)


def test_hints_that_do_not_help_are_not_used(begin):
    runtime, _ = begin(too_hard(0.13, 0.02), synthesis__max_all_zero="0.5")
    found = admit(runtime, load_builtin(ONE), "calibration-x")
    assert found.calibration["hint_ratio"] == 0.0 and "the hint does not help: success 0.0" in found.reasons[-1]


def test_a_hint_that_tells_a_secret_is_not_used(begin):
    runtime, base = begin(too_hard(0.13, 0.7), synthesis__max_all_zero="0.5")
    builtin = load_builtin(ONE)
    told = "    return 'Mind the ' + ' '.join(o['colour'] + ' ' + o['item'] for o in make_task(seed, knobs)['orders'].values())"
    package = parse_package(builtin.meta, builtin.source.replace("    return HINT", told))
    found = admit(runtime, package, "calibration-x")
    assert "the hint tells what the agent has to find out: " in found.reasons[-1] and not found.calibration["usable"]
    assert not any("hinted" in split for split, _, _ in base.sampled)


def test_a_base_that_never_succeeds_gets_no_hints(begin):
    runtime, base = begin(too_hard(0.0, 1.0))
    found = admit(runtime, load_builtin(ONE), "calibration-x").calibration
    assert not found["usable"] and "hinted" not in found and found["looks"][0]["certain"] == "too_hard"


def test_faults_of_the_package_that_the_base_met_refuse_it(begin, monkeypatch):
    runtime, base = begin(lambda knobs, hinted: 0.4)
    play, fault = base.play, {"kind": "exception", "message": str(EnvironmentFault("exception", "boom"))}
    broken = {"reward": None, "success": False, "error": fault, "stop_reason": "environment_error"}
    monkeypatch.setattr(base, "play", lambda task: dataclasses.replace(play(task), **(broken if task.trial == 3 else {})))
    found = admit(runtime, load_builtin(ONE), "calibration-x")
    assert found.calibration is None and found.reasons == ["played by the agent it ends in a fault: boom"]
    assert not synthesize_all(runtime)[ONE]["usable"] and not runtime.workdir.exists(f"environments/{ONE}/calibration.json")
