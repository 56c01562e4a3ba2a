"""The agent loop of one episode: prompt, turn of the model, tools or user, next turn, verdict.

`play` is a generator. It yields what it needs next, an action of the environment or a request to the engine, and is sent the answer. It
waits for nobody itself, so `rl.rollout` can keep many episodes in flight.

Whose failure it is decides the reward. What the model did wrong (a call that cannot be read, too many turns, a full context) ends the
episode with reward 0. What the environment or the engine did wrong gives a trajectory with an error and no reward, which nobody trains on.

A benchmark's own program (`envs.harness`) asks for the turns instead, maybe for its user simulator's too. Those are sampled with the base
in a context of their own; the trajectory has only what they said.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Generator
from typing import Any

import numpy as np

from envs import Ask, EnvironmentFault, Package, Reply, Score, Start, Target, Verdict
from rl.chat import Chat, Turn, parse_turn
from rl.engines.protocol import Completion, EngineFault, Request
from rl.trajectory import ENDS, StopReason, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One episode to be sampled.

    Attributes:
      package: what is played, a package or a benchmark's own program.
      seed: of the environment, or the number of a benchmark's task; with `rollout` and the run's seed it decides every random choice of
        the episode.
      group: rollouts that share it are normalised against each other.
      trial: makes the trajectory's id, `task_id#trial`.
      hint: guidance shown to the agent while it samples; its token span is recorded, training cuts it out.
      instructions: more text behind the package's system prompt, a part of it like the rest.
      policy: samples this task, instead of the policy of the whole batch.
    """

    package: Package | Target
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
    """How turns are sampled; `max_turns` None leaves the limit to the package, `user` is the policy of user simulators."""

    temperature: float
    run_seed: int
    max_tokens: int
    max_turns: int | None = None
    success: float = 1.0  # smallest reward that counts as success
    user: str = "base"
    user_temperature: float = 0.0


@dataclasses.dataclass(frozen=True)
class Act:
    """What the environment is to do: reset (), call (name, arguments), respond (text,), score (), or of a harness turn (message,)."""

    op: str
    arguments: tuple = ()


Answer = Start | Reply | Score | Ask | Verdict | Completion

_USERS = 1 << 40  # added to a seed, so that users and agents share no random bits


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
    record: dict[str, Any] | None = None  # a benchmark's own

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
        if isinstance(task.package, Target):
            stop, reward, checks = yield from _serve(record, task, chat, policy, session, sampling)
        else:
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
        record=record.record,
        error=error,
    )


def _converse(
    record: _Record, task: Task, chat: Chat, tools: list[dict[str, Any]], policy: str, session: str, sampling: Sampling
) -> Generator[Act | Request, Answer, StopReason]:
    """The conversation, written into `record` as it goes; returns why it ended."""
    start = yield Act("reset")
    system = _system(start.system, task)
    record.messages += [{"role": "system", "content": system}] if system else []
    record.messages += start.messages
    prompt, record.hint_span = chat.start_with_hint(system, start.messages, tools, task.hint)
    record.observe(prompt)
    max_turns = min(task.package.max_turns, sampling.max_turns or task.package.max_turns)
    for turn in range(max_turns):
        stop, reply = yield from _take_turn(record, task, chat, tools, policy, session, sampling)
        if stop is not None:
            return stop
        index, said = len(record.messages) - 1, record.messages[-1]
        if reply.tool_calls:
            for call in said["tool_calls"]:
                result = yield Act("call", (call["name"], call["arguments"]))
                record.logged.append(index)
                record.messages.append({"role": "tool", "content": result.text, "tool_call_id": call["id"]})
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


def _system(written: str, task: Task) -> str:
    """The environment's system prompt with the task's instructions behind it."""
    return "\n\n".join(text for text in (written, task.instructions) if text)


def _take_turn(
    record: _Record, task: Task, chat: Chat, tools: list[dict[str, Any]], policy: str, session: str, sampling: Sampling
) -> Generator[Request, Completion, tuple[StopReason | None, Turn]]:
    """One turn of the agent, written into `record`: what was said, or why the episode ends with it."""
    completion = yield Request(
        session=session,
        policy=policy,
        tokens=np.array(record.tokens, np.int32),
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        key=(sampling.run_seed, task.seed, task.rollout),
        stop=chat.stop,
    )
    turn = record.turn
    record.sampled(completion)
    ended = completion.finish == "stop"
    text = chat.opening + chat.decode(completion.tokens[:-1] if ended else completion.tokens)
    reply = parse_turn(text, tools)
    said = {"role": "assistant", "content": text}
    record.messages.append(said)
    if not ended:
        return (StopReason.CONTEXT if completion.finish == "context" else StopReason.MAX_TOKENS), reply
    if reply.error is not None:
        return StopReason.INVALID_ACTION, reply
    if reply.tool_calls:
        said["content"] = reply.content
        said["tool_calls"] = _identified(reply, task.id, turn)
    return None, reply


