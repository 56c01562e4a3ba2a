"""Conversations as text: within the budget, with what labels depend on, and with no line that its authors could pass off as the frame's."""

import json
import pathlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.trajectory import Trajectory
from trace_jax.agents.budget import estimate_tokens
from trace_jax.benchmarks.results import read_result_file
from trace_jax.diagnose.compaction import compact, escape, spoken
from trace_jax.errors import InputError

DATA = pathlib.Path(__file__).parents[2] / "data" / "tau2"
LINE = re.compile(r"\[(\d+|end|check)\] |\| |\|$|> [^\n]*\(|\.\.\. [\d,]+ characters left out \.\.\.$|\[\d+\] [^\n]*:$")


def call(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "", "name": name, "arguments": arguments}]}


def result(text, **more):
    return {"role": "tool", "content": text, "tool_call_id": "", **more}


def trajectory(*messages, checks=None, **more):
    start = [{"role": "system", "content": "Be helpful."}, {"role": "user", "content": "Cancel order A1."}]
    return Trajectory(
        **{"id": "t#0", "environment": "desk", "task_id": "t", "reward": 0.0, **more}, messages=[*start, *messages], checks=checks or {}
    )


END = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}, call("think", x=1), result("")]


def test_a_short_conversation_is_written_whole():
    t = trajectory(
        {
            "role": "assistant",
            "content": "Let me see.\nOne moment.",
            "tool_calls": [{"id": "c", "name": "get_order", "arguments": {"id": "A1"}}],
        },
        {"role": "tool", "content": "Error: no such order", "tool_call_id": "c"},
        checks={"db": {"passed": False, "expected": None, "actual": None, "message_index": None}},
    )
    assert compact(t, 1000).split("\n") == [
        "[0] system prompt: Be helpful.",
        "[1] user: Cancel order A1.",
        "[2] agent: Let me see.",
        "| One moment.",
        '> get_order({"id": "A1"})',
        "[3] tool result (error): Error: no such order",
        "[end] stop reason: done",
        "[end] reward: 0, failed",
        "[check] db failed",
    ]


def test_without_the_outcome_nothing_tells_of_it():
    checks = {"action:0": {"passed": True, "expected": {"name": "cancel", "arguments": {}}, "actual": None, "message_index": 3}}
    t = trajectory(*END, checks=checks, stop_reason="max_turns")
    blind = compact(t, 1000, outcome=False)
    assert blind.endswith("[end] stop reason: max_turns")
    assert not re.search("reward|check|passed|failed|expected", blind)
    assert '[check] action:0 passed at message 3: expected {"name": "cancel", "arguments": {}}' in compact(t, 1000)


def test_long_reads_give_way_before_other_text_and_that_before_what_changes_state():
    t = trajectory(
        call("get_order", id="A1"),
        result("order " * 2000),
        call("cancel_order", id="A1"),
        result("cancelled " * 30),
        {"role": "assistant", "content": "word " * 200},
        *END,
    )
    kept = 'cancel_order({"id": "A1"})', "cancelled " * 30
    first = compact(t, 800)
    assert "[3] tool result: order order" in first and "characters left out" in first and "word " * 200 in first
    second = compact(t, 400)
    assert "[3] tool result: ... 12,000 characters left out ...\n" in second and "[6] agent: word" in second and "word " * 200 not in second
    third = compact(t, 300)
    assert "[6] agent: ... 1,000 characters left out ...\n" in third
    assert all(text in compacted for compacted in (first, second, third) for text in kept)
    fourth = compact(t, 220)
    assert "[5] tool result: cancelled" in fourth and kept[0] in fourth and kept[1] not in fourth


def test_a_budget_too_small_for_what_is_kept_names_the_field_to_raise():
    with pytest.raises(InputError, match=r"t#0: its 42 messages need [\d,]+ tokens .* 300 .* raise agents.prompt_tokens"):
        compact(trajectory(*(call("cancel", id=f"order {i}" * 9) for i in range(40))), 300)


TEXT = st.text(max_size=40) | st.text(alphabet="ab\n|[]> é\u202e\x1b\ud800", max_size=400) | st.just("Error: not found " * 30)
NAME = st.sampled_from(["get_order", "cancel_order", "[end] x", "a\nb"])
CALLS = st.lists(st.tuples(NAME, st.dictionaries(st.text(max_size=5), TEXT, max_size=2)), max_size=2)
TURN = st.one_of(
    st.builds(lambda text: [{"role": "user", "content": text}], TEXT),
    st.builds(
        lambda text, calls, results: [
            {"role": "assistant", "content": text, "tool_calls": [{"id": "", "name": n, "arguments": a} for n, a in calls]},
            *(result(r) for r in results[: len(calls)]),
        ],
        TEXT,
        CALLS,
        st.lists(TEXT, min_size=2, max_size=2),
    ),
)
CONVERSATION = st.lists(TURN, max_size=12).map(lambda turns: trajectory(*(m for turn in turns for m in turn)))


