"""Where the files of a workdir lie: a local folder, or a bucket of Google Cloud Storage.

`open_store` gives one by its address. A store holds files by names with `/`; what they mean is the business of `trace_jax.workdir`.
"""

from __future__ import annotations

import os

from trace_jax.errors import InputError
from trace_jax.stores.folder import Folder
from trace_jax.stores.protocol import Store

__all__ = ["Store", "is_remote", "open_store"]


def is_remote(address: str | os.PathLike) -> bool:
    """Whether an address has a scheme, and is no path."""
    return "://" in str(address)


def open_store(address: str | os.PathLike) -> Store:
    """The store of a path or of `gs://bucket/prefix`. Nothing is made, and nobody asked, before one of its methods is called.

    Raises:
      InputError: another scheme, or a malformed address.
    """
    if not is_remote(address):
        return Folder(address)
    if not str(address).startswith("gs://"):
        raise InputError(f"{address}: a folder, or gs://BUCKET/PREFIX, can be used")
    from trace_jax.stores.bucket import Bucket  # google-cloud-storage: not for a local run

    return Bucket(str(address))
