"""`trace-jax params`: parameter counts of the model, of an adapter and of the gate, from the config alone."""

from __future__ import annotations

from model import count_adapter_parameters, count_gate_parameters, count_parameters
from trace_jax.base_model import read_architecture
from trace_jax.cli import Arguments


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
