"""The viewer beside a workdir that is damaged, incomplete, or still growing: what cannot be read is a notice, and hides nothing else."""

import dataclasses
import json

import google_crc32c
import pytest
import zstandard

from tests.trace_jax.view import made
from tests.trace_jax.view.made import get, opened, said
from trace_jax.config import Config
from trace_jax.view.shards import Shards
from trace_jax.workdir import Workdir


@pytest.fixture
def fresh(tmp_path):
    """A workdir of four rollouts in two shards."""
    with Workdir.open(tmp_path / "run", Config()) as workdir:
        for shard in range(2):
            workdir.write_shard("base", "train", shard, [made.light(shard * 2 + n) for n in range(2)])
    return tmp_path / "run"


def test_a_damaged_shard_is_a_notice_that_names_it(fresh):
    shard = fresh / "rollouts/base/train/00001.jsonl.zst"
    shard.write_bytes(shard.read_bytes()[:-3])
    with opened(fresh) as client:
        assert "4 rollouts" in said(get(client, "/"))  # by its index
        assert "train/00001.jsonl.zst: damaged" in said(get(client, "/rollout/rollouts/base/train/00001/0", 500))
    (fresh / "rollouts/base/train/00001.index.json").unlink()
    with opened(fresh) as client:
        page = said(get(client, "/"))
        assert "2 rollouts" in page and "train/00001.jsonl.zst: damaged" in page and "roll out again" in page


@pytest.mark.parametrize("damage", [b"{", b'{"crc32c": 5, "trajectories": []}', None])
def test_an_index_that_is_damaged_or_of_another_shard_does_not_count(fresh, damage):
    index = fresh / "rollouts/base/train/00001.index.json"
    found = json.loads(index.read_text())
    found["trajectories"][0]["turns"] = "many"
    index.write_bytes(damage or json.dumps(found).encode())
    with opened(fresh) as client:
        page = said(get(client, "/"))
        assert "4 rollouts" in page and ("00001.index.json: damaged" in page) == (damage != b'{"crc32c": 5, "trajectories": []}')


@pytest.mark.parametrize("file", ["rollouts/base/train/manifest.json", "diagnosis/evidence.jsonl", "diagnosis/mined.json"])
def test_other_damaged_files_are_notices_too(fresh, file):
    (fresh / file).parent.mkdir(exist_ok=True)
    (fresh / file).write_text('{"a": \n')
    with opened(fresh) as client:
        assert file in said(get(client, "/"))


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("rollouts/base/train/manifest.json", "[]"),
        ("rollouts/base/train/manifest.json", DEEP),
        ("rollouts/base/train/manifest.json", '{"shards": {"00000": {"bytes": 1, "crc32c": [1]}}}'),
        ("rollouts/base/train/manifest.json", '{"shards": {"../../../00000": {"bytes": 1, "crc32c": 1}}}'),
        ("rollouts/base/train/00000.index.json", '{"crc32c": CRC, "trajectories": [{"policy": {"name": "base", "version": 1e999}}]}'),
        ("rollouts/base/train/00000.index.json", DEEP),
        ("diagnosis/evidence.jsonl", "[1]\n"),
        ("diagnosis/evidence.jsonl", DEEP + "\n"),
        ("diagnosis/evidence.jsonl", '{"trajectory": "a", "capability": "b", "value": 1, "message_index": 0, "reason": ""}\n'),
        ("diagnosis/mined.json", "[]"),
        ("diagnosis/mined.json", '{"results": 5}'),
    ],
)
def test_what_others_wrote_in_our_files_is_a_notice_too(fresh, file, text):
    (fresh / file).parent.mkdir(exist_ok=True)
    manifest = json.loads((fresh / "rollouts/base/train/manifest.json").read_text())
    (fresh / file).write_text(text.replace("CRC", str(manifest["shards"]["00000"]["crc32c"])))
    with opened(fresh) as client:
        assert file in said(get(client, "/"))


