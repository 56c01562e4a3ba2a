"""From labelling runs to figures: coverage, gap, their spread over runs and their intervals, and which capabilities are retained.

The file of one run is `{"attempt", "totals": {"total_failed", "total_passed"}, "labels": {capability: {list: [ids]}}}` with six lists that
partition the ids. Ids for which the labeller found no label stand in `"gaps": {capability: {"failed", "passed"}}`, which is absent where
there are none. Everything is checked when it is read and nothing is guessed; after that all is arithmetic on one array of codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from trace_jax.errors import InputError
from trace_jax.evaluate.statistics import bootstrap_weights, krippendorff_alpha, percentile_interval

CODES = {"na": 0, "present": 1, "lacking": 2}
ABSENT = -1  # the run did not draw the trajectory, or has no label for it
LISTS = tuple(f"{label}_{outcome}" for outcome in ("failed", "passed") for label in ("lacking", "present", "na"))
MIN_SUPPORT = 5  # applicable passed trajectories below which a gap is marked
_BOOTSTRAP = 1000


@dataclasses.dataclass(frozen=True)
class Run:
    """One labelling run: `failed[id]` is the outcome, `codes[capability][id]` a value of CODES; ids without one are gaps."""

    attempt: int
    failed: dict[str, bool]
    codes: dict[str, dict[str, int]]


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the runs say of one capability; means, and population standard deviations, are over the runs.

    Attributes:
      er_minus, er_plus: LACKING among the applicable failed, and passed, trajectories.
      cov_interval, gap_interval: 95 % bootstrap intervals of the means.
      alpha: Krippendorff's alpha between runs, NaN where no trajectory was labelled twice or all labels are one.
      applicable_failed, applicable_passed: their number, mean over runs.
      gap_share: pairs without a label, of those that should have one; mean over runs. They count nowhere.
      lacking: ids of failed trajectories that any run calls LACKING, sorted.
    """

    capability: str
    mean_cov: float
    std_cov: float
    mean_delta: float
    std_delta: float
    er_minus: float
    er_plus: float
    cov_interval: tuple[float, float]
    gap_interval: tuple[float, float]
    alpha: float
    applicable_failed: float
    applicable_passed: float
    gap_share: float
    n_runs_passed: int
    n_runs_total: int
    passes_consistency: bool
    lacking: tuple[str, ...]

    @property
    def supported(self) -> bool:
        return self.applicable_passed >= MIN_SUPPORT


# --- the file of one run ----------------------------------------


def encode_run(run: Run) -> dict[str, Any]:
    """The JSON object of a run, lists in the order of `run.failed`."""
    labels: dict[str, dict[str, list[str]]] = {}
    gaps: dict[str, dict[str, list[str]]] = {}
    names = {code: label for label, code in CODES.items()}
    for capability, codes in run.codes.items():
        labels[capability] = {name: [] for name in LISTS}
        for identifier, failed in run.failed.items():
            end = "failed" if failed else "passed"
            if identifier in codes:
                labels[capability][f"{names[codes[identifier]]}_{end}"].append(identifier)
            else:
                gaps.setdefault(capability, {"failed": [], "passed": []})[end].append(identifier)
    failures = sum(run.failed.values())
    totals = {"total_failed": failures, "total_passed": len(run.failed) - failures}
    return {"attempt": run.attempt, "totals": totals, "labels": labels} | ({"gaps": gaps} if gaps else {})


