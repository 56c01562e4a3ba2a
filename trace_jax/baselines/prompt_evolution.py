"""GEPA: instructions behind the system prompt evolve, the weights stay as they are (arXiv 2507.19457, package `gepa`).

The package decides what is tried; we roll out. A parent prompt is tried on a few train tasks, an LLM reads these conversations with what
the grader says of them and writes a child, the child is tried on the same tasks, and if it does better on all validation tasks. Feedback
and validation tasks are two parts of the target's train split. The prompt of the best validation score is evaluated on held-out tasks.

GEPA keeps its state in a pickle; we do not. Its random numbers are seeded, every batch of rollouts is a shard of the workdir, and every
answer of the LLM is in the workdir's record, so a run that goes on plays the same evolution again from the start and soon is where it was.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.rollout import Task
from rl.trajectory import StopReason, Trajectory
from trace_jax.agents import ask_all, make_agent
from trace_jax.agents.protocol import Unavailable
from trace_jax.agents.templates import GENERAL, Templates
from trace_jax.baselines.training import POINTS
from trace_jax.config.sections import BASELINES
from trace_jax.diagnose.compaction import compact
from trace_jax.errors import InputError, Unfinished
from trace_jax.evaluate.command import heldout_tasks, summarise
from trace_jax.evaluate.outcomes import success_rate
from trace_jax.runtime import BASE, Runtime

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch

    from trace_jax.agents.client import Client

NAME = "gepa"
COMPONENT = "instructions"
_TOKENS_OF_A_WORD = 1.4
_LONGEST = 600  # characters of what a check expected, or found

Candidate = dict[str, str]  # of one component


def feedback(trajectory: Trajectory) -> str:
    """What the grader says of an episode, for the LLM that is to write better instructions."""
    if trajectory.error is not None:
        return "The environment failed, which says nothing about the assistant."
    said = [f"The score is {trajectory.reward:.2f} of 1."]
    if trajectory.stop_reason not in (None, StopReason.DONE):
        said.append(f"The episode did not come to its end: {trajectory.stop_reason}.")
    wrong = {name: check for name, check in trajectory.checks.items() if not check["passed"]}
    said += [f"{name}: expected {_json(check['expected'])}, found {_json(check['actual'])}." for name, check in wrong.items()]
    return "\n".join(said if wrong or trajectory.reward < 1.0 else [*said, "Everything was as it should be."])


class Evolution:
    """GEPA's adapter to our engine, and its reflection model; `gepa.core.adapter.GEPAAdapter` says what the methods are.

    Args:
      folder: of the rollouts; also the name of the baseline.
      limit: tokens that instructions may take.
      agent: the LLM that writes them.

    Attributes:
      failed: what ended the evolution. GEPA goes on after most errors; its stop condition asks for this.
      rows: the state before each iteration, {"rollouts", "score", "candidates", "instructions"}: the best so far.
    """

    propose_new_texts = None  # GEPA's own proposer asks `reflect`

    def __init__(self, runtime: Runtime, folder: str, limit: int, agent: Client):
        self.failed: Exception | None = None
        self.rows: list[dict[str, Any]] = []
        self._runtime, self._folder, self._limit, self._agent = runtime, folder, limit, agent
        self._batches = 0
        self._asked: collections.Counter[str] = collections.Counter()

    # --- rollouts

    def evaluate(self, batch: list[int], candidate: Candidate, capture_traces: bool = False) -> EvaluationBatch:
        """Rolls the base with a candidate's instructions out on train tasks, given by their numbers.

        A rollout that infrastructure failed gets the mean of the others, so that it speaks neither for the candidate nor against it.
        """
        from gepa.core.adapter import EvaluationBatch

        try:
            found = self._roll_out(batch, candidate[COMPONENT])
        except Exception as error:
            self.failed = error
            raise
        mean = float(np.mean([t.reward for t in found if t.error is None]))
        return EvaluationBatch(found, [mean if t.error is not None else t.reward for t in found], found if capture_traces else None)

    def _roll_out(self, batch: list[int], instructions: str) -> list[Trajectory]:
        runtime, number = self._runtime, self._batches
        self._batches += 1
        tasks = runtime.target_tasks("train", 1, label="training", places=batch, earlier=number)  # new random numbers each time
        temperature = runtime.config.evaluation.temperature  # nothing is to be explored: a prompt is tried as it will be used
        found = runtime.roll_out(BASE, self._folder, "training", number, instructed(tasks, instructions), temperature)
        if any(instructions not in t.messages[0]["content"] for t in found if t.error is None):
            where = runtime.workdir.place(f"rollouts/{self._folder}")
            raise InputError(f"{where}: holds rollouts of other instructions, since the evolution's settings changed; remove that folder")
        return found

    def make_reflective_dataset(
        self, candidate: Candidate, eval_batch: EvaluationBatch, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The conversations with the grader's word on each, as much of them as the LLM has room for."""
        room = max(self._runtime.config.agents.prompt_tokens // (len(eval_batch.trajectories) + 1), 200)
        shown = [{"Conversation": compact(t, room, outcome=False), "Feedback": feedback(t)} for t in eval_batch.trajectories]
        return {component: shown for component in components_to_update}

    # --- the LLM

    def reflect(self, prompt: str) -> str:
        """The LLM's answer, with the new instructions between backticks.

        Raises:
          ValueError: there is none that can be used, whatever the LLM was told of its faults; GEPA goes on with another question.
          Unfinished, InputError: the LLM did not answer, or refuses for good; `failed` has it too.
        """
        if self.failed is not None:
            raise self.failed  # GEPA asks twice
        sample = self._asked[prompt]
        self._asked[prompt] += 1
        try:
            answer = self._runtime.processes.agree(lambda: self._answer(prompt, sample))
        except (Unfinished, InputError) as error:
            self.failed = error
            raise
        if answer["faults"]:
            raise ValueError("; ".join(answer["faults"]))
        return answer["text"]

    def _answer(self, prompt: str, sample: int) -> dict[str, Any]:
        ask = functools.partial(self._agent.complete, [{"role": "user", "content": prompt}], None, sample, check=self._faults)
        (reply,) = ask_all(self._agent, [ask])
        if isinstance(reply, Unavailable):
            raise Unfinished(f"prompt evolution is not finished: the LLM gave no answer ({reply}); the same command goes on from there")
        return {"text": reply.text, "faults": list(reply.faults)}

    def _faults(self, text: str) -> list[str]:
        taken = token_count(self._runtime, instructions_in(text))
        return [f"the instructions take {taken} tokens, of which there may be {self._limit}: shorten them"] if taken > self._limit else []

    # --- GEPA's callback and logger

    def on_iteration_start(self, event: Mapping[str, Any]) -> None:
        self._note(event["state"])

    def on_optimization_end(self, event: Mapping[str, Any]) -> None:
        self._note(event["final_state"])

    def log(self, message: str) -> None:
        """GEPA's own words are left out; `rows` say the same."""

    def _note(self, state: Any) -> None:
        scores = state.program_full_scores_val_set
        best = max(range(len(scores)), key=scores.__getitem__)
        self.rows.append(
            {
                "rollouts": state.total_num_evals,
                "score": scores[best],
                "candidates": len(scores),
                "instructions": state.program_candidates[best][COMPONENT],
            }
        )
        self._runtime.progress.advance(0, f"{self._folder}: {len(scores)} prompts, best {scores[best]:.2f}")


def evolve(runtime: Runtime, budget: int, capabilities: int = 0) -> dict[str, Any]:
    """Evolves instructions and evaluates the best, from where an earlier run stopped.

    Args:
      budget: rollouts that it may use.
      capabilities: how many of the run's capabilities the seed prompt and the LLM are told of; 0 is plain GEPA, and has a curve.

    Returns:
      The content of `evaluation/gepa.json`, or of `capabilities/<number>/gepa.json`; prompt and log of the evolution are in
      `baselines/gepa/`, or `baselines/gepa-<number>/`.

    Raises:
      InputError: the package `gepa` is missing, or the LLM cannot be asked.
      Unfinished: the LLM did not answer.
    """
    config, workdir = runtime.config, runtime.workdir
    name = f"{NAME}-{capabilities}" if capabilities else NAME
    file = f"capabilities/{capabilities}/{NAME}.json" if capabilities else f"evaluation/{NAME}.json"
    if workdir.exists(file):
        found = workdir.read_json(file)
        runtime.progress.advance(found["training_rollouts"], earlier=True)
        return found
    told = described(runtime, capabilities)
    rows = _evolution(runtime, name, budget, told)
    best = rows[-1]
    workdir.write_bytes(f"baselines/{name}/log.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    workdir.write_bytes(f"baselines/{name}/prompt.txt", best["instructions"].encode())
    if not capabilities:
        _write_curve(runtime, rows)
    temperature = config.evaluation.temperature
    found = _held_out(runtime, name, best["instructions"], rows)
    result = summarise(name, "heldout", found, temperature, heldout_tasks(runtime))
    result |= {"training_rollouts": best["rollouts"], "validation_score": best["score"], "instructions": best["instructions"]}
    workdir.write_json(file, result)
    return result


def make_reflection_agent(runtime: Runtime, name: str = NAME) -> Client:
    """The LLM that writes prompts.

    Raises:
      InputError: the package `gepa` is missing, or the LLM of the config cannot be asked.
    """
    others = ",".join(policy for policy in BASELINES if policy != NAME)
    without = f"or leave the baseline gepa out with --config.baselines.policies={others}"
    if importlib.util.find_spec("gepa") is None:
        raise InputError(f"the package 'gepa' is missing: pip install 'trace-jax[gepa]', {without}")
    try:
        return make_agent(runtime.config, runtime.workdir, name, Templates(runtime.config.agents.prompts or GENERAL))
    except InputError as error:
        raise InputError(f"{error}; {without}") from error


def described(runtime: Runtime, capabilities: int) -> list[dict[str, str]]:
    """Name and description of the usable capabilities of largest gap."""
    usable = runtime.usable()[:capabilities] if capabilities else []
    entries = {entry["skill"]: entry for entry in runtime.workdir.read_json("diagnosis/selected_capabilities.json")} if usable else {}
    return [{"name": name.replace("_", " "), "description": entries[name].get("description", "")} for name in usable]


def seed_instructions(runtime: Runtime, told: Sequence[Mapping[str, str]], limit: int) -> str:
    """The first prompt: nothing, or what the capabilities are; of long descriptions the names alone, and of those as many as fit."""
    full = "\n".join(f"- {one['name']}: {one['description']}" for one in told)
    shorter = ["; ".join(one["name"] for one in told[:count]) for count in range(len(told), -1, -1)]
    return next(text for text in (full, *shorter) if token_count(runtime, text) <= limit)


def instructed(tasks: Sequence[Task], instructions: str) -> list[Task]:
    """The tasks with instructions behind their system prompt."""
    return [dataclasses.replace(task, instructions=instructions) for task in tasks]


def instructions_in(answer: str) -> str:
    """The new instructions of an answer, as GEPA reads them."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    return InstructionProposalSignature.output_extractor(answer)["new_instruction"]


def token_count(runtime: Runtime, text: str) -> int:
    """Tokens of the agent."""
    return len(runtime.chat.tokenizer.encode(text, add_special_tokens=False)) if text else 0


def _evolution(runtime: Runtime, name: str, budget: int, told: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """The rows of the whole evolution, the last of them its result."""
    agent = make_reflection_agent(runtime, name)
    import gepa
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    config, settings = runtime.config, runtime.config.baselines
    limit = settings.gepa_tokens or config.rollout.context // 4
    words = max(int(limit / _TOKENS_OF_A_WORD), 1)
    more = Templates(config.agents.prompts or GENERAL).render("prompt_evolution", tokens=limit, words=words, capabilities=told)
    size = runtime.target_size("train")
    places = random.Random(f"{config.seed} {NAME}").sample(range(size), size)
    count = min(settings.gepa_validation, max(len(places) // 2, 1))
    validation, training = places[:count], places[count:] or places
    minibatch = min(settings.gepa_minibatch, len(training))
    evolution = Evolution(runtime, name, limit, agent)
    gepa.optimize(
        {COMPONENT: seed_instructions(runtime, told, limit)},
        trainset=training,
        valset=validation,
        adapter=evolution,
        reflection_lm=evolution.reflect,
        reflection_prompt_template=f"{InstructionProposalSignature.default_prompt_template}\n\n{more}",
        reflection_minibatch_size=minibatch,
        # an iteration takes a parent, a child, and if it is accepted a validation: the last one must end within the budget
        max_metric_calls=max(budget - 2 * minibatch - count + 1, count + 1),
        stop_callbacks=lambda state: evolution.failed is not None,
        callbacks=[evolution],
        logger=evolution,
        seed=config.seed,
        track_best_outputs=False,
    )
    if evolution.failed is not None:
        raise evolution.failed
    return evolution.rows


def _held_out(runtime: Runtime, name: str, instructions: str, rows: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    """The base with instructions on the held-out tasks; each prompt that was the best for a while has a shard of its own."""
    tasks, temperature = heldout_tasks(runtime), runtime.config.evaluation.temperature
    if not instructions:  # which is the base
        return runtime.roll_out(BASE, "base", "heldout", 0, tasks, temperature)
    number = list(dict.fromkeys(row["instructions"] for row in rows)).index(instructions)
    return runtime.roll_out(BASE, name, "heldout", number, instructed(tasks, instructions), temperature)


def _write_curve(runtime: Runtime, rows: Sequence[Mapping[str, Any]]) -> None:
    """Held-out success of the best prompt so far against rollouts."""
    curve: dict[str, list[float]] = {"rollouts": [], "rate": []}
    for point in range(POINTS + 1):
        at = max((row for row in rows if row["rollouts"] <= rows[-1]["rollouts"] * point / POINTS), default=rows[0], key=_rollouts)
        curve["rollouts"].append(at["rollouts"])
        curve["rate"].append(success_rate(_held_out(runtime, NAME, at["instructions"], rows))["rate"])
    runtime.workdir.write_json(f"evaluation/{NAME}_curve.json", curve)


def _rollouts(row: Mapping[str, Any]) -> int:
    return row["rollouts"]


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else re.sub(r"\s+$", "", text[:_LONGEST]) + " ..."
