"""The files of a folder on a disk or in a bucket, read by byte range: `pread` here, range requests there, one interface and kind of error.

What is large is `model.tensor_files`'s; `read_text` is for the small files beside it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

BLOCK = 8 << 20  # bytes of one read
_DEADLINE = 300.0  # seconds that a read from a bucket is retried for


class File(Protocol):
    """Bytes at a place: a file on a disk or an object of a bucket. What goes wrong is an `OSError`."""

    url: str
    size: int
    gap: int  # bytes that are cheaper to read than to skip

    def read_into(self, start: int, target: memoryview) -> None: ...
    def close(self) -> None: ...


class DiskFile:
    """A file on a disk."""

    gap = 128 << 10  # the kernel reads as much ahead anyway

    def __init__(self, path: str):
        self.url = path
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, start: int, target: memoryview) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], start)
            if not count:
                raise OSError(f"the file ends at byte {start}")
            start, target = start + count, target[count:]

    def close(self) -> None:
        os.close(self._descriptor)


class BucketFile:
    """An object of a bucket, of the generation that it had when this was made."""

    gap = 4 << 20  # a request takes as long as the transfer of some megabytes

    def __init__(self, bucket: str, name: str):
        self.url = f"gs://{bucket}/{name}"
        with _bucket_errors(self.url):
            self._blob = _client(os.environ.get("STORAGE_EMULATOR_HOST")).bucket(bucket).get_blob(name, timeout=60, retry=_retry())
        if self._blob is None:
            raise FileNotFoundError(f"{self.url} does not exist")
        self.size = self._blob.size

    def read_into(self, start: int, target: memoryview) -> None:
        for begin in range(0, len(target), BLOCK):
            part = target[begin : begin + BLOCK]
            with _bucket_errors(self.url):
                # Of one generation, so that an object that is replaced meanwhile is an error and not a mixture. A range has no checksum.
                data = self._blob.download_as_bytes(
                    start=start + begin,
                    end=start + begin + len(part) - 1,
                    if_generation_match=self._blob.generation,
                    raw_download=True,
                    checksum=None,
                    timeout=60,
                    retry=_retry(),
                )
            if len(data) != len(part):
                raise OSError(f"{len(data)} bytes came for a range of {len(part)}")
            part[:] = data

    def close(self) -> None:
        """Nothing: the connections are the client's, which all files share."""


@functools.cache
def _client(emulator: str | None):
    """One client, and so one set of connections, per process; the library itself reads the emulator's address and is then anonymous."""
    from google.cloud import storage  # takes a second to import: only where a bucket is used

    return storage.Client(project=None)


def _retry():
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(_DEADLINE)


@contextmanager
def _bucket_errors(url: str) -> Iterator[None]:
    """The errors of the Google libraries as `OSError`s, so that callers know one kind."""
    from google.api_core.exceptions import GoogleAPIError, NotFound, PreconditionFailed
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except (NotFound, PreconditionFailed):
        raise OSError(f"{url} was replaced or deleted while it was read; load it again") from None
    except GoogleAuthError as error:
        raise PermissionError(f"{url}: {error}; log in with `gcloud auth application-default login`") from error
    except GoogleAPIError as error:
        raise OSError(f"{url}: {error}; check the address and that your account may read it") from error


def open_file(folder: str | Path, name: str) -> File:
    """Raises `FileNotFoundError` if it does not exist, another `OSError` if it cannot be read."""
    if bucket := re.fullmatch(r"gs://?([^/]+)/?(.*)", str(folder)):  # pathlib makes one slash of two
        prefix = bucket[2].strip("/")
        return BucketFile(bucket[1], f"{prefix}/{name}" if prefix else name)
    return DiskFile(os.path.join(folder, name))


def read_text(folder: str | Path, name: str) -> str:
    """The text of a small file of a folder, local or `gs://`. `FileNotFoundError` if it does not exist, `ValueError` if it is not UTF-8."""
    with closing(open_file(folder, name)) as file:
        data = bytearray(file.size)
        file.read_into(0, memoryview(data))
    return data.decode("utf-8")


def exists(folder: str | Path, name: str) -> bool:
    """Whether a folder, local or `gs://`, has a file; other `OSError`s than its absence, such as a missing permission, are raised."""
    try:
        open_file(folder, name).close()
    except FileNotFoundError:
        return False
    return True
