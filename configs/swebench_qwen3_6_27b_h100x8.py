"""swebench_qwen3_6_27b on one machine of eight H100: the same model, sizes and benchmark.

Command:   trace-jax preflight --config=swebench_qwen3_6_27b_h100x8
           trace-jax run --config=swebench_qwen3_6_27b_h100x8 --config.model.path=WEIGHTS --config.benchmark.data=VERIFIED --workdir=DIR
Hardware:  h100:8
"""

import dataclasses

from trace_jax.config import Config, load_config


def get_config() -> Config:
    sibling = load_config("swebench_qwen3_6_27b")
    return dataclasses.replace(
        sibling,
        name="swebench_qwen3_6_27b_h100x8",
        mesh=dataclasses.replace(sibling.mesh, topology="h100:8"),  # tensor 4, fsdp 2
        train=dataclasses.replace(sibling.train, micro_rows=2),
    )
