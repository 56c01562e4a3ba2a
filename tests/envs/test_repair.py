"""Code-repair worlds: every seed is sound, cheats earn little, the verdict has its levels, skill is worth something."""

import ast
import collections
import json

import pytest

from envs import Pool
from envs.builtin import target_tools
from envs.certify import certify
from envs.probes import play, recite
from tests.envs import repair
from tests.envs.ladder import Ladder

SMALL = {"modules": 2, "blocks": 6}


@pytest.fixture(scope="module")
def pool():
    with Pool(1, sandbox="best_effort", deadline_s=60.0) as made:
        yield made


def scores(pool, capability, seeds, script_of, knobs=None):
    package = repair.load(capability)[0]
    plays = play(pool, package, seeds, recite({seed: script_of(seed) for seed in seeds}), knobs=knobs)
    assert [one.fault for one in plays] == [None] * len(plays)
    return [one.scores[0] for one in plays]


def check_soundness(pool, capability, seeds, knobs):
    """The target fails before and passes after the oracle's edit, nothing else changes, and the decoy does not do."""
    package, names = repair.load(capability)
    full = package.resolve_knobs(knobs)
    tasks = {seed: repair.task_of(capability, seed, **(knobs or {})) for seed in seeds}
    for task in tasks.values():
        assert len(task["visible"]) >= 10 and len(task["variants"]) >= 3
    for score in scores(pool, capability, seeds, lambda seed: names["oracle"](seed, full), knobs):
        assert score.reward == 1.0 and all(check.passed for check in score.checks.values())
    for score in scores(pool, capability, seeds, lambda seed: repair.touches(tasks[seed]), knobs):
        tests = [check.passed for name, check in score.checks.items() if name.startswith("test:")]
        assert score.reward == 0.0 and not any(tests) and len(tests) >= 4 and score.checks["regression"].passed
    for score in scores(pool, capability, seeds, lambda seed: repair.DECOYS[capability](tasks[seed]), knobs):
        assert score.reward < 0.5


