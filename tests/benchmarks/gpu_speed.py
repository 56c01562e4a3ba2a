"""Model FLOPs utilisation of a LoRA GRPO step and decoded tokens per second, on the accelerators of this machine.

    python tests/benchmarks/gpu_speed.py [--devices=8] [--fsdp=8 | --data=8 | --tensor=8] [--unpacked] [--row=4096] [--rows=2] [--remat]
        [--shortest=0.25] [--batches=1,8,32,128] [--rounds=5] [--peak=989e12] [--tiny]

A Qwen3 of 1.7B's shape with random weights in bfloat16, and a random adapter of rank 32 on every linear layer. `--tiny` tries the script
on a CPU within a minute. It was run there alone so far.

Step: `Learner.step` on trajectories of random tokens, their lengths evenly between `--shortest` of a row and a row, `--rows` rows of
`--row` tokens a device and micro-batch, four micro-batches; the median after two steps that warm up. `--unpacked` gives each trajectory a
row of its own, which is what lets cuDNN attend: at `--shortest=0.75` both ways lay out the same rows, so only the kernel differs.

MFU: operations that the model needs for the real tokens, over the seconds of the step, the devices and their peak in dense bfloat16. By
`model/flops.py`: twice the forward pass (frozen weights have no gradient) and once more for what has: the adapters, and attention's two
products. Padding, rematerialisation and the flash kernels' second making of the scores are no model operations and do not count.

Decode: `JaxEngine` under the adapter, prompts of 128 random tokens, none alike, temperature 1: what 129 sampled tokens take beyond what
one takes, at each batch with as many lanes. With `--fsdp` the engine gathers weights for every token, as a run of this mesh would.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import AdapterBank, CausalLM, Config, Rope, init_bank
from model.attention import choose
from model.flops import adapter_step_flops, forward_flops
from rl.engines.jax import JaxEngine
from rl.engines.protocol import Policy, Request
from rl.learner import Learner, LearnerConfig
from rl.packing import Batch, pack
from rl.trajectory import Trajectory
from trace_jax.config import MeshSection
from trace_jax.preflight.accelerators import of_device
from trace_jax.runtime.mesh import make_mesh

LARGE = Config(151_936, 2048, 6144, 28, 16, 8, rope=Rope(theta=1e6), tie_word_embeddings=True, max_position_embeddings=40_960)
TINY = Config(512, 64, 128, 2, 4, 2, head_dim=16, tie_word_embeddings=True)
MICRO_BATCHES, PROMPT, NEW = 4, 128, 128


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured; `rows` of one device."""

    config: Config
    row: int
    rows: int
    rank: int
    shortest: float
    batches: tuple[int, ...]
    rounds: int


def draw(size: Size, rows: int, packed: bool) -> tuple[Batch, list[int]]:
    """The batch of a step, and the lengths of its trajectories; `rows` of a micro-batch on all devices."""
    random, lengths = np.random.default_rng(0), []
    while sum(lengths) < 0.95 * MICRO_BATCHES * rows * size.row:
        lengths.append(int(random.integers(int(size.shortest * size.row), size.row)) + 1)
    found = []
    for index, length in enumerate(lengths):
        mask = (random.random(length) < 0.5).astype(np.int8)
        mask[0], mask[-1] = 0, 1
        tokens = random.integers(1, size.config.vocab_size, length)
        arrays = {"tokens": tokens, "loss_mask": mask, "logprobs": -np.log(size.config.vocab_size) * mask}
        zeros = np.zeros(length)
        found.append(Trajectory(id=str(index), environment="e", task_id="", group="", reward=0.0, turns=zeros, versions=zeros, **arrays))
    batch = pack(found, random.normal(size=len(found)), lengths=(size.row,), micro_rows=rows, packed=packed)
    return batch, [length - 1 for length in lengths]  # the last token is a target alone


def random_bank(config: Config, rank: int) -> AdapterBank:
    """Both factors random, so that nothing is skipped."""
    bank = init_bank(config, 1, rank, float(rank), jax.random.key(1))
    b = {name: 0.02 * jax.random.normal(jax.random.key(i), x.shape) for i, (name, x) in enumerate(bank.b.items())}
    return dataclasses.replace(bank, b=b)


def model_flops(config: Config, lengths: list[int], rank: int) -> float:
    """Of one step's gradient, as MFU counts them."""

    def each(length: int) -> float:
        scores = forward_flops(config, length, length) - forward_flops(config, length, 0, keys=0)
        return adapter_step_flops(config, length, length, rank, remat=False) - scores / 2  # without their second making

    return sum(map(each, lengths))


def measure_step(size: Size, model: CausalLM, devices: int) -> dict[str, float]:
    rows = size.rows * devices
    batch, lengths = draw(size, rows, model.config.packed)
    learner = Learner(model, LearnerConfig(micro_rows=rows))
    state, seconds = learner.init(random_bank(model.config, size.rank)), []
    for _ in range(2 + size.rounds):
        began = time.perf_counter()
        state, metrics = learner.step(state, batch)  # returns with the metrics, so that all has been computed
        seconds.append(time.perf_counter() - began)
    if not np.isfinite(metrics["loss"]) or metrics["skipped"]:
        raise RuntimeError(f"the step went wrong: {metrics}")
    step = statistics.median(seconds[2:])
    return {
        "first": seconds[0], "step": step, "tokens": sum(lengths), "fill": metrics["fill"], "rate": sum(lengths) / step,
        "micro_batches": len(batch.tokens) // rows, "flops": model_flops(model.config, lengths, size.rank) / step / devices,
    }  # fmt: skip


