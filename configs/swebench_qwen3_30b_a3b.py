"""Qwen3-30B-A3B with an adapter of rank 32 on every linear layer, all 128 experts included: TRACE's model and sizes for SWE-bench Verified.

Command:   trace-jax preflight --config=swebench_qwen3_30b_a3b
           trace-jax run --config=swebench_qwen3_30b_a3b --config.model.path=WEIGHTS --config.benchmark.data=VERIFIED --workdir=DIR
Hardware:  v5p:2x2x4 (v5p-32: four hosts of four chips, 95.7 GiB each)
Time:      not run on a TPU
Expected:  published, Pass@1: base 26.0 %, GEPA 31.0, SWE-RL 32.6, single capability GRPO 36.6, TRACE 41.0. No result of ours is claimed

WEIGHTS is the downloaded model, VERIFIED the dataset in the form of swebench 5 (with eval scripts), as parquet, .json or .jsonl; `pip
install trace-jax[swebench]` brings mini-swe-agent and the grader. The rest is as in swebench_qwen3_6_27b. The programs are those of
tau2_qwen3_30b_a3b with rows of 32,768 tokens, half as many of them: as many tokens in a micro-batch.
"""

import dataclasses

from trace_jax.config import Config, load_config


def get_config() -> Config:
    model = load_config("tau2_qwen3_30b_a3b")
    task = load_config("swebench_qwen3_6_27b")
    return dataclasses.replace(
        task,
        name="swebench_qwen3_30b_a3b",
        model=model.model,
        mesh=model.mesh,
        rollout=dataclasses.replace(task.rollout, lanes=16),
        train=dataclasses.replace(task.train, micro_rows=8),
    )
