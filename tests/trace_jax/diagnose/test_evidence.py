"""The rules: each deficit shows as its own capability, evidence is cited, the verdict is not read."""

import collections
import dataclasses
import importlib.util
import json
import pathlib

import pytest

from rl.trajectory import Trajectory
from trace_jax.benchmarks.results import read_results
from trace_jax.diagnose.code_rules import CODE_RULES
from trace_jax.diagnose.evidence import LACKING, NA, PRESENT
from trace_jax.diagnose.rules import RULES, EvidenceAnalyst

_spec = importlib.util.spec_from_file_location("desk_agent", pathlib.Path(__file__).with_name("desk_agent.py"))
desk_agent = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(desk_agent)

DATA = pathlib.Path(__file__).parents[2] / "data" / "tau2"
CANDIDATES = [candidate for candidate, _ in RULES.values()]
CAPABILITIES = [name for name in RULES if name not in CODE_RULES]


def label(trajectories):
    return {(x.trajectory, x.capability): x for x in EvidenceAnalyst().label({1: trajectories}, CANDIDATES)[1]}


def lacking(trajectories):
    return collections.Counter(capability for (_, capability), x in label(trajectories).items() if x.value == LACKING)


def episode(user, *turns, expected=(), tell=(), stop="done"):
    """A trajectory: a turn is a text of the agent or (name, arguments, result); more texts of the user are `{"user": text}`."""
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": user}]
    for turn in turns:
        if isinstance(turn, tuple):
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": "", "name": turn[0], "arguments": turn[1]}]})
            messages.append({"role": "tool", "content": turn[2], "tool_call_id": ""})
        elif isinstance(turn, dict):
            messages.append({"role": "user", "content": turn["user"]})
        else:
            messages.append({"role": "assistant", "content": turn})
    checks = {f"action:{i}": desk_agent.expect(name, kind, **arguments) for i, (name, kind, arguments) in enumerate(expected)}
    checks |= {f"communicate:{i}": {"passed": None, "expected": x, "actual": None, "message_index": None} for i, x in enumerate(tell)}
    return Trajectory(id="t#0", environment="desk", task_id="t", messages=messages, reward=0.0, checks=checks, stop_reason=stop)


def one(capability, trajectory, *others):
    x = label([trajectory, *(dataclasses.replace(o, id=f"other{i}#0") for i, o in enumerate(others))])[("t#0", capability)]
    return x.value, x.message_index


CHECK = ("check_order", "read", {"order_id": "C39"})
RETURN = ("return_order", "write", {"order_id": "C39"})
CANCEL = ("cancel_order", "write", {"order_id": "B12"})
ADDRESS = ("set_address", "write", {"order_id": "A10", "zip": "90210"})
LIST = ("list_orders", {}, "vase C39\nlamp D77")
ANY_CHECK = episode("return C39", ("check_order", {"order_id": "C39"}, "delivered"), "done", expected=[CHECK])


# --- the four planted deficits ---


def test_a_faultless_agent_lacks_nothing():
    episodes = [desk_agent.play(seed, {}) for seed in range(150)]
    assert all(t.success for t in episodes)
    assert not lacking(episodes)
    shown = collections.Counter(c for (_, c), x in label(episodes).items() if x.value == PRESENT)
    assert all(shown[c] >= 20 for c in CAPABILITIES)


@pytest.mark.parametrize("fault", desk_agent.FAULTS)
def test_each_planted_deficit_shows_as_its_own_capability_and_as_no_other(fault):
    episodes = [desk_agent.play(seed, {fault: 0.6}) for seed in range(200)]
    found = lacking(episodes)
    assert set(found) == {desk_agent.FAULTS[fault]}
    labels = label(episodes)
    # whatever failed, failed because of this deficit
    assert all(labels[(t.id, desk_agent.FAULTS[fault])].value == LACKING for t in episodes if not t.success)


