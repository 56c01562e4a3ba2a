import difflib
import json
import shutil

import pytest

from rl.trajectory import Trajectory
from tests.trace_jax import tiny
from trace_jax.baselines import swe_rl
from trace_jax.rollout import roll_out_train_split
from trace_jax.spent import write_spent

PATCHES = ("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n", "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+c\n")


def episode(**check) -> Trajectory:
    checks = {"patch": {"passed": True, "expected": PATCHES[0], "message_index": None, **check}} if check else {}
    return Trajectory(id="a", environment="e", task_id="a", reward=1.0, checks=checks)


def test_the_reward_is_the_likeness_of_two_patches_and_minus_one_for_what_is_none():
    assert swe_rl.patch_similarity(episode(actual=PATCHES[0])) == 1.0
    expected = difflib.SequenceMatcher(None, PATCHES[1], PATCHES[0], autojunk=False).ratio()
    assert swe_rl.patch_similarity(episode(actual=PATCHES[1])) == expected and 0.9 < expected < 1.0
    assert swe_rl.patch_similarity(episode(actual="")) == swe_rl.MALFORMED
    assert swe_rl.patch_similarity(episode(actual=None)) == swe_rl.patch_similarity(episode()) == -1.0


def test_it_does_not_apply_where_nobody_shows_patches(runtime):
    tiny.retain(runtime, "tool_calling_precision")
    tiny.store_environment(runtime, "tool_calling_precision")
    assert swe_rl.patch_packages(runtime) == []


PACKAGE = """
TOOLS = [{"type": "function", "function": {"name": name, "description": name, "parameters": {
    "type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]}}}
    for name in ("check_order", "return_order", "cancel_order")]

class Environment:
    def reset(self, seed, knobs):
        self.patch = None
        return {"system": "Patch.", "messages": [{"role": "user", "content": "return order A1 please."}]}

    def call(self, name, arguments):
        self.patch = name + " " + str(arguments.get("order_id"))
        return "ok"

    def respond(self, text):
        return None

    def done(self):
        return self.patch is not None

    def score(self):
        return {"reward": 0.0, "checks": {"patch": {"passed": True, "expected": "return_order A1", "actual": self.patch, "call": None}}}

def oracle(seed, knobs):
    return [{"name": "return_order", "arguments": {"order_id": "A1"}}]

def hint(seed, knobs):
    return "Look."
"""


@pytest.mark.slow
def test_it_learns_from_patches_alone(tmp_path, checkpoint):
    """The environment's own reward is 0 throughout."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "environment.py").write_text(PACKAGE)
    meta = {"name": "patches", "capability": "", "target": "patches", "version": "1", "knobs": {}, "max_turns": 3, "rationale": ""}
    (folder / "package.json").write_text(json.dumps(meta))
    settings = {"target__package": str(folder), "target__train_tasks": "3", "rollout__sandbox": "best_effort", "diagnosis__trials": "1"}
    with tiny.open_tiny(tmp_path, checkpoint, **settings) as runtime:
        roll_out_train_split(runtime)
        packages = swe_rl.patch_packages(runtime)
        assert packages == [runtime.target]
        with runtime.stage("baseline"):
            found = swe_rl.train_swe_rl(runtime, packages, 16)
        rows = runtime.workdir.read_jsonl("baselines/swe_rl/metrics.jsonl")
        assert found["training_rollouts"] == 16 and len(rows) == 2
        assert all(row["reward"] == 0.0 and row["trajectories_kept"] > 0 and row["grad_norm"] > 0 for row in rows)
        assert write_spent(runtime.workdir)["stages"]["baseline"]["rollouts"] == 16


@pytest.mark.slow
def test_it_runs_end_to_end_on_code_repair(tmp_path, checkpoint):
    """A tiny agent cannot write a patch; that it hands nothing in is what its rewards say, and two iterations go through all the same."""
    longer = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, longer)
    config = json.loads((longer / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (longer / "config.json").write_text(json.dumps(config))
    settings = {
        "target__package": "swebench/semantic_logic_precision",
        "target__knobs": '{"modules": 1, "blocks": 2}',
        "target__train_tasks": "2",
        "diagnosis__trials": "1",
        "target__heldout_tasks": "2",
        "evaluation__tasks": "2",
        "rollout__context": "3072",
        "train__pack_length": "3072",
        "train__micro_rows": "1",
        "train__groups": "1",
        "train__group_size": "2",
    }
    with tiny.open_tiny(tmp_path, longer, **settings) as runtime:
        roll_out_train_split(runtime)
        packages = swe_rl.patch_packages(runtime)
        assert packages == [runtime.target]
        with runtime.stage("baseline"):
            found = swe_rl.train_swe_rl(runtime, packages, 4)
        assert found["training_rollouts"] == 4 and found["overall"]["n"] == 2
        trained = list(runtime.workdir.read_shards("swe_rl", "training"))
        assert len(trained) == 4 and all(t.error is None and "diff --git" in t.checks["patch"]["expected"] for t in trained)
        assert {swe_rl.patch_similarity(t) for t in trained} == {-1.0}
