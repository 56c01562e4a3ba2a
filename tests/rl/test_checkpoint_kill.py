"""A training run that is killed at random moments, also while it saves, ends as one that nothing disturbed, bit for bit.

The file is a program too: `python -m tests.rl.test_checkpoint_kill FOLDER` imports what a run needs and forks one for every attempt, which
saves the seconds of the imports; JAX itself starts in the forks.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np

from model import AdapterBank, CausalLM
from model.lora import bank_shapes
from model.parameters import parameter_specs
from rl.checkpoint import Checkpoints
from rl.learner import Learner, LearnerConfig
from rl.packing import Batch, pack
from tests.devices import environment
from tests.rl import tiny

STEPS, KILLS = 16, 10


def model_and_adapter() -> tuple[CausalLM, AdapterBank]:
    """Random ones, of NumPy, which has nothing to compile: every attempt makes them."""
    random = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return 0.3 * random.standard_normal(shape, np.float32)

    net = CausalLM(tiny.CONFIG, parameters={name: jax.numpy.asarray(draw(x.shape)) for name, x in parameter_specs(tiny.CONFIG).items()})
    a, b = ({name: draw(x[i]) for name, x in bank_shapes(tiny.CONFIG, 1, 4).items()} for i in (0, 1))
    return net, AdapterBank(a, b, np.ones(1, np.float32))


def batch(step: int) -> Batch:
    found = tiny.trajectories(6, seed=step, longest=16)
    return pack(found, np.random.default_rng(step).normal(size=len(found)), lengths=(32,), micro_rows=4)


def train(folder: pathlib.Path) -> None:
    """From the last checkpoint to the last step, then `final.npz`; what a driver does."""
    net, adapter = model_and_adapter()
    learner = Learner(net, LearnerConfig(micro_rows=4, learning_rate=1e-2))
    state, done = learner.init(adapter), 0
    checkpoints = Checkpoints(folder / "checkpoints")
    if (found := checkpoints.restore(state)) is not None:
        state, done = found.state, found.record["done"]
        assert done == found.step == int(state.step)
    for step in range(done, STEPS):
        state, _ = learner.step(state, batch(step))
        checkpoints.save(step + 1, state, {"done": step + 1}, score=-abs(step - 4.0))
    assert (checkpoints.steps(), checkpoints.best()) == ([5, STEPS - 1, STEPS], 5)
    checkpoints.close()
    leaves = jax.tree.leaves((state.params, state.opt_state, state.step, jax.random.key_data(state.rng)))
    np.savez(folder / "final.npz", *map(np.asarray, leaves))


def fork(folder: pathlib.Path) -> int:
    if (pid := os.fork()) == 0:
        try:
            train(folder)
            os._exit(0)
        finally:  # an error's traceback is printed by the hook, the parent's cleaning up is not the child's
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return pid


def saving(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoints/*tmp*")}


def disturb(folder: pathlib.Path, moments: random.Random) -> int:
    """Starts the run and kills it: now after a random time, now while it saves. Returns in how many saves it was hit."""
    hit = 0
    for attempt in range(KILLS):
        left, pid = saving(folder), fork(folder)
        deadline = time.monotonic() + (moments.random() * 2 if attempt % 3 == 0 else 120)
        saves = moments.randint(1, 2)  # until the run is in its first or second save
        seen: set[str] = set()
        while time.monotonic() < deadline and len(seen) < saves:
            seen |= saving(folder) - left
            if os.waitpid(pid, os.WNOHANG)[0]:  # it was too quick for us, or failed, which the last attempt will tell
                return hit
            time.sleep(0.001)
        time.sleep(moments.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        hit += bool(saving(folder))
    return hit


def main(folder: pathlib.Path) -> None:
    for name in ("calm", "disturbed"):
        (folder / name).mkdir()
    assert os.waitpid(fork(folder / "calm"), 0)[1] == 0
    hit = disturb(folder / "disturbed", random.Random(1))
    assert os.waitpid(fork(folder / "disturbed"), 0)[1] == 0
    print("hit in a save:", hit, flush=True)


def test_a_run_that_is_killed_ten_times_ends_as_one_that_was_not(tmp_path):
    # compiled programs are kept, and apart from those of other tests: a killed process may leave half of one
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    words = [sys.executable, "-W", "ignore", "-m", "tests.rl.test_checkpoint_kill", str(tmp_path)]
    done = subprocess.run(words, env=environment(1) | cache, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split(":")[1]) >= 3, done.stdout
    calm, disturbed = (np.load(tmp_path / name / "final.npz") for name in ("calm", "disturbed"))
    assert calm.files == disturbed.files and len(calm.files) > 20
    for name in calm.files:
        np.testing.assert_array_equal(calm[name], disturbed[name])
    assert not saving(tmp_path / "disturbed")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
