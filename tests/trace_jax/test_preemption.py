"""Several processes that are killed, preempted and started again make the run of processes that nothing disturbed, to the last byte.

A launcher like that of a pod starts all processes again until all have ended with 0. The workdir is in a folder, or in a bucket.
"""

import contextlib
import dataclasses
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests import gcs
from tests.devices import environment
from tests.rl.test_learner_mesh import free_port
from tests.trace_jax import tiny
from tests.trace_jax.test_run import command, differences
from trace_jax.config import ROOT
from trace_jax.stores import open_store

GO_ON = "what was done is saved, the same command goes on from there"


@dataclasses.dataclass(frozen=True)
class Folder:
    """Workdirs on a disk that all processes share."""

    root: pathlib.Path

    def address(self, name: str) -> str:
        """What `--workdir` is given."""
        return str(self.root / name)

    def copy(self, name: str) -> pathlib.Path:
        """A local folder with all files of a workdir."""
        return self.root / name

    def shards(self, name: str) -> int:
        """How many parts of shards it holds: how far the run is."""
        return len(list((self.root / name).glob("rollouts/*/*/*.zst")))


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Workdirs in a bucket, and a folder for copies and logs."""

    url: str
    root: pathlib.Path

    def address(self, name: str) -> str:
        return f"{self.url}/{name}"

    def copy(self, name: str) -> pathlib.Path:
        store = open_store(self.address(name))
        for file in store.list(""):
            path = self.root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read(file))
        return self.root / name

    def shards(self, name: str) -> int:
        return sum(file.endswith(".zst") for file in open_store(self.address(name)).list("rollouts"))


@dataclasses.dataclass
class Launch:
    """One attempt: all processes of the run, each with its standard error in a file."""

    processes: list[subprocess.Popen]
    logs: list[pathlib.Path]

    def wait(self, seconds: float) -> list[int]:
        """The exit codes, when all have ended."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        return [process.returncode for process in self.processes]

    def last_lines(self) -> list[str]:
        """What each said last on standard error."""
        return [(log.read_text(errors="replace").strip() or " ").splitlines()[-1] for log in self.logs]


@contextlib.contextmanager
def launched(config: pathlib.Path, address: str | pathlib.Path, count: int, logs: pathlib.Path) -> Iterator[Launch]:
    """Starts `count` processes of one run; what still runs at the end is killed."""
    logs.mkdir(parents=True, exist_ok=True)
    flags = [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}"]
    launch = Launch([], [logs / f"{index}.log" for index in range(count)])
    try:
        for index, log in enumerate(launch.logs):
            words = [sys.executable, "-m", "trace_jax", *command(config, address, *flags, f"--process_id={index}")]
            with log.open("w") as file:
                started = subprocess.Popen(words, env=environment(1) | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, stdout=file, stderr=file)
            launch.processes.append(started)
        yield launch
    finally:
        for process in launch.processes:
            process.kill()
            process.wait()


def until(launch: Launch, place: Folder | Bucket, name: str, count: int) -> None:
    """Waits until so many parts of shards are stored."""
    deadline = time.monotonic() + 900
    while place.shards(name) < count:
        ended = [process.poll() for process in launch.processes]
        assert not any(code is not None for code in ended), (ended, launch.last_lines())
        assert time.monotonic() < deadline, f"{place.shards(name)} of {count} shards"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def config(tmp_path_factory, checkpoint) -> pathlib.Path:
    return tiny.write_config(tmp_path_factory.mktemp("preemption") / "config.py", checkpoint)


@pytest.fixture(scope="module", params=["folder", "bucket"])
def place(request, config) -> Iterator[Folder | Bucket]:
    if request.param == "folder":
        yield Folder(config.parent)
        return
    with gcs.server() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in gcs.SETTINGS.items():
            patch.setenv(name, value.format(url))
        yield Bucket(gcs.Bucket().url, config.parent / "bucket")


COUNT = 4


@pytest.fixture(scope="module")
def calm(config) -> pathlib.Path:
    """The workdir of a run of four processes that nothing disturbed."""
    with launched(config, config.parent / "calm", COUNT, config.parent / "calm-logs") as launch:
        assert launch.wait(1800) == [0] * COUNT, launch.last_lines()
    return config.parent / "calm"


@pytest.mark.slow
def test_four_processes_of_which_one_is_killed_again_and_again_end_as_if_none_had_been(config, place, calm):
    name, total, chance = "killed", Folder(calm.parent).shards(calm.name), random.Random(0)
    for attempt, lost in enumerate(chance.sample(range(COUNT), COUNT)):  # process 0 too
        with launched(config, place.address(name), COUNT, place.root / f"{name}-logs" / str(attempt)) as launch:
            until(launch, place, name, max(1, total * attempt // 4))
            time.sleep(chance.random() * 3)
            launch.processes[lost].kill()
            began = time.monotonic()
            codes = launch.wait(60)
            assert codes.pop(lost) == -signal.SIGKILL and set(codes) == {1}, (codes, launch.last_lines())
            assert time.monotonic() - began < 30
            lines = launch.last_lines()
            lines.pop(lost)
            assert all(f"process {lost} on host" in line and "is lost" in line and GO_ON in line for line in lines), lines
    with launched(config, place.address(name), COUNT, place.root / f"{name}-logs" / "last") as launch:
        assert launch.wait(1800) == [0] * COUNT, launch.last_lines()
    assert differences(place.copy(name), calm) == []


@pytest.mark.slow
def test_one_process_that_is_preempted_ends_all_within_the_time_of_grace_and_they_go_on(config, place, calm):
    name, total, chance, took = "preempted", Folder(calm.parent).shards(calm.name), random.Random(7), []
    for attempt in range(4):
        with launched(config, place.address(name), COUNT, place.root / f"{name}-logs" / str(attempt)) as launch:
            until(launch, place, name, max(1, total * attempt // 4))
            time.sleep(chance.random() * 3)
            launch.processes[attempt].send_signal(signal.SIGTERM)
            began = time.monotonic()
            codes = launch.wait(60)
            took.append(time.monotonic() - began)
            assert codes == [128 + signal.SIGTERM] * COUNT, (codes, launch.last_lines())
            assert all(line == f"trace-jax: terminated; {GO_ON}" for line in launch.last_lines()), launch.last_lines()
    assert max(took) < 25, took
    print(f"seconds from SIGTERM to the end of the last process: {', '.join(f'{seconds:.1f}' for seconds in took)}")
    with launched(config, place.address(name), COUNT, place.root / f"{name}-logs" / "last") as launch:
        assert launch.wait(1800) == [0] * COUNT, launch.last_lines()
    assert differences(place.copy(name), calm) == []
