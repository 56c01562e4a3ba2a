"""The small file beside a shard says of each rollout what a list shows."""

import json

import google_crc32c
import numpy as np
import pytest

from rl.trajectory import Trajectory
from tests.trace_jax import example_run
from trace_jax.config import Config
from trace_jax.rollout_index import decode_index, encode_index, entry, index_of
from trace_jax.workdir import Workdir


def test_an_entry_tells_what_a_list_shows():
    t = example_run.trajectory(3, tokens=60, slots=2)
    assert entry(t) == {
        "id": "desk:3#0",
        "task_id": "desk:3",
        "environment": "desk",
        "seed": 3,
        "group": "",
        "trial": 0,
        "policy": {"name": "", "version": 0},
        "reward": 1.0,
        "success": True,
        "stop_reason": "done",
        "turns": 2,
        "tokens": int(np.sum(t.loss_mask)),
        "error": None,
        "hinted": False,
    }
    failed = Trajectory(id="a", environment="b", task_id="c", error={"kind": "crash", "message": "long"}, hint={"text": "h"})
    assert (entry(failed)["error"], entry(failed)["tokens"], entry(failed)["hinted"]) == ("crash", None, True)


def test_a_shard_is_written_with_its_index(tmp_path):
    written = [example_run.trajectory(n, tokens=30, slots=2) for n in range(3)]
    with Workdir.open(tmp_path, Config()) as workdir:
        workdir.write_shard("adapter:x", "train", 4, written)
        shard = workdir.read_bytes("rollouts/adapter-x/train/00004.jsonl.zst")
        index = workdir.read_bytes(index_of("rollouts/adapter-x/train/00004.jsonl.zst"))
        assert decode_index(index, google_crc32c.value(shard)) == [entry(t) for t in written]
        assert workdir.shards("adapter:x", "train") == [4] and len(list(workdir.read_shards("adapter:x", "train"))) == 3


def test_an_index_of_another_shard_does_not_count():
    index = encode_index([example_run.trajectory(0)], 17)
    assert decode_index(index, 18) is None and decode_index(index, None) is None
    for damaged in (index[:-2], b"[]", json.dumps({"crc32c": 17}).encode()):
        with pytest.raises((ValueError, KeyError, TypeError)):
            decode_index(damaged, 17)
