"""`trace-jax run`: the four steps and the evaluation, from wherever an earlier run of the workdir stopped.

    base rollouts -> diagnose -> synthesise -> train -> compose -> evaluate -> report

Every step finds what it has done already in the workdir. The order below is the whole method; `--rounds` repeats it (`trace_jax.rounds`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import rich.console

from trace_jax import report
from trace_jax.agents import make_agent
from trace_jax.agents.templates import GENERAL, Templates
from trace_jax.baselines.grpo_target import train_on_target
from trace_jax.cli import Arguments
from trace_jax.compose import NothingToCompose, compose
from trace_jax.diagnose.command import diagnose_workdir, diagnosed
from trace_jax.diagnose.diagnosis import no_contrast
from trace_jax.diagnose.select import KNOWN
from trace_jax.errors import InputError, Unfinished
from trace_jax.evaluate.command import evaluate_all
from trace_jax.rollout import roll_out_train_split
from trace_jax.rounds import improve, plan_rounds, tell_rounds
from trace_jax.runtime import Runtime, open_runtime, plan
from trace_jax.spent import rollouts_of_steps
from trace_jax.synthesize import NEEDS_ATTENTION, OPEN, own_packages, refusal, require_finished, synthesize_all
from trace_jax.train import train_adapter
from trace_jax.workdir import Workdir

_FIGURES = "diagnosis/figures.json"


def run(runtime: Runtime, later: Mapping[str, float] = MappingProxyType({})) -> dict[str, dict[str, Any]]:
    """All steps, in order.

    Args:
      later: stages of the command behind those of the run, with the rollouts of each.

    Returns:
      What step 2 found, by capability: where some need attention, the others have gone through the rest of the steps.

    Raises:
      InputError: diagnosis retained nothing, or no environment is usable; what was found is in the workdir. Or this is that of a round.
      Unfinished: the LLM did not answer, which it may later, or none of its environments is usable.
    """
    config, workdir = runtime.config, runtime.workdir
    if workdir.exists(KNOWN):
        raise InputError(f"--workdir={workdir.place()}: a later round of a run; give the --workdir of the run, and --rounds")
    if not diagnosed(workdir) and (config.analyst != "evidence" or config.generator == "llm"):
        # a missing key or model is said before hours of rollouts
        make_agent(config, workdir, "diagnose", Templates(config.agents.prompts or GENERAL))
    own_packages(runtime)  # nor is a package that cannot be used found out only then
    with runtime.stage("rollouts"):
        roll_out_train_split(runtime)
    with runtime.stage("diagnose"):
        diagnose_workdir(runtime)
    retained = runtime.retained()
    if not retained:
        with _reported(runtime, InputError):
            raise InputError(_nothing_retained(workdir))
    stages = plan(config, len(retained)) | later
    runtime.plan(stages)
    with runtime.stage("synthesize"):
        environments = synthesize_all(runtime)
    require_finished(workdir, environments, OPEN)  # an agent that is composed without a capability would not be composed again
    if not any(result["usable"] for result in environments.values()):
        with _reported(runtime, InputError, Unfinished):
            require_finished(workdir, environments, NEEDS_ATTENTION)
            reasons = "; ".join(f"{capability}: {refusal(workdir, capability, result)}" for capability, result in environments.items())
            raise InputError(f"no usable environment in {workdir.place('environments')}: {reasons}")
    usable = runtime.usable()
    with runtime.stage("train"):
        for capability in usable:
            train_adapter(runtime, capability)
    with _reported(runtime, NothingToCompose), runtime.stage("compose"):
        compose(runtime, usable)
    with runtime.stage("evaluate"):
        evaluate_all(runtime, usable)
    if config.baselines.grpo_target:
        budget = config.baselines.rollouts or rollouts_of_steps(workdir)
        runtime.plan(stages | {"baseline": budget} | later)
        with runtime.stage("baseline"):
            train_on_target(runtime, budget)
    workdir.processes.agree(lambda: report.write_report(workdir))
    return environments


def _nothing_retained(workdir: Workdir) -> str:
    """Why, and what can be done."""
    found = workdir.read_json(_FIGURES) if workdir.exists(_FIGURES) else {"passed": 1, "failed": 1}
    fix = "more diagnosis.trials give a sharper picture"
    if why := no_contrast(found["passed"], found["failed"]):
        tasks = "harder tasks or a higher" if found["passed"] else "a base that solves some tasks, easier ones, or a lower"
        fix = f"{why}; take {tasks} diagnosis.success"
    return f"no capability was retained: see {workdir.place('diagnosis')}; {fix}"


@contextlib.contextmanager
def _reported(runtime: Runtime, *kinds: type[Exception]) -> Iterator[None]:
    """Where the run cannot go on, its report is written all the same, so that the reason can be read, and the message names it."""
    try:
        yield
    except kinds as error:
        try:
            place = runtime.workdir.processes.agree(lambda: report.write_report(runtime.workdir))
        except (InputError, Unfinished):
            raise error from None  # a file that is damaged, or a bucket that is away, must not hide the reason
        raise type(error)(f"{error}; report: {place}") from error


def main(arguments: Arguments) -> None:
    """`trace-jax run`.

    Raises:
      Unfinished: a capability needs attention; all else is done.
    """
    with open_runtime(arguments) as runtime:
        later = plan_rounds(runtime.config, arguments.rounds)
        runtime.plan(runtime.stages | later)
        environments = [(arguments.workdir, run(runtime, later))]
        environments += improve(runtime, arguments.rounds)
    rich.console.Console().print(report.summary_table(arguments.workdir))
    print("".join(f"{line}\n" for line in tell_rounds(arguments.workdir)), end="")
    print(f"report: {arguments.workdir.place('report.html')}")
    for workdir, found in environments:
        require_finished(workdir, found, NEEDS_ATTENTION)
