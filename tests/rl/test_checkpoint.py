"""Checkpoints in one process, on a disk and in a bucket: what is kept, what is bit for bit the same, what damage does."""

import dataclasses
import math
import resource
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from rl.checkpoint import CheckpointError, Checkpoints
from tests.model.conftest import bucket, gcs_server  # noqa: F401


@pytest.fixture(params=["local", "gs"])
def folder(request, tmp_path) -> epath.Path:
    return epath.Path(tmp_path if request.param == "local" else request.getfixturevalue("bucket").url) / "run" / "checkpoints"


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


def test_a_step_after_restoring_is_the_step_bit_for_bit(folder):
    checkpoints = Checkpoints(folder)
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


def test_the_newest_are_kept_and_none_is_written_twice(folder):
    checkpoints = Checkpoints(folder, keep=2)
    assert all(checkpoints.save(i, state(i), {"i": i}) for i in (3, 9, 10)) and not checkpoints.save(10, state(10), {})
    checkpoints.wait()
    assert checkpoints.steps() == [9, 10]
    assert equal(checkpoints.restore(state(), step=9).state, state(9))


def test_the_best_is_kept_besides_the_newest(folder):
    scores = {1: 0.8, 2: None, 3: 0.5, 4: 0.8, 5: None, 6: -1.0, 7: 0.1}
    kept = {1: [1], 3: [1, 2, 3], 4: [3, 4], 7: [4, 6, 7]}
    best = {1: 1, 3: 1, 4: 4, 7: 4}
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.best() is None
    for step, score in scores.items():
        if step == 5:  # as a new process does
            checkpoints.close()
            checkpoints = Checkpoints(folder, keep=2)
        assert checkpoints.save(step, state(step), {}, score=score)
        if step in kept:
            assert checkpoints.steps() == kept[step] and checkpoints.best() == best[step]
    assert equal(checkpoints.restore(state(), checkpoints.best()).state, state(4)) and checkpoints.restore(state()).step == 7


def test_a_checkpoint_without_a_score_is_not_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(1, state(), {})
    assert checkpoints.best() is None
    checkpoints.save(2, state(), {}, score=-5.0)
    checkpoints.save(3, state(), {})
    assert checkpoints.best() == 2
    with pytest.raises(ValueError, match="the score of step 4 must be finite, found nan"):
        checkpoints.save(4, state(), {}, score=math.nan)


def copy(source: epath.Path, target: epath.Path, without: str = "nothing") -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_dir():
            copy(path, target / path.name)
        elif path.name != without:
            (target / path.name).write_bytes(path.read_bytes())


def test_after_a_save_that_was_interrupted_the_one_before_is_in_force_and_what_is_left_goes(folder):
    first = Checkpoints(folder, keep=3)
    for step in (1, 2):
        first.save(step, state(step), {"i": step}, score=float(step))
    first.close()
    gone = ["3", "3.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-5", "5"]
    if "://" in str(folder):
        copy(folder / "2", folder / "3", without="commit_success.txt")
    else:
        copy(folder / "2", folder / "3.orbax-checkpoint-tmp")
    copy(folder / "2", folder / "4.orbax-checkpoint-tmp-5", without="commit_success.txt")
    copy(folder / "2", folder / "5", without="_CHECKPOINT_METADATA")
    (folder / "notes" / "7").mkdir(parents=True)
    (folder / "notes" / "7" / "mine.txt").write_text("mine")
    (folder / "8").write_text("a file of that name")
    again = Checkpoints(folder, keep=3)
    assert again.steps() == [1, 2] and again.best() == 2 and equal(again.restore(state()).state, state(2))
    assert again.save(3, state(3), {}, score=0.0) and again.steps() == [1, 2, 3] and equal(again.restore(state()).state, state(3))
    assert not any((folder / name).exists() for name in gone[1:])
    assert (folder / "notes" / "7" / "mine.txt").read_text() == "mine" and (folder / "8").read_text() == "a file of that name"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    checkpoints = Checkpoints(folder)
    for step in (1, 2):
        checkpoints.save(step, state(step, (200, 200)), {"i": step})
    checkpoints.close()
    return folder


