"""The objects of a bucket: requests that are made again until they are answered, and errors in words.

Every object that is written here carries the token of its write. A write whose answer was lost is made again, finds that its precondition
does not hold any more, and learns from the token that it was itself; so nothing is lost and nothing is there twice. What is read is checked
against its crc32c.
"""

from __future__ import annotations

import base64
import datetime
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import google_crc32c
import requests
from google.api_core import exceptions
from google.api_core.retry import Retry, if_transient_error
from google.auth.exceptions import GoogleAuthError, RefreshError, TransportError
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption
from google.cloud.storage.retry import DEFAULT_RETRY

from trace_jax.errors import InputError
from trace_jax.stores.protocol import StoreFailed

T = TypeVar("T")

PATIENCE = 600.0  # seconds in which a request must have been answered, all attempts together
_REQUEST = (10, 60)  # seconds to connect, and between two bytes
_TELL = 20.0  # seconds after which a person is told
_WRITER = "trace-jax-write"
_CHUNK = 64 << 20  # bytes of a request, of a large file
_PART = DEFAULT_RETRY.with_timeout(30.0)


class Conflict(Exception):
    """Another process has written the object meanwhile."""


class Stat(NamedTuple):
    """What is known of an object without reading it. `writer` is the token of its write, if it was written here."""

    generation: int
    size: int
    updated: datetime.datetime
    writer: str | None