@pytest.mark.parametrize("capability", repair.CAPABILITIES)
def test_every_seed_is_sound(pool, capability):
    check_soundness(pool, capability, range(1), None)
    check_soundness(pool, capability, range(10, 13), SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("capability", repair.CAPABILITIES)
def test_a_thousand_seeds_are_sound(pool, capability):
    for first in range(0, 1000, 50):
        check_soundness(pool, capability, range(first, first + 50), None)


def test_visible_values_in_the_source_do_not_pass_the_variants(pool):
    seeds = [seed for seed in range(4) if not repair.task_of("deep_call_graph_traversal", seed, **SMALL)["target"]["setup"]]
    cheat = lambda seed: repair.knows_the_visible_value(repair.task_of("deep_call_graph_traversal", seed, **SMALL))  # noqa: E731
    for score in scores(pool, "deep_call_graph_traversal", seeds, cheat, SMALL):
        tests = {name: check.passed for name, check in score.checks.items() if name.startswith("test:")}
        assert sum(tests.values()) == 1 and not any(passed for name, passed in tests.items() if "variant" in name)
        assert score.reward < 0.3


def test_edits_of_tests_and_lost_code_earn_little(pool):
    for cheat in (repair.edits_tests, repair.deletes_the_function):
        script = lambda seed, cheat=cheat: cheat(repair.task_of("semantic_logic_precision", seed, **SMALL))  # noqa: E731
        assert [score.reward for score in scores(pool, "semantic_logic_precision", range(2), script, SMALL)] == [0.0, 0.0]


def test_the_verdict_has_levels(pool):
    package, names = repair.load("semantic_logic_precision")
    oracle = {seed: names["oracle"](seed, package.resolve_knobs(SMALL)) for seed in range(4)}
    path = repair.task_of("semantic_logic_precision", 1, **SMALL)["edits"][0][0]
    padding = repair.commands("for i in 1 2 3 4 5 6 7 8 9; do echo '# note' >> " + path + "; done")
    variants = {
        0: oracle[0],
        1: [*oracle[1][:2], *padding, *oracle[1][2:]],  # more lines than needed
        2: oracle[2][:-1],  # never handed in
        3: [*oracle[3][:2], *repair.commands("echo x > new.txt && git add -A && git diff --cached > patch.txt", repair.SUBMIT)],
    }
    found = scores(pool, "semantic_logic_precision", range(4), variants.get, SMALL)
    assert [score.reward for score in found] == [1.0, 0.85, 0.85, 0.85]
    assert not found[1].checks["edit_size"].passed and not found[2].checks["format"].passed
    assert "new.txt" in found[3].checks["format"].actual
    patches = [score.checks["patch"] for score in found]
    assert patches[0].actual == patches[0].expected != "" and patches[0].expected.startswith("diff --git a/")
    assert patches[1].actual.count("+# note") == 9 and [patch.actual for patch in patches[2:]] == [None, None]


@pytest.mark.parametrize("capability", ["multi_site_consistency"])
def test_the_ladder_climbs(pool, capability):
    climb(pool, capability, range(4), rollouts=1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", repair.CAPABILITIES)
def test_the_ladder_climbs_for_all(pool, capability):
    found = climb(pool, capability, range(40), rollouts=4)
    assert "ok" in {found[skill]["verdict"] for skill in (0.25, 0.5)}


def climb(pool, capability, seeds, rollouts):
    package, names = repair.load(capability)
    scripts = {seed: names["oracle"](seed, package.resolve_knobs()) for seed in seeds}
    found = Ladder(scripts, repair.slip_of(capability)).climb(pool, package, rollouts, (0.0, 0.25, 0.5, 1.0))
    rates, means = ([one[name] for one in found.values()] for name in ("success_rate", "mean_reward"))
    assert rates == sorted(rates) and means == sorted(means) and rates[0] == 0.0 and rates[-1] == means[-1] == 1.0
    return found


def test_certificate(pool):
    certificate = certify(repair.load("diff_context_precision")[0], pool, target_tools=target_tools("swebench"), seeds=range(2))
    assert certificate.passed, certificate.to_text()


@pytest.mark.slow
@pytest.mark.parametrize("capability", repair.CAPABILITIES)
def test_certificate_on_many_seeds(pool, capability):
    certificate = certify(repair.load(capability)[0], pool, target_tools=target_tools("swebench"), seeds=range(1000), minutes=240)
    assert certificate.passed, certificate.to_text()


def test_no_name_is_defined_twice():
    body = ast.parse(repair.load("semantic_logic_precision")[0].source).body
    names = collections.Counter(node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    assert max(names.values()) == 1, names.most_common(3)


def test_bash_is_the_tool_of_the_benchmark():
    schema = {"type": "object", "properties": {"command": {"type": "string", "description": "The bash command to execute"}}}
    function = {"name": "bash", "description": "Execute a bash command", "parameters": schema | {"required": ["command"]}}
    assert repair.load("multi_site_consistency")[1]["TOOLS"] == [{"type": "function", "function": function}] == target_tools("swebench")


def test_answers_have_the_form_of_the_benchmark():
    environment = repair.load("diff_context_precision")[1]["Environment"]()
    environment.reset(0, repair.load("diff_context_precision")[0].resolve_knobs(SMALL))
    assert environment.call("bash", {"command": "echo hi; false"}) == "<returncode>1</returncode>\n<output>\nhi\n</output>"
    long = environment.call("bash", {"command": "for i in 1 2 3 4; do cat README.md */*.py; done"})
    assert "<output_head>" in long and "characters elided" in long and len(long) < 11_000
    assert "Unknown tool" in environment.call("edit", {}) and "Missing 'command'" in environment.call("bash", {"command": 3})
    assert environment.respond("I think I am done.") is None and environment.done()  # the third answer in a row without a command


def test_the_same_seed_gives_the_same_task_and_others_differ():
    first, again, other = (repair.task_of("structural_refactor_awareness", seed, **SMALL) for seed in (3, 3, 4))
    repair.load("structural_refactor_awareness")[1]["_make_task"].cache_clear()
    fresh = repair.task_of("structural_refactor_awareness", 3, **SMALL)
    assert json.dumps(first) == json.dumps(fresh) and first is again and first["files"] != other["files"]
