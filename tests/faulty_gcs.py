"""What a network does to requests, between a client and the emulator of a bucket: errors, answers that are lost or torn, delays."""

import contextlib
import http.client
import http.server
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import gcs

FAULTS = ("503", "refused", "lost", "torn", "slow")
Rule = Callable[[str, str], str | None]  # method and path to one of FAULTS


def at_random(share: float, seed: int, faults: tuple[str, ...] = FAULTS) -> Rule:
    """Some of the requests, chosen by a seed."""
    chance = random.Random(seed)

    def rule(method: str, path: str) -> str | None:
        fault = chance.choice(faults) if chance.random() < share else None
        # a bucket answers a part of an upload that comes again; the emulator has forgotten the upload
        return None if "upload_id" in path and fault in ("lost", "torn") else fault

    return rule


class Proxy:
    """A server in front of an emulator, which does to each request what `rule` says.

    Attributes:
      rule: may be exchanged at any time.
      done: how often each fault came.
    """

    def __init__(self, folder: Path | None = None):
        self.rule: Rule = lambda method, path: None
        self.done = dict.fromkeys(FAULTS, 0)
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.emulator = gcs.Emulator(folder, self.url)

    def start(self) -> None:
        self.emulator.start()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.emulator.kill()


@contextlib.contextmanager
def proxy(folder: Path | None = None) -> Iterator[Proxy]:
    found = Proxy(folder)
    found.start()
    try:
        yield found
    finally:
        found.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, proxy = "HTTP/1.1", None

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if "chunked" in self.headers.get("transfer-encoding", ""):
            body = b"".join(iter(self._chunk, b""))
        fault = self.proxy.rule(self.command, self.path)
        if fault:
            self.proxy.done[fault] += 1
        if fault == "503":
            return self._answer(503, [], b"try later")
        if fault == "refused":
            return self._cut()
        if fault == "slow":
            time.sleep(0.3)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "content-length", "connection")}
        connection = http.client.HTTPConnection(self.proxy.emulator.url.removeprefix("http://"), timeout=30)
        try:
            connection.request(self.command, self.path, body, headers)
            found = connection.getresponse()
            data = found.read()
        except OSError:  # it was killed
            return self._cut()
        finally:
            connection.close()
        if fault == "lost":
            return self._cut()
        self._answer(found.status, found.getheaders(), data, torn=fault == "torn")

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, torn: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        if not (204 == status or self.command == "HEAD"):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data[: len(data) // 2] if torn else data)
        if torn:
            self._cut()

    def _chunk(self) -> bytes:
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_) -> None:
        pass

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _pass
