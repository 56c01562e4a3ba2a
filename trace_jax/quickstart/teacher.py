"""The teacher whose episodes the base agent imitates: it knows the policy and fails on purpose.

Four faults are planted, each drawn anew at every decision where it can show: the id of the next record, stopping after the first request,
returning an order without the check, and a zip code that loses a digit or has two neighbours swapped. With a fault rate of 0 the teacher
solves every task.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any


@dataclasses.dataclass(frozen=True)
class Faults:
    """Probability of each fault per decision."""

    wrong_record: float = 0.0
    stop_early: float = 0.0
    skip_check: float = 0.0
    malform: float = 0.0

    def scaled(self, factor: float) -> Faults:
        return Faults(**{key: value * factor for key, value in dataclasses.asdict(self).items()})


def play(world: dict[str, Any], seed: int, knobs: dict[str, Any], faults: Faults, rng: random.Random) -> tuple[list[dict], float]:
    """One episode of the teacher in a desk package.

    Returns:
      The messages (system first, closing text last) and the reward.
    """
    environment = world["Environment"]()
    start = environment.reset(seed, knobs)
    task = environment.task
    messages = [{"role": "system", "content": start["system"]}, *start["messages"]]

    def call(name: str, thought: str = "", **arguments: str) -> str:
        content = f"<think>{thought}</think>" if thought else ""
        messages.append({"role": "assistant", "content": content, "tool_calls": [{"name": name, "arguments": arguments}]})
        result = environment.call(name, arguments)
        messages.append({"role": "tool", "content": result})
        return result

    def identify(request: dict) -> tuple[str, str]:
        """The order id that the teacher believes is meant, and the thought in which it looks it up."""
        order_id = request["order_id"]
        if not request["ordinal"]:
            return order_id, ""
        if rng.random() < faults.wrong_record:
            order_id = neighbour(list(task["orders"]), order_id)
        return order_id, f"{request['ordinal']}: {order_id}"

    if any(request["ordinal"] for request in task["requests"]):
        call("list_orders")
    closing = "all done."
    for position, request in enumerate(task["requests"]):
        if position and rng.random() < faults.stop_early:
            break
        order_id, thought = identify(request)
        if request["kind"] == "cancel":
            call("cancel_order", thought, order_id=order_id)
        elif request["kind"] == "zip":
            code = _malform(request["zip"], rng) if rng.random() < faults.malform else request["zip"]
            call("set_address", thought, order_id=order_id, zip=code)
        elif rng.random() < faults.skip_check:
            call("return_order", thought, order_id=order_id)
        elif (status := call("check_order", thought, order_id=order_id)) == world["RETURNABLE"]:
            call("return_order", order_id=order_id)
        else:
            closing = f"cannot return {order_id} it is {status}."
    messages.append({"role": "assistant", "content": closing})
    environment.respond(closing)
    return messages, environment.score()["reward"]


def neighbour(ids: list[str], order_id: str) -> str:
    """The id one line below, from the last line the first: a slip of the eye."""
    return ids[(ids.index(order_id) + 1) % len(ids)]


def _malform(code: str, rng: random.Random) -> str:
    at = rng.randrange(len(code) - 1)
    return code[:at] + code[at + 1 :] if rng.random() < 0.5 else code[:at] + code[at + 1] + code[at] + code[at + 2 :]
