"""`trace-jax diagnose`: step 1 on the workdir's rollouts of the base agent, or on result files that another tool wrote.

With `--results` and without a workdir it only prints, and starts no JAX. `--against` sets the labels beside those of another diagnosis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from rl.trajectory import Trajectory
from trace_jax.agents import make_agent, usage_of
from trace_jax.agents.templates import Templates, domain_of
from trace_jax.benchmarks.results import read_results
from trace_jax.cli import Arguments
from trace_jax.config import Config
from trace_jax.diagnose.aggregate import Run, decode_run
from trace_jax.diagnose.agreement import agreement
from trace_jax.diagnose.diagnosis import Diagnosis, diagnose
from trace_jax.diagnose.evidence import Candidate
from trace_jax.diagnose.llm import LLMAnalyst
from trace_jax.diagnose.report import print_agreement, print_diagnosis, print_usage
from trace_jax.diagnose.rules import RULES, EvidenceAnalyst
from trace_jax.diagnose.select import decode_candidates, decode_selection, diagnosed_policy, read_known
from trace_jax.errors import InputError
from trace_jax.evaluate.hygiene import MINED, warn_of_test_splits, write_mined
from trace_jax.progress import Progress
from trace_jax.spent import write_spent
from trace_jax.stores import open_store
from trace_jax.workdir import Workdir

if TYPE_CHECKING:
    from trace_jax.runtime import Runtime

STAGE = "diagnose"
_SELECTION = "diagnosis/selected_capabilities.json"
_TOLERANCE = 1e-6  # graders compute rewards in floating point

Advance = Callable[[float, str], None]  # share of the step that is done since the last call, and what is done


def diagnose_workdir(runtime: Runtime) -> None:
    """Step 1 of a run; its files go to `diagnosis/`, the selection last, and where that exists the step is done."""
    workdir = runtime.workdir
    if not diagnosed(workdir):
        # one process asks and writes for all
        workdir.processes.agree(lambda: _diagnose(runtime.config, workdir, _rollouts(workdir), runtime.progress.advance) and None)


def diagnosed(workdir: Workdir) -> bool:
    """Whether step 1 is done: its last file is there."""
    return workdir.exists(_SELECTION)


def _rollouts(workdir: Workdir) -> Iterable[Trajectory]:
    policy = diagnosed_policy(workdir)
    if not workdir.shards(policy, "train"):
        raise InputError(
            f"{workdir.place()}: no rollouts to diagnose; run trace-jax rollout --policy=base --split=train, or give --results=FILE"
        )
    return workdir.read_shards(policy, "train")


def _diagnose(
    config: Config, workdir: Workdir | None, trajectories: Iterable[Trajectory], advance: Advance, files: Sequence[str] = ()
) -> Diagnosis:
    settings = config.diagnosis
    graded = [_graded(t, settings.success) for t in trajectories]
    if workdir is not None and (files or workdir.exists(MINED)):
        write_mined(workdir, graded, files)
    given = read_candidates(settings.candidates) if settings.candidates else None
    evidence = EvidenceAnalyst()
    if config.analyst == "evidence":
        analyst, second = evidence, None
        for name in (c.name for c in given or () if c.name not in RULES):
            raise InputError(f"{settings.candidates}: the evidence analyst has no rule for {name!r}, only for {', '.join(RULES)}")
    else:
        second = evidence if config.analyst == "both" else None
        known = second.discover([t for t in graded if t.error is None]) if second else ()
        analyst = _llm(config, workdir, graded, known, advance)
    earlier = workdir is not None and diagnosed(workdir)
    return diagnose(
        graded,
        analyst=analyst,
        second=second,
        candidates=given,
        runs=settings.runs,
        coverage=settings.coverage,
        gap=settings.gap,
        min_runs=settings.min_runs,
        seed=config.seed,
        blind=settings.blind,
        write=workdir.write_bytes if workdir else None,
        known=(workdir is not None and read_known(workdir)) or (),
        most=settings.most,
        previous=decode_selection(workdir.read_json(_SELECTION), workdir.place(_SELECTION)) if earlier else (),
    )


def _llm(
    config: Config, workdir: Workdir | None, trajectories: Sequence[Trajectory], known: Sequence[Candidate], advance: Advance
) -> LLMAnalyst:
    if workdir is None:
        raise InputError("config field 'analyst': an LLM's labels need --workdir=DIR, so that what was paid for is kept")
    templates = Templates(config.agents.prompts or domain_of(t.environment for t in trajectories))

    def tell(what: str, done: int, total: int) -> None:
        advance(1 / total if what == "labelling" else 0.0, f"{what}: {done} of {total} questions")

    return LLMAnalyst(
        make_agent(config, workdir, STAGE, templates),
        templates,
        config.agents,
        config.diagnosis,
        seed=config.seed,
        known=known,
        write=workdir.write_bytes,
        progress=tell,
    )


def read_candidates(file: str) -> list[Candidate]:
    """The capabilities of a `candidates.json`.

    Raises:
      InputError: there is no such file, or it is no such list.
    """
    path = pathlib.Path(file).expanduser()
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"config field 'diagnosis.candidates': {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"config field 'diagnosis.candidates': {path}: not JSON ({error})") from error
    bound = {name: candidate.outcome_bound for name, (candidate, _) in RULES.items()}
    return [Candidate(name, text, bound.get(name, False)) for name, text in decode_candidates(data, str(path)).items()]


def read_runs(folder: str) -> list[Run]:
    """The labelling runs of another workdir, or of its `diagnosis` folder.

    Raises:
      InputError: there are none, or one does not add up.
    """
    store = open_store(folder)
    names = [name for name in store.list("diagnosis/runs") or store.list("runs") if name.endswith(".json")]
    if not names:
        raise InputError(f"--against={folder}: no diagnosis/runs in it; give the workdir of another diagnosis")
    runs = []
    for name in names:
        place = f"{store.address}/{name}"
        try:
            runs.append(decode_run(json.loads(store.read(name)), place))
        except ValueError as error:
            raise InputError(f"{place}: not JSON ({error}); diagnose again") from error
    return runs


def _graded(trajectory: Trajectory, success: float) -> Trajectory:
    """The trajectory, a success from the threshold of the config on."""
    if trajectory.reward is None:
        return trajectory
    return dataclasses.replace(trajectory, success=trajectory.reward >= success - _TOLERANCE)


def main(arguments: Arguments) -> None:
    """Prints the diagnosis, and writes it when there is a workdir.

    Raises:
      InputError: neither results nor a workdir with rollouts, or a result file that cannot be used.
      Unfinished: the LLM left pairs without an answer, or its budget is used up.
    """
    config, workdir = arguments.config, arguments.workdir
    if not arguments.results and workdir is None:
        raise InputError("trace-jax diagnose: give --results=FILE,... or the --workdir of a run")
    others = read_runs(arguments.against) if arguments.against else None
    trajectories = read_results(arguments.results, config.diagnosis.success) if arguments.results else _rollouts(workdir)
    with contextlib.ExitStack() as stack:
        advance: Advance = lambda share, text: None  # noqa: E731
        if config.analyst != "evidence":
            progress = stack.enter_context(Progress({STAGE: 1.0}))
            stack.enter_context(progress.stage(STAGE))
            advance = progress.advance
        found = _diagnose(config, workdir, trajectories, advance, arguments.results)
    if workdir is not None:
        write_spent(workdir)
    where = workdir.place("diagnosis/evidence.jsonl") if workdir else "give --workdir=DIR, and they are in its diagnosis/evidence.jsonl"
    print_diagnosis(found, where=where)
    if arguments.results:
        warn_of_test_splits(trajectories, Console())
    if workdir is not None and STAGE in (usage := usage_of(workdir)):
        print_usage(usage[STAGE], Console())
    if others is not None:
        print_agreement(agreement(found.runs, others), arguments.against, Console())