def _identified(reply: Turn, *place: Any) -> list[dict[str, Any]]:
    """The calls of a turn, with ids that any language takes as a name."""
    return [{"id": f"call_{_hex(*place, i)}", "name": call.name, "arguments": call.arguments} for i, call in enumerate(reply.tool_calls)]


def _serve(
    record: _Record, task: Task, chat: Chat, policy: str, session: str, sampling: Sampling
) -> Generator[Act | Request, Answer, tuple[StopReason, float, dict[str, Any]]]:
    """Gives a harness the turns that it asks for, written into `record`; returns why it ended, the reward and the checks."""
    max_turns = task.package.max_turns if sampling.max_turns is None else min(task.package.max_turns, sampling.max_turns)
    user, stop = _User(task, chat, session, sampling), None
    ask = yield Act("reset")
    while not ask.done and stop is None:
        if ask.speaker == "user":
            message = yield from user.answer(ask)
        else:
            if not record.tokens:
                system = _system(ask.system, task)
                record.messages += [{"role": "system", "content": system}] if system else []
            record.messages += ask.messages
            record.tool_errors += sum(m["role"] == "tool" and m["content"].lower().startswith("error") for m in ask.messages)
            if record.turn == max_turns:
                stop = StopReason.MAX_TURNS
                break
            record.observe(_encode(chat, ask, system if not record.tokens else None))
            stop, reply = yield from _take_turn(record, task, chat, ask.tools, policy, session, sampling)
            # the program would drop the whole episode, were it sent nothing
            stop = StopReason.INVALID_ACTION if stop is None and not reply.tool_calls and not reply.spoken else stop
            message = {"role": "assistant", "content": reply.spoken, "tool_calls": record.messages[-1].get("tool_calls", [])}
        if stop is None:
            ask = yield Act("turn", (message,))
    try:
        verdict = yield Act("score")
    except EnvironmentFault:
        if stop is None:
            raise
        verdict = Verdict(0.0, stop)  # that the program did not end well makes the agent's failure no better
    if stop is None and verdict.stop_reason not in ENDS:
        raise EnvironmentFault("reply", f"run_episode must return a stop_reason of {[*ENDS]}, got {verdict.stop_reason!r}")
    record.record = verdict.record
    checks = task.package.checks(task.package.all_tasks[task.seed].id, verdict.graded, record.messages)
    return (stop, 0.0, checks) if stop is not None else (StopReason(verdict.stop_reason), verdict.reward, checks)


def _encode(chat: Chat, ask: Ask, system: str | None, ended: bool = True) -> np.ndarray:
    """What an ask adds to its speaker's context, a new one if `system` is given.

    Raises:
      EnvironmentFault: kind `reply`, the chat template cannot print it.
    """
    try:
        return chat.extend(ask.messages, ended=ended) if system is None else chat.start(system, ask.messages, ask.tools)
    except ValueError as error:
        raise EnvironmentFault("reply", f"what the harness asks the {ask.speaker} cannot be put: {error}") from error


class _User:
    """The user simulator's side of an episode: a context of its own that only grows, like the agent's."""

    def __init__(self, task: Task, chat: Chat, session: str, sampling: Sampling):
        self._task, self._chat, self._session, self._sampling = task, chat, f"{session}:user", sampling
        self._tokens: list[int] = []
        self._turn, self._ended = 0, True

    def answer(self, ask: Ask) -> Generator[Request, Completion, dict[str, Any]]:
        """
        Raises:
          EnvironmentFault: kind `user`, it has nothing to say, or no more room.
        """
        chat, sampling = self._chat, self._sampling
        self._tokens += _encode(chat, ask, None if self._tokens else ask.system, self._ended).tolist()
        completion = yield Request(
            session=self._session,
            policy=sampling.user,
            tokens=np.array(self._tokens, np.int32),
            max_tokens=sampling.max_tokens,
            temperature=sampling.user_temperature,
            key=(sampling.run_seed, self._task.seed + _USERS, self._task.rollout),
            stop=chat.stop,
        )
        self._tokens += completion.tokens.tolist()
        self._turn, self._ended = self._turn + 1, completion.finish == "stop"
        text = chat.opening + chat.decode(completion.tokens[:-1] if self._ended else completion.tokens)
        reply = parse_turn(text, ask.tools) if ask.tools else Turn(text)
        if completion.finish == "context":
            raise EnvironmentFault("user", "the context of the user simulator is full; raise rollout.context")
        if reply.error is not None or not (reply.tool_calls or reply.spoken):
            raise EnvironmentFault("user", f"the user simulator said nothing that can be passed on: {reply.error or repr(text[:200])}")
        calls = _identified(reply, self._task.id, "user", self._turn)
        return {"role": "assistant", "content": reply.spoken, "tool_calls": calls}


def _hex(*parts: Any) -> str:
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()[:24]
