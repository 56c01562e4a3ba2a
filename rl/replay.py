"""What an agent did in a stored episode, read from its messages, so that an environment can be asked again.

The messages do not say which turns the environment saw: a turn that was cut, or that could not be read, ended the episode before. This is
the other side of `rl.episode`, which writes them.
"""

from __future__ import annotations

import dataclasses

from rl.chat import parse_turn
from rl.episode import Act
from rl.trajectory import StopReason, Trajectory

_UNSEEN = {StopReason.MAX_TOKENS, StopReason.CONTEXT, StopReason.INVALID_ACTION}  # the last turn never reached the environment


@dataclasses.dataclass(frozen=True)
class Step:
    """One action and what came back.

    Attributes:
      text: the result of the call, or the user's answer, None where there was none.
      done: whether the episode was over then.
      message_index: of the answer; of the turn where there was none.
    """

    act: Act
    text: str | None
    done: bool
    message_index: int


def steps(trajectory: Trajectory) -> list[Step]:
    """The calls and texts that the environment saw, in order.

    What an assistant says in the messages that the episode began with is none of them; the record counts the agent's own turns.
    """
    messages, found = trajectory.messages, []
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    own = said[len(said) - int(trajectory.metrics.get("turns", len(said))) :]
    for index in own:
        message = messages[index]
        calls = message.get("tool_calls") or ()
        results = {m.get("tool_call_id"): n for n, m in enumerate(messages[index + 1 :], index + 1) if m["role"] == "tool"}
        for call in calls:
            if (at := results.get(call["id"])) is None:
                break  # the call before ended the episode
            found.append((Act("call", (call["name"], call["arguments"])), messages[at]["content"], at))
        last = index + 1 == len(messages)
        if calls or (last and trajectory.stop_reason in _UNSEEN):
            continue
        answered = not last and messages[index + 1]["role"] == "user"
        act = Act("respond", (parse_turn(message["content"]).spoken,))
        found.append((act, messages[index + 1]["content"], index + 1) if answered else (act, None, index))
    ended = trajectory.stop_reason == StopReason.DONE
    return [Step(act, text, ended and n + 1 == len(found), at) for n, (act, text, at) in enumerate(found)]
