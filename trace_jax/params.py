"""`trace-jax params`: parameter counts of the model, of an adapter and of the gate, from the config alone."""

from __future__ import annotations

from model import Config as Architecture
from model import ConfigError, count_adapter_parameters, count_gate_parameters, count_parameters, read_config
from trace_jax.cli import Arguments
from trace_jax.config import Config
from trace_jax.errors import InputError


def read_architecture(config: Config) -> Architecture:
    """What the model of a run is; no weights are read.

    Raises:
      InputError: the model's config cannot be honoured.
    """
    try:
        return read_config(config.model.folder)
    except ConfigError as error:
        raise InputError(f"config field 'model.path': {error}") from error


def main(arguments: Arguments) -> None:
    """Prints the counts; no weights are read.

    Raises:
      InputError: the model's config cannot be honoured.
    """
    config = arguments.config
    architecture = read_architecture(config)
    total = count_parameters(architecture)
    adapter = count_adapter_parameters(architecture, config.train.rank)
    print(f"model                        {total:>16,}")
    print(f"adapter, rank {config.train.rank:<4}           {adapter:>16,}  ({adapter / total:.1%} of the model)")
    print(f"gate over base + 4 adapters  {count_gate_parameters(architecture, 5):>16,}")
