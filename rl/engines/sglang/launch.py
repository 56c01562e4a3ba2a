"""Starts SGLang servers on this machine, waits until they answer, starts those anew that end, and ends all of them.

Each has a keeper (`keeper.py`) that ends it with this process, however that ends. A server that was started anew knows no adapters; it has
its old address, and `SGLangEngine` gives it what it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from model import Config
from model.huggingface_names import MODULES
from rl.engines.protocol import EngineError
from rl.engines.sglang import keeper
from rl.engines.sglang.replica import MARGIN

_HANGS = 120.0  # seconds without an answer after which a server that once answered is killed
_HOPELESS = 5  # starts in a row that gave no server that answers
_TAIL = 3000  # characters of a log in a message

# what a CPU build of SGLang needs: kernels of torch, no second thread of the scheduler, little memory
_CPU_OPTIONS = ("--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule").split()
_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """What a server is to serve; see the flags of `sglang.launch_server`.

    Attributes:
      context, lanes: longest context in tokens, and requests side by side, of one server.
      rank: largest rank of an adapter; 0 for a server of the base alone.
      adapters: adapters side by side in a batch; the base counts as one.
      dtype: of the weights.
      device: "cuda" or "cpu".
      tensor: devices that share one server's weights.
      experts: tell the experts of each token.
      deterministic: tokens follow from the request's key (--enable-deterministic-inference, which few attention backends have).
      memory: share of a device's memory for weights and cache; None leaves it to SGLang.
      options: more words of the command line; the last one of a name counts.
      environment: more variables.
    """

    context: int
    lanes: int
    rank: int = 0
    adapters: int = 4
    dtype: str = "bfloat16"
    device: str = "cuda"
    tensor: int = 1
    experts: bool = False
    deterministic: bool = False
    memory: float | None = None
    options: Sequence[str] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def server_command(python: Sequence[str], folder: str | Path, config: Config, settings: ServerSettings, port: int) -> list[str]:
    """The command line of one server."""
    room = settings.context + MARGIN
    flags: dict[str, object] = {
        "--model-path": folder,
        "--host": "127.0.0.1",
        "--port": port,
        "--context-length": room,
        "--max-running-requests": settings.lanes,
        "--dtype": settings.dtype,
        "--tokenizer-worker-num": 1,
    }
    words = []
    if settings.device == "cpu":
        words += _CPU_OPTIONS
        flags |= {"--max-total-tokens": settings.lanes * room, "--mem-fraction-static": 0.2}
    if settings.tensor > 1:
        flags["--tp-size"] = settings.tensor
    if settings.memory is not None:
        flags["--mem-fraction-static"] = settings.memory
    if settings.rank:
        modules = dict.fromkeys(MODULES[name].rpartition(".")[2] for name in config.projections())
        words += ["--enable-lora", "--lora-target-modules", *modules]
        flags |= {
            "--max-lora-rank": settings.rank,
            "--max-loras-per-batch": settings.adapters,
            "--max-loaded-loras": 2 * settings.adapters,  # those of a batch, and those that wait for their last request
        }
        if settings.device == "cpu":
            flags["--lora-backend"] = "torch_native"
    if settings.experts:
        words.append("--enable-return-routed-experts")
    if settings.deterministic:
        words.append("--enable-deterministic-inference")
    return [*python, "-m", "sglang.launch_server", *(str(w) for pair in flags.items() for w in pair), *words, *settings.options]


class _Server:
    """One server's process: its keeper is the head of it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], url: str, log: Path):
        self.command, self.environment, self.url, self.log = command, environment, url, log
        self.starts = 0  # in a row, without an answer since
        self.healthy = False
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.healthy, self.heard = False, time.monotonic()
        with open(self.log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-I", keeper.__file__, *self.command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,  # an interrupt from the keyboard is this process's to handle
            )

    def check(self, timeout: float) -> None:
        """Asks whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=timeout):
                self.healthy, self.heard, self.starts = True, time.monotonic(), 0
        except OSError:  # an HTTP error is one: 503 until it is warm
            pass

    def end(self) -> None:
        """Closes the keeper's pipe, upon which it ends the server."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def wait(self) -> None:
        try:
            self.process.wait(3 * keeper.PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-_TAIL:]


