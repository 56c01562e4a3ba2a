import pytest

from envs import Pool, parse_package
from envs.builtin import load_builtin
from rl.trajectory import Trajectory
from trace_jax.synthesize.hints import hint_share, hinted_success, leaks

PACKAGE = load_builtin("precondition_verification")
TASK = "    task = make_task(seed, knobs)\n    order = task['requests'][0]['order_id']\n"
TELLING = {
    "status": "return 'It is ' + task['orders'][order]['status']",
    "verdict": "return 'Return it.' if not refusals(task) else 'You cannot return it, so explain.'",
    "others": "return ' '.join(o['colour'] for o in task['orders'].values())",
}
HARMLESS = {
    "constant": "return HINT",
    "template": "return ['Look at the status first.', 'Check the order before you change it.', 'Read, then act.'][seed % 3]",
    "prompt": "return 'Check order ' + order + ' first.'",  # the customer named it; that it is an argument is the certificate's matter
    "noise": "return 'Case ' + str(seed * 7919)",
}


@pytest.fixture(scope="module")
def pool():
    with Pool() as pool:
        yield pool


def with_hint(body):
    return parse_package(PACKAGE.meta, PACKAGE.source.replace("    return HINT", f"{TASK}    {body}"))


@pytest.mark.parametrize("body", TELLING.values(), ids=TELLING)
def test_a_hint_that_tells_what_must_be_found_out_is_found(pool, body):
    (found,) = leaks(pool, with_hint(body), range(24))
    assert found.startswith("the hint tells what the agent has to find out: ")


@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS)
def test_a_hint_about_how_to_go_about_it_is_none(pool, body):
    assert leaks(pool, with_hint(body), range(24)) == []


def test_as_few_rollouts_as_suffice_see_a_hint():
    assert hint_share(0.1, 0.7, 0.2, 0.25) == 0.25  # 0.17 would do
    assert hint_share(0.05, 0.45, 0.2, 0.25) == pytest.approx(0.375)
    assert hint_share(0.02, 0.1, 0.2, 0.25) == 0.5 and hint_share(0.1, 0.1, 0.2, 0.25) == 0.5


def test_hinted_success_is_compared_with_its_band():
    def played(won):
        return [Trajectory(id=f"{n}", environment="e", task_id=f"{n}", seed=n, reward=float(n < won), success=n < won) for n in range(10)]

    assert hinted_success(played(7))["note"] == "" and hinted_success(played(7))["success_rate"] == 0.7
    assert "0.300, outside of 0.6 to 0.8: it tells too little" in hinted_success(played(3))["note"]
    assert "tells too much" in hinted_success(played(9))["note"]
