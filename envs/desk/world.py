"""A customer-service desk: orders, five tools, a scripted customer, and a grader that looks at the final state and at what was said.

This text is the first half of an environment package. `TASKS` code (the target's `desk/tasks.py` or one capability of `library/`)
follows it in the same file and defines `NOUNS`, `draw(rng, knobs) -> stressors`, `grade(checks) -> reward` and `HINT`. The package is plain
Python with JSON in and out and runs in a worker of the sandbox; nothing here may import anything of this project.
"""

import json
import random

COLOURS = ["blue", "red", "green", "black", "white", "grey", "pink", "gold"]
STATUSES = ["pending", "shipped", "lost"]  # an order in one of these may not be returned
RETURNABLE = "delivered"
ORDINALS = {"first": 0, "second": 1, "last": -1}  # how a customer names an order by its place in the list, oldest order first
ORDER_IDS = [letter + digit for letter in "ABCDEFGHIJ" for digit in "0123456789"]

SYSTEM = "You help customers with orders. Check an order before you return it. Only delivered orders may be returned, else tell the status."


def _tool(name, description, **properties):
    parameters = {key: {"type": "string", "description": text} for key, text in properties.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": parameters, "required": list(parameters)},
        },
    }


TOOLS = [
    _tool("list_orders", "All orders of the customer, oldest first, one a line: colour, item, order id."),
    _tool("check_order", "The status of an order.", order_id="The order id."),
    _tool("cancel_order", "Cancels an order.", order_id="The order id."),
    _tool("return_order", "Returns an order.", order_id="The order id."),
    _tool("set_address", "Changes where an order goes.", order_id="The order id.", zip="The new zip code, five digits."),
]
READS = {"list_orders", "check_order"}


def make_task(seed, knobs):
    """The orders and the requests of one seed.

    `draw` names the stressors: "lookup" (an order is named by its place in the list, not by its id), "multi" (two requests),
    "precondition" (a return, which the policy allows for delivered orders only), "precision" (a zip code to copy).
    """
    rng = random.Random(seed)
    stressors = draw(rng, knobs)
    count = int(knobs["records"])
    items = rng.sample(NOUNS, count)
    orders = {}
    for item, order_id in zip(items, rng.sample(ORDER_IDS, count), strict=True):
        orders[order_id] = {
            "colour": rng.choice(COLOURS),
            "item": item,
            "status": rng.choice(STATUSES + [RETURNABLE]),
            "zip": _zip(rng),
        }
    kinds = ["cancel", "cancel"] if "multi" in stressors else ["cancel"]
    if "precondition" in stressors:
        kinds[-1] = "return"
    if "precision" in stressors:
        kinds[rng.randrange(len(kinds) - (kinds[-1] == "return"))] = "zip"
    described = rng.randrange(len(kinds)) if "lookup" in stressors else None
    ids = list(orders)
    ordinal = rng.choice(list(ORDINALS))
    chosen = rng.sample(ids, len(kinds))
    if described is not None:
        meant = ids[ORDINALS[ordinal]]
        chosen = rng.sample([order_id for order_id in ids if order_id != meant], len(kinds))
        chosen[described] = meant
    requests = []
    for index, (kind, order_id) in enumerate(zip(kinds, chosen, strict=True)):
        request = {"kind": kind, "order_id": order_id, "ordinal": ordinal if index == described else None}
        if kind == "zip":
            request["zip"] = _zip(rng)
        if kind == "return":
            orders[order_id]["status"] = RETURNABLE if rng.random() < knobs["returnable"] else rng.choice(STATUSES)
        requests.append(request)
    return {"orders": orders, "requests": requests, "stressors": sorted(stressors)}


def _zip(rng):
    """Five digits, neighbours different, so that a swap of two neighbours is always another zip code."""
    digits = [rng.randrange(10)]
    while len(digits) < 5:
        digits.append(rng.choice([d for d in range(10) if d != digits[-1]]))
    return "".join(map(str, digits))


def say(task):
    """The customer's only message."""
    parts = []
    for request in task["requests"]:
        name = f"the {request['ordinal']} order" if request["ordinal"] else f"order {request['order_id']}"
        parts.append(f"send {name} to {request['zip']}" if request["kind"] == "zip" else f"{request['kind']} {name}")
    return " then ".join(parts) + " please."


