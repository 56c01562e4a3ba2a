import dataclasses
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.checkpoint import CheckpointError, Checkpoints


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    weights: dict[str, jax.Array]
    step: jax.Array
    rng: jax.Array


def state(seed=0, shape=(3, 5)):
    key = jax.random.key(seed)
    return State({"a": jax.random.normal(key, shape), "b": jnp.arange(4.0)}, jnp.int32(7), key)


def equal(a, b):
    def raw(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((raw(x) == raw(y)).all()), a, b))


@jax.jit
def step(s):
    key, use = jax.random.split(s.rng)
    return State({k: v * 1.1 + jax.random.normal(use, v.shape) for k, v in s.weights.items()}, s.step + 1, key)


def test_a_step_after_restoring_is_the_step_bit_for_bit(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, state(), {"version": 7, "next_seed": 56})
    restored = checkpoints.restore(state(seed=1))
    assert restored.step == 7 and restored.record == {"version": 7, "next_seed": 56}
    assert equal(restored.state, state()) and equal(step(restored.state), step(state()))


def test_a_state_that_is_donated_while_it_is_written_is_saved_as_it_was(tmp_path):
    donating = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    checkpoints, big = Checkpoints(tmp_path), {"w": jnp.zeros((1024, 1024))}
    checkpoints.save(0, big, {})
    for _ in range(20):
        big = donating(big)
    assert not checkpoints.restore(big).state["w"].any()


def test_the_newest_are_kept_and_the_interval_is_held(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, every=3)
    written = [i for i in range(11) if checkpoints.save(i, state(i), {"i": i})]
    assert checkpoints.save(10, state(10), {"i": 10}, force=True) and not checkpoints.save(10, state(10), {}, force=True)
    checkpoints.wait()
    assert written == [0, 3, 6, 9] and checkpoints.steps() == [9, 10]
    assert equal(checkpoints.restore(state(), step=9).state, state(9))


def test_a_half_written_checkpoint_is_ignored(tmp_path):
    first = Checkpoints(tmp_path)
    first.save(1, state(1), {"i": 1})
    first.save(2, state(2), {"i": 2})
    first.close()
    shutil.copytree(tmp_path / "2", tmp_path / "3.orbax-checkpoint-tmp-5")
    shutil.copytree(tmp_path / "2", tmp_path / "4")
    (tmp_path / "4" / "_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(tmp_path / "2" / "record")
    again = Checkpoints(tmp_path)
    assert again.steps() == [1] and equal(again.restore(state()).state, state(1))
    assert again.save(2, state(5), {}) and equal(again.restore(state()).state, state(5))


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert Checkpoints(tmp_path / "new").restore(state()) is None


@pytest.mark.parametrize("other", [state(shape=(3, 6)), {"something": jnp.zeros(3)}])
def test_a_checkpoint_of_other_settings_is_named(tmp_path, other):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(), {})
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpoints.restore(other)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 5, found \[1\]"):
        checkpoints.restore(state(), step=5)


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(), {})
    checkpoints.wait()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1 << 20))
    with pytest.raises(OSError, match="No space left on device"):
        checkpoints.save(2, state(), {})
    assert checkpoints.steps() == [1]
