"""What the steps of one run share: the base model, its tokenizer, the workers, the engines, and the batches of rollouts.

Since the tokens of a batch depend on seeds and policies alone, a run that was killed goes on with what an undisturbed one would have had.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.markup import escape

from envs import EnvironmentFault, HarnessPool, Pool, SandboxError, Start, Target
from envs.builtin import builtin_names, is_builtin, library, load_builtin
from envs.harness import TaskInfo
from envs.package import Package, PackageError, load_package
from model import CausalLM, CheckpointError, ConfigError, load_pretrained
from rl.chat import Chat
from rl.engines.jax import JaxEngine
from rl.engines.protocol import Engine, Policy
from rl.rollout import Task
from rl.trajectory import Trajectory
from trace_jax.base_model import tokenizer_folder
from trace_jax.benchmarks.live import episode_seed, live_targets, task_name
from trace_jax.config import Config
from trace_jax.diagnose.select import diagnosed_policy
from trace_jax.errors import InputError
from trace_jax.progress import Progress
from trace_jax.runtime.batches import BASE, Batches
from trace_jax.runtime.engines import embedded_engine, sgl_jax_engine, sglang_engine
from trace_jax.runtime.mesh import engine_axes, local_copy, make_mesh
from trace_jax.runtime.seeds import APART, HELDOUT_TASKS, TRAIN_TASKS
from trace_jax.spent import add_seconds, write_spent
from trace_jax.workdir import Workdir


class Runtime:
    """Built once per command, closed at its end; its parts are made when first asked for."""

    def __init__(self, config: Config, workdir: Workdir, progress: Progress, profiled: Collection[int] = ()):
        self.config, self.workdir, self.progress, self.processes = config, workdir, progress, workdir.processes
        self._profiled = frozenset(profiled)
        self.stages: Mapping[str, float] = {}
        self._prefix = ""
        self._environments: dict[str, Package] = {}
        self._tools: dict[str, list[dict[str, Any]]] = {}
        self._hints: dict[tuple[str, int], str] = {}

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # each is closed, even if the closing of another is interrupted
            for part in ("pool", "harness", "engine", "batches"):  # the last first; none is made to be closed
                if part in self.__dict__:
                    stack.callback(self.__dict__[part].close)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def within(self, workdir: Workdir, prefix: str = "") -> Iterator[Runtime]:
        """The same run over another workdir: model, engines and workers are shared, batches are not.

        Args:
          prefix: before the names of its stages in the plan.
        """
        parts = ("pool", "model", "local_model", "chat", "engine", "jax_engine", "targets")
        shared = {part: getattr(self, part) for part in (*parts, *(["harness"] if self.config.benchmark.name else []))}
        inner = copy.copy(self)
        inner.__dict__ = {name: value for name, value in self.__dict__.items() if name != "batches"} | shared
        inner.workdir, inner._prefix = workdir, prefix
        try:
            yield inner
        finally:
            if "batches" in inner.__dict__:
                inner.batches.close()

    @functools.cached_property
    def pool(self) -> Pool:
        """The workers; what holds them is printed and kept in `sandbox.json`.

        Raises:
          InputError: the kernel must hold them and does not.
        """
        config = self.config
        foreign = config.generator == "llm" or (not config.benchmark.name and not is_builtin(self.target))
        try:
            pool = Pool(config.rollout.workers, sandbox=config.rollout.sandbox or ("require" if foreign else "best_effort"))
            layers, missing = pool.layers, pool.missing
        except SandboxError as error:
            raise InputError(f"config field 'rollout.sandbox': {error}") from error
        self.progress.print(escape(pool.describe()))
        if self.processes.leads:  # not agreed upon: a pool is made when a process first needs one, maybe by a thread of its own
            record = {"mode": pool.sandbox, "layers": layers, "missing": missing}
            self.workdir.log("sandbox.json").write_text(json.dumps(record, indent=2) + "\n")
        return pool

    @functools.cached_property
    def harness(self) -> HarnessPool:
        """The workers of a benchmark's own program."""
        return HarnessPool(self.config.rollout.workers, deadline_s=self.config.benchmark.timeout)

    def pool_of(self, tasks: Sequence[Task]) -> Pool | HarnessPool:
        """The workers that host the environments of a batch."""
        return self.harness if any(isinstance(task.package, Target) for task in tasks) else self.pool

    @functools.cached_property
    def model(self) -> CausalLM:
        """The base on the devices of all processes, for the learner."""
        folder = self.config.model.weights  # before the mesh, which is wrong on any machine but the config's own
        return self._load(folder, make_mesh(self.config.mesh, jax.devices()))

    @functools.cached_property
    def local_model(self) -> CausalLM:
        """The base on this process's own devices, for all that it does by itself."""
        if self.processes.count == 1:
            return self.model
        if (own := local_copy(self.model)) is not None:
            return own
        return self._load(self.config.model.weights, make_mesh(engine_axes(self.config.mesh), jax.local_devices()))

    def _load(self, folder: pathlib.Path | str, mesh: Mesh | None) -> CausalLM:
        try:
            dtype, train = jnp.dtype(self.config.model.dtype), self.config.train
            model = load_pretrained(folder, mesh, dtype, remat=train.remat, packed=train.packing)
        except (ConfigError, CheckpointError) as error:
            raise InputError(f"config field 'model.path': {error}") from error
        context, most = self.config.rollout.context, model.config.max_position_embeddings
        if context > most:
            raise InputError(f"config field 'rollout.context': {context} is more than the {most} positions of the model; lower it")
        return model

    @functools.cached_property
    def chat(self) -> Chat:
        try:
            return Chat(tokenizer_folder(self.config.model))
        except (OSError, ValueError) as error:
            raise InputError(f"config field 'model.path': no tokenizer with a chat template: {error}") from error

    @functools.cached_property
    def jax_engine(self) -> JaxEngine:
        """The embedded engine, which samples every policy."""
        return embedded_engine(self.config, self.local_model)

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine of the config, which samples the base and single adapters."""
        if self.config.rollout.engine == "jax":
            return self.jax_engine
        if self.config.rollout.engine == "sgl_jax":
            return sgl_jax_engine(self.config, self.local_model)
        return sglang_engine(self.config, self.local_model, self.workdir, lambda text: self.progress.advance(0, text))

    @functools.cached_property
    def batches(self) -> Batches:
        return Batches(self.config, self.workdir, self.progress, self._parts)

    def _parts(self, policy: Policy | str, tasks: Sequence[Task]) -> tuple[Engine, Pool | HarnessPool, Chat]:
        return self._engine_of(policy), self.pool_of(tasks), self.chat

    def _engine_of(self, policy: Policy | str) -> Engine:
        constant = None if isinstance(policy, str) else policy.weights
        mixed = (constant is not None and np.count_nonzero(constant) > 1) or (isinstance(policy, Policy) and policy.gate is not None)
        return self.jax_engine if mixed else self.engine

    def max_lag(self, policy: Policy) -> int:
        """How many updates a batch of a policy may be older than the weights that learn from it.

        Raises:
          InputError: rollouts would run beside updates on the same devices, several of them.
        """
        lag, shared = self.config.train.max_lag, self.config.rollout.engine != "sglang" or self._engine_of(policy) is not self.engine
        mesh = self.local_model.mesh if shared else None
        if lag and mesh is not None and mesh.size > 1:
            raise InputError(
                f"config field 'train.max_lag': {lag} needs an engine on devices of its own; this one shares {mesh.size} with the "
                "learner, and two programs that meet on several devices may wait for each other: set it to 0"
            )
        return int(not shared) if lag is None else lag

    @functools.cached_property
    def targets(self) -> tuple[Package | Target, ...]:
        """What the agent is to become good at: one package, or the domains of a benchmark."""
        if self.config.benchmark.name:
            _ = self.config.model.weights  # that there are none is said before the benchmark's program starts
            return live_targets(self.config, self.harness)
        package = find_package(self.config.target.package, "target.package")
        try:
            package.resolve_knobs(self.config.target.knobs)
        except PackageError as error:
            raise InputError(f"config field 'target.knobs': {error}") from error
        return (package,)

    @property
    def target(self) -> Package | Target:
        """The target; of several domains the first."""
        return self.targets[0]

    def target_of(self, capability: str, package: Package | None = None) -> Package | Target:
        """Whose tools an environment of a capability has: of several domains the one that its package names; without a package the one
        in which the agent failed most often, among those that the library knows the capability of."""
        if package is not None:
            return next((target for target in self.targets if target.target == package.target), self.target)
        known = [target for target in self.targets if capability in library(target.target)] or list(self.targets)
        if len(known) == 1:
            return known[0]
        policy = diagnosed_policy(self.workdir)
        found = self.workdir.read_shards(policy, "train") if self.workdir.shards(policy, "train") else ()
        failed = collections.Counter(t.environment for t in found if t.error is None and not t.success)
        return max(known, key=lambda target: failed[target.name])

    def first_sight(self, target: Package | Target) -> Start:
        """What an agent sees of a target before anything else; of a benchmark the system prompt alone.

        Raises:
          EnvironmentFault: it cannot be reset.
        """
        if isinstance(target, Target):
            return Start(target.system, [])
        return self.pool.open(target, TRAIN_TASKS, self.config.target.knobs).reset()

    def environment(self, capability: str) -> Package:
        """The environment that step 2 made for a capability.

        Raises:
          InputError: there is none, or it was changed since it was certified.
        """
        if capability not in self._environments:
            folder = f"environments/{capability}"
            certificate = self.workdir.read_json(f"{folder}/certificate.json")
            try:
                package = load_package(self.workdir.local(folder))
            except PackageError as error:
                raise InputError(str(error)) from error
            if package.digest != certificate["digest"]:
                raise InputError(
                    f"{self.workdir.place(folder)}: changed since it was certified; remove it and run trace-jax synthesize again"
                )
            self._environments[capability] = package
        return self._environments[capability]

    def tools(self, package: Package | Target) -> list[dict[str, Any]]:
        """The tool schemas of a package, or of a benchmark."""
        if isinstance(package, Target):
            return package.tools
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
        calibrated = [c for c in self.retained() if self.workdir.exists(f"environments/{c}/calibration.json")]
        usable = [c for c in calibrated if self.calibration(c)["usable"]]
        if not usable:
            raise InputError(
                f"{self.workdir.place('environments')}: no usable environment; run trace-jax synthesize, "
                "or see why in calibration.json and certificate.json"
            )
        return usable

    def calibration(self, capability: str) -> dict[str, Any]:
        """What step 2 found about a capability's environment."""
        return self.workdir.read_json(f"environments/{capability}/calibration.json")

    def plan(self, stages: Mapping[str, float]) -> None:
        """The stages of the command, with the rollouts of each."""
        self.stages = stages
        self.progress.plan(stages)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of the plan: its progress, and its cost in `spent.json`."""
        began, done = time.monotonic(), False
        try:
            with self.progress.stage(self._prefix + name, self.stages[self._prefix + name]):
                yield
            done = True
        finally:
            if done or self.processes.count == 1:  # a process that was interrupted alone asks nothing of the others
                add_seconds(self.workdir, name, time.monotonic() - began)
                write_spent(self.workdir)

    def tasks(self, package: Package, split: str, first: int, seeds: int, rollouts: int, *, earlier: int = 0) -> list[Task]:
        """`rollouts` tasks for each of `seeds` seeds from `first` on; the rollouts of a seed are one group.

        Args:
          earlier: rollouts of the same seeds before; the new ones draw other random numbers.

        Raises:
          InputError: more seeds than lie between two purposes.
        """
        if first < HELDOUT_TASKS and first % APART + seeds > APART:
            raise InputError(f"split {split!r} asks for more than {APART:,} seeds; lower the groups, iterations or tasks in the config")
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
            for rollout in range(earlier, earlier + rollouts)
        ]

    def starts(self, tasks: Sequence[Task]) -> list[Start | EnvironmentFault]:
        """What the agent sees before its first turn; of a benchmark also what its simulated user says first."""
        pool = self.pool_of(tasks)
        if pool is self.pool:
            return pool.batch([(pool.open(task.package, task.seed, task.knobs), "reset", ()) for task in tasks])
        found = self.batches.look(BASE, [dataclasses.replace(task, policy=None) for task in tasks])
        return [
            EnvironmentFault(t.error["kind"], t.error["message"]) if t.error else Start(t.messages[0]["content"], t.messages[1:])
            for t in found
        ]

    def target_size(self, split: str) -> int:
        """How many of the target's tasks of "train" or "heldout" are used."""
        asked = self.config.target.train_tasks if split == "train" else self.config.evaluation.tasks
        return min(asked, len(self._benchmark_tasks(split))) if self.config.benchmark.name else asked

    def target_tasks(
        self, split: str, rollouts: int, *, label: str = "", places: Sequence[int] | None = None, earlier: int = 0
    ) -> list[Task]:
        """`rollouts` tasks for each of the target's tasks of "train" or "heldout"; the rollouts of one are one group.

        Args:
          label: the split that trajectories name, if another.
          places: of the tasks, all that are used by default.
          earlier: rollouts of the same tasks before; the new ones draw other random numbers.
        """
        size, label = self.target_size(split), label or split
        if not self.config.benchmark.name:
            first = TRAIN_TASKS if split == "train" else HELDOUT_TASKS
            parts = [(first, size)] if places is None else [(first + place, 1) for place in places]
            return [task for part in parts for task in self.tasks(self.target, label, *part, rollouts, earlier=earlier)]
        places = range(size) if places is None else places
        listed = self._benchmark_tasks(split)
        return [
            Task(
                package=target,
                seed=task.number,
                rollout=rollout,
                group=task_name(target, task),
                task_id=task_name(target, task),
                split=label,
                trial=rollout,
                knobs={"seed": episode_seed(self.config.seed, task_name(target, task), rollout)},
            )
            for target, task in (listed[place] for place in places)
            for rollout in range(earlier, earlier + rollouts)
        ]

    def _benchmark_tasks(self, split: str) -> list[tuple[Target, TaskInfo]]:
        """In the benchmark's order, one domain after the other."""
        return [(target, task) for target in self.targets for task in target.tasks(split)]

    def with_hints(self, package: Package, ratio: float, tasks: Sequence[Task]) -> list[Task]:
        """The tasks, the first `ratio` of each group's rollouts with the package's hint."""
        if not ratio:
            return list(tasks)
        out, sizes = [], collections.Counter(task.group for task in tasks)
        for task in tasks:
            if task.rollout < round(ratio * sizes[task.group]):
                key = (package.digest, task.seed)
                if key not in self._hints:
                    self._hints[key] = self.pool.function(package, "hint", task.seed, task.knobs)
                task = dataclasses.replace(task, hint=self._hints[key])
            out.append(task)
        return out

    def roll_out(
        self, policy: Policy | str, folder: str, split: str, index: int, tasks: Sequence[Task], temperature: float | None = None
    ) -> list[Trajectory]:
        """The trajectories of a batch, in the order of its tasks: read from `rollouts/<folder>/<split>/` if the shard exists, else sampled.

        See `Batches.begin` and `Batch.result`.
        """
        return self.batches.begin(policy, folder, split, index, tasks, temperature).result()

    @contextlib.contextmanager
    def profiled(self, folder: str, step: int) -> Iterator[None]:
        """Traces what is done in the block, if the step is one that the command was asked to profile, into `profile/<folder>/<step>/`."""
        if step not in self._profiled:
            yield
            return
        with jax.profiler.trace(str(self.workdir.log(f"profile/{folder}/{step:05d}"))):
            yield


def find_package(name: str, field: str) -> Package:
    """A built-in package by name, or the package of a folder.

    Raises:
      InputError: neither; the config field is named.
    """
    try:
        if name in builtin_names():
            return load_builtin(name)
        return load_package(name)
    except PackageError as error:
        raise InputError(f"config field {field!r}: {error}") from error
