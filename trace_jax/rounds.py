"""`trace-jax run --rounds=N`: what the composed agent still lacks gets adapters too.

    round 1: the run, as it is without rounds -> composed
    round k: the composed agent of round k - 1 on the train tasks, other trials of them -> diagnose -> leave out what has an adapter
             -> synthesise, train (on the frozen base, as ever) -> the gate grows by the new slots -> composed, evaluated beside the others

Round k lives in `rounds/<k>/`, a workdir of its own which shares what earlier rounds made, so that every command takes it as `--workdir`.
In it `previous` is the agent of the round before. Its gate grows: at first the new slots are closed and every token goes where it went,
then they are fitted while the old ones stay as they are, then GRPO moves all. What old slots did on old environments is not rolled out
again, and where the new gate is no better the agent stays what it was (`trace_jax.compose.choose`).

A round that retains nothing new is the last. Nothing here keeps a record of how far it came: a run that goes on plays the rounds again, and
every step finds its files. `rounds.json` is for readers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.agreement import FILE as AGREEMENT
from trace_jax.compose import compose
from trace_jax.config import Config
from trace_jax.diagnose.command import diagnose_workdir
from trace_jax.diagnose.select import KNOWN
from trace_jax.evaluate.command import compare_evaluations, evaluate_all
from trace_jax.evaluate.outcomes import rate_line
from trace_jax.export import gate_of
from trace_jax.policies import find_policy, load_mixture
from trace_jax.report import write_report
from trace_jax.rollout import roll_out_train_split
from trace_jax.runtime import Runtime, plan
from trace_jax.spent import rollouts_of_steps
from trace_jax.synthesize import OPEN, require_finished, synthesize_all
from trace_jax.train import train_adapter
from trace_jax.workdir import Workdir, policy_name

FILE = "rounds.json"
_SELECTION = "diagnosis/selected_capabilities.json"
_ROUTING, _COMPOSED = "gate/routing.json", "evaluation/composed.json"
_GUESS = 2  # new capabilities of a round that is not diagnosed yet


@dataclasses.dataclass(frozen=True)
class Round:
    """A finished round.

    Attributes:
      runtime: over the round's workdir.
      slots: of its gate, the base first.
      shared: the names in that workdir that are an earlier round's, and where these are in the workdir of the run.
      refused: capabilities for which this round, or one before, had no usable environment.
    """

    number: int
    runtime: Runtime
    slots: tuple[str, ...]
    shared: Mapping[str, str]
    refused: tuple[str, ...]

    def place(self, name: str) -> str:
        """Where a file or folder of the round is in the workdir of the run."""
        return self.shared.get(name) or (name if self.number == 1 else f"rounds/{self.number}/{name}")


def improve(runtime: Runtime, rounds: int) -> list[tuple[Workdir, dict[str, dict[str, Any]]]]:
    """Rounds 2 to `rounds`, or until one retains nothing new; round 1 is done. Writes `rounds.json` and the report again after each.

    Returns:
      The workdir of each of these rounds, and what step 2 found in it, by capability.

    Raises:
      Unfinished: an LLM did not answer, which it may later.
    """
    environments: list[tuple[Workdir, dict[str, dict[str, Any]]]] = []
    if rounds == 1:
        return environments
    slots = tuple(runtime.workdir.read_json(_ROUTING)["slots"])
    last = Round(1, runtime, slots, {}, tuple(c for c in runtime.retained() if c not in slots))
    _note(runtime.workdir, {"round": 1, "new": slots[1:], "still_lacking": [], "unusable": list(last.refused)} | _agent(last))
    for number in range(2, rounds + 1):
        now, entry, *found = _play(runtime, last, number)
        environments.append(tuple(found))
        _note(runtime.workdir, entry)
        if now is None:
            runtime.plan({name: weight for name, weight in runtime.stages.items() if _number(name) <= number})
            break
        last = now
    runtime.workdir.processes.agree(lambda: write_report(runtime.workdir))
    return environments


def _play(runtime: Runtime, last: Round, number: int) -> tuple[Round | None, dict[str, Any], Workdir, dict[str, dict[str, Any]]]:
    """One round: itself, or None where it has nothing new; its entry of `rounds.json`; its workdir, and what step 2 found."""
    config, before, prefix = runtime.config, last.runtime.workdir, f"round {number} "
    known = [entry for entry in before.read_json(_SELECTION) if entry["skill"] in last.slots]
    shared = share(last)
    inner = runtime.workdir.within(f"rounds/{number}", shared)
    if not inner.exists(KNOWN):
        inner.write_json(KNOWN, known)
    with runtime.within(inner, prefix) as part:
        mixture = load_mixture(last.runtime, last.slots[1:])
        with part.stage("rollouts"):
            previous = dataclasses.replace(find_policy(last.runtime, "composed", mixture), name="previous")
            roll_out_train_split(part, previous, earlier=(number - 1) * config.diagnosis.trials)
        with part.stage("diagnose"):
            diagnose_workdir(part)
        lacking = [capability for capability in part.retained() if capability not in last.slots]
        # the library's environment of a capability is as usable as it was, since it is the base that it is calibrated on
        new = lacking if config.generator == "llm" else [c for c in lacking if c not in last.refused]
        entry = {"round": number, "new": [], "still_lacking": _still_lacking(inner, last.slots), "unusable": lacking}
        environments: dict[str, dict[str, Any]] = {}
        if new:
            _plan(runtime, part, number, len(last.slots) - 1, len(new))
            with part.stage("synthesize"):
                environments = synthesize_all(part, new)
            require_finished(inner, environments, OPEN)
        usable = [capability for capability in new if environments[capability]["usable"]]
        if not usable:
            return None, entry | _agent(last) | {"rollouts": rollouts_of_steps(inner), "paired": None}, inner, environments
        _plan(runtime, part, number, len(last.slots) - 1, len(usable))
        if before.exists(AGREEMENT) and not inner.exists(AGREEMENT):  # of the same engine and learner
            inner.write_json(AGREEMENT, before.read_json(AGREEMENT))
        with part.stage("train"):
            for capability in usable:
                train_adapter(part, capability)
        with part.stage("compose"):
            routing = compose(part, part.usable(), gate_of(last.runtime, mixture))
        with part.stage("evaluate"):
            _evaluate(part, last)
        inner.processes.agree(lambda: write_report(inner))
    refused = [capability for capability in lacking if capability not in usable]
    now = Round(number, part, tuple(routing["slots"]), shared, tuple(dict.fromkeys([*last.refused, *refused])))
    paired = compare_evaluations(before.read_json(_COMPOSED), inner.read_json(_COMPOSED)).to_json() if before.exists(_COMPOSED) else None
    entry |= {"new": usable, "unusable": refused}
    return now, entry | _agent(now) | {"paired": paired}, inner, environments


def share(last: Round) -> dict[str, str]:
    """What the next round has from the last one and those before: names in its workdir to names in that of the run.

    That is adapters and environments, and of the rollouts those of old slots on old environments, of the base on the held-out tasks, and of
    the old agent, `previous` from now on, on the unseen seeds of the environments.
    """
    workdir = last.runtime.workdir
    old, routing = last.slots[1:], workdir.read_json(_ROUTING)
    names = {"rollouts/base/heldout": "rollouts/base/heldout"}
    for capability in old:
        folders = ["base", *(policy_name(f"adapter:{c}") for c in old)]
        cells = [f"rollouts/{folder}/{kind}-{capability}" for folder in folders for kind in ("gate", "selection")]
        names |= {name: name for name in (f"adapters/{capability}", f"environments/{capability}", *cells)}
        names[f"rollouts/previous/selection-{capability}"] = f"rollouts/{policy_name(routing['composed'])}/selection-{capability}"
    return {name: last.place(source) for name, source in names.items() if workdir.exists(source)}


def _evaluate(part: Runtime, last: Round) -> None:
    """The composed agent on the held-out tasks, and what is known of the base already; `trace-jax evaluate` has the other policies."""
    before = last.runtime.workdir
    base = ["base"] if before.exists("evaluation/base.json") else []
    leaks = before.read_json(_COMPOSED).get("leak", []) if before.exists(_COMPOSED) else []
    earlier = [leak | {"where": leak["where"] if ":" in leak["where"] else f"round {last.number}: {leak['where']}"} for leak in leaks]
    evaluate_all(part, part.usable(), [*base, "composed"], earlier)


def _still_lacking(workdir: Workdir, slots: Sequence[str]) -> list[str]:
    """The retained capabilities that have an adapter already."""
    rows = workdir.read_json("diagnosis/figures.json")["capabilities"]
    return [row["capability"] for row in rows if row["passes_consistency"] and row["capability"] in slots]


def _agent(last: Round) -> dict[str, Any]:
    """Of `rounds.json` what tells of the composed agent of a round, and the rollouts that the round took."""
    workdir = last.runtime.workdir
    overall = workdir.read_json(_COMPOSED)["overall"] if workdir.exists(_COMPOSED) else {"rate": None, "interval": None, "n": 0}
    return {
        "workdir": "." if last.number == 1 else f"rounds/{last.number}",
        "capabilities": last.slots[1:],
        "composed": workdir.read_json(_ROUTING)["composed"],
        **{key: overall[key] for key in ("rate", "interval", "n")},
        "rollouts": rollouts_of_steps(workdir),
    }


def _note(workdir: Workdir, entry: Mapping[str, Any]) -> None:
    """Puts the entry of a round into `rounds.json`; rounds behind it that an earlier command played stay."""
    entries = {one["round"]: one for one in read_rounds(workdir)} | {entry["round"]: {"paired": None} | dict(entry)}
    workdir.write_json(FILE, {"rounds": [entries[number] for number in sorted(entries)]})


def read_rounds(workdir: Workdir) -> list[dict[str, Any]]:
    """The entries of `rounds.json`, none where there was one round only."""
    return workdir.read_json(FILE)["rounds"] if workdir.exists(FILE) else []


def tell_rounds(workdir: Workdir) -> list[str]:
    """A line or two for each round, for the end of the command."""
    lines = []
    for entry in read_rounds(workdir):
        name, again = f"round {entry['round']}", ", ".join(entry["still_lacking"])
        if not entry["new"]:
            lines.append(f"{name}: nothing new was retained that an environment could be made for; the agent is that of {entry['workdir']}")
        elif entry["rate"] is not None:
            lines.append(rate_line(f"{name}, {len(entry['capabilities'])} capabilities", entry))
        lines += [f"  {kind}: {', '.join(entry[key])}" for kind, key in _KINDS.items() if entry[key]]
        if again:
            lines.append(f"  still lacking, with an adapter of an earlier round: {again}")
    return lines


_KINDS = {"new": "new", "no usable environment": "unusable"}


# --- the plan


def plan_rounds(config: Config, rounds: int) -> dict[str, float]:
    """The stages of rounds 2 to `rounds`, with the rollouts of each, before anything is known."""
    found: dict[str, float] = {}
    for number in range(2, rounds + 1):
        found |= plan_round(config, number, 4 + _GUESS * (number - 2), _GUESS)
    return found


def plan_round(config: Config, number: int, old: int, new: int) -> dict[str, float]:
    """The stages of a round with `new` capabilities beside `old` ones."""
    whole, own = plan(config, old + new), plan(config, new)
    gate, seeds = config.gate, config.train.selection_seeds
    shared = old * (gate.successes + gate.table_seeds * old) + seeds * old * (old + 1)
    stages = {
        "rollouts": own["rollouts"],
        "diagnose": own["diagnose"],
        "synthesize": own["synthesize"],
        "train": own["train"],
        "compose": whole["compose"] - shared + seeds * new,
        "evaluate": config.evaluation.tasks * config.evaluation.trials,
    }
    return {f"round {number} {name}": weight for name, weight in stages.items()}


def _plan(runtime: Runtime, part: Runtime, number: int, old: int, new: int) -> None:
    for one in (runtime, part):
        one.plan(runtime.stages | plan_round(part.config, number, old, new))


def _number(stage: str) -> int:
    """The round of a stage."""
    return int(stage.split()[1]) if stage.startswith("round ") else 1
