"""What `model.matmul.dense` is worth on a CPU: one LoRA gradient of the quickstart's model, with it and with a plain product, in one run.

    python tests/benchmarks/cpu_matmul.py

Prints CPU seconds a gradient, the median of rounds that take turns, and their ratio.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import CausalLM, Config, init_bank, token_logprobs

ROWS, LENGTH, ROUNDS = 32, 256, 7


def plain(x: jax.Array, w: jax.Array, wide: bool = False) -> jax.Array:
    return x @ w


def gradient():
    """The jitted gradient of a bank's log-probs, traced with the product that is in force now, and its arguments."""
    config = Config(474, 96, 256, 3, 4, 2, head_dim=32, tie_word_embeddings=True)
    graphdef, frozen = nnx.split(CausalLM(config, nnx.Rngs(0)))
    bank = init_bank(config, 1, 8, 16.0, jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, LENGTH)))

    @jax.jit
    def run(frozen, bank, tokens):
        def loss(factors):
            model = nnx.merge(graphdef, frozen)
            hidden = model.forward(tokens, adapters=bank.replace_factors(factors)).hidden
            return token_logprobs(model, hidden, jnp.roll(tokens, -1, 1), chunk=LENGTH)[0].mean()

        return jax.grad(loss)(bank.factors)

    jax.block_until_ready(run(frozen, bank, tokens))
    return lambda: jax.block_until_ready(run(frozen, bank, tokens))


def main() -> None:
    steps = {"dense": gradient()}
    with mock.patch("model.decoder_layer.dense", plain), mock.patch("model.causal_lm.dense", plain), mock.patch("model.lora.dense", plain):
        steps["plain"] = gradient()
    seconds = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:<6} {value:.3f} CPU seconds for {ROWS * LENGTH} tokens")
    print(f"plain / dense: {medians['plain'] / medians['dense']:.2f}")


if __name__ == "__main__":
    main()
