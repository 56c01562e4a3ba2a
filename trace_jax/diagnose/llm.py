"""The LLM analyst: proposes capabilities from batches of conversations, and labels conversations with evidence, each run anew.

A question about a conversation asks for the labels of all capabilities at once, with the number of the run as its sample, so that runs are
independent. The questions of one conversation follow each other: they have the same prompt, which providers then read once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl.trajectory import Trajectory
from trace_jax.agents import ask_all
from trace_jax.agents.budget import estimate_tokens
from trace_jax.agents.protocol import Message, Reply, Unavailable
from trace_jax.agents.templates import Templates
from trace_jax.diagnose.compaction import compact
from trace_jax.diagnose.diagnosis import MAX_CANDIDATES
from trace_jax.diagnose.discovery import (
    MERGING_SCHEMA,
    PROPOSAL_SCHEMA,
    Proposal,
    draw_batches,
    fit_batch,
    join_alike,
    read_merging,
    read_proposals,
)
from trace_jax.diagnose.evidence import Candidate, Label
from trace_jax.diagnose.labelling import Reading, answer_of, clipped, label_schema
from trace_jax.errors import Unfinished

if TYPE_CHECKING:
    from trace_jax.agents.client import Client
    from trace_jax.config import AgentsSection, DiagnosisSection

DISCOVERY, MERGING, LABELLING = PROMPTS = ("capability_discovery", "capability_merging", "capability_labelling")
_FRAME = "\n===== "  # what begins with such a line is written by others; what stands before is our own
_LISTED = 5  # missing pairs that the message lists
_LONGEST = 1500  # most characters of a definition in a prompt


class LLMAnalyst:
    """An `Analyst`.

    Args:
      agent: who is asked.
      templates: the prompts, those of the trajectories' domain.
      agents: `prompt_tokens` bounds every prompt.
      diagnosis: `batch` and `batches` of discovery; `blind` leaves the outcome out of what is labelled. Discovery contrasts outcomes, and
        sees them always.
      known: candidates that are there already; they keep their names, and proposals that mean the same are merged into them.
      write: receives `diagnosis/discovery.json`, what was proposed, merged and dropped, and `diagnosis/missing.json`, pairs that have no
        answer.
      progress: told what is being asked, how many questions are done, and of how many.
    """

    name = "llm"
    deterministic = False

    def __init__(
        self,
        agent: Client,
        templates: Templates,
        agents: AgentsSection,
        diagnosis: DiagnosisSection,
        *,
        seed: int = 0,
        known: Sequence[Candidate] = (),
        write: Callable[[str, bytes], None] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ):
        self._agent, self._templates, self._seed = agent, templates, seed
        self._tokens, self._batch, self._batches, self._blind = agents.prompt_tokens, diagnosis.batch, diagnosis.batches, diagnosis.blind
        # whom the rules can never find LACKING, an LLM can
        self._known = [dataclasses.replace(c, outcome_bound=False) for c in known][:MAX_CANDIDATES]
        self._write, self._progress = write, progress
        self.record: dict[str, Any] = {
            "backend": agent.backend.name,
            "model": agent.backend.model,
            "prompts": {name: templates.digest(name) for name in PROMPTS},
            "blind": diagnosis.blind,
        }

    # --- discovery ----------------------------------------

    def discover(self, trajectories: Sequence[Trajectory]) -> list[Candidate]:
        """The known candidates, and what the LLM proposes beside them; `record["discovery"]` says how it came about.

        Raises:
          Unfinished: a question has no answer, or no proposal can be used.
          InputError: not one conversation fits into a prompt.
        """
        room = MAX_CANDIDATES - len(self._known)
        if not room:
            return self._known
        drawn = draw_batches(trajectories, self._batch, self._batches, self._seed)
        batches = [fit_batch(batch, self._room(DISCOVERY, batch)) for batch in drawn]
        read: list[tuple[list[Proposal], list[str]]] = [([], [])] * len(batches)

        async def ask(n: int) -> None:
            ids = {_line(t.id) for t, _ in batches[n]}
            conversations = [{"id": _line(t.id), "text": text} for t, text in batches[n]]
            messages = self._messages(DISCOVERY, most=MAX_CANDIDATES, conversations=conversations)
            reply = await self._agent.complete(
                messages, PROPOSAL_SCHEMA, check=lambda answer: read_proposals(answer, ids, MAX_CANDIDATES)[1]
            )
            proposals, faults = read_proposals(answer_of(reply), ids, MAX_CANDIDATES)
            read[n] = proposals, list(reply.faults if reply.parsed is None else faults)

        self._questions("discovery", [functools.partial(ask, n) for n in range(len(batches))])
        proposals = [p for batch, _ in read for p in batch]
        faults = [fault for _, batch in read for fault in batch]
        if not proposals and not self._known:
            raise Unfinished(
                f"discovery found no capability: no proposal of {len(batches)} batches can be used ({'; '.join(faults[:3])}); "
                "take another agents.model, or prompts of your own with agents.prompts"
            )
        merged, dropped, how = self._merge(proposals, room)
        self.record["discovery"] = {
            "trajectories": sum(map(len, batches)),
            "left_out": sum(map(len, drawn)) - sum(map(len, batches)),  # too long for a batch
            "batches": len(batches),
            "proposals": len(proposals),
            "merging": how,
        }
        self._save(
            "discovery",
            {
                **self.record["discovery"],
                "proposals": [dataclasses.asdict(p) for p in proposals],
                "capabilities": [dataclasses.asdict(p) for p in merged],
                "dropped": dropped,
                "faults": faults,
            },
        )
        return [*self._known, *(Candidate(p.name, p.description) for p in merged)]

    def _merge(self, proposals: Sequence[Proposal], room: int) -> tuple[list[Proposal], list[dict[str, str]], str]:
        """At most `room` capabilities, what was dropped and why, and how it was decided."""
        alike = join_alike(proposals, self._known)
        if len(alike) + len(self._known) < 2 or not alike:
            return alike, [], "not needed"
        fixed = [{"name": c.name, "description": _line(c.description)} for c in self._known]
        left_out = []

        def messages() -> list[Message]:
            return self._messages(
                MERGING, most=room, fixed=fixed, proposals=[{"name": p.name, "description": p.description} for p in alike]
            )

        while len(alike) > 1 and _tokens(messages()) > self._tokens:
            left_out.append({"name": alike.pop().name, "reason": "there was no room for it in the question (agents.prompt_tokens)"})

        async def ask() -> Reply:
            return await self._agent.complete(
                messages(), MERGING_SCHEMA, check=lambda answer: read_merging(answer, alike, self._known, room)[2]
            )

        (reply,) = self._questions("merging", [ask])
        merged, dropped, faults = read_merging(answer_of(reply), alike, self._known, room)
        faults = list(reply.faults) if reply.parsed is None else faults
        if not faults:
            return merged, dropped + left_out, "by the LLM"
        dropped = [{"name": p.name, "reason": f"beyond {MAX_CANDIDATES} capabilities, few batches proposed it"} for p in alike[room:]]
        return alike[:room], dropped + left_out, f"by names alone, since the answer could not be used: {faults[0]}"

    # --- labelling ----------------------------------------

    def label(self, draws: Mapping[int, Sequence[Trajectory]], candidates: Sequence[Candidate]) -> dict[int, list[Label]]:
        """A label for every pair of every run, a gap with its reason where the LLM gave none that holds.

        Raises:
          Unfinished: questions without an answer, or the budget is used up; says which pairs are missing.
          InputError: a conversation fits into no prompt.
        """
        if not candidates:
            return {run: [] for run in draws}
        asked: dict[str, tuple[Trajectory, list[int]]] = {}
        for run, drawn in draws.items():
            for t in drawn:
                asked.setdefault(t.id, (t, []))[1].append(run)
        schema, told = label_schema(candidates), "hidden" if self._blind else "shown"
        capabilities = [{"name": _line(c.name), "description": _line(c.description)} for c in candidates]
        fixed = _tokens(self._messages(LABELLING, capabilities=capabilities, outcome=told, conversation=""))
        room = self._tokens - fixed - estimate_tokens(json.dumps(schema))
        shorten = functools.partial(compact, tokens=room, outcome=not self._blind)
        for t, _ in asked.values():
            shorten(t)  # raises before anything is paid for
        found: dict[tuple[int, str], list[Label]] = {}

        @functools.lru_cache(maxsize=256)  # more than are under way at a time, so that the runs share them
        def prepared(trajectory_id: str) -> tuple[list[Message], Reading]:
            t = asked[trajectory_id][0]
            return self._messages(LABELLING, capabilities=capabilities, outcome=told, conversation=shorten(t)), Reading(t, candidates)

        async def ask(run: int, trajectory_id: str) -> None:
            messages, reading = prepared(trajectory_id)
            reply = await self._agent.complete(messages, schema, run, check=reading.faults)
            found[run, trajectory_id] = reading.labels(reply)

        pairs = [(run, t.id) for t, runs in asked.values() for run in runs]
        try:
            self._questions("labelling", [functools.partial(ask, *pair) for pair in pairs])
        except Unfinished as error:
            missing = sorted(pair for pair in pairs if pair not in found)
            self._save(
                "missing", {"missing": [{"run": r, "trajectory": t, "capabilities": [c.name for c in candidates]} for r, t in missing]}
            )
            listed = "; ".join(f"run {run}: {t} x {len(candidates)} capabilities" for run, t in missing[:_LISTED])
            more = f"; and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            where = "; all of them are in diagnosis/missing.json" if self._write else ""
            raise Unfinished(f"{error}; without an answer are {listed}{more}{where}") from error
        self._save("missing", {"missing": []})
        return {run: [label for t in drawn for label in found[run, t.id]] for run, drawn in draws.items()}

    # --- asking ----------------------------------------

    def _questions(self, what: str, questions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What comes of the questions.

        Raises:
          Unfinished: some have no answer; all were asked.
        """
        progress = None if self._progress is None else functools.partial(self._told, what, len(questions))
        results = ask_all(self._agent, questions, progress)
        failed = [result for result in results if isinstance(result, Unavailable)]
        if failed:
            raise Unfinished(
                f"{what} is not finished: {len(failed)} of {len(questions)} questions have no answer (the first: {failed[0]}); "
                "the same command asks only for these"
            )
        return results

    def _told(self, what: str, total: int, done: int) -> None:
        self._progress(what, done, total)

    def _messages(self, name: str, **variables: Any) -> list[Message]:
        """A prompt as messages: what is ours as the system's, what others wrote as the user's."""
        ours, frame, theirs = self._templates.render(name, **variables).partition(_FRAME)
        return (
            [{"role": "system", "content": ours}, {"role": "user", "content": frame.lstrip() + theirs}]
            if frame
            else [{"role": "user", "content": ours}]
        )

    def _room(self, name: str, batch: Sequence[Trajectory]) -> int:
        """The tokens that a discovery prompt leaves for its conversations."""
        frames = self._messages(name, most=MAX_CANDIDATES, conversations=[{"id": _line(t.id), "text": ""} for t in batch])
        return self._tokens - _tokens(frames) - estimate_tokens(json.dumps(PROPOSAL_SCHEMA))

    def _save(self, name: str, value: Any) -> None:
        if self._write:
            self._write(f"diagnosis/{name}.json", (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _tokens(messages: Sequence[Message]) -> int:
    return sum(estimate_tokens(m["content"]) for m in messages)


def _line(text: str) -> str:
    return clipped(text, _LONGEST)
