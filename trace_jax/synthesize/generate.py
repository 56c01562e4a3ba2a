"""Environments that an LLM writes, for all capabilities at once, in rounds:

    brief -> answer -> package -> certificate -> calibration -> usable
      ^                   |            |              |
      +---- repair -------+------------+--- mutation -+

What was refused goes back to its author with every reason, up to `synthesis.rounds` times; then the capability needs a person's attention.
`environments/<capability>/generation.json` has what happened, `rounds/<n>/` every hand-in as far as it came.

A round that is finished stands in generation.json and is read from there. One that was interrupted is asked again, which the agent's record
answers for nothing, and comes out the same, since everything in it follows from the answer.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from envs import EnvironmentFault, Package, write_package
from envs.certify import brief
from envs.probes import Action, play, recite
from trace_jax.agents.protocol import Message, Reply, Unavailable
from trace_jax.agents.templates import GENERAL, Templates
from trace_jax.config import data_folder
from trace_jax.errors import Unfinished
from trace_jax.runtime import CALIBRATION, Runtime
from trace_jax.synthesize.admission import calibrated, certified
from trace_jax.synthesize.brief import PROMPT, write_briefs
from trace_jax.synthesize.handin import HandIn, read_hand_in, tool_faults

OPEN, USABLE, NEEDS_ATTENTION = "open", "usable", "needs_attention"
GENERATION, REPAIR, MUTATION = "generation", "repair", "mutation"
_PROMPTS = {GENERATION: PROMPT, REPAIR: "environment_repair", MUTATION: "environment_mutation"}
_CARELESS_SEEDS = 3
_REASON = 300  # characters of an earlier round's reason, of which one line is shown
_STAGE = "synthesize"


@dataclasses.dataclass
class Generation:
    """What has happened to one capability; the content of its generation.json.

    Attributes:
      rounds: the finished ones, in order: `round`, `kind`, `model`, `exchange` (its digest in the agent's record), `package` (its digest,
        or None), `reasons` (empty for the one that was accepted), `certificate`, `calibration` (summaries, or None) and `usage`.
      prompts: sha256 of each prompt's text.
    """

    capability: str
    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, runtime: Runtime, capability: str) -> Generation:
        name = f"environments/{capability}/generation.json"
        stored = runtime.workdir.read_json(name) if runtime.workdir.exists(name) else {}
        return cls(capability, stored.get("rounds", []), stored.get("prompts", {}))

    def write(self, runtime: Runtime) -> None:
        usages = [one["usage"] for one in self.rounds]
        costs = [usage["cost"] for usage in usages if usage["cost"] is not None]
        usage = {key: sum(usage[key] for usage in usages) for key in ("requests", "input_tokens", "output_tokens")}
        content = {
            "status": self.status(runtime.config.synthesis.rounds),
            "model": self.rounds[-1]["model"],
            "prompts": self.prompts,
            "rounds": self.rounds,
            "usage": usage | {"cost": sum(costs) if costs else None},
        }
        runtime.workdir.write_json(f"{self.folder}/generation.json", content)

    @property
    def folder(self) -> str:
        return f"environments/{self.capability}"

    @property
    def reasons(self) -> list[str]:
        """Why the last hand-in was refused."""
        return self.rounds[-1]["reasons"] if self.rounds else []

    @property
    def kind(self) -> str:
        """Of the next round."""
        if not self.rounds:
            return GENERATION
        return MUTATION if self.rounds[-1]["calibration"] else REPAIR

    def status(self, rounds: int) -> str:
        if self.rounds and not self.reasons:
            return USABLE
        return NEEDS_ATTENTION if len(self.rounds) >= rounds else OPEN


def generate(runtime: Runtime, capabilities: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An environment for each capability, or the reasons why there is none.

    Returns:
      By capability `status`, `usable` and `reasons`, with the calibration of a usable one. Status `open`: the agent could not be asked.

    Raises:
      InputError: the agent, a prompt or the selection cannot be used.
    """
    config = runtime.config.synthesis
    generations = {capability: Generation.read(runtime, capability) for capability in capabilities}
    author = _Author(runtime, [c for c in capabilities if generations[c].status(config.rounds) == OPEN])
    rollouts = config.calibration_seeds * config.calibration_rollouts
    runtime.progress.advance(rollouts * (len(capabilities) - len(author.capabilities)), earlier=True)
    unanswered: dict[str, str] = {}
    while asked := [c for c in author.capabilities if c not in unanswered and generations[c].status(config.rounds) == OPEN]:
        for capability, answer in author.ask([generations[c] for c in asked]).items():
            if "unavailable" in answer:
                unanswered[capability] = answer["unavailable"]
            else:
                _play_round(runtime, generations[capability], answer, author.prompts)
    return {c: _result(runtime, generations[c], unanswered.get(c)) for c in capabilities}


