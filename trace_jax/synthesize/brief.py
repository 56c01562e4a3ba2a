"""What an LLM is told before it writes an environment: the capability, where the agent failed, the target, the contract, an example.

The text depends on what is in the workdir and on the config alone, so that asking again after an interruption asks the same question.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from envs import Target
from envs.builtin import library, load_builtin
from envs.package import ALLOWED_MODULES
from rl.trajectory import Trajectory
from trace_jax.agents.budget import estimate_tokens
from trace_jax.agents.templates import Templates
from trace_jax.config import Config
from trace_jax.diagnose.compaction import compact
from trace_jax.diagnose.evidence import LACKING
from trace_jax.diagnose.select import decode_selection, diagnosed_policy
from trace_jax.errors import InputError
from trace_jax.runtime import Runtime
from trace_jax.synthesize.handin import KNOBS

PROMPT = "environment_generation"
EXAMPLES = 3
# shares of `agents.prompt_tokens`; the contract, the tools and the words around take the rest
_CONVERSATION, _SYSTEM, _LIBRARY = 1 / 8, 1 / 8, 1 / 4
_SELECTION, _EVIDENCE = "diagnosis/selected_capabilities.json", "diagnosis/evidence.jsonl"


def write_briefs(runtime: Runtime, templates: Templates, capabilities: Sequence[str]) -> dict[str, str]:
    """The first question about each capability.

    Raises:
      InputError: a selection or a prompt that cannot be used.
      EnvironmentFault: the target cannot be reset.
    """
    config, workdir = runtime.config, runtime.workdir
    budget = config.agents.prompt_tokens
    selection = {entry["skill"]: entry for entry in decode_selection(workdir.read_json(_SELECTION), workdir.place(_SELECTION))}
    cases = {capability: selection[capability]["example_failed_cases"] for capability in capabilities}
    found = _trajectories(runtime, {case for listed in cases.values() for case in listed})
    reasons = _reasons(workdir.read_jsonl(_EVIDENCE))
    targets = {capability: runtime.target_of(capability) for capability in capabilities}
    starts = {target.name: runtime.first_sight(target) for target in targets.values()}
    return {
        capability: templates.render(
            PROMPT,
            capability=capability,
            definition=selection[capability]["description"],
            target=target.target if isinstance(target, Target) else target.name,
            tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in runtime.tools(target)),
            system=shorten(starts[target.name].system, int(budget * _SYSTEM)),
            messages="\n".join(f"{m['role']}: {m['content']}" for m in starts[target.name].messages),
            examples=_examples(
                capability, [found[case] for case in cases[capability] if case in found], reasons, int(budget * _CONVERSATION)
            ),
            library=library_example(capability, target.target, int(budget * _LIBRARY)),
            max_turns=target.max_turns,
            **terms(config),
        )
        for capability, target in targets.items()
    }


_BOUNDS = (
    "certify_seeds", "calibration_seeds", "calibration_rollouts", "mean_low", "mean_high", "min_std", "max_all_success", "max_all_zero",
    "max_constant",
)  # fmt: skip


def terms(config: Config) -> dict[str, Any]:
    """What a config alone tells of the contract: variables of its prompt, all but those of the capability and the target."""
    return {
        "modules": sorted(ALLOWED_MODULES - {"__future__"}),
        "turns": config.rollout.max_turns,
        "max_knobs": KNOBS,
        "context": config.rollout.context,
        "turn_tokens": config.rollout.max_tokens,
        **{name: getattr(config.synthesis, name) for name in _BOUNDS},
    }


def library_example(capability: str, target: str, tokens: int) -> dict[str, str]:
    """A package of the library for another capability, of the same target if it has any.

    Returns:
      `capability`, `target`, and the texts `package` of package.json and `environment` of environment.py.
    """
    target = target if library(target) else "desk"
    package = load_builtin(next(name for name in library(target) if name != capability), target)
    meta = json.dumps(package.meta, indent=2, ensure_ascii=False)
    source = shorten_source(package.source, tokens - estimate_tokens(meta))
    return {"capability": package.capability, "target": package.target, "package": meta, "environment": source}


def shorten_source(source: str, tokens: int) -> str:
    """Python code with its longest definitions left out, one line in the place of each, until it fits or all are out."""
    lines = source.strip().splitlines()
    nodes = [(node.lineno, node.end_lineno, node.name) for node in ast.parse("\n".join(lines)).body
             if isinstance(node, ast.FunctionDef | ast.ClassDef)]  # fmt: skip
    for first, last, name in sorted(nodes, key=lambda node: node[0] - node[1]):
        if estimate_tokens("\n".join(line for line in lines if line is not None)) <= tokens:
            break
        lines[first - 1 : last] = [f"# {name}: {last - first + 1} lines are left out here", *[None] * (last - first)]
    return "\n".join(line for line in lines if line is not None)


def shorten(text: str, tokens: int) -> str:
    """The text with its middle left out where it is too long."""
    if estimate_tokens(text) <= tokens:
        return text
    kept = len(text) * tokens // estimate_tokens(text) // 2
    return f"{text[:kept]}\n[... {len(text) - 2 * kept:,} characters are left out here ...]\n{text[len(text) - kept :]}"


def _trajectories(runtime: Runtime, ids: set[str]) -> dict[str, Trajectory]:
    """Those of the base's train rollouts; a diagnosis of other tools' files names ids that the workdir has not."""
    policy = diagnosed_policy(runtime.workdir)
    if not ids or not runtime.workdir.shards(policy, "train"):
        return {}
    return {t.id: t for t in runtime.workdir.read_shards(policy, "train") if t.id in ids}


def _reasons(labels: Sequence[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """(trajectory, capability) to what the analyst saw, where that is LACKING."""
    return {
        (label["trajectory"], label["capability"]): f"message {label['message_index']}: {label['reason']}"
        for label in labels
        if label["value"] == LACKING
    }


def _examples(
    capability: str, trajectories: Sequence[Trajectory], reasons: dict[tuple[str, str], str], tokens: int
) -> list[dict[str, str]]:
    """Up to EXAMPLES conversations, of different tasks where there are; one that is too long even compacted makes room for the next."""
    examples: list[dict[str, str]] = []
    first = {t.task_id: t for t in reversed(trajectories)}
    for t in sorted(trajectories, key=lambda t: first[t.task_id] is not t):
        try:
            conversation = compact(t, tokens)
        except InputError:
            continue
        examples.append({"id": t.id, "reason": reasons.get((t.id, capability), ""), "conversation": conversation})
        if len(examples) == EXAMPLES:
            break
    return examples
