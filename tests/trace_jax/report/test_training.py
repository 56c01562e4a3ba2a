"""Figures of training have names and units that a reader understands."""

from trace_jax.report import budgets, training


def rows(count, **more):
    return [{"step": n, "reward": n / count, "success": n / count, **{k: f(n) for k, f in more.items()}} for n in range(count)]


def test_figures_are_drawn_in_groups_by_their_names_in_words():
    found = training.curves(rows(5, entropy=lambda n: 1 - n / 9, clip_share=lambda n: n / 100, sampled_tokens=lambda n: 80 - n), "x", "s1")
    titles = {group: [title for title, _ in charts] for group, charts in found["more"].items()}
    assert titles == {
        "Policy": ["entropy of the next token, nats"],
        "Loss": ["tokens with a clipped ratio"],
        "Lengths and errors": ["sampled tokens of a rollout"],
    }
    assert found["table"]["heads"][:3] == ["mean reward, %", "success, %", "entropy of the next token, nats"]
    assert found["table"]["rows"][1] == (1, ["20.0", "20.0", "0.889", "1.0", "79"])


def test_what_never_changes_is_told_instead_of_drawn():
    found = training.curves(rows(3, dual_clip_share=lambda n: 0.0, policy_lag=lambda n: 1), "x", "s1")
    assert found["constant"] == [("tokens at the dual clip", "0.0 %"), ("lag of the sampled tokens behind the learner", "1 updates")]
    assert not found["more"]


def test_a_figure_without_a_name_is_shown_by_its_key():
    found = training.curves(rows(3, **{"reward/desk_a": lambda n: n / 3, "new_thing": lambda n: n}), "x", "s1")
    assert [title for title, _ in found["more"]["By environment and others"]] == ["reward in desk_a", "new thing"]


def test_a_long_training_has_a_short_table_with_its_last_row():
    shown = training.curves(rows(1001), "x", "s1")["table"]["rows"]
    assert len(shown) <= budgets.STEPS + 1 and shown[0][0] == 0 and shown[-1][0] == 1000
