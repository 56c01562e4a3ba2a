"""Checkpoints of a training run: everything that the next step depends on, saved together or not at all.

One checkpoint holds the learner's state (trainable weights, optimizer, step, random key) and a JSON record (data position, policy version,
whatever the driver needs to go on). Orbax writes into a folder of another name and commits it last, by a rename on a file system and by a
marker on an object store, so a run that dies while it saves leaves the previous checkpoint in force. `step(restore(save(x)))` equals
`step(x)` bit for bit.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

_COMMITTED = "_CHECKPOINT_METADATA"
_OVERHEAD = 1 << 20  # bytes of a checkpoint beside its arrays: some forty small files


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint as read back: its step, the state in the template's shapes, types and shardings, and the JSON record."""

    step: int
    state: Any
    record: dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that does not belong to this run; the message names the folder and the difference."""


class Checkpoints:
    """The checkpoints of one folder, local or `gs://`.

    Args:
      path: the folder; made when first written to.
      keep: how many of the newest to keep.
      every: `save` writes at steps that are multiples of it, and whenever it is forced.
    """

    def __init__(self, path: str | epath.PathLike, *, keep: int = 2, every: int = 1):
        if keep < 1 or every < 1:
            raise ValueError(f"checkpoint.keep and checkpoint.every must be positive, found {keep} and {every}")
        self.path, self.every = epath.Path(path), every
        if "://" not in str(path):
            self.path = self.path.resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.path, options=options)

    def save(self, step: int, state: Any, record: dict[str, Any], *, force: bool = False) -> bool:
        """Starts to save `state` and `record` under `step` and returns whether it did; the state may be donated at once.

        A step that is saved already is left as it is.

        Raises:
          OSError: no room for it on the disk.
          Exception of an earlier save that failed in the background.
        """
        if step % self.every and not force:
            return False
        if step in self._manager.all_steps():
            self.wait()
            if step in self.steps():
                return False
            self._manager.delete(step)  # left incomplete by a run that died
        leaves = _without_keys(state)
        self._check_room(sum(x.nbytes for x in leaves.values()) + _OVERHEAD)
        items = {"state": ocp.args.StandardSave(leaves), "record": ocp.args.JsonSave(record)}
        return self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def _check_room(self, size: int) -> None:
        """A disk that fills up during the save would fail half a dozen threads, each with a traceback; so room is asked for first."""
        if "://" not in str(self.path) and shutil.disk_usage(self.path).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def wait(self) -> None:
        """Until all that was saved is on disk."""
        self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        parts = ("state", "record", _COMMITTED)
        self._manager.reload()
        return sorted(step for step in self._manager.all_steps() if all((self.path / str(step) / p).exists() for p in parts))

    def restore(self, template: Any, step: int | None = None) -> Restored | None:
        """The newest checkpoint, or that of `step`; None if there is none.

        Args:
          template: a state of the same tree; its arrays give shapes, types and shardings.

        Raises:
          CheckpointError: the checkpoint's tree or shapes are others (the run's settings were changed, say).
        """
        self.wait()
        steps = self.steps()
        if step is None and not steps:
            return None
        step = steps[-1] if step is None else step
        if step not in steps:
            raise CheckpointError(f"{self.path}: no complete checkpoint of step {step}, found {steps}")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _without_keys(template))
        try:
            items = {"state": ocp.args.StandardRestore(abstract), "record": ocp.args.JsonRestore()}
            out = self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(f"{self.path / str(step)} does not fit this run's model, rank or optimizer: {reason}") from error
        return Restored(step, _with_keys(out["state"], template), out["record"])

    def close(self) -> None:
        """Waits and frees the writer's threads."""
        self._manager.close()


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
