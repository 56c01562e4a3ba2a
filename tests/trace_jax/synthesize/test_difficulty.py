import json

import numpy as np
import pytest

from envs import parse_package
from rl.trajectory import Trajectory
from trace_jax.config import SynthesisSection
from trace_jax.synthesize.difficulty import bisect, distance, ends, harder_end, setting

SOURCE = "TOOLS = []\nclass Environment: ...\ndef oracle(): ...\ndef hint(): ..."
KNOBS = {
    "records": {"default": 4, "min": 2, "max": 12, "harder": "max"},
    "help": {"default": 0.5, "min": 0.0, "max": 1.0, "harder": "min"},
    "colour": {"default": 1, "min": 0, "max": 9},
    "fixed": {"default": 1, "min": 1, "max": 1},
}


def package(**knobs):
    meta = {"name": "e", "capability": "c", "target": "e", "version": "1", "max_turns": 3, "rationale": "", "knobs": knobs or KNOBS}
    return parse_package(json.loads(json.dumps(meta)), SOURCE)


HARDER = {"records": "max", "help": "min", "colour": None, "fixed": None}


def search(package, harder, verdict, judge, probes=5):
    """All settings that a search comes to, when `judge` gives their verdicts."""
    tried, settings, said = [], bisect(package, harder, verdict, probes), None
    while True:
        try:
            tried.append(settings.send(said))
        except StopIteration:
            return tried
        said = judge(tried[-1])


def test_knobs_move_together_towards_one_end_and_those_without_effect_stay():
    one = package()
    assert setting(one, HARDER, 0.0, True) == one.resolve_knobs() == {"records": 4, "help": 0.5, "colour": 1, "fixed": 1}
    assert setting(one, HARDER, 0.5, True) == {"records": 8, "help": 0.25, "colour": 1, "fixed": 1}
    assert setting(one, HARDER, 1.0, True) == {"records": 12, "help": 0.0, "colour": 1, "fixed": 1}
    assert setting(one, HARDER, 1.0, False) == {"records": 2, "help": 1.0, "colour": 1, "fixed": 1}
    for share in np.linspace(0, 1, 23):
        tuned = one.with_defaults(setting(one, HARDER, share, True))
        assert isinstance(tuned.knobs["records"].default, int) and not tuned.knobs["help"].whole


def test_only_what_the_package_does_not_say_and_can_differ_is_measured():
    assert ends(package()) == {"colour": ({"colour": 0}, {"colour": 9})}


@pytest.mark.parametrize("right", [0.07, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("verdict", ["too_easy", "too_hard"])
def test_bisection_finds_a_setting_inside_the_bounds(right, verdict):
    one = package(k={"default": 0.5, "min": 0.0, "max": 1.0})
    other = {"too_easy": "too_hard", "too_hard": "too_easy"}[verdict]

    def judge(knobs):
        share = abs(knobs["k"] - 0.5) * 2
        return "ok" if abs(share - right) < 0.05 else other if share > right else verdict

    tried = search(one, {"k": "max"}, verdict, judge)
    assert judge(tried[-1]) == "ok" and len(tried) <= 5
    assert all((one["k"] > 0.5) == (verdict == "too_easy") for one in tried)


def test_a_search_that_finds_nothing_ends():
    one = package()
    assert search(one, HARDER, "too_easy", lambda _: "too_easy") == [setting(one, HARDER, share, True) for share in (0.5, 1.0)]
    assert len(search(one, HARDER, "too_easy", lambda _: "too_hard")) == 5
    assert len(search(one, HARDER, "too_easy", lambda _: "too_hard", probes=2)) == 2
    assert search(one, dict.fromkeys(HARDER), "too_easy", lambda _: "ok") == []  # no knob does anything
    whole = package(k={"default": 4, "min": 3, "max": 6})
    assert search(whole, {"k": "max"}, "too_hard", lambda _: "too_hard") == [{"k": 3}]  # half a step is none
    assert search(whole, {"k": "max"}, "too_easy", lambda knobs: "too_hard") == [{"k": 5}]
    assert search(whole, {"k": "min"}, "too_easy", lambda _: "too_hard") == [{"k": 3}]


def played(means, rollouts=4):
    return [
        Trajectory(id=f"{seed}#{i}", environment="e", task_id=str(seed), seed=seed, reward=mean)
        for seed, mean in enumerate(means)
        for i in range(rollouts)
    ]


def test_the_harder_end_is_where_the_same_seeds_earn_less():
    random = np.random.default_rng(0)
    base = random.random(16) * 0.5
    assert harder_end(played(base + 0.3), played(base + 0.05 * random.random(16))) == "max"
    assert harder_end(played(base), played(base + 0.2 + 0.1 * random.random(16))) == "min"
    assert harder_end(played(base), played(random.permutation(base))) is None  # which may be chance
    assert harder_end(played(base), played(base)) is None


def test_the_distance_from_the_bounds_is_that_of_reward_and_success():
    bounds = SynthesisSection()
    figures = [distance({"mean_reward": m, "success_rate": s}, bounds) for m, s in ((0.3, 0.25), (0.7, 0.6), (0.1, 0.05), (0.7, 0.1))]
    np.testing.assert_allclose(figures, [0.0, 0.1, 0.25, 0.2])
