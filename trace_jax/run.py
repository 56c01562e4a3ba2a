"""`trace-jax run`: the four steps and the evaluation, from wherever an earlier run of the workdir stopped.

    base rollouts -> diagnose -> synthesise -> train -> compose -> evaluate -> report

Every step finds what it has done already in the workdir. The order below is the whole method.
"""

from __future__ import annotations

import rich.console

from trace_jax import report
from trace_jax.baselines.grpo_target import train_on_target
from trace_jax.cli import Arguments
from trace_jax.compose import compose
from trace_jax.config import Config
from trace_jax.diagnose.command import diagnose_workdir
from trace_jax.errors import InputError
from trace_jax.evaluate import evaluate_all
from trace_jax.rollout import roll_out_train_split
from trace_jax.runtime import Runtime, open_runtime
from trace_jax.spent import write_spent
from trace_jax.synthesize import synthesize_all
from trace_jax.train import train_adapter


def plan(config: Config, capabilities: int = 4) -> dict[str, float]:
    """Rollouts of each stage, which is what its time is mostly made of; updates are counted as rollouts too, at what they cost."""
    train, gate, synthesis, evaluation = config.train, config.gate, config.synthesis, config.evaluation
    batch = train.groups * train.group_size
    selection = train.selection_seeds * capabilities
    policies = sum(capabilities if name == "adapters" else 1 for name in evaluation.policies)
    return {
        "rollouts": config.target.train_tasks * config.diagnosis.trials,
        "diagnose": 1,
        "synthesize": synthesis.calibration_seeds * synthesis.calibration_rollouts * capabilities,
        "train": (train.iterations * batch + 2 * train.selection_seeds) * capabilities,
        "compose": capabilities * (gate.successes + gate.table_seeds * (capabilities + 4))
        + gate.grpo_iterations * batch
        + selection * (capabilities + 7),
        "evaluate": evaluation.tasks * evaluation.trials * policies,
    }


def run(runtime: Runtime) -> None:
    """All steps, in order.

    Raises:
      InputError: diagnosis retained nothing, or no environment is usable; what was found is in the workdir.
    """
    stages = plan(runtime.config)
    with runtime.stage("rollouts", stages["rollouts"]):
        roll_out_train_split(runtime)
    with runtime.stage("diagnose", 1):
        diagnose_workdir(runtime)
    retained = runtime.retained()
    if not retained:
        raise InputError(f"no capability was retained: see {runtime.workdir.root}/diagnosis; more diagnosis.trials give a sharper picture")
    stages = plan(runtime.config, len(retained))
    runtime.progress.plan(stages)
    with runtime.stage("synthesize", stages["synthesize"]):
        calibrations = synthesize_all(runtime)
    usable = [capability for capability in retained if calibrations[capability]["usable"]]
    if not usable:
        raise InputError(f"no environment is usable: see calibration.json and certificate.json in {runtime.workdir.root}/environments")
    with runtime.stage("train", stages["train"]):
        for index, capability in enumerate(usable):
            train_adapter(runtime, capability, index)
    with runtime.stage("compose", stages["compose"]):
        compose(runtime, usable)
    with runtime.stage("evaluate", stages["evaluate"]):
        evaluate_all(runtime, usable)
    if runtime.config.baselines.grpo_target:
        steps = ("rollouts", "synthesize", "train", "compose")
        spent = write_spent(runtime.workdir)["stages"]
        budget = int(sum(spent[name]["rollouts"] for name in steps))
        runtime.progress.plan(stages | {"baseline": budget})
        with runtime.stage("baseline", budget):
            train_on_target(runtime, budget)
    report.write_report(runtime.workdir)


def main(arguments: Arguments) -> None:
    """`trace-jax run`."""
    with open_runtime(arguments, plan(arguments.config)) as runtime:
        run(runtime)
        rich.console.Console().print(report.summary_table(runtime.workdir))
        print(f"report: {runtime.workdir.root / 'report.html'}")
