"""A toy dataset in SWE-bench's form, worked on by mini-swe-agent with a tiny Qwen3 of random weights: the machinery of swebench_* on a CPU.

Command:   pip install -e '.[swebench,smoke]' && python -m trace_jax.quickstart.random_qwen smoke-model
           python -m trace_jax.benchmarks.swebench.toy toy-dataset
           trace-jax rollout --config=swebench_smoke --policy=base --split=train --workdir=DIR
           trace-jax evaluate --config=swebench_smoke --policy=base --workdir=DIR
Hardware:  two CPU cores, 4 GB of memory, git; with --config.benchmark.environment=bubblewrap also bubblewrap
Time:      about a minute for each command, half of it the start
Expected:  nothing is solved, since the model knows nothing
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
        name="swebench_smoke",
        model=ModelSection(path="smoke-model"),
        target=TargetSection(train_tasks=3, heldout_tasks=2),
        benchmark=BenchmarkSection(name="swebench", data="toy-dataset/data.jsonl", environment="local", max_steps=4, timeout=120.0),
        rollout=RolloutSection(lanes=4, context=8192, max_tokens=64, workers=2),
        diagnosis=DiagnosisSection(trials=2),
        synthesis=SynthesisSection(calibration_seeds=2, calibration_rollouts=2, certify_seeds=4, probes=0),
        train=TrainSection(
            rank=2, alpha=2.0, iterations=2, groups=2, group_size=2, validation_seeds=2, selection_seeds=2, pack_length=8192, micro_rows=1
        ),
        gate=GateSection(warm_steps=2, successes=2, table_seeds=2, grpo_iterations=1),
        evaluation=EvaluationSection(tasks=2, policies=("base",)),
    )
