"""Qwen3.6-27B with an adapter of rank 32 on every linear layer: TRACE's model and sizes for SWE-bench Verified.

Command:   trace-jax preflight --config=swebench_qwen3_6_27b
           trace-jax run --config=swebench_qwen3_6_27b --config.model.path=WEIGHTS --config.benchmark.data=VERIFIED --workdir=DIR
Hardware:  v5p:2x2x4 (v5p-32: four hosts of four chips, 95.7 GiB each)
Time:      not run on a TPU; 9.78 s at best for a micro-batch of 131,072 tokens, 15 ms for a token in each lane
Expected:  preflight says that all four programs fit. Published, Pass@1: base 68.0 %, GEPA 69.6, SWE-RL 70.4, TRACE 73.2. No result of ours
           is claimed

WEIGHTS is the downloaded model, VERIFIED the dataset in the form of swebench 5 (with eval scripts), as parquet, .json or .jsonl; `pip
install trace-jax[swebench]` brings mini-swe-agent and the grader. `params` and `preflight` need none of them. Commands run in docker images
of the instances, on every host. By repository 363 instances are for training and 137 held out (`benchmarks/swebench/splits.json`);
64 of the former are mined. An episode has 150 turns at most; the protocol's temperature is 0.7, with thinking.

Preflight with jax 0.12.0.1 and libtpu 0.0.50.1 at JAX_OPTIMIZATION_LEVEL=O0; per device, of 95.73 GiB:

                      adapter gradient  adapter update  gate gradient  decode, 16 tokens
    arguments                12.97 GiB        1.78 GiB      14.31 GiB          31.52 GiB
    temporaries              50.10 GiB        1.64 MiB      35.18 GiB           1.19 GiB
    peak                     63.61 GiB        1.78 GiB      49.60 GiB          32.87 GiB
    in a run, of HBM             86.3%           33.4%          71.6%              36.2%
    limited by            interconnect          memory   interconnect             memory
    time, at best               9.78 s         1.38 ms        10.00 s          245.39 ms

"In a run" adds what stands beside a program: optimizer, engine's cache, its copy of the adapters; not yet the engine's pool of prefixes,
a quarter of its cache more. Each host holds a whole copy of the
weights on its four chips, so that its engine decodes without gathering any. A gradient is limited by the sums over `tensor` of what the
projections give back, each by itself and in float32.

Elsewhere: swebench_qwen3_6_27b_h100x8 is for eight GPUs; no other topology was tried.
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
        name="swebench_qwen3_6_27b",
        model=ModelSection(path="configs/architectures/Qwen3.6-27B", dtype="bfloat16"),
        mesh=MeshSection(tensor=4, topology="v5p:2x2x4"),  # data: one copy a host
        target=TargetSection(train_tasks=64, heldout_tasks=137),
        benchmark=BenchmarkSection(name="swebench", environment="docker", max_steps=150, timeout=2400.0),
        diagnosis=DiagnosisSection(trials=4),
        rollout=RolloutSection(lanes=32, context=32768, max_tokens=4096, temperature=1.0, workers=8, reproducible=False),
        train=TrainSection(
            rank=32,
            alpha=32.0,  # scale 1
            learning_rate=1e-5,
            iterations=40,
            groups=16,
            group_size=16,
            max_grad_norm=1.0,
            pack_length=32768,
            micro_rows=4,  # one a host
            remat=True,
        ),
        evaluation=EvaluationSection(tasks=137, trials=1, temperature=0.7),
    )
