import errno
import json
import os
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from rl.trajectory import Trajectory
from trace_jax import workdir as workdirs
from trace_jax.config import Config, load_config, override
from trace_jax.errors import InputError
from trace_jax.metrics import Metrics, read_metrics
from trace_jax.workdir import Workdir

HOLD = """
import sys, time
from trace_jax.workdir import Workdir
with Workdir.open(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def trajectory(index: int) -> Trajectory:
    tokens = np.arange(4) + index
    arrays = {"loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -0.5, -1.25], "turns": [0, 0, 0, 0], "versions": [0, 0, 0, 0]}
    return Trajectory(id=f"task-{index}", environment="desk", task_id=f"task-{index}", reward=1.0, tokens=tokens, **arrays)


@pytest.fixture
def workdir(tmp_path):
    with Workdir.open(tmp_path / "run", load_config("quickstart")) as workdir:
        yield workdir


def held_by_another(path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(workdirs.ROOT)}
    )
    assert holder.stdout.readline() == "held\n"
    return holder


def test_the_config_and_what_figures_depend_on_are_stored(workdir):
    stored = workdir.read_json("config.json")
    assert Config.from_json(stored["config"], "config.json") == load_config("quickstart")
    assert {"python", "jax", "flax"} <= set(stored["versions"])
    assert "revision" in stored


def test_a_workdir_is_held_by_one_run_and_a_killed_one_does_not_block(tmp_path):
    holder = held_by_another(tmp_path)
    with pytest.raises(InputError, match=rf"in use by pid {holder.pid} on host .+ since \d{{4}}-"):
        Workdir.open(tmp_path, Config())
    assert not (tmp_path / "config.json").exists()
    with Workdir.open(tmp_path, lock=False):
        pass  # the report may be written beside a run
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with Workdir.open(tmp_path, Config()) as workdir:
        assert workdir.exists("config.json")


def test_a_closed_workdir_may_be_opened_again(tmp_path):
    for _ in range(2):
        with Workdir.open(tmp_path, Config()):
            pass
    with pytest.raises(InputError, match="holds a run already"):
        Workdir.open(tmp_path, Config(), resume=False)


def test_a_run_does_not_go_on_with_another_config(tmp_path):
    config = load_config("quickstart")
    with Workdir.open(tmp_path, config) as workdir:
        workdir.write_json("diagnosis/candidates.json", {"candidates": []})
    with pytest.raises(InputError, match=r"'train\.rank' = 8, asked for is 4.*--config\.train\.rank=8"):
        Workdir.open(tmp_path, override(config, [("train.rank", "4")]))
    with pytest.raises(InputError, match=r"asked for is 4 \(and 2 more that differ\); "):
        Workdir.open(tmp_path, override(config, [("train.rank", "4"), ("train.groups", "3"), ("gate.table_seeds", "5")]))
    more = override(config, [("baselines.grpo_target", "true")])
    with Workdir.open(tmp_path, more) as workdir:
        assert workdir.config == more
    assert workdirs.stored_config(tmp_path) == more
    with Workdir.open(tmp_path) as workdir:
        assert workdir.config == more


def test_a_run_that_failed_at_its_start_may_be_begun_with_another_config(tmp_path):
    config = load_config("quickstart")
    Workdir.open(tmp_path, config).close()
    mended = override(config, [("model.path", "elsewhere")])
    Workdir.open(tmp_path, mended).close()
    assert workdirs.stored_config(tmp_path) == mended


def test_what_is_no_workdir_is_refused(tmp_path):
    with pytest.raises(InputError, match="a folder, or gs://BUCKET/PREFIX"):
        Workdir.open("s3://bucket/run")
    with pytest.raises(InputError, match="give gs://BUCKET/PREFIX"):
        Workdir.open("gs://bucket")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--workdir=.*file"):
        Workdir.open(tmp_path / "file")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(InputError, match="not written by trace-jax"):
        Workdir.open(tmp_path, Config())
    (tmp_path / "config.json").write_text('{"config": {')
    with pytest.raises(InputError, match=r"config\.json: not JSON"):
        Workdir.open(tmp_path, Config())


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(workdir, monkeypatch):
    workdir.write_bytes("gate/routing.json", b"old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        workdir.write_bytes("gate/routing.json", b"new")
    assert workdir.read_bytes("gate/routing.json") == b"old"
    assert os.listdir(workdir.local("gate")) == ["routing.json"]


def test_what_a_killed_writer_left_is_swept_and_never_listed(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / ".tmp-1-00000.jsonl.zst").write_bytes(b"half")
    with Workdir.open(tmp_path, lock=False) as workdir:
        assert workdir.list() == []
    with Workdir.open(tmp_path):
        assert not list((tmp_path / "rollouts").iterdir())


def test_names_stay_inside_the_workdir(workdir):
    for name in ("../x", "/etc/x", ""):
        with pytest.raises(ValueError, match="not a name inside"):
            workdir.write_bytes(name, b"")


def test_a_missing_file_is_an_input_error(workdir):
    with pytest.raises(InputError, match=r"candidates\.json: no such file"):
        workdir.read_json("diagnosis/candidates.json")


def test_json_lines_survive_a_torn_end(workdir):
    records = [{"step": i, "text": "x" * 5000} for i in range(3)]
    for record in records[:2]:
        workdir.append_jsonl("m.jsonl", record)
    with open(workdir.local("m.jsonl"), "ab") as file:
        file.write(b'{"step": 2, "te')
    assert workdir.read_jsonl("m.jsonl") == records[:2]
    workdir.append_jsonl("m.jsonl", records[2])
    assert workdir.read_jsonl("m.jsonl") == records
    assert workdir.read_jsonl("none.jsonl") == []


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(workdir, monkeypatch):
    workdir.append_jsonl("m.jsonl", {"step": 0})
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    with pytest.raises(OSError, match="No space left"):
        workdir.append_jsonl("m.jsonl", {"step": 1})
    assert workdir.local("m.jsonl").read_bytes() == b'{"step":0}\n'


def test_a_damaged_line_in_the_middle_is_named(workdir):
    workdir.write_bytes("m.jsonl", b'{"step":0}\n{"st\n{"step":2}\n')
    with pytest.raises(InputError, match=r"m\.jsonl, line 2"):
        workdir.read_jsonl("m.jsonl")


def test_shards_come_back_in_order_and_only_when_the_manifest_lists_them(workdir):
    assert workdir.shards("adapter:precision", "train") == []
    workdir.write_shard("adapter:precision", "train", 1, [trajectory(2)])
    workdir.write_shard("adapter:precision", "train", 0, [trajectory(0), trajectory(1)])
    folder = workdir.local("rollouts/adapter-precision/train")
    (folder / "00002.jsonl.zst").write_bytes((folder / "00001.jsonl.zst").read_bytes())  # killed before the manifest was written
    assert workdir.shards("adapter:precision", "train") == [0, 1]
    assert [t.id for t in workdir.read_shards("adapter:precision", "train")] == ["task-0", "task-1", "task-2"]
    (back,) = workdir.read_shards("adapter:precision", "train", [1])
    assert back.to_json() == trajectory(2).to_json()


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: data[:-5] + b"12345", lambda data: None])
def test_a_damaged_shard_is_an_input_error_that_names_it(workdir, damage):
    workdir.write_shard("base", "train", 0, [trajectory(i) for i in range(20)])
    path = workdir.local("rollouts/base/train/00000.jsonl.zst")
    data = damage(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(InputError, match=r"00000\.jsonl\.zst"):
        list(workdir.read_shards("base", "train"))


def test_metrics_that_go_on_from_a_checkpoint_hold_each_step_once(workdir):
    with Metrics(workdir, "adapters/precision") as metrics:
        for step in range(4):
            metrics.log(step, {"reward": step / 4, "loss": float("nan")})
    with Metrics(workdir, "adapters/precision", step=2) as metrics:
        metrics.log(2, {"reward": np.float32(0.75)})
    lines = read_metrics(workdir, "adapters/precision")
    assert [(line["step"], line["reward"]) for line in lines] == [(0, 0.0), (1, 0.25), (2, 0.75)]
    assert lines[0]["loss"] is None
    assert json.loads(workdir.local("adapters/precision/metrics.jsonl").read_text().splitlines()[0])
    assert len(workdir.list("events/adapters/precision")) == 2


def test_events_are_what_tensorboard_reads(workdir):
    """Records of length, masked CRC and bytes; a later file begins with the step from which earlier files are void."""
    with Metrics(workdir, "gate") as metrics:
        metrics.log(0, {"reward": 0.5, "loss": float("inf")})
    with Metrics(workdir, "gate", step=1) as metrics:
        metrics.log(1, {"reward": 0.75})
    files = [[Event.FromString(record) for record in records(workdir.read_bytes(name))] for name in workdir.list("events/gate")]
    (_, first), (_, again, second) = sorted(files, key=len)
    assert [(v.tag, v.simple_value) for v in first.summary.value] == [("reward", 0.5)] and first.step == 0
    assert again.step == 1 and again.session_log.status == SessionLog.START
    assert [(v.tag, v.simple_value) for v in second.summary.value] == [("reward", 0.75)] and second.step == 1


def records(data: bytes) -> list[bytes]:
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def test_a_workdir_within_another_shares_what_it_is_told_to(tmp_path):
    with Workdir.open(tmp_path, Config()) as workdir:
        workdir.write_json("adapters/x/summary.json", {"x": 1})
        workdir.write_json("rollouts/base/gate-x/manifest.json", {"shards": {}})
        for _ in range(2):
            inner = workdir.within("capabilities/1", ["adapters", "rollouts/base/gate-x", "rollouts/base/gate-y"])
        assert inner.read_json("adapters/x/summary.json") == {"x": 1} and inner.config == workdir.config
        assert inner.exists("rollouts/base/gate-x/manifest.json") and not inner.exists("rollouts/base/gate-y")
        inner.write_json("evaluation/composed.json", {})
        assert not workdir.exists("evaluation/composed.json")
        assert inner.list("rollouts", own=True) == [] and inner.list("rollouts") == ["rollouts/base/gate-x/manifest.json"]
        workdir.write_json("capabilities/1/adapters/y.json", {"y": 1})
        other = workdir.within("capabilities/2", {"adapters/z": "adapters/x", "mine": "capabilities/1/evaluation"})
        assert other.read_json("adapters/z/summary.json") == {"x": 1} and other.list() == [
            "adapters/z/summary.json",
            "config.json",
            "mine/composed.json",
            "shared.json",
        ]
        assert other.place("mine/composed.json") == workdir.place("capabilities/1/evaluation/composed.json")
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    with Workdir.open(moved / "capabilities/1") as inner:  # by itself, and elsewhere
        assert inner.read_json("adapters/x/summary.json") == {"x": 1} and inner.local("adapters/x/summary.json").exists()
        with pytest.raises(InputError, match="in use by"):
            Workdir.open(moved)
    Workdir.open(moved).close()


@pytest.mark.parametrize(
    "text", ["[1]", '{"levels": "a", "names": {}}', '{"levels": 0, "names": {"a": "a"}}', '{"levels": 1, "names": {"a": "../../etc"}}']
)
def test_what_another_wrote_of_a_shared_workdir_is_refused(tmp_path, text):
    with Workdir.open(tmp_path / "run", load_config("quickstart")) as workdir:
        workdir.within("rounds/2").write_bytes("shared.json", text.encode())
    with pytest.raises(InputError, match="shared.json: not written by trace-jax"):
        Workdir.look(tmp_path / "run/rounds/2")
