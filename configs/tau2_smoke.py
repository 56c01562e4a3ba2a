"""tau2-bench's airline played by a tiny Qwen3 of random weights with the real tokenizer: the machinery of tau2_qwen3_30b_a3b on a CPU.

Command:   pip install -e '.[tau2,smoke]' && python -m trace_jax.quickstart.random_qwen smoke-model
           trace-jax rollout --config=tau2_smoke --policy=base --split=train --workdir=DIR
           trace-jax evaluate --config=tau2_smoke --policy=base --workdir=DIR
           trace-jax export --config=tau2_smoke --what=results --policy=base --split=heldout --workdir=DIR --out=OUT
Hardware:  two CPU cores, 4 GB of memory
Time:      about a minute for each command, half of it the start
Expected:  nothing is solved, since the model knows nothing; `tau2 evaluate-trajs OUT/airline.json` comes to the same rewards
"""

from trace_jax.config import (
    BenchmarkSection,
    Config,
    DiagnosisSection,
    EvaluationSection,
    GateSection,
    ModelSection,
    RolloutSection,
    SynthesisSection,
    TargetSection,
    TrainSection,
)


def get_config() -> Config:
    return Config(
        name="tau2_smoke",
        model=ModelSection(path="smoke-model"),
        target=TargetSection(train_tasks=3, heldout_tasks=2),
        benchmark=BenchmarkSection(name="tau2", domains=("airline",), user_temperature=1.0, max_steps=12),
        rollout=RolloutSection(lanes=4, context=8192, max_tokens=64, workers=2),
        diagnosis=DiagnosisSection(trials=2),
        synthesis=SynthesisSection(calibration_seeds=2, calibration_rollouts=2, certify_seeds=4, probes=0),
        train=TrainSection(
            rank=2, alpha=2.0, iterations=2, groups=2, group_size=2, validation_seeds=2, selection_seeds=2, pack_length=8192, micro_rows=1
        ),
        gate=GateSection(warm_steps=3, successes=2, table_seeds=2, grpo_iterations=1),
        evaluation=EvaluationSection(tasks=2, policies=("base",)),
    )