def decode_run(data: Any, file: str, capabilities: Sequence[str] | None = None) -> Run:
    """Reads and checks the JSON object of a run.

    Args:
      file: named in errors.
      capabilities: the candidates; None accepts whatever the run has.

    Raises:
      InputError: a list is missing or unknown, lists and gaps do not partition the ids, two capabilities disagree on an id, the totals do
        not count the ids, or a capability is unknown or missing. The message names file, run and capability.
    """

    def fail(why: str):
        raise InputError(f"{file}: {why}")

    if not isinstance(data, dict) or not isinstance(data.get("labels"), dict) or not isinstance(data.get("totals"), dict):
        fail("not a labelling run: an object with attempt, totals and labels is needed")
    attempt, labels = data.get("attempt"), data["labels"]
    if not isinstance(attempt, int):
        fail(f"field 'attempt' is {attempt!r}, not a whole number")
    if not labels:
        fail(f"run {attempt}: field 'labels' holds no capability")
    if capabilities is not None:
        for capability in [*labels, *capabilities]:
            if capability not in capabilities:
                fail(f"run {attempt}, capability {capability!r}: not among the candidates {sorted(capabilities)}")
            if capability not in labels:
                fail(f"run {attempt}, capability {capability!r}: missing from the labels; every candidate must be labelled")
    outcome: dict[str, bool] = {}
    codes: dict[str, dict[str, int]] = {}
    gaps = data.get("gaps", {})
    if not isinstance(gaps, dict) or not gaps.keys() <= labels.keys():
        fail(f"run {attempt}: field 'gaps' must be an object whose keys are capabilities of 'labels'")
    for capability, lists in labels.items():
        where = f"run {attempt}, capability {capability!r}"
        if not isinstance(lists, dict) or sorted(lists) != sorted(LISTS):
            fail(f"{where}: needs exactly the lists {', '.join(LISTS)}")
        without = gaps.get(capability, {})
        if not isinstance(without, dict) or not without.keys() <= {"failed", "passed"}:
            fail(f"{where}: gaps must be an object of the lists failed, passed")
        mine: dict[str, int] = {}
        failed: dict[str, bool] = {}
        for name, ids in [*((name, lists[name]) for name in LISTS), *((f"gap_{end}", ids) for end, ids in without.items())]:
            if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
                fail(f"{where}: {name} must be a list of ids (text)")
            label, _, end = name.partition("_")
            for identifier in ids:
                if identifier in failed:
                    fail(f"{where}: id {identifier!r} occurs twice; the lists must partition the ids")
                failed[identifier] = end == "failed"
                if label in CODES:
                    mine[identifier] = CODES[label]
        outcome = outcome or failed
        if failed != outcome:
            odd = sorted(set(failed.items()) ^ set(outcome.items()))[0][0]
            fail(
                f"{where}: id {odd!r} is missing, additional or has another outcome than under {next(iter(labels))!r}; "
                "the lists must partition the same ids"
            )
        codes[capability] = mine
    for key, count in (("total_failed", sum(outcome.values())), ("total_passed", len(outcome) - sum(outcome.values()))):
        if data["totals"].get(key) != count:
            fail(f"run {attempt}: totals.{key} is {data['totals'].get(key)!r}, the lists hold {count}")
    return Run(attempt, outcome, codes)


# --- figures ----------------------------------------


