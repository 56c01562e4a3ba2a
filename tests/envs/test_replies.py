"""What a worker or a driver says is a value or a fault, never an exception of the host."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import EnvironmentFault
from envs.harness.host import _parse_ask, _parse_end
from envs.sandbox.programs import parse_programs
from envs.sandbox.replies import parse_function, parse_value

KEYS = """system messages role content tool_calls tool_call_id id name arguments reward checks passed expected actual call type function
parameters properties required files code deadline_s speaker tools error kind message graded record""".split()
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 40), st.just(0.5), st.sampled_from(["", "user", "agent", "function", "\ud800"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4), max_leaves=8
)


def among(**fields):
    """An object with these fields, where each may be anything."""
    return st.fixed_dictionaries({name: good | VALUES for name, good in fields.items()})


MESSAGES = st.lists(among(role=st.just("tool"), content=st.just("x"), tool_calls=VALUES, tool_call_id=VALUES), min_size=1, max_size=1)
TOOLS = st.lists(among(type=st.just("function"), function=among(name=st.just("f"), parameters=VALUES)), max_size=1)
STARTS = among(system=st.just("s"), messages=MESSAGES)
SCORES = among(reward=st.just(1), checks=among(db=among(passed=st.just(True), expected=VALUES, actual=VALUES, call=VALUES)))
ASKS = among(speaker=st.just("agent"), system=st.just("s"), messages=MESSAGES, tools=TOOLS)
ENDS = among(reward=st.just(1), error=among(kind=VALUES, message=VALUES))
PROGRAMS = st.lists(among(files=VALUES, code=st.just("x"), deadline_s=st.just(1)), max_size=1)


@settings(max_examples=60)
@given(starts=STARTS, scores=SCORES, tools=TOOLS, asks=ASKS, ends=ENDS, programs=PROGRAMS)
def test_whatever_is_said_is_a_value_that_can_be_stored_or_a_fault(starts, scores, tools, asks, ends, programs):
    for parse in (
        lambda: parse_value("reset", starts, 1),
        lambda: parse_value("score", scores, 1),
        lambda: parse_value("call", starts, 1),
        lambda: parse_function("tools", tools),
        lambda: parse_function("oracle", tools),
        lambda: parse_programs(programs),
        lambda: _parse_ask(asks),
        lambda: _parse_end(ends),
    ):
        try:
            parse()
        except EnvironmentFault as fault:
            json.dumps(str(fault), ensure_ascii=False).encode()


def test_calls_that_are_no_list_and_ids_that_are_no_text_are_refused():
    for odd in ({"tool_calls": 5}, {"tool_calls": [{"name": "f", "arguments": {}, "id": []}]}, {"tool_call_id": [1]}):
        message = {"role": "assistant", "content": "x"} | odd
        for parse in (
            lambda said: parse_value("reset", {"system": "", "messages": said}, 0),
            lambda said: _parse_ask({"speaker": "agent", "system": "", "messages": said, "tools": []}),
        ):
            try:
                parse([message])
            except EnvironmentFault as fault:
                assert fault.kind == "reply" and "must give" in str(fault)
            else:
                raise AssertionError(odd)


def test_a_fault_is_text_whatever_it_quotes():
    assert str(EnvironmentFault("exception", "half \ud800 of a pair")) == "half ? of a pair"
