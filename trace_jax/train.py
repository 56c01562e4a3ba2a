"""Step 3: one LoRA adapter per retained capability, by GRPO in its environment.

    for every iteration:  seeds -> rollouts of the adapter as it is -> advantages within each seed's group -> one update -> checkpoint

The backbone is frozen and shared; an adapter sees its own environment only. Every few iterations it is tried on unseen seeds, and the best
is what remains. A run that stops goes on from the last checkpoint and, since a batch of rollouts is stored before it is learnt from, ends
with the same adapter.

With `train.max_lag` = L the batch of iteration i is begun L updates ahead, under the adapter of iteration i - L, and sampled while the
learner works; the loss weighs its tokens by the importance of the older adapter, truncated. L = 0 is the loop above.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from model import AdapterBank, CheckpointError, Gate, init_bank, load_peft, save_peft
from rl import checkpoint
from rl.advantages import episode_metrics, group_advantages
from rl.checkpoint import Checkpoints, Restored
from rl.engines.protocol import Policy
from rl.learner import Learner, LearnerConfig, LearnerState
from rl.loss import LossConfig
from rl.packing import pack
from rl.rollout import Task
from rl.trajectory import Trajectory
from trace_jax.agreement import check_agreement
from trace_jax.cli import Arguments
from trace_jax.config import Config, TrainSection
from trace_jax.errors import InputError
from trace_jax.evaluate.outcomes import success_rate
from trace_jax.metrics import Metrics
from trace_jax.runtime import BASE, SELECTION, TRAINING, VALIDATION, Runtime, open_runtime
from trace_jax.runtime.batches import Batch

Reward = Callable[[Trajectory], float]  # of a trajectory without an error

_STOP_WINDOW = 3  # iterations whose mean reward must reach train.stop_reward


def learner_config(config: Config, learning_rate: float, warmup: int, iterations: int) -> LearnerConfig:
    """The learner's settings as the config says."""
    train = config.train
    return LearnerConfig(
        learning_rate=learning_rate,
        warmup_steps=warmup,
        total_steps=iterations,
        schedule=train.schedule,
        beta1=train.adam_b1,
        beta2=train.adam_b2,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        temperature=config.rollout.temperature,
        micro_rows=train.micro_rows,
    )


def loss_config(train: TrainSection) -> LossConfig:
    """The loss's constants as the config says."""
    return LossConfig(
        clip_low=train.clip_low,
        clip_high=train.clip_high,
        dual_clip=train.dual_clip,
        weight_cap=train.importance_cap,
        drop_below=train.outlier_low,
        drop_above=train.outlier_high,
        ratio=train.ratio,
        icepop=train.icepop or None,
        kl=train.kl,
    )


