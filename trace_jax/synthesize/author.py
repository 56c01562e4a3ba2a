"""The LLM that writes environments, and what it is told: a brief, and once something was refused its last hand-in with all reasons."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.agents.protocol import Message, Reply, Unavailable
from trace_jax.agents.templates import Templates, domain_of
from trace_jax.errors import Unfinished
from trace_jax.runtime import Runtime
from trace_jax.synthesize.brief import PROMPT, write_briefs
from trace_jax.synthesize.generation import GENERATION, MUTATION, REPAIR, Generation

_PROMPTS = {GENERATION: PROMPT, REPAIR: "environment_repair", MUTATION: "environment_mutation"}
_REASON = 300  # characters of an earlier round's reasons, of which one line is shown
_STAGE = "synthesize"


class Author:
    """The agent with what it is told: only process 0 has one, and asks for all.

    Attributes:
      capabilities: that it can be asked about.
      prompts: sha256 by name.
    """

    def __init__(self, runtime: Runtime, capabilities: Sequence[str]):
        self._runtime, self.capabilities = runtime, capabilities
        self._agent: Any = None
        if capabilities:
            self._templates = Templates(runtime.config.agents.prompts or domain_of([target.name for target in runtime.targets]))
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
        question = {"role": "user", "content": self._briefs[generation.capability]}
        if not generation.rounds:
            return [question]
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
        return [question, {"role": "assistant", "content": handed_in.strip() or "(no answer)"}, {"role": "user", "content": refusal}]


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
        "knobs": json.dumps(calibration["knobs"]),
        "tried": [{"knobs": json.dumps(one["knobs"]), "success": f"{one['success_rate']:.3f}"} for one in calibration["search"]],
        "found": {
            "rollouts": str(calibration["n_rollouts"]),
            **{key: f"{calibration[key]:.3f}" for key in ("mean_reward", "std_reward", "success_rate")},
            "interval": f"{low:.3f} to {high:.3f}",
            **{key: f"{100 * calibration[of]:.0f}" for key, of in (percent | {"constant": "constant_share"}).items()},
        },
        "seeds": [{"share": share, "count": count} for share, count in sorted(shares.items())],
        "stops": [{"reason": reason, "count": count} for reason, count in calibration["stop_reasons"].items()],
    }
