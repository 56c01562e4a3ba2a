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

    def close(self, patience: float) -> bool:
        """Makes a last copy, with so many seconds for an answer, and returns whether all is copied; the rest stays on this machine."""
        self._ended.set()
        self._objects.patience = patience
        self._thread.join(patience)
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
            if path.is_file():
                name, status = path.relative_to(self._root).as_posix(), path.stat()
                state = (status.st_size, status.st_mtime_ns)
                if self._copied.get(name) != state:
                    self._objects.put(name, path.read_bytes(), None)
                    self._copied[name] = state
