"""SWE-bench as a target: its instances, and how its verdicts are read. What runs is `driver`, in a worker.

SWE-bench Verified has no splits. Ours are by repository, so that nothing of a held-out repository is mined or trained on; `splits.json` has
the list and its rule. Repositories that are not listed fall to a side by the hash of their name.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from envs.harness import HarnessPool, Program, Target
from trace_jax.benchmarks.swebench.reports import Verdict, checks_of, verdict_of
from trace_jax.config import Config
from trace_jax.errors import InputError

DRIVER = pathlib.Path(__file__).with_name("driver.py")
SPLITS = json.loads(pathlib.Path(__file__).with_name("splits.json").read_text())
_GRADING = 0.8  # of the time for an answer: what takes longer is to end as the patch's failure, not as an outage
_VARIABLES = ("DOCKER_HOST", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "TMPDIR")


class SwebenchTarget(Target):
    """The instances of one dataset. A scripted agent that says "all done." never calls a tool, and earns nothing."""

    target = "swebench"

    def __init__(self, pool: HarnessPool, program: Program):
        """
        Raises:
          EnvironmentFault: the driver cannot read the dataset, or cannot play a row of it.
        """
        super().__init__("swebench", program, pool.describe(program), program.settings["step_limit"])
        self.grader = self.version
        self._solutions = {task.id: task.details.get("patch") for task in self.all_tasks}

    def checks(self, task_id: str, graded: Any, messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """`patch` and `test:<name>`, as the readers of result files make them; the expected patch is the dataset's, if it has one.

        An episode that was ended before it was judged has handed in nothing.
        """
        graded = graded or {}
        report = graded.get("report")
        checks = checks_of(verdict_of(report) if report else Verdict("empty_patch"), graded.get("patch") or "", messages)
        if (solution := self._solutions.get(task_id)) and "patch" in checks:
            checks["patch"]["expected"] = solution
        return checks


def make_program(data: str, environment: str, *, max_steps: int, timeout: float, python: str = "") -> Program:
    """What plays a dataset.

    Raises:
      InputError: there is none.
    """
    if not data or not pathlib.Path(data).exists():
        raise InputError(
            f"config field 'benchmark.data': {data!r} is no file or folder; give the dataset of SWE-bench as .json, .jsonl or .parquet"
        )
    settings = {
        "data": str(pathlib.Path(data).absolute()),
        "environment": environment,
        "step_limit": max_steps,
        "eval_timeout": int(_GRADING * timeout),
        "train": list(SPLITS["train"]),
        "heldout": list(SPLITS["heldout"]),
    }
    return Program(DRIVER, settings, python, _VARIABLES)


def make_targets(config: Config, pool: HarnessPool) -> tuple[Target, ...]:
    """The dataset of the config."""
    b = config.benchmark
    return (SwebenchTarget(pool, make_program(b.data, b.environment, max_steps=b.max_steps, timeout=b.timeout, python=b.python)),)
