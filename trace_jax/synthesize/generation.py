"""What an LLM's attempts at the environment of one capability have come to: `environments/<capability>/generation.json`."""

from __future__ import annotations

import dataclasses
from typing import Any

from trace_jax.runtime import Runtime

OPEN, USABLE, NEEDS_ATTENTION = "open", "usable", "needs_attention"
GENERATION, REPAIR, MUTATION = "generation", "repair", "mutation"


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
        """With the status, the last model, and `usage`, the sum over the rounds."""
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
        """Where it stands when there may be so many rounds."""
        if self.rounds and not self.reasons:
            return USABLE
        return NEEDS_ATTENTION if len(self.rounds) >= rounds else OPEN
