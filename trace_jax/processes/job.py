"""The job that this process is part of: how it finds the other processes, begins with them, and ends.

How a process finds the others is JAX's multi-controller runtime; nothing of a scheduler is built here. Whoever starts the processes starts
them again as long as one ends with another exit code than 0 and 2: they begin together or not at all, and end together. SIGTERM to one of
them is SIGTERM to all, and all are gone within 25 seconds, what was done saved: spot machines and Kubernetes grant 30. One that is lost or
fails ends the others at once.

Imported by the command line before JAX is: it is started only where there are several processes.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.errors import InputError, Unfinished
from trace_jax.processes import Processes
from trace_jax.processes.membership import Member, Membership, come, gather
from trace_jax.processes.roll_call import difference

GO_ON = "what was done is saved, the same command goes on from there"

_JOIN = 600  # seconds in which all must have come
_HEARTBEAT = 60  # seconds without a sign of life after which JAX ends all processes: for one that stands still but is not gone
_LEAVE = 15, 5  # seconds that process 0, and another, which ends waits for the others; process 0 last, since all others die with it
_STUCK = 12, 8  # seconds after a signal in which process 0, and another, must have heard it: else it stands in a step that others have left
_SAVED = 20, 16  # and in which they must have saved what they do
_GONE = 24  # seconds after a signal in which process 0 is gone, whatever it waits for
_SAME = 3  # seconds in which a process comes to the end that another has come to, if it does
_HOW = "start all of them with the same --coordinator=HOST:PORT and --num_processes, and --process_id=0, 1, ..."

_leaving = threading.Event()
_signalled: list[float] = []  # when
_disturbed = threading.Event()
_causes: list[str] = []
_membership: Membership | None = None


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


def join(job: Job, facts: Mapping[str, str | None] | None = None) -> Processes:
    """Starts JAX with the other processes, once all have come and are alike; those that do not lead fall silent on standard output.

    Args:
      facts: of `trace_jax.processes.roll_call.facts`, what must be the same in all processes.

    Raises:
      InputError: they cannot be found, or do not go together.
      Unfinished: some have not come.
    """
    global _membership
    job = _found(job)
    member = Member(job.index, job.count, facts=facts or {})
    if job.index == 0:
        print(f"waiting for {job.count - 1} other processes at {job.coordinator}", file=sys.stderr)
        _membership = gather(member, job.coordinator, _JOIN, difference)
    else:
        _membership = come(member, job.coordinator, _JOIN)
    _membership.listen(_heard)
    _end_when_signalled(_membership)
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would swallow the SIGTERM that the command line answers
    try:
        jax.distributed.initialize(
            job.coordinator, job.count, job.index, job.devices, "deactivate", _JOIN, _HEARTBEAT, 2 * _LEAVE[0]
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise Unfinished(f"could not start JAX with the other processes: {' '.join(str(error).split())[:300]}; {_HOW}") from error
    if problem := _unlike(_membership.members, jax.devices()):
        raise InputError(problem)
    processes = Processes(jax.process_index(), jax.process_count())
    if not processes.leads:
        sys.stdout = open(os.devnull, "w")
    return processes


def cause(wait: float = 0.0) -> str | None:
    """Why this process must end though it did nothing wrong: another was lost, or has failed; None if that is not so.

    Args:
      wait: seconds in which the news of it may come.
    """
    if _membership is None:
        return None
    _disturbed.wait(wait)
    return _causes[0] if _causes else None


def tell(code: int, line: str) -> None:
    """Tells the other processes, if there are any, with what exit code and last words this one ends."""
    if _membership is not None:
        _membership.tell("terminated" if code > 128 else "failed" if code else "done", line)


def leave(code: int) -> None:
    """Ends a process of several with an exit code other than 0, whether the others end too or not; nothing for one on its own.

    They are waited for, so that processes that were all told to end do so in peace. One that ends alone must not wait for long: the others
    may stand in a step of which it is part.
    """
    tell(code, f"exit code {code}")
    jax = sys.modules.get("jax")
    if not code or jax is None or not jax.distributed.is_initialized():
        return
    _leaving.set()
    farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    farewell.start()
    wait = _LEAVE[jax.process_index() > 0]
    farewell.join(max(1, min([wait, *(began + _GONE - time.monotonic() for began in _signalled)])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _heard(member: Member, ended: str, line: str) -> None:
    """Another process has ended, or is about to: so does this one, unless it is about to of its own accord."""
    own = _membership.index in _membership.ended
    if ended == "done" or own:
        return
    if ended == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    _causes.append(f"{member} is lost: killed, or its host is gone" if ended == "lost" else f"{member} has ended: {line}")
    _disturbed.set()
    if ended == "lost" and not member.index:  # JAX ends this process now, with a dump of its stack
        _end(1)

    def follow() -> None:
        if _membership.index not in _membership.ended:
            os.kill(os.getpid(), signal.SIGTERM)  # Python's main thread unwinds, which saves what it does

    timer = threading.Timer(0 if ended == "lost" else _SAME, follow)
    timer.daemon = True
    timer.start()


def _end(code: int) -> None:
    """At once, with what the command line would say."""
    print(f"trace-jax: {cause() or 'terminated'}; {GO_ON}", file=sys.stderr, flush=True)
    os._exit(1 if cause() else code)


def _end_when_signalled(membership: Membership) -> None:
    """Tells the others of SIGTERM and Ctrl-C, and ends this process some time later if it stands in a step that others have left.

    Python's main thread hears a signal between two of its own instructions, not within a step that waits for others.
    """
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    other = membership.index > 0

    def watch() -> None:
        while not (numbers := {signal.SIGINT, signal.SIGTERM} & set(os.read(heard, 16))):
            continue
        _signalled.append(time.monotonic())
        membership.tell("terminated")
        time.sleep(_STUCK[other])
        if signal.SIGINT in numbers or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:  # the command line has heard: it may be saving
            time.sleep(_SAVED[other] - _STUCK[other])
        if not _leaving.is_set():
            _end(128 + min(numbers))

    threading.Thread(target=watch, name="signals", daemon=True).start()


def _found(job: Job) -> Job:
    """The job with what JAX finds out: on a TPU pod, of Open MPI."""
    if job.coordinator is not None:
        return job
    from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize asks; the processes meet before it is called

    try:
        coordinator, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, _JOIN)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"--coordinator=auto could not find the other processes: {error}; {_HOW}") from error
    if None in (coordinator, count, index):
        raise InputError(f"--coordinator=auto finds no TPU pod, Slurm step or Open MPI here; {_HOW}")
    return Job(coordinator, count, index, None if devices is None or "JAX_LOCAL_DEVICE_IDS" in os.environ else tuple(devices))


def _unlike(members: Sequence[Member], devices: Sequence[Any]) -> str | None:
    """Which processes have other accelerators, or another number of them, than process 0."""
    counts = [collections.Counter(d.device_kind for d in devices if d.process_index == member.index) for member in members]
    shown = [", ".join(f"{n} x {kind}" for kind, n in sorted(count.items())) or "none" for count in counts]
    found = [f"{member} has {its}" for member, its in zip(members, shown, strict=True) if its != shown[0]]
    fix = "start the run on hosts alike, or as many processes as --num_processes says on each"
    return f"the accelerators of the processes differ: {members[0]} has {shown[0]}, {', '.join(found)}; {fix}" if found else None


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
