"""A bucket holds what a folder holds, whatever the network does to the requests."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from google.auth.exceptions import RefreshError, TransportError
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from tests import faulty_gcs, gcs
from tests.trace_jax.test_workdir import trajectory
from trace_jax.config import ROOT, Config, load_config
from trace_jax.errors import InputError
from trace_jax.stores import lease, objects, open_store
from trace_jax.stores.protocol import StoreFailed
from trace_jax.workdir import Workdir, stored_config


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    with faulty_gcs.proxy(tmp_path_factory.mktemp("objects")) as found:
        yield found


@pytest.fixture
def address(proxy, monkeypatch):
    """A prefix of an empty bucket, behind the proxy."""
    for name, value in gcs.SETTINGS.items():
        monkeypatch.setenv(name, value.format(proxy.url))
    proxy.rule = lambda method, path: None
    yield f"{gcs.Bucket().url}/runs/one"
    proxy.rule = lambda method, path: None


@pytest.fixture(params=["folder", "bucket"])
def store(request, tmp_path):
    store = open_store(tmp_path / "run" if request.param == "folder" else request.getfixturevalue("address"))
    store.make()
    yield store
    store.close()


def test_a_store_holds_files_folders_and_lines(store):
    assert not store.exists("a") and store.list("") == []
    with pytest.raises(FileNotFoundError):
        store.read("a/b.json")
    store.write("a/b.json", b"1")
    store.write("a/b.json", b"22")
    store.write("ab.json", b"")
    for line in (b"one\n", b"two\n", b"three\n"):
        store.append("a/lines.jsonl", line)
    assert store.read("a/b.json") == b"22" and store.read("a/lines.jsonl") == b"one\ntwo\nthree\n" and store.read("ab.json") == b""
    assert store.exists("a") and store.exists("a/b.json") and not store.exists("a/b")
    assert store.list("") == ["a/b.json", "a/lines.jsonl", "ab.json"] and store.list("a") == ["a/b.json", "a/lines.jsonl"]
    store.remove("a")
    store.remove("a")
    assert store.list("") == ["ab.json"]
    for name in ("/a", "a/../../b", ""):
        with pytest.raises(ValueError, match="not a name inside"):
            store.write(name, b"")


def test_the_mark_of_a_file_changes_when_the_file_does(store):
    store.write("a/file", b"one")
    store.write("other", b"one")
    before = store.marks("")
    assert list(before) == store.list("") == ["a/file", "other"] and store.marks("none") == {}
    assert store.marks("") == before and store.marks("a") == {"a/file": before["a/file"]}
    store.write("a/file", b"two")
    after = store.marks("")
    assert after["other"] == before["other"] and after["a/file"] != before["a/file"]


def test_libraries_write_and_read_files_of_this_machine(store):
    def write(path):
        (path / "deep").mkdir(parents=True, exist_ok=True)
        (path / "deep/weights").write_bytes(bytes(range(256)) * 5000)
        (path / "config.json").write_text("{}")

    store.produce("made/it", write)
    store.produce("made/one", lambda path: path.write_text("one"))
    assert store.list("made") == ["made/it/config.json", "made/it/deep/weights", "made/one"]
    assert (store.local("made/it") / "deep/weights").read_bytes() == bytes(range(256)) * 5000
    store.write("made/it/config.json", b"[]")
    store.remove("made/it/deep")
    folder = store.local("made/it")
    assert (folder / "config.json").read_text() == "[]" and not (folder / "deep/weights").exists()
    assert store.local("made/one").read_text() == "one" and not store.local("nothing").exists()


def test_the_copy_of_a_folder_that_became_a_file_of_its_name_makes_way_for_it(monkeypatch):
    store, held = open_store("gs://bucket/run"), {}  # the emulator cannot hold x after x/a

    def download(name, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)

    monkeypatch.setattr(store, "_objects", types.SimpleNamespace(list=lambda prefix: held, download=download))
    for generation, names in enumerate((["x/a/b", "y"], ["x/a", "y/c/d"], ["x", "y/c"], ["x/a/b", "y"])):
        held = {f"run/{name}": types.SimpleNamespace(generation=generation) for name in names}
        assert [store.local(name).read_text() for name in names] == list(held)
        assert store.local("x").is_dir() == (names[0] != "x")
    store.close()


def test_logs_have_their_place_when_the_store_is_closed(store):
    store.log("stall.log").write_text("one\n")
    with store.log("events/gate/x").open("w") as file:
        file.write("events")
    store.close()
    again = open_store(store.address)
    assert again.read("stall.log") == b"one\n" and again.read("events/gate/x") == b"events"
    with again.log("stall.log").open("a") as file:
        file.write("two\n")
    again.close()
    assert open_store(store.address).read("stall.log") == b"one\ntwo\n"


def test_a_folder_of_the_store_is_a_store(store):
    inner = store.at("rounds/2")
    inner.write("x", b"1")
    assert store.read("rounds/2/x") == b"1" and inner.at("../..").list("") == ["rounds/2/x"]


@pytest.mark.parametrize("fault", ["lost", "torn", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("503", "refused", "slow"))])
def test_every_request_may_fail_once(address, proxy, fault, monkeypatch):
    monkeypatch.setattr(objects, "_PART", DEFAULT_RETRY.with_timeout(1.0))  # the emulator does not know what it has of a cut upload
    seen = set()

    def once(method, path):
        request = (method, path.partition("upload_id")[0])
        new = request not in seen
        seen.add(request)
        return fault if new else None

    store = open_store(address)
    proxy.rule = once
    for number in range(3):
        store.append("lines.jsonl", b"%d\n" % number)
    store.write("a", b"1" * 1000)
    store.produce("b", lambda path: path.write_bytes(b"2" * 9_000_000))  # resumable
    assert store.read("lines.jsonl") == b"0\n1\n2\n"
    assert store.read("a") == b"1" * 1000 and store.local("b").read_bytes() == b"2" * 9_000_000
    store.remove("a")
    assert store.list("") == ["b", "lines.jsonl"]
    assert not [name for name in objects.Objects(address.split("/")[2]).list("") if ".tmp-" in name]


def test_nothing_is_lost_or_doubled_when_a_fifth_of_the_requests_fails(address, proxy):
    with Workdir.open(address, load_config("quickstart")) as workdir:
        proxy.rule = faulty_gcs.at_random(0.2, seed=3)
        for index in range(8):
            workdir.append_jsonl("gate/metrics.jsonl", {"step": index})
            workdir.write_shard("base", "train", index, [trajectory(index)])
        assert [record["step"] for record in workdir.read_jsonl("gate/metrics.jsonl")] == list(range(8))
        assert [t.id for t in workdir.read_shards("base", "train")] == [f"task-{i}" for i in range(8)]
    assert min(proxy.done.values()) > 0


@pytest.mark.parametrize(
    "variable, value, why",
    [
        ("STORAGE_EMULATOR_HOST", "localhost:4443", "no address with http:// or https://"),
        ("GOOGLE_APPLICATION_CREDENTIALS", ".", "Is a directory; give the file of a key"),
    ],
)
def test_an_environment_that_cannot_be_used_is_bad_input(variable, value, why, monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=f"^{variable}={re.escape(value)}: {why}"):
        Workdir.open("gs://bucket/run")


def test_the_store_may_be_away_for_a_while(address, proxy):
    store = open_store(address)
    store.write("a", b"1")
    proxy.emulator.kill()
    back = threading.Timer(1.5, proxy.emulator.start)
    back.start()
    store.write("a", b"2")
    store.append("b", b"line\n")
    back.join()
    assert store.read("a") == b"2" and store.read("b") == b"line\n"


def test_a_store_that_stays_away_ends_the_run(address, proxy, monkeypatch):
    monkeypatch.setattr(objects, "PATIENCE", 0.5)
    store = open_store(address)
    proxy.rule = lambda method, path: "503"
    with pytest.raises(StoreFailed, match=r"gs://.*/runs/one/a: no answer within 0 s .*503.*the same command goes on"):
        store.read("a")


def test_what_was_damaged_on_the_way_is_read_again(address, proxy):
    store = open_store(address)
    store.write("a", b"1" * 100_000)
    damaged = []

    class Damaging(faulty_gcs._Handler):
        def _answer(self, status, headers, data, torn=False):
            if self.command == "GET" and len(data) == 100_000 and not damaged:
                damaged.append(1)
                data = b"2" + data[1:]
            super()._answer(status, headers, data, torn)

    handler, Damaging.proxy = proxy._server.RequestHandlerClass, proxy
    proxy._server.RequestHandlerClass = Damaging
    try:
        assert open_store(address).read("a") == b"1" * 100_000 and damaged
    finally:
        proxy._server.RequestHandlerClass = handler


def test_what_cannot_be_used_is_said_at_once(address):
    with pytest.raises(InputError, match=r"no bucket 'nobody-made-this'; give another, or make it with `gcloud storage buckets create"):
        Workdir.open("gs://nobody-made-this/run", Config())
    with pytest.raises(InputError, match="no bucket 'nobody-made-this'"):
        stored_config("gs://nobody-made-this/run")


@pytest.mark.parametrize("prefix", ["a#b", "a?b=c", "a//b", "a/./b", "a/../b", "a*", "a[1]"])
def test_a_prefix_that_libraries_take_for_something_else_is_refused(prefix):
    with pytest.raises(InputError, match="give a prefix without"):
        open_store(f"gs://bucket/{prefix}")


def test_a_line_is_put_behind_the_last_whole_one(address):
    objects.Objects(address.split("/")[2]).put(f"{address.split('/', 3)[3]}/a.jsonl", b"one\ntw", 0)
    store = open_store(address)
    for line in (b"two\n", b"three\n"):
        store.append("a.jsonl", line)
    assert store.read("a.jsonl") == b"one\ntwo\nthree\n"


def test_what_only_read_a_log_does_not_write_it_again(address):
    first, other = open_store(address), open_store(address)
    first.write("stall.log", b"old\n")
    other.log("stall.log")
    first.write("stall.log", b"old\nnew\n")
    other.close()
    assert first.read("stall.log") == b"old\nnew\n"


def test_placeholders_of_folders_are_no_files(address):
    objects.Objects(address.split("/")[2]).put(f"{address.split('/', 3)[3]}/adapters/x/", b"", 0)
    store = open_store(address)
    store.write("adapters/x/y", b"1")
    assert store.list("") == ["adapters/x/y"] and (store.local("adapters") / "x/y").read_bytes() == b"1"


@pytest.mark.parametrize("status", [408, 410])
def test_errors_that_pass_are_asked_again(address, proxy, status):
    store, once = open_store(address), [status]
    handler = type("Failing", (faulty_gcs._Handler,), {"proxy": proxy})
    usual, proxy._server.RequestHandlerClass = proxy._server.RequestHandlerClass, handler
    handler._pass_on = handler._pass
    handler.do_POST = lambda self: self.fail(once.pop()) if once else self._pass_on()
    handler.fail = lambda self, code: (self.rfile.read(int(self.headers["content-length"])), self._answer(code, [], b"{}"))
    try:
        store.write("a", b"1")
        assert store.read("a") == b"1" and not once
    finally:
        proxy._server.RequestHandlerClass = usual


def test_credentials_that_cannot_be_renewed_for_a_moment_are_asked_again(address, monkeypatch):
    store, real, failures = open_store(address), storage.Bucket.get_blob, [RefreshError(TransportError("metadata server"))]

    def get_blob(*args, **settings):
        if failures:
            raise failures.pop()
        return real(*args, **settings)

    store.write("a", b"1")
    monkeypatch.setattr(storage.Bucket, "get_blob", get_blob)
    assert store.exists("a") and not failures
    failures.append(RefreshError("revoked"))
    with pytest.raises(InputError, match="no credentials"):
        store.exists("a")


STAY = """
import signal, sys, time
from trace_jax import cli
from trace_jax.stores import lease
lease.RENEW = 0.2
def main(arguments):
    print("held", flush=True)
    time.sleep(1000)
