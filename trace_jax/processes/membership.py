"""Which processes make up a run, and whether they are all still there.

Before JAX starts, all meet at the coordinator's address: each says who it is, process 0 waits for the last one, and tells all to begin or
why not. So the ones that are missing can be named, one that comes twice or too late is refused and disturbs nobody, and what must be the
same in all (`trace_jax.processes.roll_call`) is compared before anything is loaded. JAX's own service then takes the port over.

Each keeps its connection to process 0, which passes on what it hears. The kernel closes the connection of a process that dies, whatever it
dies of, and finds a host that is gone by probes. JAX would say neither which process was lost nor, for a minute, that one was; a process
that lives but stands still is left to its heartbeats.

One message a line, in JSON: `{"member": ...}`; `{"go": [member, ...]}` or `{"refused": why, "code": exit code}`; and, of a process that is
about to end, `{"process": index, "ended": "done" | "failed" | "terminated" | "lost", "line": its last words}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from trace_jax.errors import InputError, Unfinished

_AGAIN = 0.5  # seconds between two attempts
_REPORT = 60  # seconds after which process 0 says for whom it still waits
_LATE = 60  # seconds in which a run that has begun at the address, an earlier launch perhaps, may end
_VERDICT = 30  # seconds that another process waits longer than process 0, so that it hears whom that has missed
_LONGEST = 1 << 22  # bytes of a message
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a host that is gone is found in 30 s
_ALL = "start all processes of the run again"


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of the run.

    Attributes:
      index, count: of `--process_id` and `--num_processes`.
      facts: what must be the same in all, by name; known until all have begun.
    """

    index: int
    count: int
    host: str = dataclasses.field(default_factory=socket.gethostname)
    pid: int = dataclasses.field(default_factory=os.getpid)
    facts: Mapping[str, str | None] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"process {self.index} on host {self.host}"


Heard = Callable[[Member, str, str], None]  # who, how it ended, its last words


class Membership:
    """All processes of the run, once they have begun.

    Attributes:
      ended: how those ended that have, by index.
    """

    def __init__(self, index: int, members: Sequence[Member], lines: Mapping[int, socket.socket]):
        self.index, self.members, self.ended, self._lines = index, list(members), dict[int, str](), dict(lines)
        for line in lines.values():
            line.settimeout(None)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def tell(self, ended: str, line: str = "") -> None:
        """Tells the others, once, how this process is about to end."""
        if self.index not in self.ended:
            self.ended[self.index] = ended
            self._pass_on({"process": self.index, "ended": ended, "line": line})

    def listen(self, heard: Heard) -> None:
        """From now on, in a thread: calls `heard` for each of the others that ends, in the order in which they do."""
        threading.Thread(target=self._listen, args=(heard,), name="membership", daemon=True).start()

    def _listen(self, heard: Heard) -> None:
        buffers = {index: b"" for index in self._lines}
        with selectors.DefaultSelector() as selector:
            for index, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select():
                    data = _received(key.fileobj)
                    *messages, buffers[key.data] = (buffers[key.data] + data).split(b"\n")
                    for message in map(json.loads, messages):
                        self._hear(message, heard)
                    if not data:
                        selector.unregister(key.fileobj)
                        self._hear({"process": key.data, "ended": "lost", "line": ""}, heard)

    def _hear(self, message: dict[str, Any], heard: Heard) -> None:
        index = message["process"]
        if index not in self.ended:
            self.ended[index] = message["ended"]
            self._pass_on(message)
            heard(self.members[index], message["ended"], message["line"])

    def _pass_on(self, message: dict[str, Any]) -> None:
        """To those that this process is connected to: all, or process 0."""
        for index, line in self._lines.items():
            if index != message["process"]:
                with contextlib.suppress(OSError):  # it is gone: `_listen` hears of it
                    _send(line, message)


