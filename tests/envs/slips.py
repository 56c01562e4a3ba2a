"""How an agent without the capability slips in the environments of the library: where it decides, and what it does instead.

Each function takes (task, the rest of the script, random numbers) and gives the rest that is played instead, or None where there is nothing
to decide. Code of a package is ours, so it may run here.
"""

import copy
import functools
import random
import re

from envs import Package
from envs.probes import Action
from tests.envs.ladder import Slip

DONE = [{"text": "Everything is done."}]


def names(package: Package) -> dict:
    """The names that a package's code defines."""
    found = {}
    exec(compile(package.source, package.name, "exec"), found)
    return found


def slip_of(package: Package) -> Slip:
    world, knobs = names(package), package.resolve_knobs()
    slip = SLIPS[package.capability]
    task_of = functools.cache(lambda seed: {**world["make_task"](seed, knobs), "writes": world["WRITES"]})

    def slip_of_seed(seed: int, rest: list[Action], rng: random.Random) -> list[Action] | None:
        return slip(task_of(seed), rest, rng)

    return slip_of_seed


def takes_another_record(task: dict, rest: list[Action], rng: random.Random) -> list[Action] | None:
    """Changes a record that is like the one that was meant, or pays with something else."""
    if rest[0].get("name") not in task["writes"]:
        return None
    action, db = copy.deepcopy(rest[0]), task["db"]
    arguments = action["arguments"]
    if "new_item_ids" in arguments:
        meant = arguments["new_item_ids"][0]
        variants = next(product["variants"] for product in db["products"].values() if meant in product["variants"])
        others = [key for key, variant in variants.items() if variant["available"] and key not in (meant, arguments["item_ids"][0])]
        arguments["new_item_ids"][0] = rng.choice(others or [arguments["item_ids"][0]])
    else:
        meant = arguments["reservation_id"]
        user = db["users"][db["reservations"][meant]["user_id"]]
        arguments["reservation_id"] = rng.choice([identifier for identifier in user["reservations"] if identifier != meant])
    return [action, *rest[1:]]


def stops_after_one(task: dict, rest: list[Action], rng: random.Random) -> list[Action] | None:
    """Ends once a first change is made."""
    open_writes = [action for action in rest if action.get("name") in task["writes"]]
    asked = [action for action in task["actions"] if action["name"] in task["writes"]]
    return DONE if rest[0] in open_writes and len(open_writes) < len(asked) else None


def acts_without_looking(task: dict, rest: list[Action], rng: random.Random) -> list[Action] | None:
    """Makes the change at once instead of reading the record."""
    looks = [action for action in task["actions"] if action["name"] not in task["writes"]]
    if rest[0] not in looks:
        return None
    return [task["asked"][looks.index(rest[0])], *(rest[1:] if rest[1] in looks else DONE)]


def miscopies(task: dict, rest: list[Action], rng: random.Random) -> list[Action] | None:
    """Swaps two neighbours in a value, adds one to a number, or leaves out the last of a list."""
    if rest[0].get("name") not in task["writes"]:
        return None
    action = copy.deepcopy(rest[0])
    places = list(_places(action["arguments"]))
    holder, key = rng.choice(places)
    value = holder[key]
    if isinstance(value, int):
        holder[key] = value + 1
    elif isinstance(value, list):
        holder[key] = value[:-1]
    else:
        at = [place for place in range(len(value) - 1) if value[place] != value[place + 1]]
        place = rng.choice(at)
        holder[key] = value[:place] + value[place + 1] + value[place] + value[place + 2 :]
    return [action, *rest[1:]]


def _places(value):
    """Where there is something to miscopy: (the dictionary or list, the key or index)."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, list | dict):
            yield from _places(inner)
        if isinstance(inner, list) or (not isinstance(inner, dict) and len(set(str(inner))) > 1) or isinstance(inner, int):
            yield value, key


def gives_up(task: dict, rest: list[Action], rng: random.Random) -> list[Action] | None:
    """Takes the error for an answer instead of changing the setting."""
    return [{"text": "I am sorry, this is not possible now."}] if rest[0].get("name", "").startswith("set_") else None


def makes_it_up(task: dict, rest: list[Action], rng: random.Random) -> list[Action] | None:
    """Invents the number or the id that it has not got, instead of searching for it or saying that it is missing."""
    missing = rest[0] == task["script"][-1] and task["told"]
    if rest[0].get("name") != "search_contacts" and not missing:
        return None
    number = "+1" + "".join(rng.choices("0123456789", k=10))
    if found := re.search(r"Send a message to .+ saying: (.+)", task["request"]):
        call = ("send_message_with_phone_number", {"phone_number": number, "content": found[1]})
    elif found := re.search(r"Save (.+) among my contacts", task["request"]):
        call = ("add_contact", {"name": found[1], "phone_number": number})
    else:
        number = re.search(r"at (\+\d+)", task["request"])[1]
        call = ("modify_contact", {"person_id": rng.choice(list(task["db"]["contacts"])), "phone_number": number})
    return [{"name": call[0], "arguments": call[1]}, *DONE]


SLIPS = {
    "structured_data_reasoning": takes_another_record,
    "multi_step_task_completion": stops_after_one,
    "precondition_verification": acts_without_looking,
    "tool_calling_precision": miscopies,
    "state_dependency": gives_up,
    "insufficient_information": makes_it_up,
}
