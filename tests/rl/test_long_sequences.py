"""An episode of 32k tokens: nothing quadratic in its length is kept, and whole logits never exist."""

import json
import subprocess
import sys

import pytest

from tests.devices import environment

# in a process of its own, whose peak is the test's
PROGRAM = """
import dataclasses, json, resource, sys, time
import numpy as np
from rl.learner import Learner, LearnerConfig
from rl.packing import pack
from rl.trajectory import Trajectory
from tests.model import tiny

kind, steps, *lengths = sys.argv[1:]
length = max(map(int, lengths))
config = dataclasses.replace(tiny.CONFIGS[kind], vocab_size=20_000, max_position_embeddings=length, remat=True)
learner = Learner(tiny.model(config=config), LearnerConfig(micro_rows=1, logprob_chunk=512))
lowered = [learner.lower(tiny.bank(config), int(n))["gradient"].compile().memory_analysis().temp_size_in_bytes for n in lengths]
random = np.random.default_rng(0)
mask = np.r_[0, np.ones(length, np.int8)]
episode = Trajectory(
    id="long", environment="e", task_id="long", reward=1.0, tokens=random.integers(0, 20_000, length + 1), loss_mask=mask,
    logprobs=-np.log(20_000) * mask, turns=mask * 0, versions=mask * 0,
)
batch = pack([episode], [1.0], lengths=(length,))
state = learner.init(tiny.bank(config))
for _ in range(int(steps)):
    state, metrics = learner.step(state, batch)
    assert np.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0 and metrics["action_tokens"] == length, metrics
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"temporaries": lowered, "peak": peak}))
"""
GB = 1e9


def measured(kind: str, steps: int, *lengths: int) -> dict:
    """The temporaries in bytes at each length, and the peak of `steps` steps at the last."""
    words = [sys.executable, "-c", PROGRAM, kind, str(steps), *map(str, lengths)]
    done = subprocess.run(words, env=environment(1), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # attention over 32k tokens takes a minute on a CPU
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_5"])
def test_a_step_of_32k_tokens_takes_less_than_6_gb(kind):
    assert measured(kind, 1, 32768)["peak"] < 6 * GB


def test_memory_grows_with_the_length_and_not_its_square():
    short, long = measured("qwen3", 0, 8192, 32768)["temporaries"]
    assert long < 4.4 * short
    assert long < 32768 * 20_000 * 4  # whole logits alone are more; with 0.7 GB of libraries far below 6 GB
