"""tau2_qwen3_30b_a3b on one machine of eight H100: the same model, sizes and benchmark.

Command:   trace-jax preflight --config=tau2_qwen3_30b_a3b_h100x8
           trace-jax run --config=tau2_qwen3_30b_a3b_h100x8 --config.model.path=WEIGHTS --workdir=DIR
Hardware:  h100:8 (one machine of eight, 79 GiB each, of which JAX takes 59.3 unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise)
Time:      not run on a GPU; 6.7 s at best for a micro-batch of 262,144 tokens
Expected:  as tau2_qwen3_30b_a3b. No result of ours is claimed

Each GPU has an eighth of the experts, so that the engine decodes without gathering weights, and all of what remains, 9.6 GiB together.
"""

import dataclasses

from trace_jax.config import Config, load_config


def get_config() -> Config:
    sibling = load_config("tau2_qwen3_30b_a3b")
    return dataclasses.replace(
        sibling,
        name="tau2_qwen3_30b_a3b_h100x8",
        mesh=dataclasses.replace(sibling.mesh, expert=8, topology="h100:8"),
    )
