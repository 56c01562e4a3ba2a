"""The domains of tau2-bench as targets, and the solutions that come with their tasks."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from envs.base import Ask
from envs.harness import HarnessPool, Program, Target, TaskInfo
from trace_jax.benchmarks.tau2.results import checks_of
from trace_jax.config import Config

DRIVER = pathlib.Path(__file__).with_name("driver.py")
ENDPOINT = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")  # of an OpenAI-compatible endpoint
_MAX_ERRORS = 10  # tau2's default


class Tau2Target(Target):
    """One domain; the user simulator is our base, or an endpoint."""

    def __init__(self, pool: HarnessPool, program: Program):
        """
        Raises:
          EnvironmentFault: the driver cannot describe the domain.
        """
        domain = program.settings["domain"]
        super().__init__(f"tau2/{domain}", program, pool.describe(program), program.settings["max_steps"])
        self.target, self.grader = f"tau2_{domain}", self.version
        self.speaks_user = program.settings["user"] == "base"
        self._criteria = {task.id: task.details["criteria"] for task in self.all_tasks}
        if any("NL_ASSERTION" in (one.get("reward_basis") or ()) for one in self._criteria.values()):  # an LLM judges, from tau2 1.0 on
            self.program = dataclasses.replace(
                program, variables=(*program.variables, *(v for v in ENDPOINT if v not in program.variables))
            )

    def checks(self, task_id: str, graded: Any, messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """As the importers of result files make them; of an episode that tau2 did not judge, from the task's own criteria."""
        return checks_of(graded or {}, self._criteria[task_id], messages)


def make_targets(config: Config, pool: HarnessPool) -> tuple[Target, ...]:
    """The domains of the config."""
    section = config.benchmark
    return tuple(
        Tau2Target(
            pool,
            Program(
                DRIVER,
                {
                    "domain": domain,
                    "max_steps": section.max_steps,
                    "max_errors": _MAX_ERRORS,
                    "user": section.user,
                    "user_model": section.user_model,
                    "user_temperature": section.user_temperature,
                },
                section.python,
                ("TAU2_DATA_DIR", *(ENDPOINT if section.user == "endpoint" else ())),
            ),
        )
        for domain in section.domains
    )


class Golden:
    """An agent that recites a task's expected actions, one a turn, and then says all that it must."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def __call__(self, task: TaskInfo, _: Ask) -> dict[str, Any]:
        criteria = task.details["criteria"]
        actions = [a for a in criteria.get("actions") or [] if (a.get("requestor") or "assistant") == "assistant"]
        turn = self._turns[task.id] = self._turns.get(task.id, -1) + 1
        if turn < len(actions):
            call = {"id": f"call_{turn}", "name": actions[turn]["name"], "arguments": actions[turn]["arguments"]}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        said = " ".join(["All done.", *(criteria.get("communicate_info") or [])])
        return {"role": "assistant", "content": said, "tool_calls": []}
