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

from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.runtime import Runtime
from trace_jax.synthesize.admission import Admission, admit, sandbox_faults, store
from trace_jax.synthesize.author import Author
from trace_jax.synthesize.generation import OPEN, USABLE, Generation
from trace_jax.synthesize.handin import HandIn, read_hand_in

_CALIBRATION = ("verdict", "usable", "hint_ratio", "knobs", "n_rollouts", "spent", "mean_reward", "std_reward", "success_rate")


def generate(runtime: Runtime, capabilities: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An environment for each capability, or the reasons why there is none.

    Returns:
      By capability `status`, `usable` and `reasons`, with the calibration of a usable one. Status `open`: the agent could not be asked.

    Raises:
      InputError: the agent, a prompt or the selection cannot be used.
    """
    config = runtime.config.synthesis
    generations = {capability: Generation.read(runtime, capability) for capability in capabilities}
    author = Author(runtime, [c for c in capabilities if generations[c].status(config.rounds) == OPEN])
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


def _play_round(runtime: Runtime, generation: Generation, answer: Mapping[str, Any], prompts: Mapping[str, str]) -> None:
    """Judges one answer, and keeps it with what was found; the accepted one goes where training looks for it, generation.json last."""
    number, workdir = len(generation.rounds) + 1, runtime.workdir
    folder = f"{generation.folder}/rounds/{number}"
    handed_in = read_hand_in(answer["text"], generation.capability, runtime.target_of(generation.capability))
    workdir.remove(folder)  # of an interrupted round, maybe of another author
    for name, text in {"answer.md": answer["text"], **handed_in.texts}.items():
        workdir.write_bytes(f"{folder}/{name}", text.encode())
    reasons, admission = _judge(runtime, generation, handed_in, answer["faults"])
    certificate, calibration = (admission.certificate, admission.calibration) if admission else (None, None)
    for name, found in (("certificate.json", certificate), ("calibration.json", calibration)):
        if found:
            workdir.write_json(f"{folder}/{name}", found)
    if not reasons:
        store(runtime, generation.capability, admission)
    generation.rounds.append(
        {
            "round": number,
            "kind": generation.kind,
            "model": answer["model"],
            "exchange": answer["exchange"],
            "package": handed_in.package.digest if handed_in.package else None,
            "reasons": reasons,
            "certificate": certificate and {"passed": certificate["passed"], "rewards": certificate["rewards"]},
            "calibration": calibration and {key: calibration[key] for key in (*_CALIBRATION, "success_interval")},
            "usage": answer["usage"],
        }
    )
    generation.prompts |= prompts
    generation.write(runtime)


def _judge(runtime: Runtime, generation: Generation, handed_in: HandIn, faults: Sequence[str]) -> tuple[list[str], Admission | None]:
    """Why the hand-in is refused, if it is; with what became of it, if it came to its certificate."""
    package, number = handed_in.package, len(generation.rounds) + 1
    if package is None:
        return [*faults, *handed_in.faults], None
    for one in generation.rounds:
        if one["package"] == package.digest:
            return [f"this is hand-in {one['round']} again, unchanged, which was refused", *one["reasons"]], None
    which = f"round {number}: {generation.capability}"
    runtime.progress.advance(0, f"{which} in the sandbox")
    if found := sandbox_faults(runtime, package):
        return found, None
    runtime.progress.advance(0, f"{which} certified, and against the base")
    admission = admit(runtime, package, f"calibration-{generation.capability}-r{number}-{package.digest[:8]}")
    return admission.reasons, admission
