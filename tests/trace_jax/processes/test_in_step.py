"""How processes find each other, and that a workdir is one for all of them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.devices import environment
from tests.rl.test_learner_mesh import free_port
from trace_jax.errors import InputError, Unfinished
from trace_jax.processes import Processes, job
from trace_jax.processes.job import Job, find_job

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],other3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    "flags, variables, job",
    [
        ((None, None, None), {}, None),
        (("host:1234", 2, 0), JAX, Job("host:1234", 2, 0)),  # flags come first
        (("auto", None, None), {}, Job()),
        ((None, None, None), JAX, Job("h:1", 2, 1)),
        ((None, None, None), SLURM, Job("gpu07:61441", 4, 2)),
        ((None, None, None), SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}, Job("gpu07:61441", 4, 2, (1,))),
        ((None, None, None), SLURM | {"SLURM_STEP_NODELIST": "one,two", "SLURM_STEP_TASKS_PER_NODE": "1"}, Job("one:61441", 4, 2)),
        ((None, None, None), SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ((None, None, None), {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script, not a step of its
        ((None, None, None), {"OMPI_COMM_WORLD_SIZE": "2"}, Job()),
        ((None, None, None), {"TPU_WORKER_HOSTNAMES": "a,b"}, Job()),
        ((None, None, None), {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ],
)
def test_flags_or_environment_say_how_the_others_are_found(flags, variables, job):
    assert find_job(*flags, variables) == job


@pytest.mark.parametrize(
    "flags, variables, complaint",
    [
        (("host:1", 2, None), {}, "--process_id is missing: --coordinator=HOST:PORT, --num_processes, --process_id go together"),
        ((None, 2, 0), {}, "--coordinator=HOST:PORT is missing"),
        (("host", 2, 0), {}, "'host' is no HOST:PORT"),
        (("host:1", 2, 2), {}, "--process_id: 2 is not within 0..1"),
        (("auto", 2, None), {}, "leave them out"),
        ((None, None, None), JAX | {"JAX_PROCESS_ID": "x"}, "JAX_PROCESS_ID: 'x' is no number"),
        ((None, None, None), {"JAX_COORDINATOR_ADDRESS": "h:1"}, "JAX_NUM_PROCESSES is missing"),
    ],
)
def test_what_is_missing_or_wrong_is_named(flags, variables, complaint):
    with pytest.raises(InputError, match=re.escape(complaint)):
        find_job(*flags, variables)


def test_a_process_without_a_process_0_says_so(monkeypatch):
    monkeypatch.setattr(job, "_JOIN", 0)
    with pytest.raises(Unfinished, match=r"nobody answers at 127.0.0.1:\d+, where process 0 should be .* start all processes"):
        job.join(Job(f"127.0.0.1:{free_port()}", 2, 1))


@pytest.mark.parametrize("groups, count", [(10, 4), (3, 4), (0, 2), (64, 1)])
def test_shares_in_order_are_all_groups_in_order(groups, count):
    shares = [list(Processes(index, count).share(groups)) for index in range(count)]
    assert sum(shares, []) == list(range(groups))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


PROGRAM = """
import errno, json, sys
import jax, numpy as np
from envs.base import EnvironmentFault, SandboxError
from model import CausalLM
from model.parameters import lay_out
from trace_jax.config import MeshSection, load_config
from trace_jax.errors import InputError
from trace_jax.runtime.mesh import local_copy, make_mesh
from trace_jax.processes.job import Job, join
from trace_jax.workdir import Workdir
from tests.model import tiny
from tests.trace_jax.test_workdir import trajectory

folder, index, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
processes = join(Job(f"127.0.0.1:{port}", 2, index))
assert (processes.index, processes.count, processes.leads) == (index, 2, index == 0)
found = {}

# what process 0 says, all hear, and what it raises, all raise
found["agreed"] = [processes.agree(lambda: value) for value in ({"index": index}, None, [index, "x"] * 5000)]
found["bytes"] = processes.agree(lambda: bytes([index, 255]) * 3).hex()
found["nested"] = processes.agree(lambda: processes.agree(lambda: index))
found["gathered"] = processes.gather(index + 1, (index + 1) << 40)
found["same"] = processes.same({"a": np.full(3, index)})["a"].tolist()
faults = SandboxError("no worker starts"), EnvironmentFault("crash", "it ended")
for error in (InputError("field 'x': wrong"), OSError(errno.ENOSPC, "No space", "file"), *faults):
    def fail():
        raise error
    try:
        processes.agree(fail)
    except (InputError, OSError, SandboxError, EnvironmentFault) as raised:
        found[type(error).__name__] = [type(raised).__name__, str(raised), getattr(raised, "kind", None)]

# one workdir
with Workdir.open(folder, load_config("quickstart"), processes=processes) as workdir:
    workdir.write_json("who.json", {"index": index})
    workdir.append_jsonl("lines.jsonl", {"index": index})
    found["who"], found["lines"], found["exists"] = workdir.read_json("who.json"), workdir.read_jsonl("lines.jsonl"), workdir.exists("none")
    workdir.produce("made/file", lambda path: path.write_text(str(index)))
    found["made"] = (workdir.local("made") / "file").read_text()
    workdir.write_shard("base", "train", 0, [trajectory(index * 2), trajectory(index * 2 + 1)])
    workdir.write_shard("base", "train", 1, [trajectory(9)] if index else [])
    found["shards"] = workdir.shards("base", "train")
    found["read"] = [t.id for t in workdir.read_shards("base", "train")]
    try:
        workdir.read_json("missing.json")
    except InputError as error:
        found["missing"] = str(error)