def test_a_skipped_check_shows_in_passed_trajectories_too():
    episodes = [desk_agent.play(seed, {"skip_check": 0.6}) for seed in range(200)]
    labels = label(episodes)
    assert sum(labels[(t.id, "precondition_verification")].value == LACKING for t in episodes if t.success) >= 10


def test_labels_do_not_read_the_verdict():
    faults = dict.fromkeys(desk_agent.FAULTS, 0.5)
    episodes = [desk_agent.play(seed, faults) for seed in range(60)] + read_results([DATA / "gpt-4o_airline_excerpt.json"])
    turned = [
        dataclasses.replace(
            t, reward=1.0 - t.reward, success=not t.success, checks={k: {**c, "passed": not c["passed"]} for k, c in t.checks.items()}
        )
        for t in episodes
    ]
    assert label(episodes) == label(turned)


def test_every_label_that_says_something_cites_a_message_of_its_trajectory():
    episodes = [desk_agent.play(seed, dict.fromkeys(desk_agent.FAULTS, 0.5)) for seed in range(60)]
    size = {t.id: len(t.messages) for t in episodes}
    for x in label(episodes).values():
        assert (x.message_index is None) == (x.value == NA)
        assert x.reason and (x.message_index is None or 0 < x.message_index < size[x.trajectory])


# --- structured data reasoning ---


def test_a_write_to_a_record_that_was_not_meant_is_lacking_and_cites_the_call():
    t = episode(
        "cancel the vase",
        LIST,
        ("cancel_order", {"order_id": "D77"}, "ok"),
        "done",
        expected=[("cancel_order", "write", {"order_id": "C39"})],
    )
    assert one("structured_data_reasoning", t, ANY_CHECK) == (LACKING, 4)


def test_a_wrong_record_that_is_put_right_later_is_still_lacking():
    calls = [("set_address", {"order_id": i, "zip": "90210"}, "ok") for i in ("D77", "C39")]
    t = episode("send the vase to 90210", LIST, *calls, "done", expected=[("set_address", "write", {"order_id": "C39", "zip": "90210"})])
    assert one("structured_data_reasoning", t, ANY_CHECK) == (LACKING, 4)


def test_a_record_that_the_user_named_needs_no_look():
    t = episode("cancel B12", ("cancel_order", {"order_id": "B12"}, "ok"), "done", expected=[CANCEL])
    assert one("structured_data_reasoning", t)[0] == NA


def test_looking_at_several_records_before_the_right_one_is_no_mistake():
    looks = [("check_order", {"order_id": i}, "delivered") for i in ("D77", "C39")]
    t = episode("return the vase", LIST, *looks, ("return_order", {"order_id": "C39"}, "ok"), "done", expected=[CHECK, RETURN])
    assert one("structured_data_reasoning", t)[0] == PRESENT


def test_looking_at_another_record_instead_is_lacking():
    t = episode(
        "return the vase",
        LIST,
        ("check_order", {"order_id": "D77"}, "pending"),
        "cannot return D77 it is pending",
        expected=[CHECK],
        tell=["C39 lost"],
    )
    assert one("structured_data_reasoning", t) == (LACKING, 4)
    assert one("communicating_results", t)[0] == NA


def test_prose_is_not_compared():
    transfer = ("file_note", "write", {"order_id": "B12", "summary": "User 7 wants a refund."})
    t = episode("B12", ("file_note", {"order_id": "B12", "summary": "Customer 9 is upset."}, "ok"), "done", expected=[transfer])
    assert one("structured_data_reasoning", t)[0] == NA
    assert one("tool_calling_precision", t)[0] == PRESENT


# --- multi-step ---


def test_a_request_that_nothing_was_done_for_is_lacking_at_the_end():
    t = episode("cancel B12 and send A10 to 90210", ("cancel_order", {"order_id": "B12"}, "ok"), "all done", expected=[CANCEL, ADDRESS])
    assert one("multi_step_task_completion", t) == (LACKING, 4)


def test_an_episode_that_was_cut_off_shows_nothing():
    t = episode(
        "cancel B12 and send A10 to 90210", ("cancel_order", {"order_id": "B12"}, "ok"), expected=[CANCEL, ADDRESS], stop="max_turns"
    )
    assert one("multi_step_task_completion", t)[0] == NA


