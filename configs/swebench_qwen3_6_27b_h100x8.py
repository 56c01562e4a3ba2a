"""swebench_qwen3_6_27b on one machine of eight H100: the same model, sizes and benchmark.

Command:   trace-jax preflight --config=swebench_qwen3_6_27b_h100x8
           trace-jax run --config=swebench_qwen3_6_27b_h100x8 --config.model.path=WEIGHTS --config.benchmark.data=VERIFIED --workdir=DIR
Hardware:  h100:8 (one machine of eight, 79 GiB each, of which JAX takes 59.3 unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise)
Time:      not run on a GPU; 2.4 s at best for a micro-batch of 65,536 tokens
Expected:  as swebench_qwen3_6_27b. No result of ours is claimed

Of the four programs the gradient of an adapter was compiled, and fits in 87 %; the gate's, the update and decoding were not.
Eight H200 need no config of their own: --config=swebench_qwen3_6_27b --topology=h200:8 keeps its four rows and takes 78 % in a gradient.
Weights are split by tensor 4 and fsdp 2, so that decoding gathers half of them for every token.
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
