"""What the sandbox costs: steps, messages, memory and starts of its workers, locked down and not, beside their goals.

    python tests/benchmarks/sandbox_speed.py

Episodes are those of the target `desk`. Times are the best of several rounds, since other work on the machine only ever adds to them; the
CPU time a step takes, of the host and of the worker, hardly depends on it. Linux only.
"""

import os
import statistics
import time

from envs import Pool
from envs.builtin import load_builtin
from envs.sandbox.process import start

EPISODES, CALLS, ROUNDS, MESSAGES, LIVE, STARTS, MANY = 256, 4, 20, 500, 2000, 50, 64
# name: (goal, unit, whether more is better)
GOALS = {
    "batched steps": (20_000, "steps/s", True),
    "one step, median": (100, "us", False),
    f"{LIVE} live episodes": (150, "MB", False),
    "start of a worker": (10, "ms", False),
    f"start of {MANY} workers": (1000, "ms", False),
}


def cpu_seconds(pid):
    """CPU time of a process of one thread."""
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def measure(sandbox):
    """{name: value} for the goals, and {name: value} of the rest."""
    desk = load_builtin("desk")
    with Pool(1, sandbox=sandbox) as pool:
        starts, ends, many, start_cpu = [], [], [], []
        zygote = pool._launcher._zygote.process.pid
        for _ in range(STARTS):
            began, spent = time.perf_counter(), time.process_time() + cpu_seconds(zygote)
            (process,) = start(pool._launcher, [pool._options])
            ready = time.perf_counter()
            start_cpu.append(time.process_time() + cpu_seconds(zygote) + cpu_seconds(process.child.pid) - spent)
            process.kill()
            starts.append(ready - began)
            ends.append(time.perf_counter() - ready)
        for _ in range(3):
            began = time.perf_counter()
            processes = start(pool._launcher, [pool._options] * MANY)
            many.append(time.perf_counter() - began)
            for process in processes:
                process.kill()
        episodes = [pool.open(desk, seed) for seed in range(LIVE)]
        for first in range(0, LIVE, EPISODES):
            pool.batch([(episode, "reset", ()) for episode in episodes[first : first + EPISODES]])
        action = pool.function(desk, "oracle", 0)[0]
        call = ("call", (action["name"], action["arguments"]))
        pid = pool._processes[0][desk.digest].child.pid
        steps, rates, host, worker = EPISODES * CALLS, [], [], []
        for _ in range(ROUNDS):
            batch = [(episode, *call) for episode in episodes[:EPISODES] for _ in range(CALLS)]
            began, spent, theirs = time.perf_counter(), time.process_time(), cpu_seconds(pid)
            pool.batch(batch)
            rates.append(steps / (time.perf_counter() - began))
            host.append((time.process_time() - spent) / steps)
            worker.append((cpu_seconds(pid) - theirs) / steps)
        medians, message = [], []
        for _ in range(ROUNDS // 2):
            times, spent, theirs = [], time.process_time(), cpu_seconds(pid)
            for _ in range(MESSAGES):
                began = time.perf_counter()
                episodes[0].call(*call[1])
                times.append(time.perf_counter() - began)
            medians.append(statistics.median(times))
            message.append((time.process_time() - spent + cpu_seconds(pid) - theirs) / MESSAGES)
        with open(f"/proc/{pid}/status") as file:
            resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))
        values = (max(rates), min(medians) * 1e6, resident / 1024, min(starts) * 1e3, min(many) * 1e3)
        others = {
            "batched steps, median": f"{statistics.median(rates):,.0f} steps/s",
            "CPU of a batched step, host": f"{min(host) * 1e6:.1f} us",
            "CPU of a batched step, worker": f"{min(worker) * 1e6:.1f} us",
            "CPU of one step, both": f"{min(message) * 1e6:.0f} us",
            "one step, median of medians": f"{statistics.median(medians) * 1e6:.0f} us",
            "CPU of a start, all three": f"{min(start_cpu) * 1e3:.1f} ms",
            "start of a worker, median": f"{statistics.median(starts) * 1e3:.1f} ms",
            "end of a worker": f"{min(ends) * 1e3:.1f} ms",
        }
        return dict(zip(GOALS, values, strict=True)), others, pool.describe()


def main():
    locked, locked_others, words = measure("best_effort")
    plain, plain_others, _ = measure("off")
    print(f"{words}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':32}{'locked':>18}{'off':>18}   goal")
    for name, (goal, unit, more) in GOALS.items():
        values = locked[name], plain[name]
        met = all(value >= goal if more else value <= goal for value in values)
        shown = "".join(f"{f'{value:,.1f} {unit}':>18}" for value in values)
        print(f"{name:32}{shown}   {'>=' if more else '<='} {goal:,} {unit}: {'met' if met else 'not met'}")
    for name in locked_others:
        print(f"{name:32}{locked_others[name]:>18}{plain_others[name]:>18}")


if __name__ == "__main__":
    main()
