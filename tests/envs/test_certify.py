"""A certificate passes an honest environment and names what is wrong with each of many others."""

import json
import random

import pytest

from envs import Pool
from envs.certify import certify
from envs.probes import nothing, play, recite, sample_value, spam

SEEDS = range(20)


@pytest.fixture(scope="module")
def pool():
    with Pool(1) as one:
        yield one


def failing(certificate):
    return {check.name for check in certificate.checks if check.passed is False}


def test_an_honest_environment_is_certified(make_package, pool):
    package = make_package()
    certificate = certify(package, pool, target_tools=pool.function(package, "tools"), seeds=SEEDS)
    assert certificate.passed and not certificate.reasons, certificate.to_text()
    assert all(check.passed for check in certificate.checks) and len(certificate.checks) >= 15
    assert certificate.digest == package.digest and certificate.seeds == (0, 19, 20)
    assert certificate.rewards["oracle"] == {"mean": 1.0, "success": 1.0} and certificate.rewards["spam"]["mean"] == 0.0
    assert json.loads(json.dumps(certificate.to_json()))["passed"] is True
    assert certificate.to_text().endswith("certified") and "oracle" in certificate.to_text()


SEED_OF_TASK = "rng = random.Random(seed)"
VERDICT = "passed = self.over and writes == [wanted]"
WRONG = {
    "any write pays": ([(VERDICT, "passed = self.over and len(writes) > 0")], {}, {"random", "spam"}),
    "the right write among many pays": ([(VERDICT, "passed = self.over and wanted in writes")], {}, {"spam"}),
    "no wrong write pays": ([(VERDICT, "passed = all(write == wanted for write in writes)")], {}, {"nothing", "empty", "say_done", "echo"}),
    "talking pays": ([(VERDICT, "passed = any(self.wanted in str(entry[1]) for entry in self.log)")], {}, {"echo"}),
    "closing words pay": ([(VERDICT, "passed = [None, 'All done.'] in self.log or writes == [wanted]")], {}, {"say_done"}),
    "one answer for all seeds": ([(SEED_OF_TASK, "rng = random.Random(0)")], {}, {"seeds_differ", "memorised"}),
    "the oracle errs": ([('"code": codes[wanted]', '"code": min(codes.values())')], {}, {"oracle"}),
    "the oracle forgets a knob": (
        [("codes, wanted = task(seed, knobs)", "codes, wanted = task(seed, {'digits': 4})")],
        {},
        {"oracle_knobs"},
    ),
    "the step limit is too small": ([], {"max_turns": 2}, {"step_limit"}),
    "the hint tells": ([('return "Look', 'return f"It is {task(seed, knobs)[0][task(seed, knobs)[1]]}. Look')], {}, {"hint"}),
    "the prompt tells": ([('f"the {self.wanted}"', 'f"write_code {self.codes[self.wanted]}, the {self.wanted}"')], {}, {"prompt"}),
    "the order of a set decides": ([("return {item: str(code)", "items = list(set(items))\n    return {item: str(code)")], {}, {"repeats"}),
    "episodes share state": (
        [("import random\n", "import random\nCOUNT = [0]\n"), ("self.over = True", "self.over = True; COUNT[0] += 1; return str(COUNT)")],
        {},
        {"repeats"},
    ),
    "the verdict changes": (
        [("self.log, self.over = [], False", "self.log, self.over, self.asked = [], False, 0")]
        + [(VERDICT, "self.asked += 1; passed = self.asked < 3 and self.over and writes == [wanted]")],
        {},
        {"verifier"},
    ),
    "a tool raises": ([('return "Error: bad call"', "raise KeyError(name)"), ('!= "write_code"', '!= "write"')], {}, {"faults", "oracle"}),
    "the reward is too high": ([("float(passed)", "2.0 * passed")], {}, {"faults", "oracle"}),
    "the reset fails": ([("self.codes, self.wanted = task(seed, knobs)", "raise ValueError('no')")], {}, {"faults", "oracle", "spam"}),
    "the oracle raises": ([('return [{"name"', 'raise RuntimeError; return [{"name"')], {}, {"functions"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_environment_is_refused_for_its_fault(what, make_package, pool):
    replacements, meta, expected = WRONG[what]
    certificate = certify(make_package(*replacements, **meta), pool, seeds=SEEDS)
    assert expected <= failing(certificate), certificate.to_text()
    assert all("\n" not in reason for reason in certificate.reasons)
    assert not certificate.passed and len(certificate.reasons) == len(failing(certificate)) and "NOT certified" in certificate.to_text()


def test_a_crashing_environment_is_refused_and_the_pool_lives_on(make_package):
    with Pool(1, deadline_s=2.0, quarantine=2) as pool:
        crashing = make_package(('return "ok"', "import os; os._exit(1)"), gate=False)
        certificate = certify(crashing, pool, seeds=range(6))
        assert {"faults", "oracle"} <= failing(certificate)
        assert certify(make_package(), pool, seeds=range(6)).passed


def test_tools_are_compared_with_the_targets(make_package, pool):
    package = make_package()
    tools = pool.function(package, "tools")
    changed = json.loads(json.dumps(tools))
    changed[1]["function"]["description"] = "other"
    for target, words in ((changed, "schema differs: write_code"), (tools[:1], "not in the target: write_code"), (None, "not compared")):
        check = next(c for c in certify(package, pool, target_tools=target, seeds=range(4)).checks if c.name == "tools")
        assert words in check.detail and check.passed is (None if target is None else False)


def test_the_comparison_runs_in_the_same_sandbox(make_package, monkeypatch):
    made = []
    monkeypatch.setattr("envs.certify.Pool", lambda *args, **options: made.append(options) or Pool(*args, **options))
    with Pool(1, sandbox="off") as pool:
        certify(make_package(), pool, seeds=range(4))
    assert [options["sandbox"] for options in made] == ["off"]


def test_players_depend_on_seed_and_replies_alone(make_package, pool):
    package = make_package()
    player = spam(pool.function(package, "tools"))
    first, again = play(pool, package, [5, 6], player), play(pool, package, [6, 5], player)
    assert first[0] == again[1] and first[1] == again[0] and first[0].steps != first[1].steps
    assert all(len(one.steps) > 5 for one in first)
    assert [one.steps for one in play(pool, package, [5], nothing)] == [[]]
    assert len(play(pool, package, [5], recite({5: [{"name": "list_codes", "arguments": {}}] * 9}), turns=4)[0].steps) == 4


def test_sampled_arguments_fit_their_schema():
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "count": {"type": "integer", "minimum": 2, "maximum": 3},
            "cabin": {"type": "string", "enum": ["a", "b"]},
            "items": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
            },
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["id", "count", "cabin", "items"],
    }
    rng = random.Random(0)
    samples = [sample_value(schema, rng) for _ in range(50)]
    for sample in samples:
        assert isinstance(sample["id"], str) and sample["count"] in (2, 3) and sample["cabin"] in ("a", "b")
        assert sample["items"] and all(isinstance(item["on"], bool) for item in sample["items"])
    assert {"note" in sample for sample in samples} == {True, False}
