"""Step 1 from trajectories to retained capabilities: draw, discover, label in several runs, aggregate, select, write.

The labeller is an `Analyst`; the evidence analyst is the embedded one. Files go through an injected `write(relative path, bytes)`, the
selection last: where it exists the step is done.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rl.trajectory import Trajectory
from trace_jax.diagnose.aggregate import CODES, MIN_SUPPORT, Figures, Run, aggregate, encode_run
from trace_jax.diagnose.agreement import Agreement, agreement, overlaps
from trace_jax.diagnose.evidence import GAP, LACKING, Candidate, Label, expected_actions, unknown_calls
from trace_jax.diagnose.rules import EvidenceAnalyst
from trace_jax.diagnose.select import select
from trace_jax.errors import InputError

_SHARE = 0.8  # of the trajectories that a run draws where each task has one trial
_EXAMPLES = 3
MAX_CANDIDATES = 10


class Analyst(Protocol):
    """A labeller.

    Attributes:
      deterministic: a trajectory has the same labels in every run.
      record: what its labels depend on, as JSON: a model, the hashes of prompts.
    """

    name: str
    deterministic: bool
    record: dict[str, Any]

    def discover(self, trajectories: Sequence[Trajectory]) -> list[Candidate]:
        """Capabilities that the agent may lack, at most MAX_CANDIDATES."""
        ...

    def label(self, draws: Mapping[int, Sequence[Trajectory]], candidates: Sequence[Candidate]) -> Mapping[int, Sequence[Label]]:
        """A label for every pair of trajectory and candidate in every run, by the number of the run; where it finds none, one of value GAP.

        Raises:
          Unfinished: some pairs could not be asked about; asked again, only those cost anything.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What step 1 found.

    Attributes:
      figures: of all candidates, largest mean gap first; `retained` are those that passed.
      labels: of each pair the first run's that has one; of a deterministic analyst all.
      gaps: pairs without a label, with the number of the run.
      outcome: trajectory id to whether it passed.
      errors: infrastructure failures by kind; they are neither passed nor failed.
      do_nothing: tasks whose reward is 1 without any action, as far as the trajectories tell.
      passed_do_nothing: passed trajectories on such tasks.
      notes: what a reader must know of the data, in whole sentences.
      selection: the entries of `selected_capabilities.json`.
      agreement: with a second labeller, where there was one.
      overlaps: pairs of capabilities that are LACKING in the same trajectories, and the share.
      runs: the labelling runs.
    """

    candidates: list[Candidate]
    figures: list[Figures]
    labels: list[Label]
    gaps: list[tuple[int, Label]]
    outcome: dict[str, bool]
    errors: dict[str, int]
    do_nothing: list[str]
    passed_do_nothing: int
    notes: list[str]
    selection: list[dict[str, Any]]
    thresholds: dict[str, Any]
    agreement: list[Agreement]
    overlaps: list[tuple[str, str, float]]
    runs: list[Run]

    @property
    def retained(self) -> list[str]:
        return [f.capability for f in self.figures if f.passes_consistency]

    def to_json(self) -> dict[str, Any]:
        """All figures, for the report; NaN becomes null."""
        bound = {c.name: c.outcome_bound for c in self.candidates}
        rows = [{**_nulls(f), "outcome_bound": bound[f.capability], "supported": f.supported} for f in self.figures]
        rest = {k: getattr(self, k) for k in ("errors", "do_nothing", "passed_do_nothing", "notes", "thresholds", "overlaps")}
        rest["agreement"] = [_nulls(row) for row in self.agreement]
        passed = sum(self.outcome.values())
        return {"passed": passed, "failed": len(self.outcome) - passed, **rest, "capabilities": rows}


def _nulls(row: Any) -> dict[str, Any]:
    """A row of figures as JSON, NaN as null."""
    return {k: (None if v != v else v) for k, v in dataclasses.asdict(row).items()}


def diagnose(
    trajectories: Iterable[Trajectory],
    *,
    analyst: Analyst | None = None,
    second: Analyst | None = None,
    candidates: Sequence[Candidate] | None = None,
    runs: int = 10,
    coverage: float = 0.10,
    gap: float = 0.20,
    min_runs: int = 8,
    seed: int = 0,
    blind: bool = False,
    write: Callable[[str, bytes], None] | None = None,
    previous: Sequence[dict[str, Any]] = (),
    known: Sequence[dict[str, Any]] = (),
    most: int | None = None,
) -> Diagnosis:
    """Finds the capabilities that the agent lacks.

    Args:
      trajectories: of one agent, graded.
      analyst: the labeller; None is the evidence analyst.
      second: another labeller, of whose labels only the agreement with the first's is kept.
      candidates: what to label; None asks the analyst.
      runs: labelling runs, each on trajectories drawn by `draw`.
      coverage, gap, min_runs: the thresholds of a run, and in how many runs both must be reached.
      blind: hides the outcome from the labeller.
      write: receives the files of `diagnosis/`; None writes none.
      previous: entries of an earlier selection whose environments are kept.
      known, most: as in `select`.

    Raises:
      InputError: no graded trajectory, two of one id, or thresholds that no run can meet.
    """
    if not 1 <= min_runs <= runs:
        raise InputError(f"diagnosis.min_runs is {min_runs}; it must lie between 1 and diagnosis.runs, which is {runs}")
    analyst = analyst or EvidenceAnalyst()
    everything = list(trajectories)
    twice = [i for i, n in collections.Counter(t.id for t in everything).items() if n > 1]
    if twice:
        raise InputError(f"trajectory id {twice[0]!r} occurs twice; each file may be given once")
    used, notes = _train_only(everything)
    graded = [t for t in used if t.error is None]
    if not graded:
        raise InputError(
            "no graded trajectory to diagnose: all ended with an infrastructure error or there are none; check the result files"
        )
    names = sorted({t.policy.get("name") or "?" for t in graded})
    if len(names) > 1:
        notes.append(f"The trajectories come from several agents ({', '.join(names)}); the figures are those of none of them.")

    candidates = analyst.discover(graded)[:MAX_CANDIDATES] if candidates is None else list(candidates)
    seen = [_blinded(t) for t in graded] if blind else graded
    by_id = {t.id: t for t in seen}
    draws = {attempt: draw(graded, attempt, seed) for attempt in range(1, runs + 1)}
    asked = {attempt: [by_id[i] for i in ids] for attempt, ids in draws.items()}
    # labels that are the same in every run cost nothing where no run draws the trajectory
    found = analyst.label({0: seen} | asked if analyst.deterministic else asked, candidates)
    labelled = [_run(attempt, ids, graded, found[attempt], candidates) for attempt, ids in draws.items()]
    others = second.label(asked, candidates) if second else {}
    compared = agreement(labelled, [_run(attempt, ids, graded, others[attempt]) for attempt, ids in draws.items()]) if second else []
    labels: dict[tuple[str, str], Label] = {}
    gaps = []
    for attempt in sorted(found):
        gaps += [(attempt, label) for label in found[attempt] if label.value == GAP]
        for label in (label for label in found[attempt] if label.value != GAP):
            labels.setdefault((label.trajectory, label.capability), label)
    figures = aggregate(labelled, coverage=coverage, gap=gap, min_runs=min_runs, seed=seed) if candidates else []
    shared = overlaps(labelled)
    notes += _notes(graded, figures, candidates, analyst, shared)
    selection = select(figures, {c.name: c.description for c in candidates}, previous, known=known, most=most)
    selected = {entry["skill"] for entry in selection}
    if cut := [f.capability for f in figures if f.passes_consistency and f.capability not in selected]:
        notes.append(f"Retained, but beyond diagnosis.most = {most}, so left for another round: {', '.join(cut)}.")
    if again := [f.capability for f in figures if f.passes_consistency and f.capability in {entry["skill"] for entry in known}]:
        notes.append(f"Still lacking, though the agent has an adapter for it: {', '.join(again)}.")
    nothing = do_nothing_tasks(graded)
    diagnosis = Diagnosis(
        candidates=candidates,
        figures=figures,
        labels=list(labels.values()),
        gaps=gaps,
        outcome={t.id: t.success for t in graded},
        errors=dict(collections.Counter(t.error["kind"] for t in used if t.error)),
        do_nothing=nothing,
        passed_do_nothing=sum(t.success and _task(t) in set(nothing) for t in graded),
        notes=notes,
        selection=selection,
        thresholds={"coverage": coverage, "gap": gap, "min_runs": min_runs, "runs": runs, "analyst": analyst.name, "blind": blind}
        | analyst.record,
        agreement=compared,
        overlaps=shared,
        runs=labelled,
    )
    if write is not None:
        _write(diagnosis, graded, write)
    return diagnosis


def draw(trajectories: Sequence[Trajectory], attempt: int, seed: int) -> list[str]:
    """The ids that a run labels: one trial of each task that has several, and 80 % of the tasks that have one, without replacement."""
    rng = np.random.default_rng([seed, attempt])
    trials: dict[str, list[str]] = {}
    for t in trajectories:
        trials.setdefault(_task(t), []).append(t.id)
    single = [ids[0] for ids in trials.values() if len(ids) == 1]
    left_out = {single[n] for n in rng.permutation(len(single))[max(1, round(_SHARE * len(single))) :]}
    chosen = (ids[int(rng.integers(len(ids)))] for ids in trials.values())
    return [i for i in chosen if i not in left_out]


def do_nothing_tasks(trajectories: Iterable[Trajectory]) -> list[str]:
    """Tasks that reward doing nothing, told from the grader's evidence: it compared the database, and expects no change, nothing said,
    no assertion and nothing of the user."""
    tasks: dict[str, set[str]] = {}
    for t in trajectories:
        demands = {name.partition(":")[0] for name in t.checks if not name.startswith("action:")}
        demands |= {"action" for action in expected_actions(t) if action["kind"] == "write" or action.get("required")}
        tasks.setdefault(_task(t), set()).update(demands)
    return [task for task, demands in tasks.items() if demands == {"db"}]


def _task(t: Trajectory) -> str:
    """The task of a trajectory as its id names it, so that tasks of several domains stay apart."""
    return t.id.rpartition("#")[0] or t.task_id


def _train_only(trajectories: list[Trajectory]) -> tuple[list[Trajectory], list[str]]:
    splits = {t.split for t in trajectories}
    if "train" in splits:
        train = [t for t in trajectories if t.split == "train"]
        left = len(trajectories) - len(train)
        return train, [
            f"{left} trajectories of other splits were left out: capabilities are mined on the train split only."
        ] if left else []
    if splits == {""}:
        return trajectories, ["The files do not say which split their tasks belong to: do not evaluate on these tasks."]
    shown = ", ".join(sorted(splits - {""}))
    return trajectories, [f"All tasks are of the split {shown}: what is trained on this diagnosis has seen its test tasks."]


def _blinded(t: Trajectory) -> Trajectory:
    """The trajectory without its outcome: reward 0, no verdict on any check."""
    return dataclasses.replace(t, reward=0.0, success=False, checks={name: {**c, "passed": None} for name, c in t.checks.items()})


def _run(
    attempt: int, ids: Sequence[str], graded: Sequence[Trajectory], labels: Sequence[Label], candidates: Sequence[Candidate] = ()
) -> Run:
    drawn = set(ids)
    codes: dict[str, dict[str, int]] = {c.name: {} for c in candidates}
    for label in labels:
        if label.value != GAP:
            codes.setdefault(label.capability, {})[label.trajectory] = CODES[label.value.lower()]
    return Run(attempt, {t.id: not t.success for t in graded if t.id in drawn}, codes)


def _notes(
    graded: Sequence[Trajectory],
    figures: Sequence[Figures],
    candidates: Sequence[Candidate],
    analyst: Analyst,
    shared: Sequence[tuple[str, str, float]],
) -> list[str]:
    notes = []
    if analyst.deterministic:
        trials = collections.Counter(_task(t) for t in graded).values()
        several = "one trial of each task" if max(trials) > 1 else ""
        single = "80 % of the trajectories of tasks with one trial" if min(trials) == 1 else ""
        what = " and ".join(filter(None, (several, single)))
        notes.append(f"Runs differ only in what they draw, {what}; the {analyst.name} analyst labels a trajectory the same way each time.")
    unknown = unknown_calls(graded)
    if blank := sum(t.environment in unknown for t in graded) if analyst.name == EvidenceAnalyst.name else 0:
        notes.append(
            f"{blank} of {len(graded)} trajectories have no expected calls (action:0, ...): rules about calls see nothing in them; "
            "add them to the checks, or have an LLM read the conversations with --config.analyst=llm."
        )
    passed = sum(t.success for t in graded)
    if one_sided := no_contrast(passed, len(graded) - passed):
        notes.append(f"{one_sided}.")
    bound = {c.name for c in candidates if c.outcome_bound}
    fixed = [f.capability for f in figures if f.capability in bound and f.applicable_failed]
    if fixed:
        notes.append(f"A passed trajectory cannot be LACKING in {', '.join(fixed)}: ER+ is 0 by construction and the gap is ER-.")
    thin = [f"{f.capability} ({f.applicable_passed:.1f})" for f in figures if not f.supported]
    if thin:
        notes.append(f"Gaps with little support, fewer than {MIN_SUPPORT} applicable passed trajectories a run: {', '.join(thin)}.")
    missing = [f"{f.capability} ({f.gap_share:.1%})" for f in figures if f.gap_share]
    if missing:
        notes.append(f"Pairs without a valid label, which count nowhere: {', '.join(missing)}; the reasons are in gaps.jsonl.")
    same = [f"{a} and {b} ({share:.0%})" for a, b, share in shared]
    if same:
        notes.append(f"Capabilities that are LACKING in the same trajectories, and may be one: {', '.join(same)}.")
    return notes


def no_contrast(passed: int, failed: int) -> str:
    """What there is to say where all trajectories ended alike; else nothing."""
    if passed and failed:
        return ""
    return f"All trajectories {'passed' if passed else 'failed'}: there is nothing to contrast"


def _write(d: Diagnosis, graded: Sequence[Trajectory], write: Callable[[str, bytes], None]) -> None:
    rewards = {t.id: t.reward for t in graded}
    listed = []
    for c in d.candidates:
        shown = [x for x in d.labels if x.capability == c.name and x.value == LACKING and not d.outcome[x.trajectory]][:_EXAMPLES]
        examples = [
            {"task_id": x.trajectory, "reward": rewards[x.trajectory], "note": f"message {x.message_index}: {x.reason}"} for x in shown
        ]
        listed.append({"name": c.name, "description": c.description, "example_trajectories": examples})
    write("diagnosis/candidates.json", _json({"candidates": listed}))
    for run in d.runs:
        write(f"diagnosis/runs/run_{run.attempt:02d}.json", _json(encode_run(run)))
    write("diagnosis/evidence.jsonl", _lines({**dataclasses.asdict(x), "passed": d.outcome[x.trajectory]} for x in d.labels))
    gaps = ({"run": n, "trajectory": x.trajectory, "capability": x.capability, "reason": x.reason} for n, x in d.gaps)
    write("diagnosis/gaps.jsonl", _lines(gaps))  # without any too: an earlier run may have had some
    write("diagnosis/figures.json", _json(d.to_json()))
    write("diagnosis/selected_capabilities.json", _json(d.selection))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