def aggregate(
    runs: Sequence[Run],
    *,
    coverage: float = 0.10,
    gap: float = 0.20,
    min_runs: int = 8,
    seed: int = 0,
    files: Sequence[str] | None = None,
) -> list[Figures]:
    """The figures of every capability, sorted by mean gap, largest first.

    With LF, PF the LACKING and PRESENT failed trajectories of a run and LP, PP the passed ones: `Cov = LF / failed`,
    `ER- = LF / (LF + PF)`, `ER+ = LP / (LP + PP)`, `gap = ER- - ER+`, 0 where a denominator is 0. A trajectory without a label counts
    nowhere, in `failed` neither. A run passes when Cov and gap reach both thresholds; a capability is retained when `min_runs` runs pass.
    The bootstrap draws tasks (the part of an id before "#").

    Raises:
      InputError: no runs, runs with other capabilities or another outcome for an id, or an attempt that occurs twice.
    """
    files = files or [f"run {run.attempt}" for run in runs]
    if not runs:
        raise InputError("no labelling runs to aggregate; label first")
    capabilities, outcome = list(runs[0].codes), {}
    attempts: dict[int, str] = {}
    for run, file in zip(runs, files, strict=True):
        if attempts.setdefault(run.attempt, file) != file:
            raise InputError(f"{file}: attempt {run.attempt} is also that of {attempts[run.attempt]}; give each run its own number")
        for capability in sorted(set(capabilities) ^ set(run.codes)):
            raise InputError(f"{file}: run {run.attempt}, capability {capability!r}: not in all runs; label the same candidates in each")
        for identifier, failed in run.failed.items():
            if outcome.setdefault(identifier, failed) != failed:
                raise InputError(f"{file}: run {run.attempt}: id {identifier!r} has another outcome than in an earlier run")

    ids = list(outcome)
    column = {identifier: n for n, identifier in enumerate(ids)}
    codes = np.full((len(runs), len(capabilities), len(ids)), ABSENT, np.int8)
    drawn_ids = np.array([len(run.failed) for run in runs])
    for r, run in enumerate(runs):
        for c, capability in enumerate(capabilities):
            mine = run.codes[capability]
            codes[r, c, [column[i] for i in mine]] = list(mine.values())
    failed = np.fromiter(outcome.values(), bool, len(ids))
    ones = np.ones((1, len(ids)), np.float32)
    exact = {name: value[0] for name, value in _rates(codes, failed, ones).items()}  # [R, C]

    weights = bootstrap_weights(np.array([i.rpartition("#")[0] or i for i in ids]), _BOOTSTRAP, seed)
    drawn = _rates(codes, failed, weights)
    intervals = {name: percentile_interval(drawn[name].mean(1)) for name in ("cov", "gap")}
    alpha = krippendorff_alpha(codes.swapaxes(0, 1), len(CODES))
    passing = (exact["cov"] >= coverage) & (exact["gap"] >= gap)
    gap_share = (1 - (codes != ABSENT).sum(-1) / np.maximum(drawn_ids, 1)[:, None]).mean(0)

    figures = []
    for c, capability in enumerate(capabilities):
        lacking = (codes[:, c] == CODES["lacking"]).any(0) & failed
        passed_runs = int(passing[:, c].sum())
        figures.append(
            Figures(
                capability=capability,
                mean_cov=float(exact["cov"][:, c].mean()),
                std_cov=float(exact["cov"][:, c].std()),
                mean_delta=float(exact["gap"][:, c].mean()),
                std_delta=float(exact["gap"][:, c].std()),
                er_minus=float(exact["er_minus"][:, c].mean()),
                er_plus=float(exact["er_plus"][:, c].mean()),
                cov_interval=tuple(float(end[c]) for end in intervals["cov"]),
                gap_interval=tuple(float(end[c]) for end in intervals["gap"]),
                alpha=float(alpha[c]),
                applicable_failed=float(exact["applicable_failed"][:, c].mean()),
                applicable_passed=float(exact["applicable_passed"][:, c].mean()),
                gap_share=float(gap_share[c]),
                n_runs_passed=passed_runs,
                n_runs_total=len(runs),
                passes_consistency=passed_runs >= min_runs,
                lacking=tuple(sorted(ids[n] for n in np.flatnonzero(lacking))),
            )
        )
    return sorted(figures, key=lambda f: (-f.mean_delta, f.capability))


def _rates(codes: np.ndarray, failed: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Rates [B, R, C] of codes [R, C, N] when trajectory n counts `weights[b, n]` times."""
    runs, capabilities, _ = codes.shape

    def count(mask: np.ndarray) -> np.ndarray:
        return (weights @ mask.reshape(-1, mask.shape[-1]).T.astype(np.float32)).reshape(len(weights), runs, -1)

    lf, pf = (count((codes == CODES[label]) & failed) for label in ("lacking", "present"))
    lp, pp = (count((codes == CODES[label]) & ~failed) for label in ("lacking", "present"))
    total = count((codes != ABSENT) & failed)
    # counts are whole numbers, exact in float32; the ratios are taken in float64 so that 1/10 reaches a threshold of 0.10
    lf, pf, lp, pp, total = (x.astype(np.float64) for x in (lf, pf, lp, pp, total))
    er_minus, er_plus = _ratio(lf, lf + pf), _ratio(lp, lp + pp)
    return {
        "cov": _ratio(lf, total),
        "er_minus": er_minus,
        "er_plus": er_plus,
        "gap": er_minus - er_plus,
        "applicable_failed": lf + pf,
        "applicable_passed": lp + pp,
    }


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(np.broadcast_shapes(part.shape, whole.shape)), where=whole > 0)
