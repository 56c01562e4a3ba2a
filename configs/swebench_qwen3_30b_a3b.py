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

from trace_jax.config import (
    BenchmarkSection,
    Config,
    DiagnosisSection,
    EvaluationSection,
    MeshSection,
    ModelSection,
    RolloutSection,
    TargetSection,
    TrainSection,
)


def get_config() -> Config:
    return Config(
        name="swebench_qwen3_30b_a3b",
        model=ModelSection(path="configs/architectures/Qwen3-30B-A3B", dtype="bfloat16"),
        mesh=MeshSection(expert=4, topology="v5p:2x2x4"),  # data: one copy a host
        target=TargetSection(train_tasks=64, heldout_tasks=137),
        benchmark=BenchmarkSection(name="swebench", environment="docker", max_steps=150, timeout=2400.0),
        diagnosis=DiagnosisSection(trials=4),
        rollout=RolloutSection(lanes=16, context=32768, max_tokens=4096, temperature=1.0, workers=8, reproducible=False),
        train=TrainSection(
            rank=32,
            alpha=32.0,  # scale 1
            learning_rate=1e-5,
            iterations=40,
            groups=16,
            group_size=16,
            max_grad_norm=1.0,
            pack_length=32768,
            micro_rows=8,
            remat=True,
        ),
        evaluation=EvaluationSection(tasks=137, trials=1, temperature=0.7),
    )