def run_grpo(
    runtime: Runtime,
    learner: Learner,
    state: LearnerState,
    folder: str,
    shards: str,
    iterations: int,
    tasks: Callable[[int], Sequence[Task]],
    policy: Callable[[LearnerState], Policy],
    *,
    validation: Sequence[Task] = (),
    stop: bool = True,
    reward: Reward | None = None,
) -> LearnerState:
    """Iterations of GRPO, from the last checkpoint in `folder` on; metrics go to `<folder>/metrics.jsonl`.

    Args:
      shards: names the policy whose rollouts are stored.
      tasks: the batch of an iteration; a function of its number alone.
      policy: what the engine is to sample under a state.
      validation: tasks of seeds that are not trained on; every `train.validate_every` iterations, and after the last, they are rolled out.
      stop: end early at `train.stop_reward`.
      reward: what is learnt from, instead of the environment's own reward.

    Returns:
      The state of the highest mean reward in validation, of equal ones the newest; without validation the last. It has a checkpoint.
    """
    config, workdir = runtime.config, runtime.workdir
    batch, every = config.train.groups * config.train.group_size, config.train.validate_every if validation else 0
    gate = state.params if isinstance(state.params, Gate) else None  # not `policy(state)`, which gathers all of a pod's parts
    lag, initial = runtime.max_lag(Policy(name=shards, gate=gate)), state
    begun: collections.deque[Batch] = collections.deque()

    def begin(iteration: int, state: LearnerState) -> None:
        if iteration < iterations:
            if lag:  # it may be loaded after the update that the state's arrays are donated to
                state = dataclasses.replace(state, params=jax.tree.map(jnp.copy, state.params))
            begun.append(runtime.batches.begin(policy(state), shards, "training", iteration, tasks(iteration)))

    keep = max(config.train.keep_checkpoints, lag + 1)  # those under which a run that goes on begins its first batches
    with contextlib.closing(Checkpoints(workdir.place(f"{folder}/checkpoints"), keep=keep)) as checkpoints:
        record = {"iteration": 0, "rewards": []}
        if (found := _restored(checkpoints, state)) is not None:
            state, record = found.state, found.record
            validated = record["iteration"] // every * len(validation) if every else 0
            runtime.progress.advance(record["iteration"] * batch + validated, earlier=True)
        first = record["iteration"]
        going = not (stop and _saturated(record["rewards"], config.train.stop_reward))
        for iteration in range(first, first + lag * going):
            begin(iteration, _earlier(checkpoints, initial, state, iteration - lag))
        with Metrics(workdir, folder, first) as log:
            for iteration in range(first, iterations):
                if stop and _saturated(record["rewards"], config.train.stop_reward):
                    runtime.progress.advance((iterations - iteration) * batch, earlier=True)
                    break
                with runtime.profiled(folder, iteration):
                    began = time.perf_counter()
                    begin(iteration + lag, state)
                    gathering = time.perf_counter() - began
                    now = begun.popleft()
                    found = now.result()
                    sync, spent = gathering + now.sync_seconds, time.perf_counter() - began
                    state, metrics = update(learner, state, found, config.train, reward)
                metrics |= {"seconds/sync": sync, "seconds/rollout": max(0.0, spent - sync)}
                record = {"iteration": iteration + 1, "rewards": [*record["rewards"], metrics["reward"]]}
                last = iteration + 1 == iterations or (stop and _saturated(record["rewards"], config.train.stop_reward))
                while last and begun:
                    begun.pop().cancel()
                if every and (last or (iteration + 1) % every == 0):
                    found = runtime.roll_out(policy(state), shards, "validation", iteration, validation)
                    metrics["validation"] = episode_metrics(found)["reward"]
                log.log(iteration, metrics)
                runtime.progress.advance(0, f"iteration {iteration + 1}/{iterations}, reward {metrics['reward']:.2f}")
                checkpoints.save(iteration + 1, state, record, score=metrics.get("validation"))
        checkpoints.wait()
        best = checkpoints.best() if every else None
        return state if best is None else _restored(checkpoints, state, best).state


def _earlier(checkpoints: Checkpoints, initial: LearnerState, newest: LearnerState, step: int) -> LearnerState:
    """The state of an earlier step, under which an undisturbed run would have begun a batch; the newest where it is not kept."""
    if step <= 0:
        return initial
    return _restored(checkpoints, newest, step).state if step in checkpoints.steps() else newest


def _restored(checkpoints: Checkpoints, state: LearnerState, step: int | None = None) -> Restored | None:
    try:
        return checkpoints.restore(state, step)
    except checkpoint.CheckpointError as error:
        raise InputError(str(error)) from error


def update(
    learner: Learner, state: LearnerState, trajectories: Sequence[Trajectory], train: TrainSection, reward: Reward | None = None
) -> tuple[LearnerState, dict]:
    """Advantages, packing, one step; the metrics of all three. `reward` takes the place of the environment's own."""
    began = time.perf_counter()
    advantages = group_advantages(trajectories, divide_by_std=train.advantage_std, min_group=train.min_group, reward=reward)
    kept = np.flatnonzero(advantages.kept)
    metrics = episode_metrics(trajectories) | advantages.metrics
    if not len(kept):
        return state, metrics
    rows = {"lengths": train.row_lengths, "micro_rows": learner.config.micro_rows, "packed": train.packing}
    batch = pack([trajectories[i] for i in kept], advantages.values[kept], **rows)
    metrics["seconds/pack"] = time.perf_counter() - began
    state, learnt = learner.step(state, batch)
    return state, metrics | learnt


def _saturated(rewards: Sequence[float], stop: float | None) -> bool:
    return stop is not None and len(rewards) >= _STOP_WINDOW and float(np.mean(rewards[-_STOP_WINDOW:])) >= stop


