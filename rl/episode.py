"""The agent loop of one episode: prompt, turn of the model, tools or user, next turn, verdict.

`play` is a generator. It yields what it needs next, an action of the environment or a request to the engine, and is sent the answer. It
waits for nobody itself, so `rl.rollout` can keep many episodes in flight.

Whose failure it is decides the reward. What the model did wrong (a call that cannot be read, too many turns, a full context) ends the
episode with reward 0. What the environment or the engine did wrong gives a trajectory with an error and no reward, which nobody trains on.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Generator
from typing import Any

import numpy as np

from envs import EnvironmentFault, Package, Reply, Score, Start
from rl.chat import Chat, parse_reply
from rl.engines.protocol import Completion, EngineFault, Request
from rl.trajectory import StopReason, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One episode to be sampled.

    Attributes:
      seed: of the environment; with `rollout` and the run's seed it decides every random choice of the episode.
      group: rollouts that share it are normalised against each other.
      trial: makes the trajectory's id, `task_id#trial`.
      hint: guidance shown to the agent while it samples; its token span is recorded, training cuts it out.
      instructions: more text behind the package's system prompt, a part of it like the rest.
      policy: samples this task, instead of the policy of the whole batch.
    """

    package: Package
    seed: int
    rollout: int
    group: str
    task_id: str
    split: str
    trial: int
    knobs: dict[str, Any] | None = None
    hint: str | None = None
    instructions: str = ""
    policy: str | None = None

    @property
    def id(self) -> str:
        return f"{self.task_id}#{self.trial}"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the turns of an episode are sampled; `max_turns` None leaves the limit to the package."""

    temperature: float
    run_seed: int
    max_tokens: int
    max_turns: int | None = None
    success: float = 1.0  # smallest reward that counts as success


@dataclasses.dataclass(frozen=True)
class Act:
    """What the environment is to do: reset (), call (name, arguments), respond (text,) or score ()."""

    op: str
    arguments: tuple = ()


Answer = Start | Reply | Score | Completion


@dataclasses.dataclass
class _Record:
    """What happened so far: the messages, and the token arrays in pieces of one length."""

    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    mask: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    turns: list[int] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    experts: np.ndarray | None = None  # of the tokens up to the last sampled one, where the engine tells
    hint_span: tuple[int, int] | None = None
    logged: list[int] = dataclasses.field(default_factory=list)  # message index of each call and text that the environment saw
    turn: int = 0
    version: int = 0
    tool_errors: int = 0

    def observe(self, tokens: np.ndarray) -> None:
        """Appends tokens that the model reads and did not write, as part of the turn that it is about to take."""
        self._append(tokens, [0] * len(tokens), [0.0] * len(tokens))

    def sampled(self, completion: Completion) -> None:
        self.version, self.experts = completion.version, completion.experts
        self._append(completion.tokens, [1] * len(completion.tokens), completion.logprobs.tolist())
        self.turn += 1

    def experts_of_all(self) -> np.ndarray | None:
        """[len(tokens), L', k], -1 for tokens that no turn has read."""
        if self.experts is None:
            return None
        unread = len(self.tokens) - len(self.experts)
        return np.pad(self.experts, ((0, unread), (0, 0), (0, 0)), constant_values=-1)

    def _append(self, tokens: np.ndarray, mask: list[int], logprobs: list[float]) -> None:
        self.tokens += tokens.tolist()
        self.mask += mask
        self.logprobs += logprobs
        self.turns += [self.turn] * len(tokens)
        self.versions += [self.version] * len(tokens)


def play(
    task: Task, chat: Chat, tools: list[dict[str, Any]], policy: str, session: str, sampling: Sampling
) -> Generator[Act | Request, Answer, Trajectory]:
    """Plays a task to its end.

    Yields:
      What it needs next; send it the answer, or throw the `EnvironmentFault` or `EngineFault` into it.

    Returns:
      The trajectory.
    """
    record = _Record()
    reward, checks, error, stop = None, {}, None, StopReason.ENVIRONMENT_ERROR
    try:
        stop = yield from _converse(record, task, chat, tools, policy, session, sampling)
        score = yield Act("score")
        reward = score.reward if stop == StopReason.DONE else 0.0
        checks = {
            name: {
                "passed": check.passed,
                "expected": check.expected,
                "actual": check.actual,
                "message_index": None if check.call is None else record.logged[check.call],
            }
            for name, check in score.checks.items()
        }
    except EnvironmentFault as fault:
        error, stop = {"kind": fault.kind, "message": str(fault)}, StopReason.ENVIRONMENT_ERROR
    except EngineFault as fault:
        error, stop = {"kind": f"engine_{fault.kind}", "message": str(fault)}, StopReason.ENGINE_ERROR
    return Trajectory(
        id=task.id,
        environment=task.package.name,
        task_id=task.task_id,
        split=task.split,
        seed=task.seed,
        group=task.group,
        trial=task.trial,
        policy={"name": policy, "version": record.version},
        messages=record.messages,
        reward=reward,
        success=reward is not None and reward >= sampling.success,
        stop_reason=stop,
        checks=checks,
        tokens=record.tokens,
        loss_mask=record.mask,
        logprobs=record.logprobs,
        turns=record.turns,
        versions=record.versions,
        experts=record.experts_of_all(),
        hint=None if record.hint_span is None else {"text": task.hint, "token_span": list(record.hint_span)},
        metrics={
            "turns": float(record.turn),
            "tool_calls": float(sum(len(m.get("tool_calls", ())) for m in record.messages if m["role"] == "assistant")),
            "tool_errors": float(record.tool_errors),
            "sampled_tokens": float(sum(record.mask)),
        },
        error=error,
    )


def _converse(
    record: _Record, task: Task, chat: Chat, tools: list[dict[str, Any]], policy: str, session: str, sampling: Sampling
) -> Generator[Act | Request, Answer, StopReason]:
    """The conversation, written into `record` as it goes; returns why it ended."""
    start = yield Act("reset")
    system = "\n\n".join(text for text in (start.system, task.instructions) if text)
    record.messages += [{"role": "system", "content": system}] if system else []
    record.messages += start.messages
    prompt, record.hint_span = chat.start_with_hint(system, start.messages, tools, task.hint)
    record.observe(prompt)
    max_turns = min(task.package.max_turns, sampling.max_turns or task.package.max_turns)
    for turn in range(max_turns):
        completion = yield Request(
            session=session,
            policy=policy,
            tokens=np.array(record.tokens, np.int32),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            key=(sampling.run_seed, task.seed, task.rollout),
            stop=chat.stop,
        )
        record.sampled(completion)
        ended = completion.finish == "stop"
        text = chat.opening + chat.decode(completion.tokens[:-1] if ended else completion.tokens)
        reply = parse_reply(text, tools)
        said = {"role": "assistant", "content": text}
        record.messages.append(said)
        index = len(record.messages) - 1
        if not ended:
            return StopReason.CONTEXT if completion.finish == "context" else StopReason.MAX_TOKENS
        if reply.error is not None:
            return StopReason.INVALID_ACTION
        if reply.tool_calls:
            identified = [(call, f"call_{_hex(task.id, turn, i)}") for i, call in enumerate(reply.tool_calls)]
            said["content"] = reply.content
            said["tool_calls"] = [{"id": name, "name": call.name, "arguments": call.arguments} for call, name in identified]
            for call, name in identified:
                result = yield Act("call", (call.name, call.arguments))
                record.logged.append(index)
                record.messages.append({"role": "tool", "content": result.text, "tool_call_id": name})
                record.tool_errors += result.text.lower().startswith("error")
                if result.done:
                    return StopReason.DONE
        else:
            result = yield Act("respond", (reply.spoken,))
            record.logged.append(index)
            if result.text is not None:
                record.messages.append({"role": "user", "content": result.text})
            if result.done:
                return StopReason.DONE
        if turn + 1 < max_turns:
            record.observe(chat.extend(record.messages[index + 1 :]))
    return StopReason.MAX_TURNS


def _hex(*parts: Any) -> str:
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()[:24]
