"""Before the first update: do engine and learner give the same tokens the same log-probs?

They are two programs. Where they differ (a dtype, a kernel, an adapter that never arrived, a scale) the importance weights of the loss
hide it, and training goes on with noise for a gradient (trl#4873). So 64 episodes are sampled under an adapter of random numbers, which
changes what the model says, and scored again by the learner under the same adapter.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from envs.package import Package
from model import AdapterBank
from rl.engines.protocol import Policy
from rl.learner import Learner
from rl.packing import pack
from trace_jax.runtime import AGREEMENT, AGREEMENT_SEEDS, Runtime

FILE = "agreement.json"
_CHANGE = 0.6  # size of the random adapter's output, beside that of the projection it is added to, roughly


def check_agreement(runtime: Runtime, learner: Learner, adapter: AdapterBank, package: Package) -> None:
    """Writes `agreement.json`; tries nothing again that has passed with the same engine, rank and bound, and all again that has not.

    Args:
      adapter: of the sizes that are trained; its B is replaced by random numbers.
      package: the environment whose episodes are sampled.

    Raises:
      RuntimeError: the mean absolute difference is above `train.agreement`.
    """
    bound, engine = runtime.config.train.agreement, runtime.config.rollout.engine
    settings = {"engine": engine, "rank": adapter.rank, "bound": bound}
    before = runtime.workdir.read_json(FILE) if runtime.workdir.exists(FILE) else {}
    refused = before.get("refused", 0)  # batches of an engine that has been mended since, perhaps
    if not bound or (settings.items() <= before.items() and before["mean"] <= bound):
        return
    params = learner.init(_random(adapter, runtime.config.seed)).params
    policy = Policy(name="agreement", version=1, adapters=learner.gathered(params))
    tasks = runtime.tasks(package, "agreement", AGREEMENT, AGREEMENT_SEEDS, 1)
    found = [t for t in runtime.roll_out(policy, f"agreement-{engine}-{package.name}", "agreement", refused, tasks) if t.error is None]
    train = runtime.config.train
    rows = {"lengths": train.row_lengths, "micro_rows": learner.config.micro_rows, "packed": train.packing}
    batch = pack(found, np.zeros(len(found), np.float32), **rows)
    mask = batch.mask > 0
    if not mask.any():
        raise RuntimeError(f"{package.name}: none of {len(found)} episodes has a sampled token, so engine and learner cannot be compared")
    logprobs = learner.logprobs(params, batch)
    gap = np.abs(logprobs - batch.logprobs)[mask]
    effect = np.abs(logprobs - learner.logprobs(None, batch))[mask]
    measured = {
        "sequences": len(found),
        "tokens": int(mask.sum()),
        "mean": float(gap.mean()),
        "largest": float(gap.max()),
        "adapter_effect": float(effect.mean()),  # what the difference would be if the engine had not heard of the adapter
    }
    agree = measured["mean"] <= bound
    runtime.workdir.write_json(FILE, settings | measured | {"refused": refused + (not agree)})
    if not agree:
        raise RuntimeError(
            f"engine {engine!r} and learner disagree: their log-probs of {measured['tokens']} tokens differ by {measured['mean']:.4f} "
            f"on average, by {measured['largest']:.3f} at most; the adapter changes them by {measured['adapter_effect']:.4f}. See {FILE}; "
            "give both the same model and dtype, or raise train.agreement"
        )


def _random(adapter: AdapterBank, seed: int) -> AdapterBank:
    """The adapter with B of random normal numbers, so that its output has about `_CHANGE` of the size of its projection's."""
    keys = jax.random.split(jax.random.key(seed), len(adapter.b))
    size = _CHANGE / float(np.max(np.asarray(adapter.scale))) / math.sqrt(adapter.rank)
    b = {name: size * jax.random.normal(key, x.shape, x.dtype) for key, (name, x) in zip(keys, sorted(adapter.b.items()), strict=True)}
    return dataclasses.replace(adapter, b=b)