def test_a_read_and_its_write_are_one_request():
    t = episode("return C39", ("return_order", {"order_id": "C39"}, "ok"), "done", expected=[CHECK, RETURN])
    assert one("multi_step_task_completion", t)[0] == NA


def test_a_refusal_that_has_to_be_told_is_a_request():
    t = episode(
        "cancel B12 and return C39", ("cancel_order", {"order_id": "B12"}, "ok"), "done", expected=[CANCEL, CHECK], tell=["C39 lost"]
    )
    assert one("multi_step_task_completion", t)[0] == LACKING
    assert one("precondition_verification", t)[0] == NA


def test_a_request_that_was_looked_at_and_turned_down_was_attended_to():
    calls = [("cancel_order", {"order_id": "B12"}, "ok"), ("check_order", {"order_id": "C39"}, "lost")]
    t = episode("cancel B12 and return C39", *calls, "cannot return C39", expected=[CANCEL, CHECK, RETURN])
    assert one("multi_step_task_completion", t)[0] == PRESENT


# --- precondition ---


def test_a_write_before_its_check_is_lacking():
    calls = [("return_order", {"order_id": "C39"}, "ok"), ("check_order", {"order_id": "C39"}, "delivered")]
    t = episode("return C39", *calls, "done", expected=[CHECK, RETURN])
    assert one("precondition_verification", t) == (LACKING, 2)


def test_a_check_of_another_record_does_not_count():
    calls = [("check_order", {"order_id": "D77"}, "delivered"), ("return_order", {"order_id": "C39"}, "ok")]
    assert one("precondition_verification", episode("return C39", *calls, "done", expected=[CHECK, RETURN]))[0] == LACKING


def test_a_change_that_the_check_forbids_is_lacking():
    calls = [("check_order", {"order_id": "C39"}, "lost"), ("return_order", {"order_id": "C39"}, "ok")]
    assert one("precondition_verification", episode("return C39", *calls, "done", expected=[CHECK], tell=["C39 lost"])) == (LACKING, 4)


def test_the_wrong_record_checked_is_another_capabilitys_failure():
    calls = [("check_order", {"order_id": "D77"}, "delivered"), ("return_order", {"order_id": "D77"}, "ok")]
    t = episode("return the vase", LIST, *calls, "done", expected=[CHECK, RETURN])
    assert one("precondition_verification", t)[0] == PRESENT
    assert one("structured_data_reasoning", t)[0] == LACKING


def test_a_change_where_none_is_expected_is_lacking_even_if_it_is_refused():
    t = episode(
        "cancel B12",
        ("cancel_order", {"order_id": "B12"}, "Error: too late"),
        "sorry",
        expected=[("check_order", "read", {"order_id": "B12"})],
    )
    assert one("precondition_verification", t) == (LACKING, 2)


def test_holding_back_where_no_change_is_expected_is_present():
    assert one("precondition_verification", episode("cancel it", "I may not do that."), ANY_CHECK) == (PRESENT, 2)


@pytest.mark.parametrize("checks", [{}, {"db": {"passed": False}}, {"tone": {"passed": True, "expected": "kind"}}])
def test_where_no_trajectory_has_expected_calls_nothing_is_known_of_them(checks):
    slip = ("set_address", {"order_id": "A10", "zip": "92010"}, "Error: malformed")
    t = episode("cancel B12, send A10 to 90210", ("cancel_order", {"order_id": "B12"}, "ok"), slip, "done")
    t.checks = checks
    assert {x.value for x in label([t]).values()} == {NA}
    assert one("precondition_verification", t, ANY_CHECK) == (LACKING, 2)  # the grader of this environment knows calls, and expects none
    elsewhere = dataclasses.replace(ANY_CHECK, environment="another")
    assert one("precondition_verification", t, elsewhere)[0] == NA
    told = dataclasses.replace(t, checks=episode("", ("x", {}, "B12 is lost"), tell=["B12 lost"]).checks)
    told.messages[3]["content"] = "B12 is lost"
    assert one("communicating_results", told)[0] == LACKING


