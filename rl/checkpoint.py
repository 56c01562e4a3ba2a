"""Checkpoints of a training run: everything that the next step depends on, saved together or not at all.

One checkpoint holds the learner's state (trainable weights, optimizer, step, random key) and a JSON record (data position, policy version,
whatever the driver needs to go on). Orbax writes into a folder of another name and commits it last, by a rename on a file system and by a
marker on an object store, so a run that dies while it saves leaves the previous checkpoint in force. `step(restore(save(x)))` equals
`step(x)` bit for bit, on any number of processes; on another mesh the arrays are the same and the step is theirs to the last bits.

Of several processes each writes the pieces that it holds, and all call every method together. What is decided by looking at the folder
is decided while nobody writes to it, so that all see the same; only the first process deletes.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import shutil
import zlib
from typing import Any

import fsspec.config
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

# what a complete checkpoint has; an object store adds a marker that orbax looks for
_PARTS = ("_CHECKPOINT_METADATA", "record/metadata", "state/manifest.ocdbt")
_STEP = re.compile(r"(\d+)(\.orbax-checkpoint-tmp.*)?")
_OVERHEAD = 1 << 20  # bytes of a checkpoint beside its arrays: some forty small files
# Seconds that a process waits for the others, and for the writing of one checkpoint. JAX itself notices a dead process after 100, and
# orbax one that does not come along to a save after 300; this one is for processes that take their time to load the model.
_PATIENCE = 900


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint as read back: its step, the state in the template's shapes, types and shardings, and the JSON record."""

    step: int
    state: Any
    record: dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that could not be written, is damaged or belongs to another run; the message names the folder and what to do."""


class Checkpoints:
    """The checkpoints of one folder, local or `gs://`, which several processes share.

    Args:
      path: the folder; made when first written to. Files of other names in it are left alone.
      keep: how many of the newest to keep. The one of the highest score is kept besides, of equal ones the newest.
    """

    def __init__(self, path: str | epath.PathLike, *, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep must be positive, found {keep}")
        self._local = "://" not in str(path)
        self.path = epath.Path(path).resolve() if self._local else epath.Path(path)
        # else a process would for ever see the folder as it was when it first listed it, and not what others write and delete
        fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
        self._swept = False
        # With the processes named, orbax waits for them at barriers that run out; without, in a collective that hangs for ever.
        self._processes = set(range(jax.process_count()))
        newest = checkpoint_managers.LatestN(keep)
        best = checkpoint_managers.BestN(get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            best_fn=_rank,
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([newest, best]),
            async_options=ocp.AsyncOptions(timeout_secs=_PATIENCE),
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=self._processes, barrier_sync_key_prefix=str(self.path)
            ),
            # a manager that opens a folder for reading alone neither makes it nor waits for the other processes
            create=False,
            save_root_metadata=False,
            lightweight_initialize=True,
        )
        self._manager = ocp.CheckpointManager(self.path, options=options)

    def save(self, step: int, state: Any, record: dict[str, Any], *, score: float | None = None) -> bool:
        """Starts to save `state` and `record` under `step` and returns whether it did; the state may be donated at once.

        Waits for an earlier save that is still being written. A step that is saved already is left as it is.

        Args:
          score: what `best` goes by, higher is better; None for a state that was not evaluated.

        Raises:
          OSError: no room for it on the disk.
          CheckpointError: the earlier save failed in the background, or another process does not come along.
        """
        if score is not None and not math.isfinite(score):
            raise ValueError(f"the score of step {step} must be finite, found {score}")
        if step in (steps := self.steps()):
            return False
        if not self._swept:
            self._sweep(steps)
        leaves = _without_keys(state)
        self._check_room(sum(x.nbytes for x in leaves.values()) + _OVERHEAD)
        items = {"state": ocp.args.StandardSave(leaves), "record": ocp.args.JsonSave(record)}
        try:
            return self._manager.save(step, args=ocp.args.Composite(**items), metrics={"score": score}, force=True)
        except jax.errors.JaxRuntimeError as error:
            raise CheckpointError(f"{self.path}: {_LOST}: {_reason(error)}") from error

    def _sweep(self, steps: list[int]) -> None:
        """Removes all but the complete `steps`: what runs left that died while they wrote or deleted."""
        if jax.process_index() == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            for path in self.path.iterdir() if self.path.exists() else ():  # an empty folder of a bucket is none
                if _STEP.fullmatch(path.name) and path.name not in map(str, steps) and path.is_dir():
                    path.rmtree()
        self._meet("swept")
        if self._local and not self.path.exists():
            raise CheckpointError(f"{self.path} was made by process 0, but process {jax.process_index()} does not see it: {_SHARED}")
        self._manager.reload()
        self._swept = True

    def _check_room(self, size: int) -> None:
        """A disk that fills up during the save would fail half a dozen threads, each with a traceback; so room is asked for first."""
        if self._local and shutil.disk_usage(self.path).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _meet(self, place: str) -> None:
        """Waits until all processes are here."""
        try:
            ocp.multihost.sync_global_processes(f"{self.path} {place}", timeout=_PATIENCE, processes=self._processes)
        except jax.errors.JaxRuntimeError as error:
            raise CheckpointError(f"{self.path}: {_LOST}: {_reason(error)}") from error

    def wait(self) -> None:
        """Until all that was saved is on disk.

        Raises:
          CheckpointError: it could not be written; the checkpoint before it stays in force.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:  # of the file system, of tensorstore, of the other processes
            raise CheckpointError(
                f"{self.path}: a checkpoint could not be written, the one before it stays in force; free space or mend access, the same "
                f"command goes on from there: {_reason(error)}"
            ) from error

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first; waits for one that is being written."""
        self.wait()
        try:
            self._manager.reload()
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: a score cannot be read ({error}); remove the step's folder whose metrics/metrics is no JSON"
            ) from error
        return sorted(step for step in self._manager.all_steps() if all((self.path / str(step) / part).exists() for part in _PARTS))

    def best(self) -> int | None:
        """The complete checkpoint of the highest score, of equal ones the newest; None if none has a score."""
        ranks = {step: _rank(self._manager.metrics(step) or {}) for step in self.steps()}
        step = max(ranks, key=lambda step: (ranks[step], step), default=None)
        return None if step is None or ranks[step] == -math.inf else step

    def restore(self, template: Any, step: int | None = None) -> Restored | None:
        """The newest checkpoint, or that of `step`; None if there is none.

        Args:
          template: a state of the same tree; its arrays give shapes, types and shardings.

        Raises:
          CheckpointError: the checkpoint's tree or shapes are others (the run's settings were changed, say), or it is damaged.
        """
        steps = self._agreed(self.steps())
        if step is None and not steps:
            return None
        step = steps[-1] if step is None else step
        if step not in steps:
            raise CheckpointError(f"{self.path}: no complete checkpoint of step {step}, found {steps}")
        abstract, path = jax.tree.map(ocp.utils.to_shape_dtype_struct, _without_keys(template)), self.path / str(step)
        items = {"state": ocp.args.StandardRestore(abstract), "record": ocp.args.JsonRestore()}
        try:
            saved = ocp.StandardCheckpointHandler().metadata(path / "state").tree
            differences = _differences(saved, abstract)
            out = None if differences else self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax raises a bare Exception, among others, for arrays that it cannot read
            raise CheckpointError(
                f"{path} cannot be read: {_reason(error)}; if it is damaged, remove it, and the same command goes on from the one before it"
            ) from error
        if differences:
            raise CheckpointError(f"{path} does not fit this run's model, rank or optimizer: {differences}")
        return Restored(step, _with_keys(out["state"], template), out["record"])

    def _agreed(self, steps: list[int]) -> list[int]:
        """`steps`, when all processes have found the same."""
        if len(self._processes) > 1:
            self._meet("restore")
            found = multihost_utils.process_allgather(np.uint32(zlib.crc32(repr(steps).encode())))
            if len(set(found.tolist())) > 1:
                raise CheckpointError(f"{self.path}: process {jax.process_index()} finds {steps}, others do not: {_SHARED}")
        return steps

    def close(self) -> None:
        """Waits and frees the writer's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()