class Servers:
    """Servers that answer, at `urls`; see `start_servers`."""

    def __init__(self, deadline: float):
        self._servers: list[_Server] = []
        self._deadline = deadline
        self._over = threading.Event()
        self._watch: threading.Thread | None = None

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def add(self, server: _Server) -> None:
        self._servers.append(server)

    def wait(self, progress: Callable[[str], None] | None) -> None:
        """Until all answer; raises `EngineError` with the end of a log if one ends or is not there in time."""
        began = said = time.monotonic()
        while waiting := [server for server in self._servers if not server.healthy]:
            for server in waiting:
                if (code := server.process.poll()) is not None:
                    raise EngineError(f"{server.url}: the SGLang server ended with {code}; {server.log} ends with\n{server.tail()}")
                server.check(timeout=5.0)
            now = time.monotonic()
            if now - began > self._deadline:
                last = waiting[0]
                raise EngineError(f"{last.url}: no answer within {self._deadline:.0f} s; {last.log} ends with\n{last.tail()}")
            if progress is not None and now - said > 5:
                said = now
                progress(f"{len(self._servers) - len(waiting)} of {len(self._servers)} SGLang servers after {now - began:.0f} s")
            time.sleep(0.25)
        self._watch = threading.Thread(target=self._keep, name="sglang-servers", daemon=True)
        self._watch.start()

    def _keep(self) -> None:
        """Starts anew what ended or hangs."""
        while not self._over.wait(1.0):
            for server in self._servers:
                gone = server.process.poll() is not None
                if not gone:
                    server.check(timeout=5.0)
                    silent = time.monotonic() - server.heard
                    gone = silent > (_HANGS if server.healthy else self._deadline)
                if gone and not self._over.is_set() and server.starts < _HOPELESS:
                    server.end()
                    server.wait()
                    server.start()

    def close(self) -> None:
        """Ends all servers; without effect the second time."""
        self._over.set()
        if self._watch is not None:
            self._watch.join()
        for server in self._servers:
            server.end()
        for server in self._servers:
            server.wait()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_servers(
    folder: str | Path,
    config: Config,
    settings: ServerSettings,
    *,
    logs: str | Path,
    count: int = 1,
    python: str | Sequence[str] = sys.executable,
    deadline: float = 900.0,
    progress: Callable[[str], None] | None = None,
) -> Servers:
    """`count` servers of the model in `folder`, all of which answer; on GPUs each has the next `settings.tensor` of them.

    Args:
      logs: the folder that gets `sglang-0.log`, ...
      python: of the environment that has sglang, with a command before it if need be.
      deadline: seconds within which all have to answer.
      progress: told now and then how many do.

    Raises:
      EngineError: one ended or did not answer in time; the message has the end of its log.
    """
    logs = Path(logs)
    logs.mkdir(parents=True, exist_ok=True)
    python = [python] if isinstance(python, str) else list(python)
    devices = _devices(count * settings.tensor) if settings.device == "cuda" else []
    servers = Servers(deadline)
    try:
        for index in range(count):
            port = _free_port()
            environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # for MARGIN, which no position reaches
            if settings.device == "cpu":
                environment |= _CPU_ENVIRONMENT
            else:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index * settings.tensor : (index + 1) * settings.tensor])
            command = server_command(python, folder, config, settings, port)
            log = logs / f"sglang-{index}.log"
            servers.add(_Server(command, environment | {**settings.environment}, f"http://127.0.0.1:{port}", log))
        servers.wait(progress)
    except BaseException:
        servers.close()
        raise
    return servers


def _devices(count: int) -> list[str]:
    """The names of the first `count` GPUs that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(count)] if given is None else [d for d in given.split(",") if d]
    if len(devices) < count:
        raise EngineError(f"{count} GPUs are needed, CUDA_VISIBLE_DEVICES={given} names {len(devices)}; start fewer servers")
    return devices[:count]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
