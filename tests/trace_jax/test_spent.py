import jax
import numpy as np
import pytest

from rl.trajectory import Trajectory
from trace_jax.config import Config
from trace_jax.spent import add_seconds, rollouts_of_steps, stage_of, write_spent
from trace_jax.workdir import Workdir


def shard(count: int, sampled: int) -> list[Trajectory]:
    mask = np.arange(10) >= 10 - sampled
    arrays = {"tokens": np.zeros(10), "loss_mask": mask, "logprobs": -1.0 * mask, "turns": np.zeros(10), "versions": np.zeros(10)}
    return [Trajectory(id=f"t{i}", environment="desk", task_id=f"t{i}", reward=0.0, **arrays) for i in range(count)]


@pytest.mark.parametrize(
    "folder, split, stage",
    [
        ("base", "train", "rollouts"),
        ("base", "heldout", "evaluate"),
        ("adapter-x", "train", "evaluate"),  # `trace-jax rollout`, no part of the run
        ("base", "calibration-x", "synthesize"),
        ("adapter-x", "training", "train"),
        ("adapter-x", "own-x", "train"),
        ("base", "own-x", "train"),
        ("adapter-x", "gate-x", "compose"),
        ("base", "selection-x", "compose"),
        ("gate", "training", "compose"),
        ("constant-0.25", "gate-x", "compose"),
        ("grpo_target", "training", "baseline"),
        ("single-x", "training", "baseline"),
        ("gepa-2", "training", "baseline"),
        ("swe_rl", "training", "baseline"),
        ("grpo_target", "heldout", "evaluate"),  # the curve is no cost of training
    ],
)
def test_every_folder_of_rollouts_belongs_to_a_stage(folder, split, stage):
    assert stage_of(folder, split) == stage


def test_rollouts_count_once_and_seconds_add_up_over_processes(tmp_path):
    with Workdir.open(tmp_path, Config()) as workdir:
        assert write_spent(workdir) == {"stages": {}, "total": {"seconds": 0, "rollouts": 0, "sampled_tokens": 0}}
        workdir.write_shard("base", "train", 0, shard(3, 4))
        workdir.write_shard("adapter:x", "training", 0, shard(2, 5))
        workdir.write_shard("adapter:x", "training", 1, shard(2, 5))
        workdir.write_shard("adapter:x", "training", 1, shard(2, 5))  # an interrupted batch that was rolled out again
        for seconds in (1.5, 2.0):
            add_seconds(workdir, "train", seconds)
        spent = write_spent(workdir)
        assert spent == workdir.read_json("spent.json")
        assert spent["stages"]["rollouts"] == {"seconds": 0.0, "rollouts": 3, "sampled_tokens": 12}
        assert spent["stages"]["train"] == {"seconds": 3.5, "rollouts": 4, "sampled_tokens": 20}
        assert spent["total"] == {"seconds": 3.5, "rollouts": 7, "sampled_tokens": 32}


def test_devices_are_noted_with_the_time_that_they_were_held(tmp_path):
    with Workdir.open(tmp_path, Config()) as workdir:
        for stage in ("train", "compose"):
            add_seconds(workdir, stage, 2.0)
        elsewhere = {"platform": "tpu", "kind": "TPU v5 lite", "count": 16}
        workdir.append_jsonl("seconds.jsonl", {"stage": "train", "seconds": 3.0, "devices": elsewhere})
        workdir.append_jsonl("seconds.jsonl", {"stage": "train", "seconds": 1.0})  # a run of old
        here, there = write_spent(workdir)["devices"]
        assert here == {"platform": "cpu", "kind": "cpu", "count": len(jax.devices()), "seconds": 4.0}
        assert there == elsewhere | {"seconds": 3.0}


def test_agents_of_fewer_capabilities_are_a_stage_of_their_own(tmp_path):
    with Workdir.open(tmp_path, Config()) as workdir:
        workdir.write_shard("base", "heldout", 0, shard(3, 4))
        inner = workdir.within("capabilities/1", ["rollouts/base/heldout"])
        inner.write_shard("gate", "training", 0, shard(2, 5))
        spent = write_spent(workdir)
        assert spent["stages"]["capabilities"] == {"seconds": 0.0, "rollouts": 2, "sampled_tokens": 10}
        assert spent["total"]["rollouts"] == 5 and rollouts_of_steps(workdir) == 0


def test_what_an_llm_was_paid_is_there_where_one_was_asked(tmp_path):
    line = dict(
        key="k", request="r", backend="claude", model="m", sample=0, stage="diagnose", text="x", cut=False, limit=64,
        input_tokens=10, output_tokens=2, cost=0.5, estimated=False, when="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    with Workdir.open(tmp_path, Config()) as workdir:
        assert "agents" not in write_spent(workdir)
        workdir.append_jsonl("agents/exchanges.jsonl", line)
        workdir.append_jsonl("agents/exchanges.jsonl", line | {"key": "l", "stage": "synthesize", "cost": None, "estimated": True})
        paid = {"requests": 2, "input_tokens": 20, "output_tokens": 4, "cost": 0.5, "estimated": 1}
        assert write_spent(workdir)["agents"] == paid == workdir.read_json("spent.json")["agents"]