_LOST = "another process is lost or stuck, start all of them again with the same command"
_SHARED = "the processes of a run need one folder that all of them share, or gs://"


def _rank(metrics: dict[str, Any]) -> float:
    score = metrics.get("score")
    return -math.inf if score is None else score


def _reason(error: BaseException) -> str:
    """The first line of what it began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or repr(error)).splitlines()[0]


def _differences(saved: dict[str, Any], template: dict[str, Any]) -> str:
    """How the arrays of a checkpoint and of the run differ, in words; empty if they do not."""

    def show(arrays: dict[str, Any], name: str) -> str:
        return f"{np.dtype(arrays[name].dtype)}{list(arrays[name].shape)}" if name in arrays else "nothing"

    found = ((name, show(saved, name), show(template, name)) for name in sorted(saved.keys() | template.keys()))
    lines = [f"{name} is {theirs} there, {ours} here" for name, theirs, ours in found if theirs != ours]
    return "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_keys(state: Any) -> Any:
    """Random keys as their raw bits, which every store can hold; the tree as a list of its leaves by path, which it can name."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): jax.random.key_data(x) if _is_key(x) else x for path, x in leaves}


def _with_keys(leaves: dict[str, Any], template: Any) -> Any:
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    values = [leaves[jax.tree_util.keystr(path)] for path, _ in paths]
    values = [
        jax.random.wrap_key_data(x, impl=jax.random.key_impl(t)) if _is_key(t) else x for x, (_, t) in zip(values, paths, strict=True)
    ]
    return jax.tree.unflatten(structure, values)
