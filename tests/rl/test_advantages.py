import numpy as np

from rl.advantages import episode_metrics, group_advantages
from rl.trajectory import Trajectory


def rollouts(*groups, error=()):
    """One trajectory per reward; group names count up; indices in `error` are infrastructure failures."""
    out = []
    for g, rewards in enumerate(groups):
        for reward in rewards:
            failed = len(out) in error
            out.append(
                Trajectory(
                    id=f"t{len(out)}",
                    environment="e",
                    task_id=f"s{g}",
                    group=f"g{g}",
                    reward=None if failed else reward,
                    success=not failed and reward == 1.0,
                    error={"kind": "worker_died", "message": "x"} if failed else None,
                    stop_reason="environment_error" if failed else "done",
                    messages=[{"role": "assistant", "content": "a"}] * 2,
                )
            )
    return out


def test_rewards_are_normalised_within_their_group():
    result = group_advantages(rollouts([1.0, 0.0, 0.5, 0.0], [0.2, 0.4]), epsilon=1e-4)
    for part, rewards in ((slice(0, 4), [1.0, 0.0, 0.5, 0.0]), (slice(4, 6), [0.2, 0.4])):
        r = np.array(rewards)
        np.testing.assert_allclose(result.values[part], (r - r.mean()) / (r.std() + 1e-4), rtol=1e-6)
    assert result.kept.all()


def test_the_standard_deviation_can_be_left_out():
    np.testing.assert_allclose(group_advantages(rollouts([1.0, 0.0]), divide_by_std=False).values, [0.5, -0.5])


def test_groups_with_one_reward_only_are_dropped_and_counted():
    result = group_advantages(rollouts([1.0, 1.0], [0.0, 0.0], [0.1 + 0.2, 0.3], [0.0, 1.0]))
    np.testing.assert_array_equal(result.kept, [False] * 6 + [True] * 2)
    assert not result.values[:6].any()
    assert result.metrics["groups_constant"] == 3 and result.metrics["constant_share"] == 0.75


def test_an_error_is_not_in_its_group_and_two_are_enough_to_go_on():
    result = group_advantages(rollouts([1.0, 0.0, 0.0], [1.0, 0.0], error=(2, 4)))
    np.testing.assert_allclose(result.values, [1, -1, 0, 0, 0], atol=1e-3)
    np.testing.assert_array_equal(result.kept, [True, True, False, False, False])
    assert result.metrics["groups_too_small"] == 1 and result.metrics["errors/worker_died"] == 2


def test_equal_group_names_of_two_environments_are_two_groups():
    trajectories = rollouts([1.0, 0.0]) + rollouts([0.0, 0.0])
    for t in trajectories[2:]:
        t.environment = "other"
    assert group_advantages(trajectories).metrics["groups"] == 2


def test_success_with_and_without_a_hint_is_told_where_there_are_hints():
    found = rollouts([1.0, 1.0, 0.0, 0.0], [1.0], error=(4,))
    for t, hinted in zip(found, (1, 0, 1, 1, 1), strict=True):
        t.hint = {"text": "look", "token_span": [1, 2]} if hinted else None
    metrics = episode_metrics(found)
    assert metrics["hinted_share"] == 0.75 and metrics["hinted_success"] == 1 / 3 and metrics["unhinted_success"] == 1.0
    assert "unhinted_success" not in episode_metrics(found[:1]) and not [n for n in episode_metrics(found[1:2]) if "hinted" in n]


def test_episode_metrics_leave_errors_out():
    metrics = episode_metrics(rollouts([1.0, 0.0, 0.5], error=(1,)))
    assert metrics["reward"] == 0.75 and metrics["success"] == 0.5 and metrics["turns"] == 2 and metrics["reward/e"] == 0.75
    assert episode_metrics(rollouts([1.0], error=(0,))) == {}


def test_another_reward_may_take_the_place_of_the_environments_and_be_negative():
    found = rollouts([0.0, 0.0, 0.0], [1.0, 0.0], error=(2,))
    result = group_advantages(found, divide_by_std=False, reward=lambda t: {"t0": -1.0, "t1": 0.5}.get(t.id, 0.3))
    np.testing.assert_allclose(result.values, [-0.75, 0.75, 0, 0, 0])
    assert result.kept.tolist() == [True, True, False, False, False]
