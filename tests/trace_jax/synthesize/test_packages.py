"""Environments of the user's own, in the place of the library's."""

import json

import numpy as np
import pytest

from envs.builtin import load_builtin
from envs.package import write_package
from rl.trajectory import Trajectory
from tests.trace_jax import tiny
from trace_jax.errors import InputError
from trace_jax.synthesize import own_packages, synthesize_all

ONE = "structured_data_reasoning"
MARK = "\nWHOSE = 'mine'\n"


@pytest.fixture
def mine(tmp_path):
    """FOLDER with a package that differs from the library's in one line."""
    package = load_builtin(ONE)
    write_package(tmp_path / "mine" / ONE, package.meta, package.source + MARK)
    (tmp_path / "mine" / "__pycache__").mkdir()
    return tmp_path / "mine"


@pytest.fixture
def runtime(tmp_path, checkpoint, mine, monkeypatch):
    """A base that succeeds every other time, and certificates that always pass."""

    def roll_out(policy, folder, split, index, tasks):
        sampled.append(split)
        return [
            Trajectory(id=t.id, environment=t.package.name, task_id=t.task_id, seed=t.seed, group=t.group, reward=w, success=bool(w))
            for t in tasks
            for w in [float(np.random.default_rng([t.seed, t.rollout]).random() < 0.5)]
        ]

    sampled = []
    passed = {"passed": True, "reasons": []}
    monkeypatch.setattr("trace_jax.synthesize.admission.certified", lambda runtime, package: passed | {"digest": package.digest})
    bounds = {"synthesis__calibration_seeds": "20", "train__group_size": "4", "synthesis__packages": str(mine)}
    with tiny.open_tiny(tmp_path, checkpoint, **bounds) as runtime:
        monkeypatch.setattr(runtime, "roll_out", roll_out)
        runtime.sampled = sampled
        tiny.retain(runtime, ONE)
        yield runtime
    runtime.workdir.close()


def test_a_package_of_one_s_own_comes_before_the_library_s(runtime, mine):
    assert synthesize_all(runtime)[ONE]["usable"]
    assert (runtime.workdir.local(f"environments/{ONE}") / "environment.py").read_text().endswith(MARK)
    package, found = own_packages(runtime)[ONE], len(runtime.sampled)
    assert runtime.sampled[0] == f"calibration-{ONE}-r1-{package.digest[:8]}"
    assert synthesize_all(runtime)[ONE]["usable"] and len(runtime.sampled) == found  # done once

    write_package(mine / ONE, package.meta, package.source + "VERSION = 2\n")
    assert synthesize_all(runtime)[ONE]["usable"] and len(runtime.sampled) > found  # edited, so calibrated again
    assert runtime.environment(ONE).source.endswith("VERSION = 2\n")

    runtime.workdir.write_json(f"adapters/{ONE}/summary.json", {})
    assert synthesize_all(runtime)[ONE]["usable"]
    write_package(mine / ONE, package.meta, package.source)
    with pytest.raises(InputError, match=f"{ONE}: was edited since .*adapters/{ONE} was trained in it; take another --workdir"):
        synthesize_all(runtime)


def test_its_code_runs_where_the_kernel_holds_it(runtime):
    assert runtime.pool.sandbox == "require"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("capability", "looking", f"{ONE}/package.json: capability = 'looking' must be '{ONE}', as its folder is called"),
        ("target", "greenhouse", f"{ONE}/package.json: target = 'greenhouse' must be 'desk', the run's target"),
        ("max_turns", 0, "config field 'synthesis.packages': .*package.json: max_turns = 0"),
    ],
)
def test_a_package_that_cannot_be_used_is_told_before_anything_is_rolled_out(runtime, mine, field, value, said):
    meta = json.loads((mine / ONE / "package.json").read_text()) | {field: value}
    (mine / ONE / "package.json").write_text(json.dumps(meta))
    with pytest.raises(InputError, match=said):
        own_packages(runtime)


@pytest.mark.parametrize(("folder", "said"), [("no", "no: no such folder; give one with"), (ONE, f"{ONE} is a package itself; give the")])
def test_a_folder_that_is_none_of_packages(tmp_path, checkpoint, folder, said):
    (tmp_path / ONE).mkdir()
    (tmp_path / ONE / "package.json").write_text("{}")
    with tiny.open_tiny(tmp_path, checkpoint, synthesis__packages=str(tmp_path / folder)) as runtime:
        with pytest.raises(InputError, match=f"config field 'synthesis.packages': .*{said}"):
            own_packages(runtime)
    runtime.workdir.close()