def measure_decode(size: Size, model: CausalLM, batch: int) -> float:
    """Tokens a second of all lanes."""
    engine = JaxEngine(model, lanes=batch, context=PROMPT + NEW + 16, chunk=64)
    engine.load(Policy("adapter", adapters=random_bank(model.config, size.rank)))
    random, calls = np.random.default_rng(batch), 0

    def seconds(new: int) -> float:
        nonlocal calls
        calls += 1
        prompts = random.integers(1, size.config.vocab_size, (batch, PROMPT), dtype=np.int32)
        asked = [Request(f"{calls}:{i}", "adapter", tokens, new, 1.0, (0, i, calls)) for i, tokens in enumerate(prompts)]
        began = time.perf_counter()
        engine.generate(asked)
        return time.perf_counter() - began

    for new in (1, NEW + 1):
        seconds(new)
    short, long = (statistics.median(seconds(new) for _ in range(size.rounds)) for new in (1, NEW + 1))
    return batch * NEW / max(long - short, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis, default in (("data", 0), ("fsdp", 0), ("tensor", 1)):
        parser.add_argument(f"--{axis}", type=int, default=default)
    parser.add_argument("--devices", type=int, help="the first so many; all by default")
    parser.add_argument("--unpacked", action="store_true")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--row", type=int)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--shortest", type=float, default=0.25)
    parser.add_argument("--batches")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--peak", type=float, help="FLOP/s of one device, where the table of preflight does not have it")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    devices = jax.devices()[: options.devices]
    if devices[0].platform == "cpu" and not options.tiny:
        raise SystemExit("no accelerator was found (pip install 'trace-jax[gpu]'); --tiny tries the script on a CPU")
    config, dtype = (TINY, jnp.float32) if options.tiny else (LARGE, jnp.bfloat16)
    config = dataclasses.replace(config, remat=options.remat, packed=not options.unpacked)
    batches = options.batches or ("1,8" if options.tiny else "1,8,32,128")
    size = Size(
        config, options.row or (128 if options.tiny else 4096), options.rows, 4 if options.tiny else 32, options.shortest,
        tuple(map(int, batches.split(","))), options.rounds or (1 if options.tiny else 5),
    )  # fmt: skip
    mesh = make_mesh(MeshSection(data=options.data, fsdp=options.fsdp, tensor=options.tensor), devices)
    known = of_device(devices[0])
    peak = options.peak or (known and known.flops)
    capability = getattr(devices[0], "compute_capability", "")
    attention = choose(devices[0].platform, capability, dtype, config.head_dim, config.packed)
    layout = ", ".join(f"{axis} {n}" for axis, n in mesh.shape.items()) if mesh else "one device"
    fraction = os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]
    print(f"{len(devices)} x {devices[0].device_kind}; jax {jax.__version__}, {devices[0].client.platform_version.splitlines()[0]}")
    print(f"mesh: {layout}; memory fraction {fraction}; XLA_FLAGS {os.environ.get('XLA_FLAGS', 'not set')}")
    print(f"peak: {f'{peak / 1e12:g} TFLOP/s a device, dense bfloat16' if peak else 'unknown; give --peak'}")
    model = CausalLM(config, nnx.Rngs(0), dtype, mesh)
    parameters = sum(x.size for x in model.parameters().values())
    print(f"{parameters / 1e6:,.1f} M parameters, {jnp.dtype(dtype).name}, rank {size.rank}; attention of the step: {attention}")
    found = measure_step(size, model, len(devices))
    mfu = found["flops"] / peak if peak else None
    print(f"step: {found['micro_batches']} micro-batches of {size.rows * len(devices)} x {size.row}{', rematerialised' * config.remat}, "
          f"fill {found['fill']:.2f}: {found['step']:.3f} s (the first, compiled: {found['first']:.1f} s), {found['rate']:,.0f} tokens/s, "
          f"{found['flops'] / 1e12:.3g} model TFLOP/s a device, MFU {f'{mfu:.1%}' if peak else 'unknown'}")  # fmt: skip
    if stats := devices[0].memory_stats():
        print(f"memory: {stats['peak_bytes_in_use'] / 2**30:.1f} of {stats['bytes_limit'] / 2**30:.1f} GiB at most")
    decoded = {}
    for batch in size.batches:
        decoded[batch] = measure_decode(size, model, batch)
        print(f"decode, batch {batch}: {decoded[batch]:,.0f} tokens/s", flush=True)
    setting = {"device": devices[0].device_kind, "devices": len(devices), "jax": jax.__version__, "mesh": layout, "attention": attention}
    print(json.dumps(setting | {"peak": peak, "mfu": mfu} | found | {"decode": decoded}))


if __name__ == "__main__":
    main()
