import random

import pytest

from envs.builtin import library, load_builtin
from trace_jax.quickstart.teacher import Faults, play
from trace_jax.quickstart.world import execute

LIBRARY = library("desk")
KNOBS = load_builtin("desk").resolve_knobs()
# which fault each environment of the library can show
SHOWS = {
    "structured_data_reasoning": "wrong_record",
    "multi_step_task_completion": "stop_early",
    "precondition_verification": "skip_check",
    "tool_calling_precision": "malform",
}


def rewards(world, faults: Faults, count: int = 60) -> list[float]:
    return [play(world, seed, KNOBS, faults, random.Random(seed))[1] for seed in range(count)]


def calls(messages) -> list[dict]:
    return [call for message in messages for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("name", ["desk", *LIBRARY])
def test_without_faults_the_teacher_solves_every_task(name):
    assert set(rewards(execute(name), Faults())) == {1.0}


@pytest.mark.parametrize("name", LIBRARY)
def test_a_fault_costs_the_reward_in_its_own_environment_and_in_no_other(name):
    world = execute(name)
    for fault in SHOWS.values():
        found = rewards(world, Faults(**{fault: 1.0}))
        assert sum(found) / len(found) < 0.5 if fault == SHOWS[name] else set(found) == {1.0}, fault


def test_faults_show_in_the_target_and_are_drawn_anew():
    world = execute("desk")
    shares = [sum(r == 1.0 for r in rewards(world, Faults(0.6, 0.6, 0.6, 0.6).scaled(factor), 200)) / 200 for factor in (0.0, 0.5, 1.0)]
    assert shares[0] == 1.0 > shares[1] > shares[2] > 0.1
    seed = next(seed for seed in range(99) if play(world, seed, KNOBS, Faults(stop_early=1.0), random.Random(0))[1] < 1)
    outcomes = {play(world, seed, KNOBS, Faults(stop_early=0.5), random.Random(draw))[1] for draw in range(20)}
    assert outcomes == {0.0, 1.0}  # the same task fails and succeeds, which reinforcement can tell apart


def test_a_malformed_zip_code_is_near_the_right_one():
    world = execute("tool_calling_precision")
    for seed in range(20):
        right = calls(play(world, seed, KNOBS, Faults(), random.Random(seed))[0])[-1]["arguments"]["zip"]
        wrong = calls(play(world, seed, KNOBS, Faults(malform=1.0), random.Random(seed))[0])[-1]["arguments"]["zip"]
        assert wrong != right and (len(wrong) == 4 or sorted(wrong) == sorted(right))


def test_an_episode_depends_on_its_seeds_alone():
    world, faults = execute("desk"), Faults(0.5, 0.5, 0.5, 0.5)
    assert play(world, 3, KNOBS, faults, random.Random(5)) == play(world, 3, KNOBS, faults, random.Random(5))
