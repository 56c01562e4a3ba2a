"""A small desk and an agent with faults that can be switched on one by one, to see whether each shows as its own capability and no other.

Nothing of this is known to the rules: they see messages and checks only.
"""

import random

from rl.trajectory import Trajectory

FAULTS = {
    "wrong_record": "structured_data_reasoning",
    "stop_early": "multi_step_task_completion",
    "skip_check": "precondition_verification",
    "malform": "tool_calling_precision",
}


def expect(name, kind, **arguments):
    return {"passed": None, "expected": {"name": name, "arguments": arguments, "kind": kind}, "actual": None, "message_index": None}


def play(seed: int, faults: dict[str, float]) -> Trajectory:
    """One episode; `faults` gives the probability of each fault where it can show."""
    rng = random.Random(seed)
    items = rng.sample(["vase", "lamp", "chair", "table", "clock"], 4)
    ids = [f"{letter}{rng.randrange(100):02d}" for letter in rng.sample("ABCDEFGHIJ", 4)]
    orders = dict(zip(ids, items, strict=True))
    status = {i: rng.choice(["delivered", "pending", "shipped"]) for i in ids}
    requests = []
    for order_id, kind in zip(rng.sample(ids, 2), rng.sample(["cancel", "return", "zip"], rng.choice([1, 2])), strict=False):
        requests.append({"kind": kind, "id": order_id, "named": rng.random() < 0.6, "zip": "".join(rng.sample("123456789", 5))})
    said = [
        f"{r['kind']} {r['id'] if r['named'] else 'the ' + orders[r['id']]}" + (f" to {r['zip']}" if r["kind"] == "zip" else "")
        for r in requests
    ]
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": " and ".join(said)}]

    checks, told_wanted, effects, done = {}, [], set(), set()
    for r in requests:
        if r["kind"] == "return":
            checks[f"action:{len(checks)}"] = expect("check_order", "read", order_id=r["id"])
            if status[r["id"]] != "delivered":
                told_wanted.append(f"{r['id']} {status[r['id']]}")
                continue
        name = {"cancel": "cancel_order", "return": "return_order", "zip": "set_address"}[r["kind"]]
        arguments = {"order_id": r["id"], **({"zip": r["zip"]} if r["kind"] == "zip" else {})}
        checks[f"action:{len(checks)}"] = expect(name, "write", **arguments)
        effects.add((name, *arguments.values()))
    for i, wanted in enumerate(told_wanted):
        checks[f"communicate:{i}"] = {"passed": None, "expected": wanted, "actual": None, "message_index": None}
    checks["db"] = {"passed": None, "expected": None, "actual": None, "message_index": None}

    def call(name, **arguments):
        if name == "list_orders":
            result = "\n".join(f"{item} {i}" for i, item in orders.items())
        elif name == "check_order":
            result = status[arguments["order_id"]]
        elif len(arguments.get("zip", "12345")) != 5:
            result = "Error: bad zip"
        else:
            result = "ok"
            done.add((name, *arguments.values()))
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": "", "name": name, "arguments": arguments}]})
        messages.append({"role": "tool", "content": result, "tool_call_id": ""})
        return result

    def happens(fault):
        return rng.random() < faults.get(fault, 0.0)

    if not all(r["named"] for r in requests):
        call("list_orders")
    closing = []
    for position, r in enumerate(requests):
        if position and happens("stop_early"):
            break
        order_id = (
            r["id"] if r["named"] or not happens("wrong_record") else rng.choice([i for i in ids if i not in [q["id"] for q in requests]])
        )
        if r["kind"] == "cancel":
            call("cancel_order", order_id=order_id)
        elif r["kind"] == "zip":
            code = r["zip"]
            if happens("malform"):
                code = code[1] + code[0] + code[2:] if rng.random() < 0.5 else code[1:]
            call("set_address", order_id=order_id, zip=code)
        elif happens("skip_check") or call("check_order", order_id=order_id) == "delivered":
            call("return_order", order_id=order_id)
        else:
            closing.append(f"cannot return {order_id} it is {status[order_id]}")
    messages.append({"role": "assistant", "content": ", ".join(closing) or "all done"})
    passed = done == effects and all(
        w.split()[0] in messages[-1]["content"] and w.split()[1] in messages[-1]["content"] for w in told_wanted
    )
    checks["db"]["passed"] = done == effects
    return Trajectory(
        id=f"{seed}#0",
        environment="desk",
        task_id=str(seed),
        split="train",
        messages=messages,
        reward=float(passed),
        success=passed,
        checks=checks,
    )