def gather(member: Member, address: str, seconds: float, check: Callable[[Sequence[Member]], str | None]) -> Membership:
    """What process 0 does: waits for all others, and tells them to begin.

    Args:
      member: this process.
      address: `HOST:PORT`; it listens there until all have come.
      check: why they may not begin, None if they may.

    Raises:
      Unfinished: some have not come in time, or the port is in use.
      InputError: `check` says so; the others raise the same.
    """
    deadline = time.monotonic() + seconds
    came: dict[int, tuple[Member, socket.socket]] = {}
    with _listener(address, min(deadline, time.monotonic() + _LATE)) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        report = time.monotonic() + _REPORT
        while len(came) < member.count - 1 and (now := time.monotonic()) < deadline:
            if now > report:
                report = now + _REPORT
                missing = _named(set(range(1, member.count)) - set(came), member.count)
                print(f"waiting for {missing}, {deadline - now:.0f} s more", file=sys.stderr)
            for key, _ in selector.select(min(report, deadline) - now):
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ, b"")
                    continue
                line, data = key.fileobj, _received(key.fileobj)
                known = next((index for index, (_, its) in came.items() if its is line), None)
                other = None if known is not None else _introduced(key.data + data)
                problem = other and _problem(other, member, came)
                if not data or problem or len(key.data) > _LONGEST:  # it has died, or is none of ours, or must not come along
                    came.pop(known, None)
                    if problem:
                        print(f"trace-jax: refused: {problem}", file=sys.stderr)
                        _refuse([line], problem, 2)
                    selector.unregister(line)
                    line.close()
                elif other:
                    came[other.index] = other, line
                else:
                    selector.modify(line, selectors.EVENT_READ, key.data + data)
    lines = {index: came[index][1] for index in sorted(came)}
    members = [member, *(came[index][0] for index in lines)]
    if missing := set(range(1, member.count)) - set(came):
        there = ", ".join(f"{m.index} on {m.host}" for m in members)
        problem = (
            f"{len(missing)} of {member.count} processes did not come to {address} in {seconds:.0f} s: {_named(missing, member.count)}; "
            f"there were {there}. See the logs of the missing ones, and {_ALL}"
        )
        _refuse(lines.values(), problem, 1)
        raise Unfinished(problem)
    if problem := check(members):
        _refuse(lines.values(), problem, 2)
        raise InputError(problem)
    for line in lines.values():
        with contextlib.suppress(OSError):  # it has died, which will be heard
            _send(line, {"go": [_without_facts(m) for m in members]})
    return Membership(0, members, lines)


def come(member: Member, address: str, seconds: float) -> Membership:
    """What every other process does: goes to process 0 and waits until it says to begin.

    Raises:
      Unfinished: process 0 does not answer in time, others are missing, or a run has begun there without this process.
      InputError: process 0 says that the processes do not go together.
    """
    deadline, late, reason = time.monotonic() + seconds, float("inf"), "no answer"
    while True:
        answer = b""
        try:
            host, _, port = address.rpartition(":")
            line = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
            _send(line, {"member": dataclasses.asdict(member)})
            line.settimeout(max(1.0, deadline + _VERDICT - time.monotonic()))
            while not answer.endswith(b"\n") and (answer[:1] or b"{") == b"{" and (data := _received(line)):
                answer += data
        except OSError as error:
            reason = str(error)
        if answer.endswith(b"\n") and answer.startswith(b"{"):
            message = json.loads(answer)
            if "refused" in message:
                raise (InputError if message["code"] == 2 else Unfinished)(message["refused"])
            if "go" in message:
                return Membership(member.index, [Member(**m) for m in message["go"]], {0: line})
        now = time.monotonic()
        if answer:  # JAX's service speaks first, and another language
            late = min(late, now + _LATE)
        if now > late:
            raise Unfinished(
                f"the run at {address} has begun without {member}: this one comes too late, or that run is of an earlier launch; "
                f"end what still runs there, and {_ALL}"
            )
        if now > deadline:
            raise Unfinished(f"nobody answers at {address}, where process 0 should be ({reason}); see its log, and {_ALL}")
        time.sleep(_AGAIN)


def _listener(address: str, deadline: float) -> socket.socket:
    port = int(address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    while True:
        try:
            return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if time.monotonic() > deadline:
                raise Unfinished(
                    f"port {port} is in use on host {socket.gethostname()}, perhaps by an earlier launch that still runs; "
                    f"end it, or give all processes another port in --coordinator={address}"
                ) from error
            time.sleep(_AGAIN)


def _introduced(data: bytes) -> Member | None:
    """The process that has said who it is; None while it has not, or where it is something else that found the port."""
    try:
        return Member(**json.loads(data)["member"]) if data.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def _problem(other: Member, first: Member, came: Mapping[int, tuple[Member, socket.socket]]) -> str | None:
    """Why a process cannot be one of the run."""
    if other.count != first.count:
        return f"{other} was started with --num_processes={other.count}, {first} with {first.count}; {_ALL}"
    taken = first if other.index == first.index else came[other.index][0] if other.index in came else None
    if taken:
        return (
            f"{other} (pid {other.pid}) comes second: host {taken.host} has a process {taken.index} too (pid {taken.pid}); "
            "give each its own --process_id, or end the one of an earlier launch"
        )
    return None


def _named(missing: Set[int], count: int) -> str:
    """The missing processes, with their hosts where a TPU pod says them."""
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return ", ".join(f"{index} on {hosts[index]}" if len(hosts) == count else f"process {index}" for index in sorted(missing))


def _without_facts(member: Member) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(member, facts={}))


def _refuse(lines: Sequence[socket.socket], problem: str, code: int) -> None:
    for line in lines:
        with contextlib.suppress(OSError):
            _send(line, {"refused": problem, "code": code})


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")


def _received(line: socket.socket) -> bytes:
    """What has come; nothing where the other end is gone."""
    try:
        return line.recv(1 << 16)
    except OSError:
        return b""