@pytest.mark.parametrize(
    "change",
    [
        {"messages": ["text"]},
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        {"checks": {"db": {}}},
        {"policy": "base"},
        {"error": "outage", "reward": None},
        {"metrics": {"a": "b"}},
        {"reward": "1"},
        {"stop_reason": []},
        {"loss_mask": ["x"], "tokens": [1], "logprobs": [0], "turns": [0], "versions": [0]},
        {"hint": DEEP},
    ],
    ids=str,
)
def test_a_line_that_is_no_trajectory_is_named_and_stops_no_other(fresh, change):
    folder = fresh / "rollouts/base/train"
    manifest = json.loads((folder / "manifest.json").read_text())
    lines = [made.light(0).to_json(), made.light(1).to_json() | change]
    data = zstandard.compress("".join(json.dumps(line) + "\n" for line in lines).replace(f'"{DEEP}"', DEEP).encode())
    (folder / "00000.jsonl.zst").write_bytes(data)
    manifest["shards"]["00000"] |= {"bytes": len(data), "crc32c": google_crc32c.value(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for index in folder.glob("*.index.json"):  # so that both shards are read, one behind the other
        index.unlink()
    with opened(fresh) as client:
        page = said(get(client, "/"))
        assert "00000.jsonl.zst, line 2: trajectory 'desk:0#1'" in page or "line 2: maximum recursion depth" in page
        assert "2 rollouts" in page  # of the other shard


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_ours_in_one_file_hides_no_other(fresh, monkeypatch):
    for index in (fresh / "rollouts/base/train").glob("*.index.json"):
        index.unlink()
    read = Shards.read
    monkeypatch.setattr(Shards, "read", lambda self, shard: 1 / 0 if "00000" in shard.name else read(self, shard))
    with opened(fresh) as client:
        page = said(get(client, "/"))
        assert "2 rollouts" in page and "being read" not in page


def test_an_environment_with_a_name_of_a_megabyte_is_cut(tmp_path):
    with Workdir.open(tmp_path, Config()) as workdir:
        workdir.write_shard("base", "train", 0, [dataclasses.replace(made.light(n), environment="x" * 1_000_000) for n in range(9)])
    with opened(tmp_path) as client:
        assert len(get(client, "/")) < 50_000


def test_texts_of_tokens_and_names_of_slots_that_are_none_are_left_aside(tmp_path):
    made.fill(tmp_path / "run")
    for file, text in (("pieces", '[1, "a"]'), ("routing", '{"slots": [[1]]}')):
        (tmp_path / "run/gate" / f"{file}.json").write_text(text)
    with opened(tmp_path / "run") as client:
        assert "[" in get(client, "/rollout/rollouts/composed/heldout/00000/0")


def test_links_are_followed_where_a_run_has_its_folders(fresh, tmp_path):
    (fresh / "rollouts/base/round").symlink_to(fresh / "rollouts/base/round")  # leads nowhere
    (fresh / "everything").symlink_to("/")
    (fresh / "rollouts").rename(tmp_path / "larger")
    (fresh / "rollouts").symlink_to(tmp_path / "larger")
    with opened(fresh) as client:
        page = said(get(client, "/"))
        assert "4 rollouts" in page and "not to be read" not in page


def test_a_shard_that_cannot_be_opened_is_said(fresh):
    shard = fresh / "rollouts/base/train/00001.jsonl.zst"
    shard.unlink()
    shard.mkdir()
    with opened(fresh) as client:
        assert "00001.jsonl.zst" in said(get(client, "/rollout/rollouts/base/train/00001/0", 503))


def test_the_list_follows_a_run_that_is_under_way(fresh):
    with opened(fresh) as client, Workdir.open(fresh, lock=False) as run:
        client.rollouts._fresh = 0
        run.write_shard("base", "train", 2, [made.light(8)])
        assert "5 rollouts" in said(get(client, "/"))
        run.write_shard("base", "train", 0, [made.light(n) for n in range(20, 23)])  # it was removed, and rolled out again
        assert "6 rollouts" in said(get(client, "/"))
        assert "desk:5#1" in said(get(client, "/rollout/rollouts/base/train/00000/1"))
        run.remove("rollouts/base/train")
        assert "There are no rollouts here yet" in said(get(client, "/"))
