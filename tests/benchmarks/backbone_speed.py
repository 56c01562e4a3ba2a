"""Tokens per second of the backbone on a CPU, side by side with transformers + PEFT and with this machine's own matrix product.

    python tests/benchmarks/backbone_speed.py [--rounds=5] [--dtype=float32]

One run, rounds that take turns, medians. Dense and MoE (16 experts, 4 a token) at d = 1024, 8 layers, 1,024 tokens of one row; the
quickstart's model beside them. Products and attention (its causal half) are counted as FLOPs; the rate is set against the product
[1024, 1024] @ [1024, 3072], the FFN's own shape. Routed: top-1 of a gate over four rank-16 adapters. LoRA step: forward and backward of one
rank-16 adapter on all linear layers, experts included.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
import transformers
from flax import nnx

from model import CausalLM, Config, Routing, init_bank, init_gate, read_config, save_peft, save_pretrained, token_logprobs
from model.flops import forward_flops

T, RANK, ADAPTERS = 1024, 16, 4
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
_LARGE |= {"vocab_size": 8192, "tie_word_embeddings": True, "intermediate_size": 3072}
CONFIGS = {
    "dense": Config(**_LARGE),
    "moe": Config(**_LARGE, model_type="qwen3_moe", num_experts=16, num_experts_per_tok=4, moe_intermediate_size=768, norm_topk_prob=True),
}


def ours(config: Config, tokens: np.ndarray, folder: pathlib.Path, dtype: jnp.dtype) -> dict:
    """{what: a function that runs it once}; saves the model and one adapter in `folder`."""
    graphdef, state = nnx.split(CausalLM(config, nnx.Rngs(0), dtype))
    save_pretrained(nnx.merge(graphdef, state), folder / "model")

    def random_bank(adapters: int, seed: int):
        bank = init_bank(config, adapters, RANK, float(RANK), jax.random.key(seed), dtype)
        b = {name: 0.02 * jax.random.normal(jax.random.key(i), x.shape, dtype) for i, (name, x) in enumerate(bank.b.items())}
        return dataclasses.replace(bank, b=b)

    bank, one = random_bank(ADAPTERS, 1), random_bank(1, 2)
    save_peft(one, config, folder / "adapter")
    gate, x = init_gate(config, ADAPTERS + 1, 0.0, jax.random.key(3)), jnp.asarray(tokens)

    @jax.jit
    def forward(state, bank, gate):
        model = nnx.merge(graphdef, state)
        routing = None if gate is None else Routing(gate=gate)
        return token_logprobs(model, model.forward(x, adapters=bank, routing=routing).hidden, jnp.roll(x, -1, 1))[0]

    @jax.jit
    def step(state, bank):
        def loss(factors):
            model = nnx.merge(graphdef, state)
            hidden = model.forward(x, adapters=bank.replace_factors(factors)).hidden
            return token_logprobs(model, hidden, jnp.roll(x, -1, 1))[0].mean()

        return jax.grad(loss)(bank.factors)

    return {
        "forward": lambda: jax.block_until_ready(forward(state, None, None)),
        "routed": lambda: jax.block_until_ready(forward(state, bank, gate)),
        "LoRA step": lambda: jax.block_until_ready(step(state, one)),
    }


def theirs(folder: pathlib.Path, tokens: np.ndarray, dtype: torch.dtype) -> dict:
    net = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    x = torch.tensor(tokens)
    adapted = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype), folder / "adapter", is_trainable=True
    )

    def logprobs(net):
        log = torch.log_softmax(net(x, use_cache=False).logits.float(), -1)
        return torch.gather(log, -1, torch.roll(x, -1, 1)[..., None])

    def forward():
        with torch.no_grad():
            return logprobs(net)

    def step():
        adapted.zero_grad()
        logprobs(adapted).mean().backward()

    return {"forward": forward, "LoRA step": step}


def matmul(dtype: jnp.dtype) -> dict:
    x, w = (jax.random.normal(jax.random.key(0), shape, dtype) for shape in ((1024, 1024), (1024, 3072)))
    product = jax.jit(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32))
    a, b = (torch.randn(shape, dtype=getattr(torch, jnp.dtype(dtype).name)) for shape in ((1024, 1024), (1024, 3072)))
    return {"jax": lambda: product(x, w).block_until_ready(), "torch": lambda: a @ b}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    dtype = jnp.dtype(options.dtype)
    quickstart = read_config(pathlib.Path(__file__).parents[2] / "trace_jax/quickstart/checkpoint")
    with tempfile.TemporaryDirectory() as scratch:
        runs, work = {("matmul", "", name): run for name, run in matmul(dtype).items()}, {}
        for name, config in (CONFIGS | {"quickstart": quickstart}).items():
            folder = pathlib.Path(scratch) / name
            tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1 if name in CONFIGS else 4, T if name in CONFIGS else 256))
            work[name] = forward_flops(config, tokens.size, tokens.shape[1]), tokens.size
            for kind, run in ours(config, tokens, folder, dtype).items():
                runs[name, kind, "ours"] = run
            for kind, run in theirs(folder, tokens, getattr(torch, options.dtype)).items():
                runs[name, kind, "transformers"] = run
        for run in runs.values():
            run()  # compiles
        seconds = {key: [] for key in runs}
        for _ in range(options.rounds):
            for key, run in runs.items():
                start = time.perf_counter()
                for _ in range(10 if key[0] == "matmul" else 1):
                    run()
                seconds[key].append((time.perf_counter() - start) / (10 if key[0] == "matmul" else 1))
    median = {key: statistics.median(values) for key, values in seconds.items()}
    rates = {name: 2 * 1024 * 1024 * 3072 / median["matmul", "", name] for name in ("jax", "torch")}
    report = {"matmul GFLOP/s": {name: round(rate / 1e9) for name, rate in rates.items()}}
    for name, (operations, tokens) in work.items():
        forward = median[name, "forward", "ours"]
        report[name] = {
            "tokens/s forward, ours / transformers": [round(tokens / median[name, "forward", who]) for who in ("ours", "transformers")],
            "tokens/s LoRA step, ours / PEFT": [round(tokens / median[name, "LoRA step", who]) for who in ("ours", "transformers")],
            "ratio forward": round(median[name, "forward", "transformers"] / forward, 2),
            "ratio LoRA step": round(median[name, "LoRA step", "transformers"] / median[name, "LoRA step", "ours"], 2),
            "share of jax's matmul rate, forward": round(operations / forward / rates["jax"], 2),
            "routed over base": round(median[name, "routed", "ours"] / forward, 2),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
