"""Who resolved what: reports and log trees of the SWE-bench harness, and how a run finds its own.

An agent's files never say whether an instance was resolved. The harness does, in one report for a run, `<model>.<run id>.json`, and in a
`report.json` for every instance of its log tree, `logs/run_evaluation/<run id>/<model>/<instance>/`, which also names the tests. A run is
joined with them by instance id.

Outcomes are the harness's. What it could not grade (`error`: a patch that does not apply, tests out of time) counts as a failure, as in its
own score; what it calls a failure of the infrastructure has no reward. An empty patch is a failure.

Reports, log trees and predictions can be read alone: their trajectories have no messages, but outcomes, tests and patches.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl.trajectory import StopReason, Trajectory
from trace_jax.errors import InputError

ENVIRONMENT = "swebench"
HOW = (
    "grade its predictions with `swebench eval DATASET -p preds.json --run-id NAME` and put the report, <model>.NAME.json, into the folder "
    "of the run or beside it"
)
_HEAD = 1 << 16  # bytes in which the first keys of a report or of predictions stand
_PREDICTIONS = ("preds.json", "all_preds.jsonl", "all_preds.json")
_IDS = {"resolved_ids": "resolved", "unresolved_ids": "unresolved", "empty_patch_ids": "empty_patch", "error_ids": "error"}
_AGENTS_FAULTS = (">>>>> Patch Apply Failed", "Test timed out", "Timeout error:")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the harness found of one instance.

    Attributes:
      outcome: resolved, unresolved, empty_patch, error, or infra_failure.
      tests: `{"FAIL_TO_PASS" | "PASS_TO_PASS": {"success": [names], "failure": [names]}}`, empty where it says none.
      reason: of an error or a failure of the infrastructure.
    """

    outcome: str
    tests: Mapping[str, Mapping[str, list[str]]] = dataclasses.field(default_factory=dict)
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The verdicts of a run.

    Attributes:
      dataset: instances of the data set that was graded, None where a log tree alone is known.
      submitted: instances that the run has predictions for.
    """

    source: pathlib.Path
    submitted: int
    dataset: int | None
    verdicts: Mapping[str, Verdict]

    def rates(self) -> str:
        """The resolve rate over each of its denominators, which differ where a run covers a part of a data set."""
        resolved = sum(v.outcome == "resolved" for v in self.verdicts.values())
        rate = f"{resolved} of {self.submitted} submitted ({resolved / max(self.submitted, 1):.1%})"
        return rate if self.dataset is None else f"{rate}, of {self.dataset} in the data set ({resolved / max(self.dataset, 1):.1%})"


# --- the contract of result readers ----------------------------------------


def recognises(path: pathlib.Path) -> bool:
    """A report, a log tree or a part of one, predictions, or a folder of predictions."""
    if path.is_dir():
        return predictions_of(path) is not None or next(path.rglob("report.json"), None) is not None
    return path.is_file() and path.suffix in (".json", ".jsonl") and bool(_kind(path))


def read(path: pathlib.Path, report: pathlib.Path | None = None) -> Iterator[Trajectory]:
    """One trajectory an instance, without messages.

    Args:
      report: a report or log tree for predictions, where it is not to be looked for beside them.

    Raises:
      InputError: a damaged file, predictions without a report, or two sources that contradict each other.
    """
    kind = _kind(path) if path.is_file() else "predictions" if predictions_of(path) else "tree"
    if kind == "predictions":
        file = path if path.is_file() else predictions_of(path)
        found = find_report(file.parent if file.name in _PREDICTIONS else file.with_suffix(""), report)
        for name, prediction in read_predictions(file).items():
            yield joined(name, prediction["model_patch"], found, file, str(prediction.get("model_name_or_path") or ""))
        return
    found = load_tree(path) if kind == "tree" else _with_tests(load_report(path), path)
    for name, verdict in found.verdicts.items():
        yield judged(name, verdict, found, patch=None)


# --- reading files ----------------------------------------


def load_report(path: pathlib.Path) -> Report:
    """A report of a run, of any schema up to swebench 5."""
    data = load_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("resolved_ids"), list) or not isinstance(data.get("submitted_ids"), list):
        raise InputError(f"{path}: field 'resolved_ids' or 'submitted_ids' is not a list; give the report that the harness wrote")
    reasons = data.get("failure_reasons") if isinstance(data.get("failure_reasons"), dict) else {}
    verdicts = {}
    for key, outcome in _IDS.items():
        for name in data.get(key) or []:
            if name in verdicts:
                raise InputError(f"{path}: {name} is both {verdicts[name].outcome} and {outcome}; the report is damaged, make it again")
            verdicts[name] = Verdict(outcome, reason=str(reasons.get(name) or ""))
    for name in data.get("infra_failure_ids") or []:
        verdicts[name] = Verdict("infra_failure", reason=str(reasons.get(name) or ""))
    missing = [name for name in data["submitted_ids"] if name not in verdicts]
    if missing:
        raise InputError(f"{path}: {missing[0]} was submitted but has no outcome; the evaluation was not finished, run it again")
    total = data.get("total_instances")
    return Report(path, len(data["submitted_ids"]), int(total) if isinstance(total, int) else None, dict(sorted(verdicts.items())))


def load_tree(path: pathlib.Path) -> Report:
    """The verdicts of the log tree of one run, of any folder in it, or of one `report.json`."""
    files = [path] if path.is_file() else sorted(path.rglob("report.json"))
    verdicts: dict[str, Verdict] = {}
    for file in files:
        for name, verdict in _verdicts_of(file).items():
            if name in verdicts:
                raise InputError(f"{path}: {name} is graded twice in it; give the folder of one run, logs/run_evaluation/<run id>/<model>")
            verdicts[name] = verdict
    if path.is_dir():
        graded = {file.parent for file in files}
        for log in sorted(path.rglob("run_instance.log")):
            if log.parent not in graded:
                verdicts.setdefault(log.parent.name, _ungraded(log))
    if not verdicts:
        raise InputError(f"{path}: no report.json in it; give the folder logs/run_evaluation/<run id> that the harness wrote")
    return Report(path, len(verdicts), None, verdicts)


def _verdicts_of(file: pathlib.Path) -> dict[str, Verdict]:
    data = load_json(file)
    if not isinstance(data, dict) or not all(isinstance(v, dict) and isinstance(v.get("resolved"), bool) for v in data.values()):
        raise InputError(f"{file}: not {{instance: {{resolved, tests_status, ...}}}}; give the report.json that the harness wrote")
    return {name: verdict_of(graded) for name, graded in data.items()}


def verdict_of(graded: Mapping[str, Any]) -> Verdict:
    """The verdict of what swebench says of one instance (`get_eval_report`)."""
    tests = {kind: graded.get("tests_status", {}).get(kind) or {} for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    reason = str(graded.get("infra_failure_reason") or "")
    if graded["resolved"]:
        return Verdict("resolved", tests)
    if graded.get("infra_failure"):
        return Verdict("infra_failure", tests, reason)
    if graded.get("patch_is_None") or not graded.get("patch_exists", True):
        return Verdict("empty_patch", tests)
    if not graded.get("patch_successfully_applied", True):
        return Verdict("error", tests, reason or "the patch or the tests did not run")
    return Verdict("unresolved", tests)


def _ungraded(log: pathlib.Path) -> Verdict:
    """An instance that the harness gave up: the patch's fault if its log says so."""
    text = log.read_text(errors="replace")
    found = next((fault for fault in _AGENTS_FAULTS if fault in text), None)
    return Verdict("error", reason=found.strip("> :")) if found else Verdict("infra_failure", reason="the harness ended without a verdict")


