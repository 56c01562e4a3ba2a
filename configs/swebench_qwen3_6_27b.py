"""Draft.

Command:   trace-jax preflight --config=swebench_qwen3_6_27b
Hardware:  x
"""

from trace_jax.config import Config, MeshSection, ModelSection, RolloutSection, TrainSection


def get_config() -> Config:
    return Config(
        name="swebench_qwen3_6_27b",
        model=ModelSection(path="configs/architectures/Qwen3.6-27B", dtype="bfloat16"),
        mesh=MeshSection(tensor=4, topology="v5p:2x2x4"),
        rollout=RolloutSection(lanes=32, context=32768, max_tokens=4096),
        train=TrainSection(rank=32, alpha=32.0, pack_length=32768, micro_rows=4, remat=True),
    )
