"""The quickstart's training with a real SGLang server for an engine."""

import pytest

from tests.sglang_server.install import sglang_python
from tests.sglang_server.server import SHIM
from tests.trace_jax import tiny
from trace_jax import train
from trace_jax.agreement import FILE
from trace_jax.config import load_config
from trace_jax.progress import Progress
from trace_jax.runtime import Runtime, plan
from trace_jax.workdir import Workdir

ONE = "multi_step_task_completion"


@pytest.mark.slow
@pytest.mark.sglang
def test_an_adapter_trained_on_the_servers_rollouts_is_as_good_as_one_of_the_embedded_engine(tmp_path):
    overrides = {
        "jax": [],
        "sglang": [
            ("rollout.engine", "sglang"),
            ("servers.device", "cpu"),
            ("servers.python", f"env PYTHONPATH={SHIM} OMP_NUM_THREADS=2 {sglang_python()}"),
        ],
    }
    after = {}
    for engine, more in overrides.items():
        config = load_config("quickstart", more)
        stages = plan(config, 1)
        with Workdir.open(tmp_path / engine, config) as workdir, Runtime(config, workdir, Progress(stages)) as runtime:
            runtime.plan(stages)
            tiny.retain(runtime, ONE)
            tiny.store_environment(runtime, ONE)
            train.make_learner.cache_clear()
            train.train_adapter(runtime, ONE)
            summary = workdir.read_json(f"adapters/{ONE}/summary.json")
            rows = workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")
            print(engine, summary, [round(row["reward"], 2) for row in rows], workdir.read_json(FILE))
            assert not any(name.startswith("errors/") for row in rows for name in row)
            after[engine] = summary["after"]
    assert after["sglang"]["rate"] >= after["jax"]["interval"][0]
