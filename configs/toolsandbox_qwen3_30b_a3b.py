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

import dataclasses

from trace_jax.config import BenchmarkSection, Config, DiagnosisSection, EvaluationSection, TargetSection, load_config


def get_config() -> Config:
    return dataclasses.replace(
        load_config("tau2_qwen3_30b_a3b"),
        name="toolsandbox_qwen3_30b_a3b",
        target=TargetSection(train_tasks=79, heldout_tasks=50),  # all there are
        benchmark=BenchmarkSection(name="toolsandbox", max_steps=30),
        diagnosis=DiagnosisSection(success=0.9),
        evaluation=EvaluationSection(tasks=50, trials=4),
    )
