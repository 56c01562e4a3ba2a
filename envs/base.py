"""The types that an environment and its users share, and the one exception that is never the agent's reward.

An environment package speaks plain JSON (see `envs.package`). These types are what the host makes of it after every reply was checked.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as the agent makes it."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclasses.dataclass(frozen=True)
class Start:
    """What the agent sees first: the policy, and messages `{"role", "content"}` (of the user, or a conversation that goes on)."""

    system: str
    messages: list[dict[str, Any]]


class Reply(NamedTuple):
    """The answer to one action: a tool's result or the user's text (None: nothing more to say), and whether the episode is over."""

    text: str | None
    done: bool


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a benchmark's own program wants said next (`envs.harness`).

    Attributes:
      speaker: "agent", or "user" where its user simulator is sampled too.
      system: that speaker's system prompt.
      messages: what is new since that speaker's last turn, as it sees it.
      tools: OpenAI schemas.
      done: the episode is over, and nothing is asked.
    """

    speaker: str = ""
    system: str = ""
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    done: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a benchmark's own program judged an episode.

    Attributes:
      reward: in [0, 1].
      stop_reason: why it ended, a `StopReason` of `rl.trajectory`.
      graded: the benchmark's own verdict, which its `Target` makes checks of; None where the host ended the episode first.
      record: what writers of the benchmark's result files need.
    """

    reward: float
    stop_reason: str
    graded: Any = None
    record: Any = None


@dataclasses.dataclass(frozen=True)
class Check:
    """The evidence of one check of the verifier.

    Attributes:
      call: index in the episode's own log of calls and texts, which is all that an environment knows of the conversation; the episode loop
        makes a `message_index` of it.
    """

    passed: bool
    expected: Any
    actual: Any
    call: int | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """The verdict. `reward` is in [0, 1]; the names of `checks` say their kind (`action:0`, `db`, `communicate:0`, `assertion:0`)."""

    reward: float
    checks: dict[str, Check]


class EnvironmentFault(Exception):
    """The environment's own failure: it crashed, missed a deadline, or replied with what is no reply. Never the agent's reward.

    Its message may quote what an environment said. It is always text that can be stored: half a surrogate pair becomes a question mark.

    Attributes:
      kind: `exception` (its code raised), `crash` (it ended the worker), `deadline`, `reply` (malformed), `replay` (the same actions gave
        another result), `quarantine` (other episodes of the package crashed too often), `user`, `judge` or another name that a benchmark's
        program has for what let it down.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message.encode(errors="replace").decode())
        self.kind = kind


class SandboxError(RuntimeError):
    """Workers do not start, or this system cannot lock them down as was asked; the message names the layer, the system and the fix."""