# one model, a copy of it on each process
mesh = make_mesh(MeshSection(), jax.devices())
found["mesh"] = dict(mesh.shape)
net = tiny.model()
def on(mesh):
    return CausalLM(net.config, mesh=mesh, parameters=lay_out(net.parameters(), net.config, mesh))
whole = on(mesh)
copy = local_copy(whole)
pointers = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in whole.parameters().values()]
found["shared"] = pointers == [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in copy.parameters().values()]
tokens = tiny.tokens(2, 8)
found["logits"] = bool(np.array_equal(copy(tokens), net(tokens))) or float(np.abs(np.asarray(copy(tokens)) - net(tokens)).max())
found["part"] = local_copy(on(make_mesh(MeshSection(data=1), jax.devices()))) is None
print(json.dumps(found), file=sys.__stdout__, flush=True)
"""


# one device each: as in the run of two processes (test_run)
@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow, id="one device each"), pytest.param(2, id="two devices each")]
)
def told(request, tmp_path_factory):
    """What two processes say that they see."""
    port, folder = free_port(), tmp_path_factory.mktemp("shared") / "run"
    words = [sys.executable, "-c", PROGRAM, str(folder)]
    running = [
        subprocess.Popen(
            [*words, str(i), str(port)], env=environment(request.param), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    out = [process.communicate(timeout=200) for process in running]
    assert [process.returncode for process in running] == [0, 0], out[0][1][-2000:] + out[1][1][-2000:]
    return request.param, folder, [json.loads(stdout.splitlines()[-1]) for stdout, _ in out]


def test_all_hear_what_process_0_says(told):
    _, _, (first, second) = told
    assert first == second
    assert first["agreed"] == [{"index": 0}, None, [0, "x"] * 5000] and first["bytes"] == "00ff" * 3 and first["nested"] == 0
    assert first["gathered"] == [[1, 1 << 40], [2, 2 << 40]] and first["same"] == [0, 0, 0]
    assert first["InputError"] == ["InputError", "field 'x': wrong", None]
    assert first["OSError"] == ["OSError", "[Errno 28] No space: 'file'", None]
    assert first["SandboxError"] == ["SandboxError", "no worker starts", None]
    assert first["EnvironmentFault"] == ["EnvironmentFault", "it ended", "crash"]


def test_a_workdir_is_written_by_one_and_seen_alike_by_all(told):
    _, folder, (found, _) = told
    assert found["who"] == {"index": 0} and found["lines"] == [{"index": 0}] and not found["exists"] and found["made"] == "0"
    assert found["missing"].startswith(f"{folder}/missing.json: no such file")
    assert (folder / "lines.jsonl").read_text().count("\n") == 1


def test_each_writes_its_part_of_a_shard_and_all_read_the_whole(told):
    _, folder, (found, _) = told
    assert found["shards"] == [0, 1] and found["read"] == [f"task-{i}" for i in (0, 1, 2, 3, 9)]
    names = sorted(os.listdir(folder / "rollouts" / "base" / "train"))
    parts = [f"{shard:05d}-{part}of2" for shard in (0, 1) for part in (0, 1)]
    assert names == [f"{part}.{kind}" for part in parts for kind in ("index.json", "jsonl.zst")] + ["manifest.json"]


def test_the_engine_of_a_process_takes_the_learners_weights_where_it_holds_them_all(told):
    devices, _, (found, _) = told
    assert found["mesh"] == {"data": 2, "fsdp": devices, "expert": 1, "tensor": 1}
    assert found["shared"] and found["part"]
    assert found["logits"] is True or found["logits"] < 1e-5


WAITER = """
import sys, time
from trace_jax.endings import Terminated, complain, signals_raise
from trace_jax.processes.job import Job, cause, join, leave

index, port, waits = (int(word) for word in sys.argv[1:])
processes = join(Job(f"127.0.0.1:{port}", 2, index))
try:
    with signals_raise():
        print("ready", file=sys.__stdout__, flush=True)
        if index == waits:
            processes.gather(1)  # the other never comes
        time.sleep(100)
except Terminated:
    leave(complain(cause() or "terminated", 1 if cause() else 143))
"""


def end(number, told, waits):
    """Sends a signal to some of two processes, one of which may stand in a step of both; how each ends, and the time of the signal."""
    port = free_port()
    words = [sys.executable, "-c", WAITER]
    running = [
        subprocess.Popen(
            [*words, str(i), str(port), str(waits)], env=environment(1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    for process in running:
        assert "ready\n" in process.stdout  # the runtime has lines of its own
    time.sleep(1)
    began = time.monotonic()
    for index in told:
        running[index].send_signal(number)
    errors = [process.communicate(timeout=60)[1] for process in running]
    return [(process.returncode, (error.splitlines() or [""])[-1]) for process, error in zip(running, errors, strict=True)], began


@pytest.mark.parametrize(
    "told, waits", [([0], 1)] + [pytest.param(told, waits, marks=pytest.mark.slow) for told, waits in (([1], 0), ([0, 1], 0), ([0, 1], 1))]
)
def test_all_end_where_one_is_told_to_even_where_one_waits_for_another(told, waits):
    ends, began = end(signal.SIGTERM, told, waits)
    assert [code for code, _ in ends] == [143, 143], ends
    assert all("trace-jax: terminated" in line for _, line in ends), ends
    assert time.monotonic() - began < 25


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_all_end_at_once_where_one_is_killed_and_say_which(lost):
    ends, began = end(signal.SIGKILL, [lost], -1)
    assert ends[lost][0] == -signal.SIGKILL and ends[not lost][0] == 1, ends
    assert f"trace-jax: process {lost} on host {socket.gethostname()} is lost: killed, or its host is gone" in ends[not lost][1], ends
    assert time.monotonic() - began < 25