@pytest.mark.parametrize("part", ["_CHECKPOINT_METADATA", "record/metadata", "record", "state", "state/manifest.ocdbt", "all of it"])
def test_a_checkpoint_that_lacks_a_part_is_none_and_is_written_again(two, tmp_path, part):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    lost = tmp_path / "2" if part == "all of it" else tmp_path / "2" / part
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    (tmp_path / "2").mkdir(exist_ok=True)
    again = Checkpoints(tmp_path)
    template = state(shape=(200, 200))
    assert again.steps() == [1] and again.restore(template).record == {"i": 1}
    assert again.save(2, state(5), {}) and equal(again.restore(state()).state, state(5))


@pytest.mark.parametrize("how", ["truncated", "emptied", "deleted"])
@pytest.mark.parametrize("what", ["arrays", "record/metadata", "state/_METADATA", "state/manifest.ocdbt"])
def test_damage_is_an_error_that_names_the_folder_and_the_fix(two, tmp_path, what, how):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    path, big = tmp_path / "2" / what, state(shape=(200, 200))
    if what == "arrays":
        path = max((tmp_path / "2" / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if how == "truncated" else b"")
    if how == "deleted":
        path.unlink()
    again = Checkpoints(tmp_path)
    if again.steps() == [1]:  # found to be incomplete before it is read
        assert how == "deleted" and again.restore(big).step == 1
        return
    with pytest.raises(CheckpointError) as error:
        again.restore(big)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/2 cannot be read: ") and "\n" not in message
    assert message.endswith("; if it is damaged, remove it, and the same command goes on from the one before it")
    shutil.rmtree(tmp_path / "2")
    assert Checkpoints(tmp_path).restore(big).record == {"i": 1}


def test_a_score_that_cannot_be_read_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(), {}, score=1.0)
    checkpoints.close()
    (tmp_path / "1" / "metrics" / "metrics").write_text('{"sco')
    with pytest.raises(CheckpointError, match="a score cannot be read .*; remove the step's folder whose metrics/metrics is no JSON"):
        Checkpoints(tmp_path).restore(state())


def test_a_write_that_fails_in_the_background_is_told_and_leaves_the_checkpoint_before(tmp_path):
    checkpoints, big = Checkpoints(tmp_path), {"w": jax.random.normal(jax.random.key(0), (1000, 1000))}
    checkpoints.save(1, big, {"i": 1}, score=0.0)
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # the system refuses to write more, as on a full disk
    try:
        assert checkpoints.save(2, big, {"i": 2}, score=1.0)
        with pytest.raises(CheckpointError, match="could not be written, the one before it stays in force; free space .*File too large"):
            checkpoints.save(3, big, {"i": 3})
        assert checkpoints.save(3, big, {"i": 3})
        with pytest.raises(CheckpointError, match=f"{tmp_path}: a checkpoint could not be written"):
            checkpoints.wait()
        assert checkpoints.steps() == [1] and checkpoints.best() == 1 and checkpoints.restore(big).record == {"i": 1}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.save(2, big, {"i": 4}) and checkpoints.restore(big).record == {"i": 4}
    checkpoints.close()


def test_a_save_waits_for_the_one_before_and_returns_before_its_own_end(tmp_path):
    checkpoints, big = Checkpoints(tmp_path, keep=3), {"w": jax.random.normal(jax.random.key(0), (2000, 2000))}
    for step in (1, 2, 3):
        checkpoints.save(step, big, {})
        assert not (tmp_path / str(step)).exists()
        assert all((tmp_path / str(earlier)).exists() for earlier in range(1, step))
    assert checkpoints.steps() == [1, 2, 3]


def test_an_empty_folder_has_no_checkpoint_and_is_not_made_by_looking(folder):
    checkpoints = Checkpoints(folder)
    assert checkpoints.restore(state()) is None and checkpoints.best() is None and checkpoints.steps() == [] and not folder.exists()


@pytest.mark.parametrize(
    "other, difference",
    [
        (state(shape=(3, 6)), r"\.weights\['a'\] is float32\[3, 5\] there, float32\[3, 6\] here$"),
        ({"something": jnp.zeros(3)}, r"\.step is int32\[\] there, nothing here; .* and 2 more$"),
        (dataclasses.replace(state(), step=jnp.float32(7)), r"\.step is int32\[\] there, float32\[\] here$"),
    ],
)
def test_a_checkpoint_of_other_settings_is_named(tmp_path, other, difference):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(), {})
    with pytest.raises(CheckpointError, match=f"does not fit this run's model, rank or optimizer: .*{difference}"):
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
