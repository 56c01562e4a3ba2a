"""A real SGLang server on this machine's CPU, for tests marked `sglang`.

    with serve(folder, "--enable-lora", "--max-lora-rank", "8", ...) as server:
        reply = server.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}})

A server is three processes of 1.5 GB together and takes 20 to 80 seconds to start. One process's servers run at a time, by a lock on
a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sglang_server.install import sglang_python

SHIM = Path(__file__).parent / "shim"
_LOCK = Path(tempfile.gettempdir()) / "sglang.lock"
_servers_of_this_process = 0

OPTIONS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--dtype": "float32",
    "--host": "127.0.0.1",
    "--max-running-requests": "8",
    "--max-total-tokens": "4096",
    "--mem-fraction-static": "0.2",
    "--random-seed": "1",
}
FLAGS = ("--disable-overlap-schedule",)


def environment(**more: str) -> dict[str, str]:
    """The variables of a server's process: the shim on PYTHONPATH, no network, no compiler (35 s at the first request with a penalty)."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "2"} | more
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SHIM), more.get("PYTHONPATH"))))
    return env


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that answers; `process` is the head of a process group of its own."""

    url: str
    process: subprocess.Popen
    log: Path

    def post(self, path: str, body: Mapping | None = None, timeout: float = 120) -> dict | list:
        """The reply's JSON. `urllib.error.HTTPError` for a status of 400 or more, its message with the reply's text."""
        data = json.dumps(body or {}).encode()
        return self._ask(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}), timeout)

    def get(self, path: str, timeout: float = 120) -> dict | list:
        return self._ask(urllib.request.Request(self.url + path), timeout)

    def tail(self, characters: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    def _ask(self, request: urllib.request.Request, timeout: float) -> dict | list:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            error.msg = f"{error.msg}: {error.read().decode(errors='replace')[:2000]}"
            raise
        return json.loads(text) if text[:1] in (b"{", b"[") else {}


@contextlib.contextmanager
def serve(
    model: Path,
    *options: str,
    log: Path | None = None,
    deadline: float = 300.0,
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> Iterator[Server]:
    """A server of the folder `model` for the time of a `with`; it is healthy at the beginning and its whole process group dead at the end.

    Args:
      options: of `sglang.launch_server`, after OPTIONS and FLAGS; the last one of a name counts.
      log: the file that gets what the server prints; one in the system's temporary folder by default.
      deadline: seconds within which it has to answer.
      env: more variables; PYTHONPATH comes after the shim.

    Raises `RuntimeError` with the end of the log if the server ends or does not answer in time.
    """
    python = python or sglang_python()
    with one_at_a_time(), contextlib.ExitStack() as stack:
        port = _free_port()
        if log is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "sglang.log"
        defaults = [word for pair in OPTIONS.items() for word in pair]
        command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port), *defaults, *FLAGS, *options]
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment(**(env or {})), start_new_session=True, cwd=log.parent
            )
        server = Server(f"http://127.0.0.1:{port}", process, log)
        stack.callback(_stop, process)
        _wait_until_healthy(server, deadline)
        yield server


def _wait_until_healthy(server: Server, deadline: float) -> None:
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise RuntimeError(f"the SGLang server ended with {server.process.returncode} before it was healthy:\n{server.tail()}")
        with contextlib.suppress(OSError, json.JSONDecodeError):  # an HTTP error is an OSError: 503 until it is warm
            server.get("/health", timeout=20)
            return
        time.sleep(0.5)
    raise RuntimeError(f"the SGLang server was not healthy within {deadline:.0f} s:\n{server.tail()}")


def _stop(process: subprocess.Popen) -> None:
    """Kills the group: a server has nothing to save, and asked to end it would wait for its requests."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


@contextlib.contextmanager
def one_at_a_time(patience: float = 1800) -> Iterator[None]:
    """Other processes wait; a second server of this one does not."""
    global _servers_of_this_process
    with open(_LOCK, "a") as file:
        end = time.monotonic() + patience
        while not _servers_of_this_process:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise RuntimeError(f"another process's SGLang server has run for {patience:.0f} s; see who holds {_LOCK}") from None
                time.sleep(1)
        _servers_of_this_process += 1
        try:
            yield
        finally:
            _servers_of_this_process -= 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