def _result(runtime: Runtime, generation: Generation, unanswered: str | None) -> dict[str, Any]:
    status = generation.status(runtime.config.synthesis.rounds)
    if status == USABLE:
        return {"status": status} | runtime.calibration(generation.capability)
    return {"status": status, "usable": False, "reasons": [unanswered] if unanswered else generation.reasons}


class _Author:
    """The agent with what it is told: only process 0 has one, and asks for all.

    Attributes:
      capabilities: that it can be asked about.
      prompts: sha256 by name.
    """

    def __init__(self, runtime: Runtime, capabilities: Sequence[str]):
        self._runtime, self.capabilities = runtime, capabilities
        self._agent: Any = None
        if capabilities:
            self._templates = domain_templates(runtime)
            self.prompts = {name: self._templates.digest(name) for name in _PROMPTS.values()}
            self._briefs: Mapping[str, str] = runtime.processes.agree(lambda: write_briefs(runtime, self._templates, capabilities))

    def ask(self, generations: Sequence[Generation]) -> dict[str, dict[str, Any]]:
        """One question about each, at the same time.

        Returns:
          By capability the answer as JSON, or `unavailable`: why there is none.
        """
        names = [generation.capability for generation in generations]
        number = max(len(generation.rounds) for generation in generations) + 1
        what = f"round {number}, asked: {', '.join(f'{one.capability} ({one.kind})' for one in generations)}"
        questions = [self._messages(generation) for generation in generations]
        try:
            return dict(zip(names, self._runtime.processes.agree(lambda: self._exchange(questions, what)), strict=True))
        except Unfinished as error:  # no budget is left; what was answered is in the record
            return {name: {"unavailable": str(error)} for name in names}

    def _exchange(self, questions: Sequence[Sequence[Message]], what: str) -> list[dict[str, Any]]:
        from trace_jax.agents import ask_all, make_agent  # not for the library, which needs no client

        runtime = self._runtime
        self._agent = self._agent or make_agent(runtime.config, runtime.workdir, _STAGE, self._templates)
        asked = [functools.partial(self._agent.complete, messages) for messages in questions]
        runtime.progress.advance(0, what)
        replies = ask_all(self._agent, asked, lambda done: runtime.progress.advance(0, f"{what}; {done} of {len(asked)} answered"))
        return [_answer(reply, self._agent.backend.model) for reply in replies]

    def _messages(self, generation: Generation) -> list[Message]:
        """The brief and, once something was refused, the last hand-in with all reasons."""
        brief = {"role": "user", "content": self._briefs[generation.capability]}
        if not generation.rounds:
            return [brief]
        *before, last = generation.rounds
        folder = f"{generation.folder}/rounds/{last['round']}"
        handed_in = self._runtime.workdir.read_bytes(f"{folder}/answer.md").decode()
        told: dict[str, Any] = {
            "round": last["round"],
            "rounds": self._runtime.config.synthesis.rounds,
            "reasons": last["reasons"],
            "earlier": [{"round": one["round"], "reason": _one_line(one["reasons"])} for one in before],
        }
        if generation.kind == MUTATION:
            told |= _distribution(self._runtime.workdir.read_json(f"{folder}/calibration.json"))
        refusal = self._templates.render(_PROMPTS[generation.kind], **told)
        return [brief, {"role": "assistant", "content": handed_in.strip() or "(no answer)"}, {"role": "user", "content": refusal}]


def domain_templates(runtime: Runtime) -> Templates:
    """The prompts of the config, or those of the target's domain: `tau2` for `tau2` and `tau2_airline`."""
    own = runtime.target.name.partition("_")[0]
    return Templates(runtime.config.agents.prompts or (own if (data_folder("prompts") / own).is_dir() else GENERAL))


def _answer(reply: Reply | Unavailable, model: str) -> dict[str, Any]:
    if isinstance(reply, Unavailable):
        return {"unavailable": str(reply)}
    usage = dataclasses.asdict(reply.usage)
    del usage["earlier"]  # tells of interruptions only
    return {"text": reply.text, "model": model, "faults": list(reply.faults), "exchange": reply.digest, "usage": usage}


def _one_line(reasons: Sequence[str]) -> str:
    return " ".join("; ".join(reasons).split())[:_REASON]


