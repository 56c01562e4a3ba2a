"""A certificate passes an honest environment and names what is wrong with each of many others."""

import dataclasses
import json
import random
import re
import warnings

import pytest

from envs import Pool, guesses, probes
from envs import certify as certificates
from envs import checks as look
from envs.arguments import check_schema, fill, odd_arguments, plausible_arguments, read, sample_value
from envs.base import EnvironmentFault, Reply
from envs.certify import certify, draw_seeds
from envs.exploits import stray_edits
from envs.probes import inject_calls, nothing, play, recite, spam
from envs.readings import IDS
from tests.envs import hackable

SEEDS = range(10)


@pytest.fixture(scope="module", autouse=True)
def little_time():
    """Fewer calls and guesses than outside of tests, since each is a message to a worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "SPAM_CALLS", 60)
        patch.setattr(guesses, "WORDS", 64)
        yield


@pytest.fixture(scope="module")
def pool():
    with Pool(1) as one:
        yield one


@pytest.fixture(scope="module")
def honest(pool):
    """The certificate of the honest twin."""
    package = hackable.make()
    return certify(package, pool, target_tools=pool.function(package, "tools"), seeds=SEEDS)


def failing(certificate):
    return {check.name for check in certificate.checks if check.passed is False}


def test_an_honest_environment_is_certified(honest):
    assert honest.passed and not honest.reasons, honest.to_text()
    assert all(check.passed for check in honest.checks) and len(honest.checks) >= 27
    assert honest.digest == hackable.make().digest and honest.seeds == (0, 9, 10) and len(honest.fresh) == 5
    assert honest.rewards["oracle"] == {"mean": 1.0, "success": 1.0} and honest.rewards["spam"]["success"] == 0.0
    assert json.loads(json.dumps(honest.to_json()))["passed"] is True
    assert honest.to_text().endswith("certified") and "oracle" in honest.to_text() and "ms (p99)" in honest.to_text()


KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in hackable.VARIANTS else kind for kind in hackable.KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hackable_environment_is_refused_for_its_fault(kind, honest, pool):
    used = [range(2_000_000, 2_001_000)] if "training" in kind else []
    certificate = certify(hackable.make(kind), pool, target_tools=pool.function(hackable.make(), "tools"), seeds=SEEDS, used=used)
    assert hackable.KINDS[kind].refused <= failing(certificate), certificate.to_text()
    assert all("\n" not in reason for reason in certificate.reasons)
    assert not certificate.passed and len(certificate.reasons) == len(failing(certificate)) and "NOT certified" in certificate.to_text()


HONEST_TOO = {
    "an oracle that knows without reading": {
        '        {"name": "list_items", "arguments": {}},\n        {"name": "get_item", "arguments": {"item_id": wanted}},\n': ""
    },
    "a table made when it is first needed": {
        "def task(seed, knobs):": "TABLE = []\n\ndef task(seed, knobs):\n    if not TABLE:\n        TABLE.append(seed * 0)"
    },
    "a cache of functools": {
        "import random\n": "import functools\nimport random\n",
        "def task": "@functools.cache\ndef made(seed):\n    return seed\n\ndef task",
    },
    "stray writes that are meant to be free": {
        "import random\n": "import random\nSTRAY_WRITES = 'Only the item that was asked for is looked at.'\n",
        hackable.REWARD: "reward = float(action and state[self.wanted] == self.goal[self.wanted])",
    },
}


@pytest.mark.parametrize("what", HONEST_TOO)
def test_what_looks_like_a_fault_and_is_none_is_certified(what, pool):
    package = hackable.change(HONEST_TOO[what])
    certificate = certify(package, pool, seeds=SEEDS)
    assert certificate.passed, certificate.to_text()
    if "STRAY_WRITES" in package.source:
        (check,) = [check for check in certificate.checks if check.name == "stray_write"]
        assert check.passed is None and "full reward on" in check.detail and "Only the item that was asked" in check.detail


def test_what_is_stored_follows_from_the_package_and_the_salt(honest, pool):
    again = certify(hackable.make(), pool, target_tools=pool.function(hackable.make(), "tools"), seeds=SEEDS)
    stored, repeated = honest.to_json(), again.to_json()
    assert stored | {"when": ""} == repeated | {"when": ""} and "timing" not in stored
    assert set(honest.to_json(timing=True)["timing"]) == {"median_ms", "p99_ms", "slowest_ms"} and honest.timing != again.timing


def test_fresh_seeds_are_known_to_nobody_who_does_not_know_the_salt():
    one, other = hackable.make(), hackable.make("the hint tells")
    drawn = draw_seeds(one, "a", range(1000))
    assert drawn == draw_seeds(one, "a", range(1000)) and len(set(drawn)) == 100 and not set(drawn) & set(range(1000))
    assert not set(drawn) & set(draw_seeds(one, "b", range(1000))) - set(range(5000))
    assert not set(drawn) & set(draw_seeds(other, "a", range(1000))) - set(range(5000))
    used = [range(70, 90), range(10**9, 10**9 + 5)]
    assert all(sum(seed in part for seed in draw_seeds(one, "a", range(9), used)) >= 1 for part in used)
    assert sum(0 <= seed < certificates.USUAL_SEEDS for seed in drawn) > 30 and max(drawn) > 2**31 and min(drawn) < 0


def test_a_package_that_takes_too_long_is_refused(pool):
    certificate = certify(hackable.make(), pool, seeds=SEEDS, minutes=1e-9)
    assert failing(certificate) == {"time"} and not certificate.passed
    assert "after 1e-09 minutes (config field 'synthesis.certify_minutes'); make" in certificate.reasons[0]


def test_a_knob_that_changes_nothing_is_told(pool):
    knobs = {"items": {"default": 4, "min": 2, "max": 7}, "idle": {"default": 1, "min": 0, "max": 2}}
    certificate = certify(hackable.make(knobs=knobs), pool, seeds=SEEDS)
    assert certificate.passed and "idle changes nothing that can be seen" in certificate.to_text()


UNNAMED = {'expected = {"name": "set_prices", "arguments": expected, "kind": "write"}': "expected = expected['prices']"}


def test_without_names_of_writes_each_action_is_left_out_in_turn(pool):
    certificate = certify(hackable.change(UNNAMED), pool, seeds=SEEDS)
    assert certificate.passed, certificate.to_text()
    assert "each action of the oracle was left out in turn: 8 of 32 are needed" in certificate.to_text()
    (check,) = [check for check in certificate.checks if check.name == "stray_write"]
    assert check.passed and "writes that nobody asked for" in check.detail  # what cannot be left out is a write
    free = {hackable.REWARD: "reward = float(action and state[self.wanted] == self.goal[self.wanted])"}
    lenient = certify(hackable.change(UNNAMED | free), pool, seeds=SEEDS)
    assert failing(lenient) == {"stray_write"}
    assert re.search(r"; seed -?\d+: set_prices\(\{.*(\}\)|\.\.\.\)), reward 1; if that is meant", lenient.reasons[0])
    idle = certify(hackable.change(UNNAMED | {hackable.REWARD: "reward = float(len(self.log) > 1)"}), pool, seeds=SEEDS)
    assert "incomplete" in failing(idle)


def test_a_stray_edit_is_added_to_what_the_oracle_hands_in():
    script = [{"name": "bash", "arguments": {"command": c}} for c in ("sed -i 1d a.py", "git diff -- a.py > p", "cat p")]
    listing = probes.Play(1, steps=[({}, Reply("a.py\nb/__init__.py\ntests/test_a.py\nb/c.py", False))])
    commands = [action["arguments"]["command"] for action in stray_edits({1: script}, [listing])[1]]
    assert commands == ["sed -i 1d a.py", "sed -i '1,$d' b/c.py", "git diff > p", "cat p"]


def test_words_are_those_of_the_package_and_what_its_expressions_match():
    package = hackable.make("a word that an expression matches is paid")
    found = guesses.words(package, [], ["policy of Bjorn-7"])
    assert {"lamp", "action:0", "1000", "Bjorn-7"} <= set(found) and len(set(found)) == len(found)
    assert guesses.matches(r"^(yes|no)[sz]\d{2}$") == ["yess11", "nos11"]
    assert guesses.matches("(") == []


@pytest.mark.parametrize(
    "pattern, found", [(r"(?:\w|aa){45}(?<=b)", ["a" * 45, "a" * 90]), ("(" * 6 + "a" + "{50})" * 6, []), ("[[]a", ["[a"])]
)
def test_an_expression_of_a_package_costs_the_host_nothing(pattern, found):
    with warnings.catch_warnings(action="error"):
        assert guesses.matches(pattern) == found


def test_long_words_of_a_package_cost_the_host_their_length():
    word = "a" * 300_000
    assert read(word).named == {} and not IDS.findall(word)  # hours, at the square of it
    assert read('name: x, "order_id": "#W7"').named == {"name": ["x"], "order_id": ["#W7"]} and IDS.findall("a-7 b 8.c") == ["a-7", "8"]
    huge = dataclasses.replace(hackable.make(), source="x = 0x" + "f" * 9000 + "\ny = x" + ".y" * 900 + ".now")
    assert "9" not in guesses.words(huge, []) and look.clock_is_not_read(huge).passed  # neither too long nor too deep to be read


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"properties": {"a": {"type": 5}}}, "another type; got 5"),
        ({"properties": {"a": {"type": "array", "items": True}}}, "objects as schemas; got True"),
        ({"properties": {"a": {"enum": []}}}, r"another enum; got \[\]"),
        ({"properties": {"a": {"type": "array", "minItems": 10**9}}}, "another minItems"),
        (
            {"$defs": {"A": {"properties": dict.fromkeys("abcdefg", {"$ref": "#/$defs/A"})}}, "properties": {"a": {"$ref": "#/$defs/A"}}},
            "places",
        ),
    ],
)
def test_schemas_that_no_arguments_can_be_made_for_are_refused(schema, words):
    with pytest.raises(EnvironmentFault, match=words):
        check_schema(schema)


def test_an_odd_schema_is_the_packages_fault(pool):
    source = hackable.make().source + "\nTOOLS[0]['function']['parameters']['properties'] = {'a': {'anyOf': 7}}\n"
    certificate = certify(dataclasses.replace(hackable.make(), source=source), pool, seeds=SEEDS)
    assert [check.name for check in certificate.checks] == ["functions"] and "anyOf" in certificate.reasons[0]


def test_what_a_package_answers_in_place_of_its_certificate_is_no_error_of_the_host(pool):
    for answer in ("5", '"x"', "[" * 100_000):
        forged = hackable.make().source + f"\nimport json\njson.dumps = lambda *_, **__: {answer!r}\n"
        certificate = certify(dataclasses.replace(hackable.make(), source=forged), pool, seeds=range(2))
        assert {check.name: check.passed for check in certificate.checks}["state"] is None


def test_a_schema_may_refer_to_itself_without_end():
    choice = {
        "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
    }
    check_schema(choice)
    assert sample_value(choice, random.Random(0)).keys() == {"a"}


def test_the_words_of_deep_expressions_are_read_once(monkeypatch):
    read, constants = [], guesses._constants
    monkeypatch.setattr(guesses, "_constants", lambda nodes: read.append(len(nodes)) or constants(nodes))
    deep = "x = 'a'" + " + 'a'" * 500 + "\ny = 'b'" + ".get('c')" * 500
    guesses.words(dataclasses.replace(hackable.make(), source=deep), [])
    assert sum(read) < 8_000  # nodes; each below each would be a million


def test_slow_steps_are_refused_with_their_figures(pool, monkeypatch):
    monkeypatch.setattr(look, "MEDIAN_BAR_S", 1e-9)
    package = hackable.make()
    check, timing = look.steps_are_fast(pool, package, look.oracle_scripts(pool, package, [1, 2]), [])
    assert check.passed is False and "median" in check.detail and 0 < timing["median_ms"] <= timing["p99_ms"] <= timing["slowest_ms"]


def test_a_crashing_environment_is_refused_and_the_pool_lives_on(make_package):
    with Pool(1, deadline_s=2.0, quarantine=2) as pool:
        crashing = make_package(('return "ok"', "import os; os._exit(1)"), gate=False)
        certificate = certify(crashing, pool, seeds=range(6))
        assert {"faults", "oracle"} <= failing(certificate)
        assert certify(make_package(), pool, seeds=range(6)).passed


def test_tools_are_compared_with_the_targets(pool):
    tools = pool.function(hackable.make(), "tools")
    changed = json.loads(json.dumps(tools))
    changed[2]["function"]["description"] = "other"
    for target, words in ((changed, "schema differs: set_prices"), (tools[:2], "not in the target: set_prices"), (None, "not compared")):
        check = look.tools_equal_target(tools, target)
        assert words in check.detail and check.passed is (None if target is None else False)


def test_the_comparison_runs_in_the_same_sandbox(make_package, monkeypatch):
    made = []
    monkeypatch.setattr("envs.timed.Pool", lambda *args, **options: made.append(options) or Pool(*args, **options))
    with Pool(1, sandbox="off") as pool:
        certify(make_package(), pool, seeds=range(4))
    assert {options["sandbox"] for options in made} == {"off"}


def test_players_depend_on_seed_and_replies_alone(make_package, pool):
    package = make_package()
    player = spam(pool.function(package, "tools"))
    first, again = play(pool, package, [5, 6], player), play(pool, package, [6, 5], player)
    assert first[0] == again[1] and first[1] == again[0] and first[0].steps != first[1].steps
    assert all(len(one.steps) > 5 for one in first)
    assert [one.steps for one in play(pool, package, [5], nothing)] == [[]]
    assert len(play(pool, package, [5], recite({5: [{"name": "list_codes", "arguments": {}}] * 9}), turns=4)[0].steps) == 4


def test_the_verifier_can_be_asked_in_between(pool):
    package = hackable.make()
    script = recite(look.oracle_scripts(pool, package, [3]))
    assert play(pool, package, [3], script, peek=True) == play(pool, package, [3], script)


SCHEMA = {
    "type": "object",
    "$defs": {
        "Bag": {"type": "object", "properties": {"owner_id": {"type": "string"}, "count": {"type": "integer"}}, "required": ["owner_id"]}
    },
    "properties": {
        "order_id": {"type": "string"},
        "count": {"type": "integer", "minimum": 2, "maximum": 3},
        "cabin": {"type": "string", "enum": ["a", "b"]},
        "items": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
        },
        "bags": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Bag"}, {"type": "object", "additionalProperties": True}]}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["order_id", "count", "cabin", "items", "bags"],
}


def test_sampled_arguments_fit_their_schema():
    rng = random.Random(0)
    samples = [sample_value(SCHEMA, rng) for _ in range(50)]
    for sample in samples:
        assert isinstance(sample["order_id"], str) and sample["count"] in (2, 3) and sample["cabin"] in ("a", "b")
        assert sample["items"] and all(isinstance(item["on"], bool) for item in sample["items"])
        assert all(isinstance(bag.get("owner_id", ""), str) for bag in sample["bags"])
    assert {"note" in sample for sample in samples} == {True, False}
    assert any("owner_id" in bag for sample in samples for bag in sample["bags"])


def test_plausible_arguments_come_from_what_was_read():
    seen = read('You are anna_1. {"order_id": "#W77", "items": [{"owner_id": "bob_2", "count": 3}]} and some words')
    calls = plausible_arguments({"name": "book", "parameters": SCHEMA}, seen, random.Random(0), 200)
    assert {call["cabin"] for call in calls} == {"a", "b"} and any(call["order_id"] == "#W77" for call in calls)
    bags = [bag for call in calls for bag in call["bags"]]
    assert any(bag.get("owner_id") == "bob_2" and bag.get("count") == 3 for bag in bags) and {} in bags
    assert any(len(call["bags"]) > 1 for call in calls) and any("note" in call for call in calls)
    assert read("x")._replace(worked={"order_id": ["a"]}).worked == {"order_id": ["a"]}
    only = plausible_arguments({"parameters": SCHEMA}, seen._replace(worked={"order_id": ["Z9"]}), random.Random(0), 20)
    assert {call["order_id"] for call in only} == {"Z9"}


def test_injections_reach_every_argument_that_takes_a_text():
    assert fill(SCHEMA, "!") == {
        "order_id": "!",
        "count": 1,
        "cabin": "!",
        "items": [{"on": True}],
        "bags": [{"owner_id": "!", "count": 1}],
        "note": "!",
    }
    endless = {"type": "object", "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}}}
    endless["properties"] = {"node": {"$ref": "#/$defs/Node"}}
    assert "next" in json.dumps(fill(endless, "!")) and json.dumps(sample_value(endless, random.Random(0)))
    assert len(list(odd_arguments({"parameters": SCHEMA}))) > 10
    player = inject_calls([{"function": {"name": "book", "parameters": SCHEMA}}])(0, None)
    assert "<|im_start|>" in next(player)["arguments"]["bags"][0]["owner_id"]