class Objects:
    """The objects of `gs://<bucket>`; names are whole, prefix and all.

    Attributes:
      patience: seconds in which a request must have been answered; less when the process ends.
    """

    def __init__(self, bucket: str):
        self._name, self.patience, self._client = bucket, PATIENCE, None

    @property
    def _timeout(self) -> tuple[float, float]:
        return min(_REQUEST[0], self.patience), min(_REQUEST[1], self.patience)

    def stat(self, name: str) -> Stat | None:
        """None where there is no such object."""
        blob = self._asked(name, lambda bucket: bucket.get_blob(name, retry=None, timeout=self._timeout))
        return None if blob is None else _stat(blob)

    def list(self, prefix: str, most: int | None = None) -> dict[str, Stat]:
        """All objects whose names begin so, or the first of them.

        Raises:
          InputError: there is no such bucket.
        """

        def names(bucket: storage.Bucket) -> dict[str, Stat]:
            found = bucket.client.list_blobs(bucket, prefix=prefix, max_results=most, retry=None, timeout=self._timeout)
            return {blob.name: _stat(blob) for blob in found}

        try:
            return self._asked(prefix, names)
        except FileNotFoundError as error:
            fix = f"give another, or make it with `gcloud storage buckets create gs://{self._name}`"
            raise InputError(f"gs://{self._name}/{prefix}: no bucket {self._name!r}; {fix}") from error

    def get(self, name: str) -> tuple[bytes, int]:
        """The content and its generation. Raises FileNotFoundError."""

        def read(bucket: storage.Bucket) -> tuple[bytes, int]:
            blob = bucket.blob(name)
            data = blob.download_as_bytes(retry=None, timeout=self._timeout, checksum="crc32c")
            _check(blob, google_crc32c.Checksum(data))
            return data, blob.generation

        return self._asked(name, read)

    def download(self, name: str, path: pathlib.Path) -> None:
        """Writes the content to a file, which appears whole. Raises FileNotFoundError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".part-{uuid.uuid4().hex}")

        def read(bucket: storage.Bucket) -> None:
            blob = bucket.blob(name)
            blob.download_to_filename(part, retry=None, timeout=self._timeout, checksum="crc32c")
            with part.open("rb") as file:
                checksum = google_crc32c.Checksum()
                for _ in checksum.consume(file, 1 << 20):
                    continue
            _check(blob, checksum)

        try:
            self._asked(name, read)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def put(self, name: str, content: bytes | pathlib.Path, match: int | None) -> int:
        """Writes an object, whole or not at all; returns its generation.

        Args:
          content: or the file that holds it.
          match: the generation that it replaces, 0 where there must be none; None replaces whatever is there.

        Raises:
          Conflict: another generation is there.
        """
        token = uuid.uuid4().hex
        settings = dict(if_generation_match=match, timeout=self._timeout, checksum="crc32c", content_type="application/octet-stream")

        def write(bucket: storage.Bucket) -> int:
            blob = bucket.blob(name, chunk_size=None if isinstance(content, bytes) else _CHUNK)
            blob.metadata = {_WRITER: token}
            if isinstance(content, bytes):
                blob.upload_from_string(content, retry=None, **settings)
            else:
                blob.upload_from_filename(content, retry=_PART, **settings)
            return blob.generation

        try:
            return self._asked(name, write)
        except exceptions.PreconditionFailed as error:
            return self._written(name, token, error)

    def append(self, name: str, line: bytes, match: int, part: str) -> int:
        """Puts an object together of itself and a line, which lies for a moment in an object of its own, `part`; returns the generation.

        Args:
          match: the generation that is there.

        Raises:
          Conflict: another one is.
        """
        token, tried = uuid.uuid4().hex, False
        self.put(part, line, None)

        def compose(bucket: storage.Bucket) -> int:
            nonlocal tried
            # not every store that speaks this protocol holds compose to its precondition
            if tried and (found := bucket.get_blob(name, retry=None, timeout=self._timeout)) and _stat(found).writer == token:
                return found.generation
            tried, blob = True, bucket.blob(name)
            blob.metadata = {_WRITER: token}
            blob.compose([bucket.blob(name), bucket.blob(part)], if_generation_match=match, retry=None, timeout=self._timeout)
            return blob.generation

        try:
            return self._asked(name, compose)
        except exceptions.PreconditionFailed as error:
            return self._written(name, token, error)
        finally:
            self.delete([part])

    def delete(self, names: Sequence[str], match: int | None = None) -> None:
        """Removes objects, those that are there."""
        for name in names:
            try:
                self._asked(
                    name, lambda bucket, name=name: bucket.blob(name).delete(if_generation_match=match, retry=None, timeout=self._timeout)
                )
            except (FileNotFoundError, exceptions.PreconditionFailed):
                continue

    def _written(self, name: str, token: str, error: Exception) -> int:
        """The generation of an object that a request wrote whose answer was lost."""
        found = self.stat(name)
        if found is None or found.writer != token:
            raise Conflict(name) from error
        return found.generation

    def _asked(self, name: str, request: Callable[[storage.Bucket], T]) -> T:
        """The answer to a request.

        Raises:
          FileNotFoundError: there is no such object.
          InputError: no such bucket, no access, or no credentials.
          StoreFailed: it was not answered in time.
        """
        place, told, began, patience = f"gs://{self._name}/{name}", False, time.monotonic(), self.patience

        def tell(error: Exception) -> None:
            nonlocal told
            if not told and time.monotonic() - began > min(_TELL, patience):
                told = True
                print(f"{place}: the store does not answer ({_first(error)}); trying again for {patience:.0f} s", file=sys.stderr)

        retry = Retry(_may_pass, initial=0.2, maximum=10.0, multiplier=2.0, timeout=patience, on_error=tell)
        try:
            return retry(request)(self._bucket())
        except exceptions.NotFound as error:
            raise FileNotFoundError(place) from error
        except (exceptions.Forbidden, exceptions.Unauthorized) as error:
            role = "this account needs the role storage.objectUser on the bucket, see `gcloud auth application-default login`"
            raise InputError(f"{place}: no access ({_first(error)}); {role}") from error
        except exceptions.BadRequest as error:
            raise InputError(f"{place}: refused ({_first(error)}); give a valid bucket and prefix") from error
        except GoogleAuthError as error:
            raise InputError(f"{place}: no credentials ({_first(error)}); run `gcloud auth application-default login`") from error
        except exceptions.RetryError as error:
            fix = "what was written before is there, the same command goes on from there"
            raise StoreFailed(f"{place}: no answer within {patience:.0f} s ({_first(error.cause or error)}); {fix}") from error

    def _bucket(self) -> storage.Bucket:
        if self._client is None:
            self._client = _client()
        return self._client.bucket(self._name)


def _client() -> storage.Client:
    """Raises InputError for what the environment says that cannot be used."""
    emulator, key = os.environ.get("STORAGE_EMULATOR_HOST"), "GOOGLE_APPLICATION_CREDENTIALS"
    if emulator and not emulator.startswith(("http://", "https://")):
        raise InputError(f"STORAGE_EMULATOR_HOST={emulator}: no address with http:// or https:// before it; set it so, or unset it")
    try:
        return storage.Client()
    except (IsADirectoryError, PermissionError) as error:
        raise InputError(f"{key}={os.environ.get(key)}: {error.strerror}; give the file of a key, or unset it") from error


# RetryError: of a part of a large file, which is then begun anew
_PASSING = (ConnectionError, DataCorruption, requests.Timeout, exceptions.BadGateway, exceptions.GatewayTimeout, exceptions.RetryError)


_AGAIN = (408, 410)  # too slow; the session of an upload is gone


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed."""
    if isinstance(error, RefreshError):  # the metadata server of the machine did not answer
        return error.retryable or isinstance(error.args[0], TransportError)
    return isinstance(error, _PASSING) or if_transient_error(error) or getattr(error, "code", None) in _AGAIN


def _check(blob: storage.Blob, checksum: google_crc32c.Checksum) -> None:
    """The client checks it too, but not where the store names no checksum in the answer's head."""
    found = base64.b64encode(checksum.digest()).decode()
    if blob.crc32c and blob.crc32c != found:
        raise DataCorruption(None, f"crc32c {found}, expected {blob.crc32c}")


def _stat(blob: storage.Blob) -> Stat:
    return Stat(blob.generation, blob.size, blob.updated, (blob.metadata or {}).get(_WRITER))


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
