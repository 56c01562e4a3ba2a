"""ToolSandbox played by a tiny Qwen3 of random weights with the real tokenizer: the machinery of toolsandbox_qwen3_30b_a3b on a CPU.

Command:   pip install -e '.[smoke]' && python -m trace_jax.quickstart.random_qwen smoke-model
           trace-jax rollout --config=toolsandbox_smoke --config.benchmark.python=PYTHON --policy=base --split=train --workdir=DIR
           trace-jax evaluate --config=toolsandbox_smoke --config.benchmark.python=PYTHON --policy=base --workdir=DIR
Hardware:  two CPU cores, 4 GB of memory; PYTHON is that of an environment with ToolSandbox (README)
Time:      about a minute for each command, half of it the start
Expected:  nothing is solved but what doing nothing solves, since the model knows nothing
"""

import dataclasses

from trace_jax.config import BenchmarkSection, Config, load_config


def get_config() -> Config:
    benchmark = BenchmarkSection(name="toolsandbox", user_temperature=1.0, max_steps=12)
    return dataclasses.replace(load_config("tau2_smoke"), name="toolsandbox_smoke", benchmark=benchmark)