import trace_jax.report
trace_jax.report.main = main
cli.COMMANDS["report"] = cli.dataclasses.replace(cli.COMMANDS["report"], lock=True)
sys.exit(cli.main(["report", "--config=quickstart", f"--workdir={sys.argv[1]}"]))
"""


def test_a_process_that_is_told_to_end_does_so_while_the_store_is_away(address, proxy):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", STAY, address], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "held\n"
    proxy.rule = lambda method, path: "503"
    time.sleep(1.5)  # its lease is being asked for
    began = time.monotonic()
    process.terminate()
    assert process.wait(60) == 143 and time.monotonic() - began < 20


def test_a_lease_counts_from_when_it_was_asked_for(address, proxy, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 600.0)
    monkeypatch.setattr(lease, "TERM", 0.25)
    with Workdir.open(address, Config()) as workdir:
        held = workdir._store._session.lease
        proxy.rule = lambda method, path: "slow"  # 0.3 s
        held.renew()
        asked = held._generation
        held.check()  # so its term is over again
        assert held._generation != asked
        proxy.rule = lambda method, path: None


def test_a_command_beside_the_run_may_write_what_the_run_writes(address):
    with Workdir.open(address, Config()) as run, Workdir.open(address, lock=False) as report:
        run.write_bytes("report.html", b"1")
        report.write_bytes("report.html", b"2")
        run.write_bytes("report.html", b"3")
        assert report.read_bytes("report.html") == b"3"


HOLD = """
import sys, time
from trace_jax.stores import lease
from trace_jax.workdir import Workdir
lease.RENEW = 0.2
with Workdir.open(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(address):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", HOLD, address], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_with_the_owner_s_name_and_a_killed_one_does_not_block(address, holder):
    with pytest.raises(InputError, match=rf"in use by pid {holder.pid} on host .+ since \d{{4}}-"):
        Workdir.open(address, Config())
    with Workdir.open(address, lock=False) as workdir:
        assert not workdir.exists("config.json")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    began = time.monotonic()
    with Workdir.open(address, Config()) as workdir:  # of this machine: it can be seen to be gone
        assert workdir.exists("config.json") and time.monotonic() - began < 5
    Workdir.open(address, Config()).close()


def test_of_another_machine_it_is_taken_after_its_term(address, holder, monkeypatch):
    monkeypatch.setattr(lease, "_gone", lambda holder: False)
    monkeypatch.setattr(lease, "TERM", 2.0)
    monkeypatch.setattr(lease, "_LOOK", 0.1)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    began = time.monotonic()
    with Workdir.open(address, Config()) as workdir:
        assert time.monotonic() - began >= 2.0 and workdir.exists("config.json")


def test_a_run_that_was_stopped_and_taken_over_writes_nothing_more(address, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 600.0)  # as if its thread did not run
    monkeypatch.setattr(lease, "TERM", 0.3)
    monkeypatch.setattr(lease, "_LOOK", 0.1)
    monkeypatch.setattr(lease, "_gone", lambda holder: False)
    stopped = Workdir.open(address, Config())
    stopped.write_bytes("gate/x", b"1")
    with Workdir.open(address, Config()) as new:
        new.write_bytes("gate/x", b"2")
        for write in (lambda: stopped.write_bytes("gate/x", b"3"), lambda: stopped.append_jsonl("gate/new", {})):
            with pytest.raises(StoreFailed, match="was taken over by pid"):
                write()
        stopped.close()
        assert new.read_bytes("gate/x") == b"2" and not new.exists("gate/new")
        new.write_bytes("gate/x", b"4")  # the old one's end did not give this one's lease back
        with pytest.raises(InputError, match="in use by"):
            monkeypatch.setattr(lease, "TERM", 60.0)
            new_lease = new._store._session.lease
            threading.Timer(0.2, new_lease.renew).start()
            Workdir.open(address, Config())


def test_what_a_killed_writer_left_is_swept(address):
    name = f"{address.split('/', 3)[3]}/gate/{'.tmp-'}x-metrics.jsonl"
    bucket = objects.Objects(address.split("/")[2])
    bucket.put(name, b"x", 0)
    with Workdir.open(address, Config()) as workdir:
        assert workdir.list() == ["config.json"]
    assert bucket.stat(name) is None


def test_a_damaged_shard_is_named(address):
    with Workdir.open(address, load_config("quickstart")) as workdir:
        workdir.write_shard("base", "train", 0, [trajectory(0)])
        manifest = workdir.read_json("rollouts/base/train/manifest.json")
        manifest["shards"]["00000"]["crc32c"] ^= 1
        workdir.write_bytes("rollouts/base/train/manifest.json", json.dumps(manifest).encode())
        with pytest.raises(InputError, match=r"gs://.*00000\.jsonl\.zst: not the size and the crc32c"):
            list(workdir.read_shards("base", "train"))