def expected_actions(task):
    """What the policy asks for, in order: the check before a return, and the writes that are allowed."""
    actions = []
    for request in task["requests"]:
        target = {"order_id": request["order_id"]}
        if request["kind"] == "cancel":
            actions.append({"name": "cancel_order", "arguments": target})
        elif request["kind"] == "zip":
            actions.append({"name": "set_address", "arguments": {**target, "zip": request["zip"]}})
        else:
            actions.append({"name": "check_order", "arguments": target})
            if task["orders"][request["order_id"]]["status"] == RETURNABLE:
                actions.append({"name": "return_order", "arguments": target})
    return actions


def refusals(task):
    """(order id, status) of every return that the policy forbids: what the customer must be told."""
    pairs = [(r["order_id"], task["orders"][r["order_id"]]["status"]) for r in task["requests"] if r["kind"] == "return"]
    return [(order_id, status) for order_id, status in pairs if status != RETURNABLE]


def run_tool(orders, name, arguments):
    """Applies one call to the orders and gives the result; a bad call gives a text that begins with "Error" and changes nothing."""
    schema = next((t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == name), None)
    if schema is None:
        return "Error: no such tool"
    if sorted(arguments) != sorted(schema["required"]) or not all(isinstance(v, str) for v in arguments.values()):
        return "Error: wrong arguments"
    if name == "list_orders":
        return "\n".join(f"{o['colour']} {o['item']} {order_id}" for order_id, o in orders.items())
    order = orders.get(arguments["order_id"])
    if order is None:
        return "Error: no such order"
    if name == "check_order":
        return order["status"]
    if name == "set_address":
        if len(arguments["zip"]) != 5 or not (arguments["zip"].isascii() and arguments["zip"].isdigit()):
            return "Error: bad zip"
        order["zip"] = arguments["zip"]
    else:
        status = "cancelled" if name == "cancel_order" else "returned"
        if order["status"] == status:
            return "Error: already " + status
        order["status"] = status
    return "ok"


class Environment:
    """One episode."""

    def reset(self, seed, knobs):
        self.task = make_task(seed, knobs)
        self.orders = json.loads(json.dumps(self.task["orders"]))
        self.log = []  # calls and texts, in order
        self.ended = False
        return {"system": SYSTEM, "messages": [{"role": "user", "content": say(self.task)}]}

    def call(self, name, arguments):
        result = run_tool(self.orders, name, arguments)
        self.log.append({"name": name, "arguments": arguments, "error": result.startswith("Error")})
        return result

    def respond(self, text):
        self.log.append({"text": text})
        self.ended = True

    def done(self):
        return self.ended

    def score(self):
        wanted = json.loads(json.dumps(self.task["orders"]))
        checks = {}
        for index, action in enumerate(expected_actions(self.task)):
            run_tool(wanted, action["name"], action["arguments"])
            match, nearest = None, None
            for position, entry in enumerate(self.log):
                if entry.get("name") == action["name"]:
                    nearest = position
                    if entry["arguments"] == action["arguments"] and not entry["error"]:
                        match = position
                        break
            position = nearest if match is None else match
            actual = None if position is None else {key: self.log[position][key] for key in ("name", "arguments")}
            kind = "read" if action["name"] in READS else "write"
            checks[f"action:{index}"] = {
                "passed": match is not None,
                "expected": {**action, "kind": kind},
                "actual": actual,
                "call": position,
            }
        wrong = {key: self.orders[key] for key in wanted if self.orders[key] != wanted[key]}
        checks["db"] = {"passed": not wrong, "expected": {key: wanted[key] for key in wrong}, "actual": wrong, "call": None}
        for index, (order_id, status) in enumerate(refusals(self.task)):
            said = [i for i, e in enumerate(self.log) if "text" in e and order_id in e["text"] and status in e["text"]]
            checks[f"communicate:{index}"] = {
                "passed": bool(said),
                "expected": f"{order_id} {status}",
                "actual": None if not said else self.log[said[0]]["text"],
                "call": said[0] if said else None,
            }
        return {"reward": grade(checks), "checks": checks}


def oracle(seed, knobs):
    """The calls and the closing text of an agent that follows the policy."""
    task = make_task(seed, knobs)
    actions = [{"name": "list_orders", "arguments": {}}] if any(r["ordinal"] for r in task["requests"]) else []
    actions += expected_actions(task)
    told = [f"cannot return {order_id} it is {status}." for order_id, status in refusals(task)]
    return actions + [{"text": " ".join(told) or "all done."}]


def hint(seed, knobs):
    """Guidance that names no order and no value."""
    return HINT
