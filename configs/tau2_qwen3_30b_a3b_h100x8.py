"""tau2_qwen3_30b_a3b on one machine of eight H100: the same model, sizes and benchmark.

Command:   trace-jax preflight --config=tau2_qwen3_30b_a3b_h100x8
           trace-jax run --config=tau2_qwen3_30b_a3b_h100x8 --config.model.path=WEIGHTS --workdir=DIR
Hardware:  h100:8
"""

import dataclasses

from trace_jax.config import Config, load_config


def get_config() -> Config:
    sibling = load_config("tau2_qwen3_30b_a3b")
    return dataclasses.replace(
        sibling,
        name="tau2_qwen3_30b_a3b_h100x8",
        mesh=dataclasses.replace(sibling.mesh, expert=8, topology="h100:8"),
        train=dataclasses.replace(sibling.train, micro_rows=8),
    )
