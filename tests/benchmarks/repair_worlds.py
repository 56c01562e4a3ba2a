"""What a code-repair world costs: repositories made, commands, tests in the episode and programs in locked workers, per second.

    python tests/benchmarks/repair_worlds.py [--seeds=30] [--workers=2]

Repositories are made in this process, at the package's default knobs; commands are those of an agent that looks before it edits. A program
is one fresh locked process that imports the candidate and runs all its tests, visible and hidden; they are asked for by `score`.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from envs import Pool
from tests.envs import repair

LOOKS = (
    "ls -R",
    "grep -rn 'def ' .",
    "cat */*.py | head -50",
    "sed -n '10,40p' README.md",
    "git status",
    "find . -name '*.py' | xargs wc -l",
)


def rate(count, began):
    return f"{count / (time.perf_counter() - began):10.1f}/s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for capability in repair.CAPABILITIES:
        package, names = repair.load(capability)
        knobs, seeds = package.resolve_knobs(), range(options.seeds)
        began = time.perf_counter()
        tasks = [repair.task_of(capability, seed) for seed in seeds]
        lines = sum(text.count("\n") for path, text in tasks[0]["files"].items() if path in tasks[0]["right"])
        print(f"{capability} ({lines} lines, {len(tasks[0]['visible']) + 1} visible tests)")
        print(f"  repositories {rate(len(tasks), began)}")
        shell, began = names["Shell"](tasks[0]["files"]), time.perf_counter()
        for _ in range(100):
            for command in LOOKS:
                shell.run(command)
        print(f"  commands     {rate(100 * len(LOOKS), began)}")
        began = time.perf_counter()
        for _ in range(20):
            shell.run("python -m pytest -q")
        print(f"  test runs    {rate(20, began)}")
        with Pool(options.workers, sandbox="best_effort", deadline_s=120.0) as pool:
            episodes = [pool.open(package, seed) for seed in seeds]
            pool.batch([(episode, "reset", ()) for episode in episodes])
            for seed, episode in zip(seeds, episodes, strict=True):
                pool.batch([(episode, "call", (action["name"], action["arguments"])) for action in names["oracle"](seed, knobs)])
            began = time.perf_counter()
            found = pool.batch([(episode, "score", ()) for episode in episodes])
            print(f"  programs     {rate(len(found), began)}   all solved: {all(score.reward == 1.0 for score in found)}", flush=True)


if __name__ == "__main__":
    main()
