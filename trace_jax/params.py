"""`trace-jax params`: how many parameters the model, one adapter and the gate have, from their configs alone."""

from __future__ import annotations

import rich.console
import rich.table

from envs.builtin import LIBRARY
from model import ConfigError, count_adapter_parameters, count_gate_parameters, count_parameters, read_config
from trace_jax.cli import Arguments
from trace_jax.errors import InputError


def main(arguments: Arguments) -> None:
    """Prints the table. The gate chooses among the adapters that the workdir retained, or else those that the library could train.

    Raises:
      InputError: the model's folder is missing, or its config is none that we can run.
    """
    config, workdir = arguments.config, arguments.workdir
    try:
        model = read_config(config.model.folder)
    except ConfigError as error:
        raise InputError(f"config field 'model.path': {error}") from error
    selection = "diagnosis/selected_capabilities.json"
    adapters = len(workdir.read_json(selection)) if workdir and workdir.exists(selection) else len(LIBRARY)
    base, adapter = count_parameters(model), count_adapter_parameters(model, config.train.rank)
    gate = count_gate_parameters(model, adapters + 1)

    table = rich.table.Table("", "parameters", "of the model")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, count in (
        ("model", base),
        (f"one adapter, rank {config.train.rank}", adapter),
        (f"{adapters} adapters", adapters * adapter),
        (f"gate, {adapters + 1} slots", gate),
        ("composed", base + adapters * adapter + gate),
    ):
        table.add_row(name, f"{count:,}", f"{count / base:.2%}")
    rich.console.Console().print(table)
