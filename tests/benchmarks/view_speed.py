"""How fast `trace-jax view` opens a workdir: from the start of the process to the first page, a filter, a rollout.

    python -m tests.benchmarks.view_speed [--rollouts=10000] [--tokens=2000] [--turns=10] [--long=50] [--folder=/tmp/view_speed]

Makes a workdir of rollouts as long as real ones (and `--long` of 16,384 tokens), in shards of 200, and asks a fresh process for its pages:
with the indices, without them (which are then read from the shards behind the pages), and from a bucket of the emulator. The disk it takes
is about 16 MB for each thousand of 2,000 tokens.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np

from rl.trajectory import Trajectory
from tests import gcs
from trace_jax.stores import open_store
from trace_jax.workdir import Workdir

SHARD = 200
POLICIES = ("base", "adapter:structured_data_reasoning", "adapter:precondition_verification", "router", "composed")
WORDS = "order customer refund status delivered policy address confirm reservation flight cabin bag payment the a of to and is was".split()


def rollout(number: int, policy: str, tokens: int, turns: int) -> Trajectory:
    """An episode: each turn a thought, a call and its answer."""
    rng, words = np.random.default_rng(number), random.Random(number)

    def text(count: int) -> str:
        return " ".join(words.choices(WORDS, k=count))

    messages = [{"role": "system", "content": text(tokens // 8)}, {"role": "user", "content": text(40)}]
    each = max(tokens // turns // 4, 8)
    for turn in range(turns):
        call = {"id": f"call_{turn}", "name": "get_order", "arguments": {"order_id": f"#W{rng.integers(1e7)}"}}
        messages.append({"role": "assistant", "content": f"<think>{text(each)}</think>", "tool_calls": [call]})
        messages.append({"role": "tool", "content": json.dumps({"status": text(each)}), "tool_call_id": call["id"]})
    mask = np.arange(tokens) * turns * 2 // tokens % 2 == 1
    reward = float(rng.random() < 0.4)
    return Trajectory(
        id=f"retail:{number // 4}#{number % 4}",
        environment="tau2/retail",
        task_id=f"retail:{number // 4}",
        seed=number // 4,
        group=str(number // 4),
        trial=number % 4,
        policy={"name": policy, "version": 0},
        messages=messages,
        reward=reward,
        success=reward == 1.0,
        checks={f"action:{n}": {"passed": reward == 1.0, "expected": call, "actual": None, "message_index": 2 + 2 * n} for n in range(3)},
        tokens=rng.integers(0, 150_000, tokens),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.exponential(0.3, tokens), 0).astype(np.float32),
        turns=np.arange(tokens) * turns // tokens,
        versions=np.zeros(tokens),
    )


def fill(folder: pathlib.Path, count: int, tokens: int, turns: int, long: int) -> None:
    """Shards of all policies, on train and held-out tasks alike; the long ones in a folder of their own."""
    with Workdir(open_store(folder)) as workdir:
        workdir.write_json("config.json", {"config": {}})
        for shard in range(-(-count // SHARD)):
            policy, split = POLICIES[shard % len(POLICIES)], ("train", "heldout")[shard // len(POLICIES) % 2]
            numbers = range(shard * SHARD, min((shard + 1) * SHARD, count))
            workdir.write_shard(policy, split, shard, [rollout(n, policy, tokens, turns) for n in numbers])
        if long:
            workdir.write_shard("base", "long", 0, [rollout(n, "base", 16_384, 40) for n in range(long)])


def measure(address: str, environment: dict[str, str], count: int) -> dict[str, float]:
    """Seconds of what a person waits for."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "trace_jax", "view", address, "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = {}

    def timed(what: str, path: str) -> str:
        start = time.perf_counter()
        page = urllib.request.urlopen(url + path, timeout=600).read().decode()
        found[what] = time.perf_counter() - start
        return page

    try:
        url = process.stdout.readline().split(" at ")[-1].split(",")[0]
        found["listens"] = time.perf_counter() - began
        page = timed("first page", "/")
        found["start to first page"] = time.perf_counter() - began
        if sys.platform == "linux":  # what it would be where nobody else works
            ticks = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            found["of that, processor time"] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        while f"<strong>{count:,}</strong>" not in page:
            time.sleep(0.2)
            page = timed("page while it is filled", "/")
        found["start to all listed"] = time.perf_counter() - began
        timed("list again", "/")
        timed("filter", "/?policy=base&reward=zero&sort=-tokens")
        timed("page 20", "/?page=20")
        timed("rollout, its shard not read yet", "/rollout/rollouts/base/train/00000/7")
        timed("rollout", "/rollout/rollouts/base/train/00000/8?reward=zero")
        if "long (" in page:
            timed("rollout of 16,384 tokens", "/rollout/rollouts/base/long/00000/3")
            timed("the same, all its tokens", "/rollout/rollouts/base/long/00000/3?tokens=all")
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text() if sys.platform == "linux" else ""
        found["MB at most"] = next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rollouts", 10_000), ("tokens", 2000), ("turns", 10), ("long", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/view_speed"))
    asked = parser.parse_args()
    local, bare = asked.folder / "indexed", asked.folder / "bare"
    if not local.exists():
        fill(local, asked.rollouts, asked.tokens, asked.turns, asked.long)
    shutil.copytree(local, bare, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.index.json"))
    count, results = asked.rollouts + asked.long, {}
    results["with indices"] = measure(str(local), dict(os.environ), count)
    results["without"] = measure(str(bare), dict(os.environ), count)
    with gcs.server() as url:
        os.environ |= {name: value.format(url) for name, value in gcs.SETTINGS.items()}
        bucket = gcs.Bucket()
        for path in filter(pathlib.Path.is_file, local.rglob("*")):
            bucket.put(f"run/{path.relative_to(local)}", path.read_bytes())
        results["bucket"] = measure(f"{bucket.url}/run", dict(os.environ), count)
    names = dict.fromkeys(name for found in results.values() for name in found)
    print(f"{'seconds':<34}" + "".join(f"{where:>14}" for where in results))
    for name in names:
        figures = (f"{found[name]:14.2f}" if name in found else f"{'-':>14}" for found in results.values())
        print(f"{name:<34}" + "".join(figures))


if __name__ == "__main__":
    main()