def predictions_of(folder: pathlib.Path) -> pathlib.Path | None:
    """The file of predictions of a run's folder."""
    return next((folder / name for name in _PREDICTIONS if (folder / name).is_file()), None)


def read_predictions(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Predictions by instance id, from a list, a dictionary, or lines of JSON."""
    if path.suffix == ".jsonl":
        rows = list(json_lines(path))
    else:
        data = load_json(path)
        rows = list(data.values()) if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise InputError(f"{path}: neither a list nor a dictionary of predictions")
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("instance_id"), str) or "model_patch" not in row:
            raise InputError(f"{path}: prediction {i} lacks 'instance_id' or 'model_patch'")
    found = {row["instance_id"]: row for row in rows}
    if len(found) < len(rows):
        raise InputError(f"{path}: an instance has two predictions; give the file of one run")
    return found


def load_json(path: pathlib.Path) -> Any:
    """The JSON of a file; a damaged one is named with the place of the damage."""
    try:
        return json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}; the file is cut short or damaged, copy it again"
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not JSON text ({type(error).__name__}); copy it again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def json_lines(path: pathlib.Path) -> Iterator[Any]:
    """The values of lines of JSON, blank lines left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError):
                    raise InputError(f"{path}, line {number}: not valid JSON; the file is cut short or damaged, copy it again") from None


