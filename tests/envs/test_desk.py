"""The built-in target and the library of capability environments, hosted as any package is."""

import pytest

from envs import Pool
from envs.builtin import library, load_builtin
from envs.probes import at_random, play, recite, say, spam

LIBRARY = library("desk")
SEEDS = range(300)
STRESSOR = {
    "structured_data_reasoning": "lookup",
    "multi_step_task_completion": "multi",
    "precondition_verification": "precondition",
    "tool_calling_precision": "precision",
}


@pytest.fixture(scope="module")
def pool():
    with Pool(1) as pool:
        yield pool


def names(package) -> dict:
    """The package's own names: its text is ours, so it may run here."""
    found = {}
    exec(compile(package.source, package.name, "exec"), found)
    return found


def scripts(pool, package, knobs=None):
    return dict(zip(SEEDS, pool.functions(package, "oracle", [(seed, knobs) for seed in SEEDS]), strict=True))


@pytest.fixture(scope="module", params=["desk", *LIBRARY])
def package(request):
    return load_builtin(request.param)


def test_the_oracle_earns_everything(pool, package):
    for knobs in ({}, {"records": 6, "returnable": 1.0}, {"records": 3, "returnable": 0.0}):
        plays = play(pool, package, SEEDS, recite(scripts(pool, package, knobs)), knobs=knobs)
        assert {one.reward for one in plays} == {1.0}
        assert all(one.steps[-1][1].done for one in plays)


def test_doing_nothing_and_garbage_earn_nothing_in_the_target(pool):
    desk = load_builtin("desk")
    tools = pool.function(desk, "tools")

    def garbage(seed, start):
        for arguments in ({}, {"order_id": 3}, {"order_id": "A0", "zip": "123456"}, {"order_id": "ZZ"}, {"zip": "12345"}):
            for tool in ("cancel_order", "set_address", "return_order", "", "no_such_tool"):
                reply = yield {"name": tool, "arguments": arguments}
                assert reply.text.startswith("Error")
        yield {"text": "all done."}

    for player in (say("all done."), say(""), garbage):
        assert {one.reward for one in play(pool, desk, SEEDS, player)} == {0.0}
    assert sum(one.reward for one in play(pool, desk, SEEDS[:30], spam(tools))) == 0
    # a random call hits one of 100 order ids
    assert sum(one.reward for one in play(pool, desk, SEEDS, at_random(tools, 10))) <= 0.02 * len(SEEDS)


def test_another_tasks_solution_earns_nothing_in_the_target(pool):
    desk = load_builtin("desk")
    solved = scripts(pool, desk)
    others = {seed: solved[(seed + 1) % len(SEEDS)] for seed in SEEDS}
    assert sum(one.reward for one in play(pool, desk, SEEDS, recite(others))) <= 0.02 * len(SEEDS)


def test_each_stressor_shows_in_the_tasks():
    world = names(load_builtin("desk"))
    knobs = load_builtin("desk").resolve_knobs()
    seen = set()
    for seed in SEEDS:
        task = world["make_task"](seed, knobs)
        said, actions = world["say"](task), [action["name"] for action in world["expected_actions"](task)]
        stressors = set(task["stressors"])
        seen.add(frozenset(stressors))
        assert (" then " in said) == (len(task["requests"]) == 2) == ("multi" in stressors)
        assert ("return order" in said or "return the" in said) == ("check_order" in actions) == ("precondition" in stressors)
        assert any(word.isdigit() and len(word) == 5 for word in said.split()) == ("set_address" in actions) == ("precision" in stressors)
        ids = [request["order_id"] for request in task["requests"]]
        assert all(order in said for order in ids) == ("lookup" not in stressors)
        for order, status in world["refusals"](task):
            assert status != "delivered" and {"name": "return_order", "arguments": {"order_id": order}} not in world["expected_actions"](
                task
            )
    assert set(STRESSOR.values()) == set().union(*seen) and len(seen) == 13  # all the mixes, the plain task among them


@pytest.mark.parametrize("capability", LIBRARY)
def test_a_library_environment_asks_for_its_own_skill_alone(capability):
    package = load_builtin(capability)
    world = names(package)
    assert package.target == "desk" and package.capability == capability
    for seed in SEEDS[:50]:
        assert world["make_task"](seed, package.resolve_knobs())["stressors"] == [STRESSOR[capability]]


def test_the_library_has_the_tools_and_knobs_of_the_target_and_nouns_of_its_own(pool):
    desk = load_builtin("desk")
    for capability in LIBRARY:
        package = load_builtin(capability)
        assert pool.function(package, "tools") == pool.function(desk, "tools")
        assert package.knobs == desk.knobs and package.max_turns == desk.max_turns
        assert not set(names(package)["NOUNS"]) & set(names(desk)["NOUNS"])
        assert names(package)["SYSTEM"] == names(desk)["SYSTEM"]


def test_equal_seeds_give_equal_episodes_in_any_worker(pool, package):
    player = at_random(pool.function(package, "tools"), 10)
    here = play(pool, package, SEEDS[:40], player)
    with Pool(2, hash_seed=7) as other:
        assert here == play(other, package, SEEDS[:40], player)
    assert len({repr(one.steps) for one in here}) == 40


def test_the_verdict_says_what_is_missing(pool):
    """The checks are what the evidence analyst reads: the expected action, what came nearest, and where."""
    desk = load_builtin("desk")
    world = names(desk)
    knobs = desk.resolve_knobs({"returnable": 0.0})
    seed = next(s for s in SEEDS if world["make_task"](s, knobs)["stressors"] == ["precondition"])
    (order, status), *_ = world["refusals"](world["make_task"](seed, knobs))
    episode = pool.open(desk, seed, {"returnable": 0.0})
    episode.reset()
    episode.call("return_order", {"order_id": order})
    episode.respond("all done.")
    score = episode.score()
    assert score.reward == 0.0
    assert not score.checks["action:0"].passed and score.checks["action:0"].expected["kind"] == "read"
    assert score.checks["db"].expected[order]["status"] == status and score.checks["db"].actual[order]["status"] == "returned"
    assert not score.checks["communicate:0"].passed and score.checks["communicate:0"].expected == f"{order} {status}"


@pytest.mark.parametrize("capability", LIBRARY)
def test_the_library_rewards_a_part_with_a_part(pool, capability):
    package = load_builtin(capability)
    plays = play(pool, package, SEEDS, say("all done."))
    assert all(0.0 <= one.reward <= 0.3 for one in plays)


def test_a_forbidden_change_is_not_refused_by_the_tool(pool):
    """The policy binds the agent, not the tool; else there would be nothing to verify."""
    desk = load_builtin("desk")
    episode = pool.open(desk, 0)
    episode.reset()
    listed = episode.call("list_orders", {}).text
    order = listed.split()[2]
    assert episode.call("return_order", {"order_id": order}).text == "ok"
    assert episode.call("return_order", {"order_id": order}).text == "Error: already returned"
    assert episode.call("check_order", {"order_id": order}).text == "returned"
