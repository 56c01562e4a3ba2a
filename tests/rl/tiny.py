"""A tiny random Qwen3 with adapters that do something, and random trajectories, for the tests of the learners."""

import functools

import jax
import numpy as np
from flax import nnx

from model import AdapterBank, CausalLM, Config, init_bank
from rl.trajectory import Trajectory

CONFIG = Config(50, 32, 48, 2, 2, 1, head_dim=16, tie_word_embeddings=True)


@functools.cache
def model() -> CausalLM:
    with jax.ensure_compile_time_eval():  # the first call may come from within a jitted function
        net = CausalLM(CONFIG, nnx.Rngs(0))
        # random embeddings of deviation 0.02 give flat distributions; larger ones make mistakes show
        net.embed[...] = net.embed[...] * 15
    return net


def bank(adapters: int = 1, rank: int = 4, seed: int = 0, size: float = 0.3) -> AdapterBank:
    """A random bank whose B is not zero."""
    key = jax.random.key(seed)
    fresh = init_bank(CONFIG, adapters, rank, 2.0 * rank, key)
    keys = jax.random.split(key, len(fresh.b))
    b = {name: size * jax.random.normal(k, x.shape) for k, (name, x) in zip(keys, fresh.b.items(), strict=True)}
    return AdapterBank(fresh.a, b, fresh.scale)


def trajectories(count: int = 12, seed: int = 0, longest: int = 30) -> list[Trajectory]:
    random, out = np.random.default_rng(seed), []
    for index in range(count):
        length = int(random.integers(5, longest))
        mask = (random.random(length) < 0.5).astype(np.int8)
        mask[0], mask[-1] = 0, 1
        out.append(
            Trajectory(
                id=f"t{index}",
                environment="e",
                task_id=f"t{index}",
                group=f"g{index // 4}",
                reward=float(random.random()),
                tokens=random.integers(1, CONFIG.vocab_size, length),
                loss_mask=mask,
                logprobs=-random.random(length) * 6 * mask,
                turns=np.zeros(length),
                versions=np.zeros(length),
            )
        )
    return out


def relative(a, b) -> float:
    """Relative L2 distance of two trees."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(np.float64) for tree in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
