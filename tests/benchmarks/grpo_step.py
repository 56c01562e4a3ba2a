"""One LoRA GRPO step, side by side with Tunix and with TRL + PEFT: tokens per second, peak memory, compile time.

    python tests/benchmarks/grpo_step.py --tunix-python=TUNIX/bin/python --trl-python=TRL/bin/python [--rounds=5] [--sizes=tiny,large]

The three need environments of their own (trace-jax and a Python of 3.12 take google-tunix too):

    python3.12 -m venv TUNIX && TUNIX/bin/pip install google-tunix
    python3.11 -m venv TRL && TRL/bin/pip install trl peft 'torch<2.14'

One Qwen3 with random weights and one random adapter on q, k, v, o, gate, up and down, read by all from one Hugging Face and one PEFT
folder; float32; one batch of rollouts. What is timed is the update on rollouts that are given, from advantages to AdamW, never sampling;
grpo_contenders.py says what of each library runs. Every contender is a process of its own that stays alive; in each round they make one
step in turn, so that all see the same machine. Before that, the log-probs of the sampled tokens, the loss and its gradient are compared.

The rollouts are those of multi-turn agents: a prompt for each group, then turns of sampled tokens and observations, their number
geometric, cut at the row's length. Ours packs them into rows; Tunix (on anything but a TPU) and TRL pad each to the longest prompt and the
longest completion of the batch. "Real" tokens are those of the rollouts, the same for all; "computed" counts padding too, so that its rate
shows the kernels without packing's share. Micro-batches are the fastest of those tried for each (`--micro` overrides them). Linux only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pathlib
import statistics
import subprocess
import sys
import tempfile

import jax
import numpy as np
from flax import nnx
from grpo_contenders import END, Workload
from safetensors.numpy import load_file

from model import AdapterBank, CausalLM, Config, Rope, init_bank, save_peft, save_pretrained, token_logprobs
from model.flops import adapter_step_flops
from rl.advantages import group_advantages
from rl.trajectory import Trajectory

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ("ours", "tunix", "trl")
TOLERANCE = 1e-3  # of log-probs (absolute), loss (of the mean |advantage|) and gradient (relative L2)


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and a batch. `micro`: rows of a micro-batch, packed rows of ours and trajectories of the others; `check`: trajectories of
    the comparison."""

    config: Config
    rank: int
    row: int
    groups: int
    group: int
    check: int
    micro: dict[str, int]
    goals: dict[str, float]  # ours over theirs, in real tokens per second


def _config(**fields) -> Config:
    return Config(**fields, rope=Rope(theta=1e6), tie_word_embeddings=True)


SIZES = {
    "tiny": Size(
        _config(vocab_size=800, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                head_dim=32),
        rank=8, row=256, groups=8, group=8, check=16,
        micro={"ours": 4, "tunix": 16, "trl": 16}, goals={"tunix": 1.5, "trl": 1.5},
    ),
    "large": Size(
        _config(vocab_size=6144, hidden_size=768, intermediate_size=2304, num_hidden_layers=6, num_attention_heads=12,
                num_key_value_heads=4, head_dim=64),
        rank=16, row=512, groups=4, group=4, check=4,
        micro={"ours": 2, "tunix": 4, "trl": 4}, goals={"tunix": 1.5, "trl": 1.0},
    ),
}  # fmt: skip


# --- what is given to all