@settings(deadline=None, max_examples=150)
@given(CONVERSATION, st.integers(50, 3000), st.booleans())
def test_every_compaction_keeps_its_budget_its_marks_and_what_labels_depend_on(t, tokens, outcome):
    try:
        text = compact(t, tokens, outcome=outcome)
    except InputError:
        assert tokens < 100 + 60 * sum(1 + len(m.get("tool_calls") or []) for m in t.messages)
        return
    assert text == compact(t, tokens, outcome=outcome)
    assert estimate_tokens(text) <= tokens
    text.encode()
    lines = text.split("\n")
    assert all(LINE.match(line) for line in lines)
    assert [int(line[1 : line.index("]")]) for line in lines if re.match(r"\[\d", line)] == list(range(len(t.messages)))
    shown = re.split(r"\n(?=\[)", text)
    for index, message in enumerate(t.messages):
        requested = message.get("tool_calls") or []
        assert sum(line.startswith("> ") for line in shown[index].split("\n")) == len(requested)
        error = message["role"] == "tool" and message["content"].startswith("Error")
        if index == 1 or error or index >= len(t.messages) - 4:
            assert escape(message["content"]).replace("\n", "\n| ")[:8].rstrip("\n| ") in shown[index]
    assert any(line == "[end] stop reason: done" for line in lines)


def test_control_characters_and_special_tokens_are_written_out():
    assert escape("a\x1b[31m\r\nb\rc\x7f\u202e\u200b<|im_start|>\U000e0041\ud800\tä") == (
        "a\\x1b[31m\nb\\x0dc\\x7f\\u202e\\u200b<\\|im_start|>\\U000e0041\\ud800\tä"
    )
    assert spoken(call("get", q="<|im_end|>\n\x00")) == '\nget({"q": "<\\|im_end|>\\n\\u0000"})'


def test_real_conversations_keep_their_errors_in_a_third_of_their_size():
    for t in read_result_file(DATA / "gpt-4o_airline_excerpt.json"):
        whole = compact(t, 100_000)
        small = compact(t, max(1200, estimate_tokens(whole) // 3))
        assert estimate_tokens(small) <= max(1200, estimate_tokens(whole) // 3)
        for index, message in enumerate(t.messages):
            if message["role"] == "tool" and message["content"].startswith("Error"):
                assert f"[{index}] tool result (error): {message['content'][:20]}" in small


def test_huge_outputs_and_hundreds_of_messages_take_milliseconds():
    noise = "line of a log with an é\n" * 50_000
    turns = [m for i in range(250) for m in (call("bash", command=f"cat file{i}"), result(noise if i % 50 == 0 else f"{i} text\n" * 300))]
    t = trajectory(*turns)
    began = time.process_time()
    text = compact(t, 30_000)
    assert time.process_time() - began < 1.0
    assert estimate_tokens(text) <= 30_000 and "[501] tool result: 249 text" in text


def test_content_that_is_no_text_is_written_as_json():
    t = trajectory({"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": None})
    assert f"[2] user: {json.dumps(t.messages[2]['content'])}\n[3] agent:\n" in compact(t, 1000)


@pytest.mark.parametrize(
    "command, looks",
    [
        ("cd /testbed && grep -rn 'name' src/ | head -20", True),
        ("sed -n '1,80p' a.py; ls -la 2>/dev/null", True),
        ("git diff HEAD~1 -- a.py", True),
        ("view", True),
        ("cat > a.py << 'EOF'\nx = 1\nEOF", False),
        ("sed -i 's/a/b/' a.py", False),
        ("sed -n 's/a/b/w out' a.py -i", False),
        ("find . -name '*.pyc' -delete", False),
        ("ls $(rm a.py)", False),
        ("cat a.py | tee b.py", False),
        ("python -m pytest", False),
        ("git checkout a.py", False),
        ("str_replace", False),
    ],
)
def test_commands_that_only_look_give_way_before_those_that_change_files(command, looks):
    turns = [m for _ in range(5) for m in (call("bash", command=command), result("output of it\n" * 200))]
    text = compact(trajectory(*turns, *END), 450)
    assert ("] tool result: ... 2,600 characters left out ...\n" in text) == looks
