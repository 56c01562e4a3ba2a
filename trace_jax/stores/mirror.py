"""Files that grow, which a bucket has none of: they are written on this machine and copied into the bucket now and then."""

from __future__ import annotations

import pathlib
import sys
import threading

from trace_jax.errors import InputError
from trace_jax.stores.objects import Objects
from trace_jax.stores.protocol import StoreFailed

_EVERY = 30.0  # seconds between two copies


class Mirror:
    """Copies what has changed below a folder.

    Args:
      objects: for this thread alone.
      root: the folder; its files are named like their objects.
    """

    def __init__(self, objects: Objects, root: pathlib.Path):
        self._objects, self._root = objects, root
        self._copied: dict[str, tuple[int, int]] = {}
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._keep, name="mirror", daemon=True)
        self._thread.start()

    def copied(self, path: pathlib.Path) -> None:
        """A file is in the bucket as it is here."""
        self._copied[path.relative_to(self._root).as_posix()] = _state(path)

    def close(self, patience: float, last: bool = True) -> bool:
        """Makes a last copy, with so many seconds for an answer, and returns whether all is copied; the rest stays on this machine.

        Args:
          last: False where the bucket's files are no longer this process's.
        """
        self._ended.set()
        self._objects.patience = patience
        self._thread.join(patience)
        if not last:
            return True
        try:
            self._copy()
            return True
        except (StoreFailed, InputError) as error:
            print(f"trace-jax: the logs of this process stay in {self._root}: {error}", file=sys.stderr)
            return False

    def _keep(self) -> None:
        while not self._ended.wait(_EVERY):
            try:
                self._copy()
            except (StoreFailed, InputError):
                continue  # the run itself will be told

    def _copy(self) -> None:
        for path in sorted(self._root.rglob("*")):
            name = path.relative_to(self._root).as_posix()
            try:
                state = _state(path)
                if not path.is_file() or self._copied.get(name) == state:
                    continue
                data = path.read_bytes()
            except FileNotFoundError:  # a library has removed it meanwhile
                continue
            self._objects.put(name, data, None)
            self._copied[name] = state


def _state(path: pathlib.Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
