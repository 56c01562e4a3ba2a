"""A checkpoint belongs to no mesh and no number of processes: what one layout saves, every other restores.

The file is a program too: `python -m tests.rl.test_checkpoint_mesh MODEL PROCESSES INDEX PORT TASK...` carries out tasks like
`write:FOLDER:fsdp=2` and `read:FOLDER:data=2,fsdp=2,expert=2`, since the number of devices is set before JAX starts.
"""

import functools
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model import AdapterBank, init_bank, load_pretrained
from rl import checkpoint
from rl.checkpoint import CheckpointError, Checkpoints
from rl.learner import Learner, LearnerConfig, LearnerState
from rl.packing import Batch, pack
from tests.devices import environment
from tests.rl import tiny


def batch() -> Batch:
    found = tiny.trajectories(16)
    return pack(found, np.random.default_rng(1).normal(size=len(found)), lengths=(48,), micro_rows=8)


@functools.cache
def start(model: str, mesh: str) -> tuple[Learner, Callable[[], LearnerState]]:
    """A learner on a mesh like `data=2,fsdp=4`, or on one device, and what makes its first state, B not zero."""
    axes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(",") if axis)}
    layout = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes)) if axes else None
    net = load_pretrained(model, layout)
    learner = Learner(net, LearnerConfig(micro_rows=8, learning_rate=1e-2))
    fresh, random = init_bank(net.config, 1, 4, 8.0, jax.random.key(0)), np.random.default_rng(2)
    b = {name: 0.2 * random.standard_normal(x.shape).astype(np.float32) for name, x in fresh.b.items()}
    return learner, lambda: learner.init(AdapterBank(fresh.a, b, fresh.scale), seed=5)


def whole(tree, prefix: str) -> dict[str, np.ndarray]:
    """All leaves by name, each put together from its pieces, random keys as their bits."""
    tree = jax.tree.map(lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    if jax.process_count() > 1:
        mesh = jax.tree.leaves(tree)[0].sharding.mesh
        tree = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return {prefix + jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def figures(learner: Learner, state: LearnerState) -> dict[str, np.ndarray]:
    """The state, loss and gradient of the batch there, and the state after it. `state` is used up."""
    found = whole(state, "state")
    gradient, sums = learner.gradient(state.params, batch())
    after, _ = learner.step(state, batch())
    return found | whole(gradient, "gradient") | whole(after, "after") | {"loss": np.asarray(sums["loss"])}


def write(model: str, folder: pathlib.Path, mesh: str) -> None:
    """Three checkpoints, of which the first is the best and the last the newest; what follows from the last goes into a file."""
    learner, first = start(model, mesh)
    state, template, checkpoints = first(), first(), Checkpoints(folder / "checkpoints", keep=1)
    for step, score in enumerate([0.9, 0.1, None], 1):
        state, _ = learner.step(state, batch())
        assert checkpoints.save(step, state, {"step": step}, score=score)
    expected = figures(learner, state)
    assert not checkpoints.save(3, template, {}) and checkpoints.steps() == [1, 3] and checkpoints.best() == 1
    restored = checkpoints.restore(template)
    assert restored.step == 3 and restored.record == {"step": 3}
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored.state, template))
    for name, value in figures(learner, restored.state).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    if jax.process_index() == 0:
        np.savez(folder / "expected.npz", **expected)
    checkpoints.close()


def read(model: str, folder: pathlib.Path, mesh: str) -> None:
    """The state is the same, loss and gradient are to 1e-5 of their norm."""
    expected = dict(np.load(folder / "expected.npz"))
    learner, first = start(model, mesh)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    assert checkpoints.steps() == [1, 3] and checkpoints.best() == 1
    found = figures(learner, checkpoints.restore(first()).state)
    checkpoints.close()
    assert found.keys() == expected.keys()
    for name in (name for name in found if name.startswith("state")):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)

    def vector(arrays):
        return np.concatenate([np.ravel(arrays[name]) for name in sorted(arrays) if name.startswith("gradient")])

    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    error = np.linalg.norm(vector(found) - vector(expected)) / np.linalg.norm(vector(expected))
    assert error < 1e-5, (mesh, error)


def apart(model: str, folder: pathlib.Path, mesh: str) -> None:
    """Processes that see different folders, and one that waits for another in vain."""
    checkpoints, first = Checkpoints(folder / "checkpoints"), jax.process_index() == 0
    if not first:
        checkpoints.steps = lambda: []
    with pytest.raises(CheckpointError, match=r"finds \[.*\], others do not: the processes of a run need one folder"):
        checkpoints.restore({})
    checkpoint._PATIENCE = 2
    if first:
        with pytest.raises(CheckpointError, match="another process is lost or stuck, start all of them again"):
            Checkpoints(folder / "alone").save(1, {}, {})


def run(model: pathlib.Path, processes: int, devices: int, *tasks: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [sys.executable, "-m", "tests.rl.test_checkpoint_mesh", str(model), str(processes)]
    running = [
        subprocess.Popen([*words, str(index), port, *tasks], env=environment(devices), stdout=-1, stderr=-1, text=True)
        for index in range(processes)
    ]
    try:
        for process in running:
            out, error = process.communicate(timeout=280)
            assert process.returncode == 0 and "done" in out, error[-3000:]
    finally:
        for process in running:
            process.kill()


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_what_one_layout_saves_every_other_restores(kind, tmp_path):
    from tests.model import tiny as models  # torch, which the processes do without

    model = tmp_path / "model"
    models.checkpoint(model, kind, num_hidden_layers=2, **({"num_experts": 8} if "moe" in kind else {}))
    two, eight, other = tmp_path / "two", tmp_path / "eight", "expert" if "moe" in kind else "tensor"
    two.mkdir(), eight.mkdir()
    run(model, 2, 1, f"write:{two}:fsdp=2", f"apart:{two}:")
    mesh = f"data=2,fsdp=2,{other}=2"
    run(model, 1, 8, f"read:{two}:{mesh}", f"write:{eight}:fsdp=8", f"read:{eight}:{mesh}")
    read(str(model), two, "")
    read(str(model), eight, "")


def main(model: str, processes: str, index: str, port: str, *tasks: str) -> None:
    if int(processes) > 1:
        jax.config.update("jax_enable_preemption_service", False)  # it would swallow a SIGTERM
        jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(index))
    for task in tasks:
        name, folder, mesh = task.split(":")
        {"write": write, "read": read, "apart": apart}[name](model, pathlib.Path(folder), mesh)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