def initial_adapter(runtime: Runtime, name: str) -> AdapterBank:
    """An adapter that does nothing yet; another one for every name and seed, whatever else is trained."""
    train = runtime.config.train
    key = jax.random.fold_in(jax.random.key(runtime.config.seed), np.uint32(zlib.crc32(name.encode())))
    return init_bank(runtime.model.config, 1, train.rank, train.alpha, key)


def load_adapter(runtime: Runtime, capability: str) -> AdapterBank:
    """A trained adapter, from its PEFT folder.

    Raises:
      InputError: it has not been trained in this workdir, or its folder is damaged.
    """
    workdir, folder = runtime.workdir, f"adapters/{capability}"
    if not workdir.exists(f"{folder}/summary.json"):
        raise InputError(f"adapter {capability!r} is not trained in {workdir.place()}; run trace-jax train --capability={capability}")
    try:
        return load_peft(workdir.local(f"{folder}/hf"), runtime.model.config)
    except CheckpointError as error:
        remove = workdir.place(f"{folder}/summary.json")
        raise InputError(f"{error}; remove {remove} and run trace-jax train --capability={capability}") from error


@functools.lru_cache(maxsize=1)
def make_learner(runtime: Runtime) -> Learner:
    """The learner of all adapters of a run: what it compiled for one serves the next."""
    train = runtime.config.train
    settings = learner_config(runtime.config, train.learning_rate, train.warmup_steps, train.iterations)
    return Learner(runtime.model, settings, loss_config(train))


def train_adapter(runtime: Runtime, capability: str) -> None:
    """Trains the adapter of one capability, exports it, and measures it on unseen seeds of its own environment."""
    config, workdir, folder = runtime.config, runtime.workdir, f"adapters/{capability}"
    train, name = config.train, f"adapter:{capability}"
    if workdir.exists(f"{folder}/summary.json"):
        validated = train.validations(train.iterations) * train.validation_seeds
        runtime.progress.advance(train.iterations * train.groups * train.group_size + validated + 2 * train.selection_seeds, earlier=True)
        return
    package, hint_ratio = runtime.environment(capability), runtime.calibration(capability)["hint_ratio"]

    def tasks(iteration: int) -> list[Task]:
        found = runtime.tasks(package, "training", TRAINING + iteration * train.groups, train.groups, train.group_size)
        return runtime.with_hints(package, hint_ratio, found)

    learner, adapter = make_learner(runtime), initial_adapter(runtime, capability)
    check_agreement(runtime, learner, adapter, package)
    state = learner.init(adapter, seed=config.seed)
    state = run_grpo(
        runtime,
        learner,
        state,
        folder,
        name,
        train.iterations,
        tasks,
        lambda state: Policy(name=name, version=int(state.step), adapters=learner.gathered(state.params)),
        validation=runtime.tasks(package, "validation", VALIDATION, train.validation_seeds, 1),
    )
    adapter = learner.gathered(state.params)
    workdir.produce(f"{folder}/hf", lambda path: save_peft(adapter, runtime.model.config, path))
    split = f"own-{capability}"
    checks = runtime.tasks(package, split, SELECTION, train.selection_seeds, 1)
    policy = Policy(name=name, version=int(state.step), adapters=adapter)
    # at the temperature that it was calibrated and trained at
    before = runtime.roll_out(BASE, "base", split, 0, checks)
    after = runtime.roll_out(policy, name, split, 0, checks)
    rows = workdir.read_jsonl(f"{folder}/metrics.jsonl")
    workdir.write_json(
        f"{folder}/summary.json",
        {
            "capability": capability,
            "iterations": len(rows),
            "updates": int(state.step),
            "rollouts": len(rows) * train.groups * train.group_size + sum("validation" in row for row in rows) * train.validation_seeds,
            "before": success_rate(before),
            "after": success_rate(after),
        },
    )


def main(arguments: Arguments) -> None:
    """`trace-jax train [--capability=C]`."""
    with open_runtime(arguments, "train") as runtime:
        usable = runtime.usable()
        if arguments.capability and arguments.capability not in usable:
            raise InputError(f"--capability={arguments.capability}: no usable environment; there are: {', '.join(usable)}")
        for capability in [arguments.capability] if arguments.capability else usable:
            train_adapter(runtime, capability)
