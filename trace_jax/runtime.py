"""What the steps of one run share: the base model, its tokenizer, the workers, the engine, and how a batch of rollouts is made or found.

A batch of rollouts is the unit of resuming. It is sampled in one go from its seeds and stored as one shard; a step that asks for a batch
whose shard exists reads the shard. Since the tokens of a batch depend on seeds and policies alone, a run that was killed goes on with what
an undisturbed one would have had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from envs import Pool
from envs.builtin import LIBRARY, load_builtin
from envs.package import Package, PackageError, load_package
from model import CheckpointError, ConfigError, Qwen3, load_pretrained
from rl.chat import Chat
from rl.engines.jax import JaxEngine
from rl.engines.protocol import Policy
from rl.rollout import Task, roll_out
from rl.trajectory import Trajectory
from trace_jax.cli import Arguments
from trace_jax.config import Config
from trace_jax.errors import InputError
from trace_jax.progress import Progress
from trace_jax.spent import add_seconds, write_spent
from trace_jax.workdir import Workdir, policy_name

# Which seeds a step may use, so that no step sees another's tasks. The target's train split is a fixed set, as a benchmark's is.
TRAIN_TASKS = 0
CALIBRATION = 1_000_000
TRAINING = 2_000_000
GATE = 3_000_000
GATE_TRAINING = 4_000_000
SELECTION = 5_000_000  # held-out seeds of the capability environments, which decide what is kept
HELDOUT_TASKS = 9_000_000


class Runtime:
    """Built once per command, closed at its end; its parts are made when first asked for."""

    def __init__(self, config: Config, workdir: Workdir, progress: Progress):
        self.config, self.workdir, self.progress = config, workdir, progress
        self.temperature = config.rollout.temperature
        self._tools: dict[str, list[dict[str, Any]]] = {}
        self._hints: dict[tuple[str, int], str] = {}

    def close(self) -> None:
        if "pool" in self.__dict__:
            self.pool.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @functools.cached_property
    def pool(self) -> Pool:
        return Pool(workers=self.config.rollout.workers)

    @functools.cached_property
    def model(self) -> Qwen3:
        try:
            return load_pretrained(self.config.model.folder, dtype=jnp.dtype(self.config.model.dtype))
        except (ConfigError, CheckpointError) as error:
            raise InputError(f"config field 'model.path': {error}") from error

    @functools.cached_property
    def chat(self) -> Chat:
        return Chat(self.config.model.folder)

    @functools.cached_property
    def engine(self) -> JaxEngine:
        return JaxEngine(self.model, lanes=self.config.rollout.lanes, context=self.config.rollout.context)

    @functools.cached_property
    def target(self) -> Package:
        return find_package(self.config.target.package, "target.package")

    def environment(self, capability: str) -> Package:
        """The environment that step 2 made for a capability."""
        return load_package(self.workdir.root / "environments" / capability)

    def tools(self, package: Package) -> list[dict[str, Any]]:
        """The tool schemas of a package."""
        if package.digest not in self._tools:
            self._tools[package.digest] = self.pool.function(package, "tools")
        return self._tools[package.digest]

    def retained(self) -> list[str]:
        """The capabilities that step 1 retained, largest gap first.

        Raises:
          InputError: step 1 has not run in this workdir.
        """
        return [entry["skill"] for entry in self.workdir.read_json("diagnosis/selected_capabilities.json") if entry["passes_consistency"]]

    def usable(self) -> list[str]:
        """The retained capabilities whose environment is certified and calibrated.

        Raises:
          InputError: step 2 has not run, or left none.
        """
        found = [c for c in self.retained() if self.calibration(c)["usable"]]
        if not found:
            raise InputError(
                f"{self.workdir.root}/environments: no usable environment; their calibration.json and certificate.json say why"
            )
        return found

    def calibration(self, capability: str) -> dict[str, Any]:
        """What step 2 found about a capability's environment."""
        return self.workdir.read_json(f"environments/{capability}/calibration.json")

    @contextlib.contextmanager
    def stage(self, name: str, total: float) -> Iterator[None]:
        """One stage of the run, of `total` rollouts: its progress, and its cost in `spent.json`."""
        began = time.monotonic()
        try:
            with self.progress.stage(name, total):
                yield
        finally:
            add_seconds(self.workdir, name, time.monotonic() - began)
            write_spent(self.workdir)

    def tasks(self, package: Package, split: str, first: int, seeds: int, rollouts: int) -> list[Task]:
        """`rollouts` tasks for each of `seeds` seeds from `first` on; the rollouts of a seed are one group."""
        knobs = self.config.target.knobs if package.name == self.target.name else {}
        return [
            Task(
                package=package,
                seed=seed,
                rollout=rollout,
                group=str(seed),
                task_id=f"{package.name}:{seed}",
                split=split,
                trial=rollout,
                knobs=knobs,
            )
            for seed in range(first, first + seeds)
            for rollout in range(rollouts)
        ]

    def with_hints(self, package: Package, ratio: float, tasks: Sequence[Task]) -> list[Task]:
        """The tasks, the first `ratio` of each group's rollouts with the package's hint."""
        if not ratio:
            return list(tasks)
        out = []
        for task in tasks:
            if task.rollout < round(ratio * self.config.train.group_size):
                key = (package.digest, task.seed)
                if key not in self._hints:
                    self._hints[key] = self.pool.function(package, "hint", task.seed, package.resolve_knobs(task.knobs))
                task = dataclasses.replace(task, hint=self._hints[key])
            out.append(task)
        return out

    def roll_out(
        self, policy: Policy | str, folder: str, split: str, index: int, tasks: Sequence[Task], temperature: float | None = None
    ) -> list[Trajectory]:
        """The trajectories of a batch, in the order of its tasks: read from `rollouts/<folder>/<split>/` if the shard exists, else sampled.

        Args:
          policy: loaded into the engine when the batch has to be sampled; a name if it is loaded already.
          folder: names the policy in the workdir.
          temperature: of training and diagnosis by default.
        """
        if index in self.workdir.shards(folder, split):
            found = list(self.workdir.read_shards(folder, split, [index]))
            if [(t.environment, t.seed, t.trial) for t in found] != [(t.package.name, t.seed, t.trial) for t in tasks]:
                where = self.workdir.root / "rollouts" / policy_name(folder) / split
                raise InputError(f"{where}/{index:05d}.jsonl.zst holds other tasks than asked for; remove that folder and run again")
            self.progress.advance(len(found), earlier=True)
            return found
        if isinstance(policy, Policy):
            self.engine.load(policy)
        found = roll_out(
            self.engine,
            self.pool,
            self.chat,
            tasks,
            policy if isinstance(policy, str) else policy.name,
            temperature=self.temperature if temperature is None else temperature,
            run_seed=self.config.seed,
            max_tokens=self.config.rollout.max_tokens,
            max_turns=self.config.rollout.max_turns,
            on_progress=self.progress.advance,
        )
        self.workdir.write_shard(folder, split, index, found)
        return found


@contextlib.contextmanager
def open_runtime(arguments: Arguments, stages: Mapping[str, float] | None = None) -> Iterator[Runtime]:
    """The runtime of a command, with a progress line over its stages."""
    with (
        arguments.workdir.path("stall.log").open("a") as stall_log,
        Progress(stages or {arguments.command: 1.0}, stall_log=stall_log) as progress,
        Runtime(arguments.config, arguments.workdir, progress) as runtime,
    ):
        yield runtime


def find_package(name: str, field: str) -> Package:
    """A built-in package by name, or the package of a folder.

    Raises:
      InputError: neither; the config field is named.
    """
    try:
        if name == "desk" or name in LIBRARY:
            return load_builtin(name)
        return load_package(name)
    except PackageError as error:
        raise InputError(f"config field {field!r}: {error}") from error