def _distribution(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """What the prompt of a mutation shows of a calibration."""
    shares = collections.Counter(f"{share:.2f}" for share in calibration["per_seed"].values())
    low, high = calibration["success_interval"]
    percent = {"none": "zero_rate", "part": "partial_rate", "perfect": "groups_all_perfect", "zero": "groups_all_zero"}
    return {
        "verdict": calibration["verdict"],
        "found": {
            "rollouts": str(calibration["n_rollouts"]),
            **{key: f"{calibration[key]:.3f}" for key in ("mean_reward", "std_reward", "success_rate")},
            "interval": f"{low:.3f} to {high:.3f}",
            **{key: f"{100 * calibration[of]:.0f}" for key, of in (percent | {"constant": "constant_share"}).items()},
        },
        "seeds": [{"share": share, "count": count} for share, count in sorted(shares.items())],
        "stops": [{"reason": reason, "count": count} for reason, count in calibration["stop_reasons"].items()],
    }


def _play_round(runtime: Runtime, generation: Generation, answer: Mapping[str, Any], prompts: Mapping[str, str]) -> None:
    """Judges one answer, and keeps it with what was found; the accepted one goes where training looks for it."""
    number, workdir = len(generation.rounds) + 1, runtime.workdir
    folder = f"{generation.folder}/rounds/{number}"
    handed_in = read_hand_in(answer["text"], generation.capability, runtime.target.name)
    for name, text in {"answer.md": answer["text"], **handed_in.texts}.items():
        workdir.write_bytes(f"{folder}/{name}", text.encode())
    reasons, certificate, calibration = _judge(runtime, generation, handed_in, answer["faults"])
    for name, found in (("certificate.json", certificate), ("calibration.json", calibration)):
        if found:
            workdir.write_json(f"{folder}/{name}", found)
    if not reasons:
        package = handed_in.package
        workdir.produce(generation.folder, lambda path: write_package(path, package.meta, package.source))
        workdir.write_json(f"{generation.folder}/certificate.json", certificate)
        workdir.write_json(f"{generation.folder}/calibration.json", calibration)
    generation.rounds.append(
        {
            "round": number,
            "kind": generation.kind,
            "model": answer["model"],
            "exchange": answer["exchange"],
            "package": handed_in.package.digest if handed_in.package else None,
            "reasons": reasons,
            "certificate": certificate and {"passed": certificate["passed"], "rewards": certificate["rewards"]},
            "calibration": calibration and {key: calibration[key] for key in _CALIBRATION},
            "usage": answer["usage"],
        }
    )
    generation.prompts |= prompts
    generation.write(runtime)


_CALIBRATION = ("verdict", "usable", "hint_ratio", "n_rollouts", "mean_reward", "std_reward", "success_rate", "success_interval")
Judgement = tuple[list[str], dict[str, Any] | None, dict[str, Any] | None]


def _judge(runtime: Runtime, generation: Generation, handed_in: HandIn, faults: Sequence[str]) -> Judgement:
    """Why the hand-in is refused, if it is; with its certificate and its calibration, as far as it came."""
    package, number = handed_in.package, len(generation.rounds) + 1
    if package is None:
        return [*faults, *handed_in.faults], None, None
    for one in generation.rounds:
        if one["package"] == package.digest:
            return [f"this is hand-in {one['round']} again, unchanged, which was refused", *one["reasons"]], None, None
    which = f"round {number}: {generation.capability}"
    runtime.progress.advance(0, f"{which} in the sandbox")
    if found := runtime.processes.agree(lambda: _sandbox_faults(runtime, package)):
        return found, None, None
    certificate = certified(runtime, package)
    if not certificate["passed"]:
        return certificate["reasons"], certificate, None
    runtime.progress.advance(0, f"{which} against the base")
    calibration = calibrated(runtime, package, f"calibration-{generation.capability}-r{number}-{package.digest[:8]}")
    if calibration["faults"]:
        return [f"played by the agent it ends in a fault: {fault}" for fault in calibration["faults"]], certificate, None
    return [] if calibration["usable"] else calibration["reasons"], certificate, calibration


def _sandbox_faults(runtime: Runtime, package: Package) -> list[str]:
    """What must hold before a certificate: the tools, on which its players rely, are the target's, and bad calls do no harm."""
    try:
        tools = runtime.pool.function(package, "tools")
    except EnvironmentFault as fault:
        return [f"environment.py does not run: {brief(fault)}"]
    if faults := tool_faults(tools, runtime.tools(runtime.target)):
        return faults
    careless: list[Action] = [{"name": "no_such_tool", "arguments": {}}]
    for tool in tools:
        function = tool["function"]
        required = function["parameters"].get("required", [])
        careless += [{"name": function["name"], "arguments": arguments} for arguments in (
            {}, {"no_such_argument": 1}, dict.fromkeys(required), {key: [{"a": 1}] for key in required})]  # fmt: skip
    faults = []
    for action in [*careless, {"text": ""}]:
        seeds = range(CALIBRATION, CALIBRATION + _CARELESS_SEEDS)
        found = [one.fault for one in play(runtime.pool, package, seeds, recite(dict.fromkeys(seeds, [action]))) if one.fault]
        if found:
            faults.append(f"{json.dumps(action)} ends in a fault: {brief(found[0])}")
    return faults