def draw_rollouts(size: Size, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, mask) of each trajectory; the last token is sampled, the first token of a group's prompt is its own."""
    random, row = np.random.default_rng(seed), size.row
    out = []
    for _ in range(size.groups):
        prompt = int(random.integers(row // 8, row // 4))
        start = random.integers(END + 1, size.config.vocab_size, prompt)
        for _ in range(size.group):
            mask = [0] * prompt
            for turn in range(int(random.geometric(0.25))):
                mask += [0] * int(turn and random.integers(row // 32, row // 8)) + [1] * int(random.integers(row // 32, row // 8))
            mask = np.array(mask[:row], np.int8)
            mask = mask[: np.flatnonzero(mask)[-1] + 1]
            tokens = random.integers(END + 1, size.config.vocab_size, len(mask)).astype(np.int32)
            tokens[:prompt] = start
            out.append((tokens, mask))
    return out


def random_bank(config: Config, rank: int) -> AdapterBank:
    """Both factors random: an adapter whose B is zero hides mistakes."""
    bank = init_bank(config, 1, rank, 2.0 * rank, jax.random.key(1))
    b = {name: 0.02 * jax.random.normal(jax.random.key(i), x.shape) for i, (name, x) in enumerate(bank.b.items())}
    return dataclasses.replace(bank, b=b)


def prepare(size: Size, folder: pathlib.Path) -> Workload:
    """Writes model, adapter and workload; the rollouts' log-probs are the adapted model's own, as if it had sampled them."""
    model, bank = CausalLM(size.config, nnx.Rngs(0)), random_bank(size.config, size.rank)
    save_pretrained(model, folder / "model")
    save_peft(bank, size.config, folder / "adapter")
    graphdef, state = nnx.split(model)

    @jax.jit
    def score(state, bank, tokens):
        model = nnx.merge(graphdef, state)
        return token_logprobs(model, model.forward(tokens, adapters=bank).hidden, jax.numpy.roll(tokens, -1, 1))[0]

    tokens, masks = zip(*draw_rollouts(size), strict=True)
    logprobs = []
    for x, mask in zip(tokens, masks, strict=True):
        found = np.asarray(score(state, bank, np.pad(x, (0, size.row - len(x)))[None]))[0]
        logprobs.append((np.pad(found, (1, 0))[: len(x)] * mask).astype(np.float32))
    count = len(tokens)
    rewards = np.round(np.random.default_rng(1).random(count), 2)
    records = [Trajectory(id=str(i), environment="e", task_id="", group=str(i // size.group), reward=r) for i, r in enumerate(rewards)]
    prompts = np.array([np.flatnonzero(mask)[0] for mask in masks])
    workload = Workload(list(tokens), list(masks), logprobs, prompts, rewards, group_advantages(records).values, size.group)
    workload.save(folder / "workload.npz")
    settings = {"row": size.row, "rank": size.rank, "alpha": 2.0 * size.rank, "check": size.check}
    (folder / "settings.json").write_text(json.dumps(settings))
    return workload


# --- the contenders' processes


class Contender:
    """A process that makes steps when asked. Raises RuntimeError with the end of its log if it dies."""

    def __init__(self, name: str, python: str, folder: pathlib.Path, micro: int, mode: str = "time"):
        self.name, self.log = name, folder / f"{name}.log"
        command = [python, str(ROOT / "tests/benchmarks/grpo_contenders.py"), name, str(folder), str(micro), mode]
        environment = os.environ | ({"PYTHONPATH": str(ROOT)} if name == "ours" else {})
        with self.log.open("w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            self.process = subprocess.Popen(command, env=environment, cwd=folder, **pipes)

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def ask(self, request: str) -> dict:
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.read()

    def finish(self) -> None:
        """Ends the process and waits for it."""
        self.process.stdin.close()
        self.process.stdout.close()
        if status := self.process.wait():
            raise RuntimeError(f"{self.name} ended with status {status}:\n{self.log.read_text()[-3000:]}")


def compare(size: Size, pythons: dict[str, str], folder: pathlib.Path, workload: Workload) -> dict:
    """Each contender's loss on the first trajectories as one micro-batch, and the largest differences from ours."""
    found = {}
    for name, python in pythons.items():
        Contender(name, python, folder, 1 if name == "ours" else size.check, "check").finish()
        found[name] = load_file(folder / f"check-{name}.safetensors")
    mine, scale = found["ours"], np.abs(workload.advantages).mean()
    given = np.concatenate([x[m > 0] for x, m in zip(workload.logprobs[: size.check], workload.mask[: size.check], strict=True)])
    report = {"loss": {name: float(x["loss"][0]) for name, x in found.items()}}
    report["log-prob, ours vs the rollouts' own"] = float(np.abs(mine["logprobs"] - given).max())
    keys = mine.keys() - {"loss", "logprobs"}

    def flat(arrays: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([arrays[key].ravel() for key in sorted(keys)]).astype(np.float64)

    for name in pythons.keys() - {"ours"}:
        theirs = found[name]
        if theirs.keys() != mine.keys():
            raise RuntimeError(f"{name} trains other matrices: {sorted(theirs.keys() ^ mine.keys())[:4]}")
        differences = {
            "log-prob": float(np.abs(mine["logprobs"] - theirs["logprobs"]).max()),
            "loss": float(abs(mine["loss"][0] - theirs["loss"][0]) / scale),
            "gradient": float(np.linalg.norm(flat(mine) - flat(theirs)) / np.linalg.norm(flat(mine))),
        }
        report[f"ours vs {name}"] = differences
        if odd := {what: x for what, x in differences.items() if not x <= TOLERANCE}:
            raise RuntimeError(f"ours and {name} do not compute the same: {odd}")
    return report


def measure(size: Size, pythons: dict[str, str], folder: pathlib.Path, micro: dict[str, int], rounds: int) -> dict[str, dict]:
    """Per contender: first step, seconds and CPU seconds of every later one, bytes, positions computed, and the rate of its products."""
    contenders = {name: Contender(name, python, folder, micro[name]) for name, python in pythons.items()}
    shapes = {"1024^3": (1024, 1024, 1024), "FFN": (1024, size.config.hidden_size, size.config.intermediate_size)}
    out = {}
    for name, contender in contenders.items():
        out[name] = contender.read() | {"first": contender.ask("step")["seconds"], "steps": [], "flops": {shape: [] for shape in shapes}}
        contender.ask("step")  # some compile again for the state that they made
    for turn in range(rounds):
        order = [*contenders][turn % len(contenders) :] + [*contenders][: turn % len(contenders)]
        for name in order:
            out[name]["steps"].append(contenders[name].ask("step"))
    for name, contender in contenders.items():
        out[name] |= contender.ask("report")
    for _ in range(rounds):
        for name, contender in contenders.items():
            for shape, dims in shapes.items():
                out[name]["flops"][shape].append(contender.ask(f"matmul {' '.join(map(str, dims))}")["flops"])
    for contender in contenders.values():
        contender.finish()
    return out


# --- the report


def median_of(found: dict, field: str) -> float:
    return statistics.median(step[field] for step in found["steps"])


def report(name: str, size: Size, workload: Workload, micro: dict[str, int], found: dict[str, dict]) -> None:
    lengths = np.array([len(x) for x in workload.tokens])
    real, sampled = int(lengths.sum()), int(sum(x.sum() for x in workload.mask))
    parameters = size.config
    print(f"\n== {name}: d {parameters.hidden_size}, {parameters.num_hidden_layers} layers, FFN {parameters.intermediate_size}, "
          f"vocabulary {parameters.vocab_size}, rank {size.rank}, rows of {size.row}")  # fmt: skip
    print(f"{len(lengths)} trajectories in {size.groups} groups: {real} tokens, {sampled} of them sampled; length {lengths.min()} to "
          f"{lengths.max()}, mean {lengths.mean():.0f}")  # fmt: skip
    columns = (
        "micro",
        "computed",
        "fill",
        "first s",
        "step s",
        "spread",
        "CPU s",
        "real/s",
        "computed/s",
        "GFLOP/s",
        "peak MiB",
        "at import",
    )
    print(f"{'':6}" + "".join(f"{column:>11}" for column in columns))
    for who, x in found.items():
        seconds, walls = median_of(x, "seconds"), [step["seconds"] for step in x["steps"]]
        flops = adapter_step_flops(size.config, real, int(lengths.mean()), size.rank, remat=False)
        row = (
            micro[who], x["positions"], f"{real / x['positions']:.2f}", f"{x['first']:.1f}", f"{seconds:.3f}",
            f"{(max(walls) - min(walls)) / seconds:.0%}", f"{median_of(x, 'cpu'):.3f}", f"{real / seconds:.0f}",
            f"{x['positions'] / seconds:.0f}", f"{flops / seconds / 1e9:.0f}", f"{x['peak'] / 2**20:.0f}", f"{x['imported'] / 2**20:.0f}",
        )  # fmt: skip
        print(f"{who:6}" + "".join(f"{value:>11}" for value in row))
    for shape in next(iter(found.values()))["flops"]:
        print(
            f"matmul {shape}, GFLOP/s: " + ", ".join(f"{who} {statistics.median(x['flops'][shape]) / 1e9:.0f}" for who, x in found.items())
        )
    for who in found.keys() - {"ours"}:
        mine, theirs = found["ours"], found[who]
        rounds = [b["seconds"] / a["seconds"] for a, b in zip(mine["steps"], theirs["steps"], strict=True)]
        ratio, goal = median_of(theirs, "seconds") / median_of(mine, "seconds"), size.goals[who]
        cpu = median_of(theirs, "cpu") / median_of(mine, "cpu")
        print(f"{verdict(ratio >= goal)} {ratio:.2f}x {who} in real tokens/s, goal {goal}x (rounds {min(rounds):.2f} to {max(rounds):.2f}, "
              f"in CPU seconds {cpu:.2f}x, in computed positions {ratio * mine['positions'] / theirs['positions']:.2f}x)")  # fmt: skip
        print(f"{verdict(mine['peak'] <= theirs['peak'])} peak memory {mine['peak'] / theirs['peak']:.2f} of {who}'s, goal at most 1")


def verdict(met: bool) -> str:
    return "met    " if met else "NOT MET"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="tiny,large")
    parser.add_argument("--contenders", default="ours,tunix,trl")
    parser.add_argument("--micro", default="", help="such as ours:8,trl:4")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="1 is fairest where others compute: no thread waits for another")
    parser.add_argument("--ours-python", default=sys.executable)
    parser.add_argument("--tunix-python", default=sys.executable)
    parser.add_argument("--trl-python", default=sys.executable)
    options = parser.parse_args()
    pythons = {name: getattr(options, f"{name}_python") for name in options.contenders.split(",")}
    changes = {name: int(rows) for name, rows in (item.split(":") for item in options.micro.split(",") if item)}
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    print(
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; micro-batches in rows (ours) and trajectories (tunix, trl)"
    )
    for name in options.sizes.split(","):
        size = SIZES[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            workload = prepare(size, folder)
            print(json.dumps({name: compare(size, pythons, folder, workload)}, indent=1))
            report(name, size, workload, size.micro | changes, measure(size, pythons, folder, size.micro | changes, options.rounds))


if __name__ == "__main__":
    main()
