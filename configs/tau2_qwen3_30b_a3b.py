"""Draft.

Command:   trace-jax preflight --config=tau2_qwen3_30b_a3b
Hardware:  x
"""

from trace_jax.config import Config, MeshSection, ModelSection, RolloutSection, TrainSection


def get_config() -> Config:
    return Config(
        name="tau2_qwen3_30b_a3b",
        model=ModelSection(path="configs/architectures/Qwen3-30B-A3B", dtype="bfloat16"),
        mesh=MeshSection(expert=4, topology="v5p:2x2x4"),
        rollout=RolloutSection(lanes=32, context=16384, max_tokens=2048),
        train=TrainSection(rank=32, alpha=32.0, pack_length=16384, micro_rows=16, remat=True),
    )