def _kind(path: pathlib.Path) -> str:
    """What the first keys of a JSON file make it: report, tree (a report of one instance), predictions, or nothing of these."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if b'"resolved_instances"' in head or b'"resolved_ids"' in head:
        return "report"
    if b'"patch_successfully_applied"' in head:
        return "tree"
    return "predictions" if b'"model_name_or_path"' in head and b'"instance_id"' in head else ""


# --- joining ----------------------------------------


def find_report(run: pathlib.Path, given: pathlib.Path | None = None) -> Report | None:
    """The report of a run's folder, with the tests of its log tree where there is one.

    Looked for are reports in the folder, or beside it (also in `reports/`) with the folder's name as their run id; and log trees
    `logs/run_evaluation/<folder's name>` likewise.

    Raises:
      InputError: there are several, or report and tree contradict each other.
    """
    if given is not None:
        return load_tree(given) if given.is_dir() or _kind(given) == "tree" else _with_tests(load_report(given), given)
    inside = _reports_in([run, run / "reports"])
    own = [p for p in inside if p.stem.endswith(f".{run.name}")]
    found = own or inside or [p for p in _reports_in([run.parent, run.parent / "reports"]) if p.stem.endswith(f".{run.name}")]
    if len(found) > 1:
        raise InputError(f"{run}: {found[0].name} and {found[1].name} are both reports; leave the one of this run there")
    if found:
        return _with_tests(load_report(found[0]), found[0], run)
    tree = next((t for t in (run / "logs", _tree(run.parent, run.name)) if t.is_dir() and next(t.rglob("report.json"), None)), None)
    return load_tree(tree) if tree else None


def _tree(folder: pathlib.Path, run_id: str) -> pathlib.Path:
    return folder / "logs" / "run_evaluation" / run_id


def _reports_in(folders: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    files = (p for folder in folders if folder.is_dir() for p in sorted(folder.glob("*.json")) if not p.name.endswith(".traj.json"))
    return [p for p in files if _kind(p) == "report"]


def _with_tests(report: Report, path: pathlib.Path, run: pathlib.Path | None = None) -> Report:
    """The report with what its log tree, if found, says of the tests."""
    places = [*([run, run.parent] if run else []), path.parent, path.parent.parent]
    runs = (
        tree for place in places if (place / "logs" / "run_evaluation").is_dir() for tree in (place / "logs" / "run_evaluation").iterdir()
    )
    tree = next((t for t in runs if t.is_dir() and path.stem.endswith(f".{t.name}")), None)
    if tree is None:
        return report
    verdicts = dict(report.verdicts)
    for name, seen in load_tree(tree).verdicts.items():
        if name in verdicts and (seen.outcome == "resolved") != (verdicts[name].outcome == "resolved"):
            raise InputError(f"{path}: {name} is {verdicts[name].outcome}, but {seen.outcome} in {tree}; they are of different runs")
        if name in verdicts:
            verdicts[name] = dataclasses.replace(verdicts[name], tests=seen.tests, reason=seen.reason or verdicts[name].reason)
    return dataclasses.replace(report, verdicts=verdicts)


def joined(name: str, patch: str | None, report: Report | None, source: pathlib.Path, model: str = "", **fields: Any) -> Trajectory:
    """The trajectory of an instance with its patch, judged by the report; an empty patch needs none.

    Raises:
      InputError: no report, or one that does not know the instance: the outcome is unknown.
    """
    if not (patch or "").strip():
        verdict = Verdict("empty_patch")
    elif report is None:
        raise InputError(f"{source}: whether {name} was resolved is unknown, for there is no report of the harness; {HOW}")
    elif name not in report.verdicts:
        raise InputError(f"{source}: {report.source} says nothing of {name}; they are of different runs. If not, {HOW}")
    else:
        verdict = report.verdicts[name]
    return judged(name, verdict, report, patch=patch, model=model, **fields)


def judged(
    name: str, verdict: Verdict, report: Report | None, *, patch: str | None, model: str = "", trial: int = 0, **fields: Any
) -> Trajectory:
    """A trajectory with a verdict; `fields` are those of `Trajectory` that only the agent's file knows."""
    fields = {"stop_reason": StopReason.DONE} | fields
    metrics = fields.pop("metrics", {})
    if report is not None:
        metrics |= {"submitted_instances": float(report.submitted)}
        metrics |= {} if report.dataset is None else {"dataset_instances": float(report.dataset)}
    if verdict.outcome == "infra_failure":
        fields["stop_reason"] = StopReason.ENVIRONMENT_ERROR
        fields["error"] = {"kind": "infra_failure", "message": verdict.reason or "the harness could not run the tests"}
    return Trajectory(
        id=f"{name}#{trial}",
        environment=ENVIRONMENT,
        task_id=name,
        group=name,
        trial=trial,
        policy={"name": model, "version": 0},
        reward=None if "error" in fields else float(verdict.outcome == "resolved"),
        success=verdict.outcome == "resolved" and "error" not in fields,
        checks=checks_of(verdict, patch, fields.get("messages", ())),
        metrics=metrics | fractions(verdict),
        **fields,
    )


def checks_of(verdict: Verdict, patch: str | None, messages: Sequence[Mapping[str, Any]] = ()) -> dict[str, dict[str, Any]]:
    """`patch` (was there one that applies; `actual` is its text) and `test:<name>` for every test that had to pass or to keep passing.

    The message of the patch is the agent's last; a test has none.
    """
    checks = {}
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if patch is not None or verdict.outcome in ("empty_patch", "error"):
        applied = bool((patch or "").strip()) and verdict.outcome != "error"
        checks["patch"] = {"passed": applied, "expected": "a patch that applies", "actual": patch or "", "message_index": last}
    for kind, found in verdict.tests.items():
        for outcome, passed in (("success", True), ("failure", False)):
            for test in found.get(outcome) or []:
                checks[f"test:{test}"] = {"passed": passed, "expected": kind, "actual": outcome, "message_index": None}
    return checks


def fractions(verdict: Verdict) -> dict[str, float]:
    """`fail_to_pass` and `pass_to_pass`: the share of the tests that pass, of each kind that has any."""
    out = {}
    for kind, found in verdict.tests.items():
        passed, failed = len(found.get("success") or []), len(found.get("failure") or [])
        out |= {kind.lower(): passed / (passed + failed)} if passed + failed else {}
    return out
