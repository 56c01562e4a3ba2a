"""Benchmarks as targets, by the name in the config. Each is a module with `make_targets(config, pool) -> (Target, ...)`, its domains."""

from __future__ import annotations

import hashlib
import importlib

from envs import EnvironmentFault
from envs.harness import HarnessPool, Target, TaskInfo
from trace_jax.config import Config
from trace_jax.errors import InputError

MODULES = {
    "tau2": "trace_jax.benchmarks.tau2.target",
    "swebench": "trace_jax.benchmarks.swebench.target",
    "toolsandbox": "trace_jax.benchmarks.toolsandbox.target",
    "own": "trace_jax.benchmarks.own.target",
}
INSTALL = {"tau2": "pip install trace-jax[tau2]", "swebench": "pip install trace-jax[swebench]", "toolsandbox": "install it"}


def live_targets(config: Config, pool: HarnessPool) -> tuple[Target, ...]:
    """The targets of `config.benchmark`.

    Raises:
      InputError: the benchmark is not installed where its program is to run, or cannot be used.
    """
    name = config.benchmark.name
    try:
        return importlib.import_module(MODULES[name]).make_targets(config, pool)
    except EnvironmentFault as fault:
        fix = f"; {INSTALL[name]}, or name the Python that has it in benchmark.python" if "ModuleNotFound" in str(fault) else ""
        raise InputError(f"config field 'benchmark.name': {name} cannot be used: {fault}{fix}") from fault


def task_name(target: Target, task: TaskInfo) -> str:
    """How a task is called where those of several domains may meet, "airline:2"; of a benchmark without domains as it calls it itself."""
    _, several, domain = target.name.rpartition("/")
    return f"{domain}:{task.id}" if several else task.id


def episode_seed(run_seed: int, name: str, trial: int) -> int:
    """What the benchmark's program is given as its seed, in 31 bits: another for every trial."""
    return int.from_bytes(hashlib.sha256(f"{run_seed} {name} {trial}".encode()).digest()[:4], "big") >> 1
