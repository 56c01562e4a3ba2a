"""Calls beside expected actions."""

import pytest

from trace_jax.diagnose.calls import agent_calls, answers, fields, pair, read_or_write


def call(name, identifier="", **arguments):
    return {"id": identifier, "name": name, "arguments": arguments}


def assistant(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def tool(content, identifier=""):
    return {"role": "tool", "content": content, "tool_call_id": identifier}


def expect(name, kind="write", **arguments):
    return {"name": name, "arguments": arguments, "kind": kind}


@pytest.mark.parametrize(
    "name",
    ["get_user_details", "find_user", "search_flight", "list_orders", "check_order", "calculate", "think", "transfer_to_human_agents"],
)
def test_names_of_reads(name):
    assert read_or_write(name) == "read"


@pytest.mark.parametrize("name", ["cancel_order", "book_reservation", "transfer_money", "checkout", "getaway_book"])
def test_names_of_writes(name):
    assert read_or_write(name) == "write"


def test_results_belong_to_calls_by_id_and_by_position_where_there_are_none():
    parallel = [assistant(call("a", "1"), call("b", "2")), tool("for b", "2"), tool("Error: for a", "1")]
    assert [(c.name, c.result, c.error) for c in agent_calls(parallel)] == [("a", "Error: for a", True), ("b", "for b", False)]
    unnamed = [assistant(call("a"), call("b")), tool("for a"), tool("for b"), assistant(call("c"))]
    assert [(c.name, c.result, c.message_index) for c in agent_calls(unnamed)] == [("a", "for a", 0), ("b", "for b", 0), ("c", None, 3)]


def test_a_flagged_result_is_an_error_whatever_its_text():
    assert agent_calls([assistant(call("a")), {**tool("nope"), "error": True}])[0].error


def test_fields_ignore_the_order_of_lists_and_the_type_of_whole_numbers():
    assert fields({"flights": [{"n": "A1"}, {"n": "B2"}], "amount": 50.0}) == fields({"amount": 50, "flights": [{"n": "b2"}, {"n": "a1"}]})


def test_a_call_answers_by_the_arguments_it_gives_or_by_those_that_count():
    action = expect("book", id="A1", note="x")
    assert answers(action, "book", {"id": "A1"})
    assert not answers(action, "book", {"id": "A1", "note": "y"})
    assert answers(action, "book", {"id": "A1", "note": "y"}, compare=["id"])
    assert answers(action, "book", {"anything": 1}, compare=[])


def test_exact_calls_are_paired_first_and_each_write_once():
    calls = agent_calls([assistant(call("cancel", order="D77")), assistant(call("cancel", order="B12"))])
    assert pair([expect("cancel", order="C39"), expect("cancel", order="B12")], calls) == [0, 1]
    assert pair([expect("cancel", order="B12"), expect("cancel", order="B12")], calls[1:]) == [0, None]


def test_one_look_answers_several_expected_reads():
    calls = agent_calls([assistant(call("check", order="B12"))])
    assert pair([expect("check", "read", order="B12"), expect("check", "read", order="B12")], calls) == [0, 0]


def test_the_call_with_more_equal_fields_is_nearer():
    calls = agent_calls([assistant(call("send", order="A10", zip="1")), assistant(call("send", order="B12", zip="2"))])
    assert pair([expect("send", order="B12", zip="3"), expect("send", order="A10", zip="4")], calls) == [1, 0]
