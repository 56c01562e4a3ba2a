"""Qwen3-30B-A3B with an adapter of rank 32 on every linear layer, all 128 experts included: TRACE's model and sizes for ToolSandbox.

Command:   trace-jax preflight --config=toolsandbox_qwen3_30b_a3b
           trace-jax run --config=toolsandbox_qwen3_30b_a3b --config.model.path=WEIGHTS --config.benchmark.python=PYTHON --workdir=DIR
Hardware:  v5p:2x2x4 (v5p-32: four hosts of four chips, 95.7 GiB each)
Time:      not run on a TPU; the programs are those of tau2_qwen3_30b_a3b, whose preflight holds here
Expected:  published, over the 129 base scenarios, mean similarity and perfect scores: base .411 and 19, GRPO .519 and 22, GEPA .520
           and 22, TRACE .552 and 26. No result of ours is claimed

WEIGHTS is the downloaded model; PYTHON the Python of an environment that has ToolSandbox, which is not on the package index and whose
dependencies do not fit ours (README). Users are simulated by the base model, unless benchmark.user=endpoint names another.

The reward is the benchmark's similarity, from 0 to 1, with no threshold; for diagnosis a scenario is passed at 0.9, since similarity
counts the overlap of free text with a model answer and seldom reaches 1. Without RAPID_API_KEY the 91 scenarios that need no network are
played, 52 to train on and 39 held out; with it 79 and 50. 26 of the 129 (16 of the 91) reward doing nothing: see the floor beside each
result.

A scenario ends after 30 messages and is short: 16,384 tokens hold the schemas of all tools and every conversation.
"""

from trace_jax.config import (
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
        name="toolsandbox_qwen3_30b_a3b",
        model=ModelSection(path="configs/architectures/Qwen3-30B-A3B", dtype="bfloat16"),
        mesh=MeshSection(expert=4, topology="v5p:2x2x4"),  # data: one copy a host
        target=TargetSection(train_tasks=79, heldout_tasks=50),  # all there are
        diagnosis=DiagnosisSection(success=0.9),
        rollout=RolloutSection(lanes=32, context=16384, max_tokens=2048, temperature=1.0),
        train=TrainSection(
            rank=32,
            alpha=32.0,  # scale 1
            learning_rate=1e-5,
            iterations=40,
            groups=16,
            group_size=16,
            max_grad_norm=1.0,
            pack_length=16384,
            micro_rows=16,  # one a chip
            remat=True,
        ),
        evaluation=EvaluationSection(tasks=50, trials=4),
    )
