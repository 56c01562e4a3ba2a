"""ToolSandbox as a target environment: which scenarios are played, and how its verdicts are read.

The benchmark runs in a Python of its own (`driver.py`), since its dependencies do not fit ours.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from envs.harness import HarnessPool, Program, Target
from trace_jax.benchmarks.toolsandbox import splits
from trace_jax.benchmarks.toolsandbox.milestones import checks
from trace_jax.config import Config

DRIVER = pathlib.Path(__file__).with_name("driver.py")
_MESSAGES = 30  # after which ToolSandbox ends a scenario, tools' results and the user's answers included
_NETWORK = "RAPID_API_KEY"  # the key of the API that some tools ask
_ENDPOINT = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")  # of an OpenAI-compatible endpoint


class ToolSandboxTarget(Target):
    """The scenarios of ToolSandbox.

    Attributes:
      similarity: from which on a milestone counts as passed in the checks.
    """

    target = "toolsandbox"
    splits = ("train", "heldout")

    def __init__(
        self,
        program: Program,
        description: dict[str, Any],
        *,
        variants: Sequence[str] = ("",),
        offline: bool = True,
        similarity: float = 1.0,
    ):
        """
        Args:
          description: what the driver's `describe` says.
          variants: of each base scenario, from `splits.VARIANTS`; "" alone are the 129 scenarios that results are published for.
          offline: leave out the scenarios whose tools ask RapidAPI, which takes a key; 91 of the 129 are left.
        """
        chosen = [
            {**task, "split": splits.split_of(task["id"])}
            for task in description["tasks"]
            if splits.parts(task["id"])[1] in variants and (not offline or splits.offline(task["id"]))
        ]
        super().__init__("toolsandbox", program, {**description, "tasks": chosen}, max_turns=_MESSAGES)
        self.speaks_user = program.settings["user"] == "base"
        self.grader = f"tool_sandbox {self.version}"
        self.similarity = similarity

    def checks(self, task_id: str, graded: Any, messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return checks(graded, graded["conversation"], messages, self.similarity) if graded else {}

    def floor(self, task_id: str) -> float:
        """The similarity of an agent that does nothing: 1 in the 26 base scenarios without a milestone, whose reward says little."""
        return splits.floor(task_id)


def make_targets(config: Config, pool: HarnessPool) -> tuple[Target, ...]:
    """The base scenarios; those on the network too where RAPID_API_KEY is set."""
    section = config.benchmark
    settings = {"user": section.user, "user_model": section.user_model, "user_temperature": section.user_temperature}
    variables = (_NETWORK, *(_ENDPOINT if section.user == "endpoint" else ()))
    program = Program(DRIVER, settings, section.python, variables)
    offline = not os.environ.get(_NETWORK)
    return (ToolSandboxTarget(program, pool.describe(program), offline=offline, similarity=config.diagnosis.success),)
