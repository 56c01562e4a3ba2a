"""A toy dataset in SWE-bench's form, worked on by mini-swe-agent with a tiny Qwen3 of random weights: the machinery of swebench_* on a CPU.

Command:   pip install -e '.[swebench,smoke]' && python -m trace_jax.quickstart.random_qwen smoke-model
           python -m trace_jax.benchmarks.swebench.toy toy-dataset
           trace-jax rollout --config=swebench_smoke --policy=base --split=train --workdir=DIR
           trace-jax evaluate --config=swebench_smoke --policy=base --workdir=DIR
Hardware:  two CPU cores, 4 GB of memory, git; with --config.benchmark.environment=bubblewrap also bubblewrap
Time:      about a minute for each command, half of it the start
Expected:  nothing is solved, since the model knows nothing
"""

import dataclasses

from trace_jax.config import BenchmarkSection, Config, load_config


def get_config() -> Config:
    benchmark = BenchmarkSection(name="swebench", data="toy-dataset/data.jsonl", environment="local", max_steps=4, timeout=120.0)
    return dataclasses.replace(load_config("tau2_smoke"), name="swebench_smoke", benchmark=benchmark)
