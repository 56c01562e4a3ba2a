"""The processes of one run: usually one, on a pod one a host, all running the same command in step.

Process 0 leads. It alone writes to the workdir, and what the workdir is asked, all are told by it, so that no two processes ever see it at
different moments and go different ways. Everything else is computed by all from the same batches. How a process finds the others is JAX's
multi-controller runtime; nothing of a scheduler is built here.

Imported by the command line before JAX is: it is started only where there are several processes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from envs.base import EnvironmentFault, SandboxError
from trace_jax.errors import InputError, Unfinished

T = TypeVar("T")

_HEARTBEAT = 60  # seconds without a sign of life after which a process counts as lost, and all others end
_JOIN = 300  # seconds in which all must have started
_leaving = threading.Event()
_HOW = "start all of them with the same --coordinator=HOST:PORT and --num_processes, and --process_id=0, 1, ..."
_LEAVE = 15, 5  # seconds that process 0, and another, which ends waits for the others; process 0 last, since all others die with it
_STUCK = 12, 8  # seconds after SIGTERM in which process 0 must have heard it, and another be about to leave


class Processes:
    """This process among those of the run. The methods are called by all of them, in the same order.

    Attributes:
      index, count: this one's number, and how many there are.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self._answering = False

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.index == 0

    def agree(self, answer: Callable[[], T]) -> T:
        """What process 0 computes; the others wait for it, and for what it has written by then.

        Args:
          answer: gives None, bytes, or a JSON value. What it asks in turn is answered there and then.

        Raises:
          InputError, Unfinished, OSError, SandboxError, EnvironmentFault: process 0 raised it; all do.
        """
        if self.count == 1 or self._answering:
            return answer()
        self._answering = True
        try:
            message = _encode(answer) if self.leads else b""
        finally:
            self._answering = False
        return _decode(self._broadcast(message))

    def same(self, arrays: T) -> T:
        """A tree of arrays as process 0 has it, NumPy in all."""
        if self.count == 1:
            return arrays
        from jax.experimental.multihost_utils import broadcast_one_to_all

        return broadcast_one_to_all(arrays)

    def gather(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers of every process, in the order of their indices."""
        if self.count == 1:
            return [numbers]
        import numpy as np
        from jax.experimental.multihost_utils import process_allgather

        low, high = (
            process_allgather(np.array(part, np.uint32)) for part in zip(*((n & 0xFFFFFFFF, n >> 32) for n in numbers), strict=True)
        )
        return [tuple(int(a) | int(b) << 32 for a, b in zip(*pair, strict=True)) for pair in zip(low, high, strict=True)]

    def share(self, groups: int) -> range:
        """The groups, of so many, that this process works on: consecutive ones, so that all shares in order are all of them in order."""
        return range(groups * self.index // self.count, groups * (self.index + 1) // self.count)

    def _broadcast(self, data: bytes) -> bytes:
        import numpy as np

        (size,) = self.same(np.array([len(data)], np.uint32))
        room = 1 << max(10, int(size - 1).bit_length())  # few sizes, since each is compiled
        padded = np.zeros(room, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        return np.asarray(self.same(padded))[:size].tobytes()


ALONE = Processes()


@dataclasses.dataclass(frozen=True)
class Job:
    """How this process finds the others. What is None, JAX finds out (TPU pods, Open MPI)."""

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    devices: tuple[int, ...] | None = None


def find_job(coordinator: str | None, count: int | None, index: int | None, environment: Mapping[str, str] = os.environ) -> Job | None:
    """The job that flags or environment say, in this order: the flags, JAX's own variables, a Slurm step, Open MPI, a TPU pod.

    Args:
      coordinator: `HOST:PORT` of process 0, or "auto".
      count, index: of `--num_processes` and `--process_id`.

    Returns:
      None for a process on its own.

    Raises:
      InputError: one of the three is missing, or they do not go together.
    """
    get = environment.get
    if coordinator == "auto":
        if (count, index) != (None, None):
            raise InputError("--coordinator=auto finds --num_processes and --process_id itself; leave them out, or give HOST:PORT")
        return Job()
    if (coordinator, count, index) != (None, None, None):
        return _checked(coordinator, count, index, ("--coordinator=HOST:PORT", "--num_processes", "--process_id"))
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if get(names[0]):
        return _checked(get(names[0]), *(_number(name, get(name)) for name in names[1:]), names)
    if int(get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        host = _first_host(environment["SLURM_STEP_NODELIST"])
        port = 61440 + int(environment["SLURM_JOB_ID"]) % 4096  # the same in all processes, seldom the same for two jobs
        many = not get("SLURM_STEP_TASKS_PER_NODE", "1").startswith("1(") and get("SLURM_STEP_TASKS_PER_NODE", "1") != "1"
        # one process a host has all its devices, one of several has the device of its number
        devices = (int(environment["SLURM_LOCALID"]),) if many else None
        return Job(f"{host}:{port}", int(environment["SLURM_STEP_NUM_TASKS"]), int(environment["SLURM_PROCID"]), devices)
    if int(get("OMPI_COMM_WORLD_SIZE", 1)) > 1 or "," in get("TPU_WORKER_HOSTNAMES", "") or "," in get("TPU_PROCESS_ADDRESSES", ""):
        return Job()
    return None


def join(job: Job) -> Processes:
    """Starts JAX with the other processes; those that do not lead fall silent on standard output.

    Raises:
      InputError: they cannot be found.
    """
    import jax

    if job.index == 0:
        print(f"waiting for {job.count - 1} other processes at {job.coordinator}", file=sys.stderr)
    elif job.coordinator:
        _wait_for(job.coordinator)
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow the SIGTERM that the command line answers
    settings = dict(
        coordinator_address=job.coordinator, num_processes=job.count, process_id=job.index, local_device_ids=job.devices,
        initialization_timeout=_JOIN, heartbeat_timeout_seconds=_HEARTBEAT, shutdown_timeout_seconds=2 * _LEAVE[0],
    )  # fmt: skip
    if job.coordinator:  # all that is known is given; JAX is not to look for a device of its own choice
        settings["cluster_detection_method"] = "deactivate"
    try:
        jax.distributed.initialize(**settings)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"could not join the other processes: {' '.join(str(error).split())[:300]}; {_HOW}") from error
    processes = Processes(jax.process_index(), jax.process_count())
    if not processes.leads:
        sys.stdout = open(os.devnull, "w")
    _end_when_stuck(processes)
    return processes


def leave(code: int) -> None:
    """Ends a process of several with an exit code other than 0, whether the others end too or not; nothing for one on its own.

    They are waited for, so that processes that were all told to end do so in peace. One that ends alone must not wait for long: the others
    stand in a step of which it is part, and learn that it is lost from its silence.
    """
    jax = sys.modules.get("jax")
    if not code or jax is None or not jax.distributed.is_initialized():
        return
    _leaving.set()
    farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    farewell.start()
    farewell.join(_LEAVE[jax.process_index() > 0])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_when_stuck(processes: Processes) -> None:
    """Ends this process some time after SIGTERM if it stands in a step that another, which was told too, has left.

    Python hears a signal between two of its own instructions, not within a step that waits for others. Without this the process would wait
    until the coordinator is gone, and be ended by JAX's runtime with a dump.
    """
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def watch() -> None:
        while signal.SIGTERM not in os.read(heard, 16):
            continue
        time.sleep(_STUCK[not processes.leads])
        acts = processes.leads and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # so the command line has heard: it may be saving
        if not acts and not _leaving.is_set():
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="sigterm", daemon=True).start()


def _wait_for(coordinator: str) -> None:
    """Until process 0 listens; JAX itself would end this process with a dump of its stack."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + _JOIN
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(f"nobody answers at {coordinator}, where process 0 should be ({error}); {_HOW}") from error
            time.sleep(0.5)


def _checked(coordinator: str | None, count: int | None, index: int | None, names: tuple[str, ...]) -> Job:
    values = dict(zip(names, (coordinator, count, index), strict=True))
    if missing := [name for name, value in values.items() if value is None]:
        raise InputError(f"{missing[0]} is missing: {', '.join(names)} go together")
    if not re.fullmatch(r".+:\d+", coordinator):
        raise InputError(f"{names[0]}: {coordinator!r} is no HOST:PORT")
    if not 0 <= index < count:
        raise InputError(f"{names[2]}: {index} is not within 0..{count - 1}, of {names[1]} = {count}")
    return Job(coordinator, count, index)


def _number(name: str, text: str | None) -> int | None:
    if text is not None and not text.isdecimal():
        raise InputError(f"{name}: {text!r} is no number")
    return None if text is None else int(text)


def _first_host(nodes: str) -> str:
    """`node07` of `node[07-12,15],other3`."""
    name, first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes).groups()
    return name + (first or "")


def _encode(answer: Callable[[], Any]) -> bytes:
    try:
        value = answer()
        message = {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else {"value": value}
    except InputError as error:
        message = {"input": str(error)}
    except Unfinished as error:
        message = {"unfinished": str(error)}
    except SandboxError as error:
        message = {"sandbox": str(error)}
    except EnvironmentFault as error:
        message = {"fault": [error.kind, str(error)]}
    except OSError as error:
        message = {"os": [error.errno, error.strerror, error.filename and str(error.filename)]}
    return json.dumps(message).encode()


def _decode(data: bytes) -> Any:
    message = json.loads(data)
    if "input" in message:
        raise InputError(message["input"])
    if "unfinished" in message:
        raise Unfinished(message["unfinished"])
    if "sandbox" in message:
        raise SandboxError(message["sandbox"])
    if "fault" in message:
        raise EnvironmentFault(*message["fault"])
    if "os" in message:
        raise OSError(*message["os"])
    return base64.b64decode(message["bytes"]) if "bytes" in message else message["value"]
