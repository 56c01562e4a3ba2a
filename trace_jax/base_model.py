"""What a config says of its base model: the architecture, and the files that libraries want on this machine, of one in a bucket too."""

from __future__ import annotations

import functools
import pathlib
import tempfile

from model import Config as Architecture
from model import ConfigError, read_config
from model.composed import COMPANIONS
from model.files import exists, read_text
from trace_jax.config import Config, ModelSection
from trace_jax.errors import InputError
from trace_jax.stores import is_remote


def read_architecture(config: Config) -> Architecture:
    """What the model of a run is; no weights are read.

    Raises:
      InputError: the model's config cannot be honoured.
    """
    try:
        return read_config(config.model.folder)
    except ConfigError as error:
        raise InputError(f"config field 'model.path': {error}") from error


def tokenizer_folder(model: ModelSection) -> pathlib.Path:
    """A local folder with tokenizer and chat template.

    Raises:
      InputError: there is no such model, or none that may be read.
    """
    if not is_remote(model.path):
        return pathlib.Path(model.folder)
    try:
        return pathlib.Path(_fetched(model.path).name)
    except OSError as error:
        raise InputError(f"config field 'model.path': {error}") from error


def local_weights(model: ModelSection, why: str) -> pathlib.Path:
    """The folder of the weights, for programs that read no bucket.

    Raises:
      InputError: it is in a bucket, and why that does not do.
    """
    if is_remote(model.path):
        fix = f"copy the model with `gcloud storage cp -r {model.path} FOLDER` and set --config.model.path=FOLDER"
        raise InputError(f"config field 'model.path': {why}; {fix}")
    return pathlib.Path(model.weights)


@functools.lru_cache(maxsize=1)
def _fetched(address: str) -> tempfile.TemporaryDirectory:
    """The tokenizer's files, until the process ends; `config.json` too, by which transformers finds the tokenizer's class."""
    folder = tempfile.TemporaryDirectory(prefix="trace-jax-")
    for name in ("config.json", *COMPANIONS):
        if exists(address, name):
            pathlib.Path(folder.name, name).write_text(read_text(address, name), "utf-8")
    return folder