# --- precision ---


@pytest.mark.parametrize(("zip_code", "result"), [("9021", "Error: bad zip"), ("92010", "ok")])
def test_a_slip_in_a_dictated_value_is_lacking(zip_code, result):
    t = episode("send A10 to 90210", ("set_address", {"order_id": "A10", "zip": zip_code}, result), "done", expected=[ADDRESS])
    assert one("tool_calling_precision", t, ANY_CHECK) == (LACKING, 2)
    assert one("structured_data_reasoning", t, ANY_CHECK)[0] == NA


def test_a_refusal_of_true_copies_is_no_slip():
    t = episode("cancel B12", ("cancel_order", {"order_id": "B12"}, "Error: already cancelled"), "done", expected=[CANCEL])
    assert one("tool_calling_precision", t, ANY_CHECK)[0] == NA


@pytest.mark.parametrize("result", ["Error: no such tool", "Error: wrong arguments"])
def test_a_malformed_call_is_lacking(result):
    t = episode("cancel B12", ("cancel", {"order": "B12"}, result), "done", expected=[CANCEL])
    assert one("tool_calling_precision", t, ANY_CHECK)[0] == LACKING


def test_an_episode_that_ended_with_an_invalid_call_is_lacking():
    assert one("tool_calling_precision", episode("cancel B12", "<tool_call>{", expected=[CANCEL], stop="invalid_action")) == (LACKING, 2)


def test_a_date_in_the_users_words_is_not_made_up():
    book = ("book", "write", {"day": "2024-05-20", "seat": "4"})
    t = episode("book May 20, seat 4", ("book", {"day": "2024-05-20", "seat": "4"}, "Error: sold out"), "sorry", expected=[book])
    assert one("tool_calling_precision", t)[0] == NA


# --- communication ---


def test_what_was_found_but_not_told_is_lacking_and_what_was_never_found_is_not():
    check = ("check_order", {"order_id": "C39"}, "lost")
    assert one("communicating_results", episode("return C39", check, "no", expected=[CHECK], tell=["C39 lost"])) == (LACKING, 4)
    assert one("communicating_results", episode("return C39", check, "C39 is lost", expected=[CHECK], tell=["C39 lost"])) == (PRESENT, 4)
    assert one("communicating_results", episode("return C39", "no", expected=[CHECK], tell=["C39 lost"]))[0] == NA


# --- real conversations ---


def test_real_failures_are_explained_by_message():
    labels = label(read_results([DATA / "gpt-4o_airline_excerpt.json"]))
    assert labels[("1#0", "precondition_verification")].reason == "cancel_reservation(Q69X3R) is a change that should not be made"
    assert labels[("7#0", "multi_step_task_completion")].reason == "ended with 1 of 3 requests not attended to: cancel_reservation(59XX6W)"
    wrong = labels[("14#0", "structured_data_reasoning")]
    assert wrong.value == LACKING and wrong.message_index == 34
    assert "HAT083, HAT274 where HAT023 was right" in wrong.reason
    assert "Payment amount does not add up" in labels[("14#0", "tool_calling_precision")].reason
    assert not any(x.value == LACKING for (i, _), x in labels.items() if i in ("0#0", "4#0", "8#0", "19#0"))


def test_discovery_proposes_what_some_trajectory_exercises():
    assert EvidenceAnalyst().discover([episode("cancel B12", "which one?", expected=[CANCEL])]) == []
    assert "structured_data_reasoning" in [c.name for c in EvidenceAnalyst().discover(read_results([DATA / "gpt-4o_airline_excerpt.json"]))]


def test_labels_are_plain_data():
    labels = EvidenceAnalyst().label({1: read_results([DATA / "taubench_airline_excerpt.json"])}, CANDIDATES)[1]
    assert json.loads(json.dumps([dataclasses.asdict(x) for x in labels]))
