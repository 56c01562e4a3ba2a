"""The gate's use by kind of turn and tool follows from tokens, turns and messages."""

import numpy as np
import pytest

from rl.trajectory import Trajectory
from trace_jax.report import gate

PIECES = ["read", "<think>", "hm", "</think>", "<tool_", "call>", "words"]


def trajectory():
    """A turn that thinks and calls a tool, and one that speaks; tokens that are read between them."""
    tokens = [0, 0, 1, 2, 3, 4, 5, 0, 6, 6]
    mask = [0, 0, 1, 1, 1, 1, 1, 0, 1, 1]
    call = {"id": "a", "name": "get_order", "arguments": {}}
    messages = [
        {"role": "assistant", "content": "Hello, that nobody sampled."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "<think>hm</think>", "tool_calls": [call, call]},
        {"role": "tool", "content": "y"},
        {"role": "assistant", "content": "words words"},
    ]
    slots = np.array([[0, 0], [0, 1], [1, 1], [1, 1], [1, 1], [2, 0], [2, 2], [0, 0], [2, 2], [0, 2]])
    return Trajectory(
        id="t", environment="e", task_id="t", reward=1.0, messages=messages, tokens=tokens, loss_mask=mask,
        logprobs=np.zeros(10), turns=[0] * 7 + [1] * 3, versions=np.zeros(10), slots=slots,
    )  # fmt: skip


def test_tokens_are_told_apart_by_turn_kind_and_tool():
    found = gate.usage([trajectory()], PIECES, ["base", "a", "b"])
    rows = {row.kind: (row.tokens, row.share) for row in found["rows"]}
    assert rows == {
        "what it read": (3, pytest.approx([5 / 6, 1 / 6, 0])),
        "what it wrote": (7, pytest.approx([2 / 14, 6 / 14, 6 / 14])),
        "its first turn": (5, pytest.approx([0.1, 0.6, 0.3])),
        "its later turns": (2, pytest.approx([0.25, 0, 0.75])),
        "thoughts": (3, pytest.approx([0, 1, 0])),
        "tool calls": (2, pytest.approx([0.25, 0, 0.75])),
        "words to the user": (2, pytest.approx([0.25, 0, 0.75])),
        "get_order": (2, pytest.approx([0.25, 0, 0.75])),
    }
    assert found["trajectories"] == 1 and found["tools_left_out"] == 0
    assert [row.group for row in found["rows"]] == [gate.READ] * 2 + [gate.TURN] * 2 + [gate.SAID] * 3 + [gate.TOOL]


def test_without_texts_thoughts_are_not_told_apart():
    rows = {row.kind: row.tokens for row in gate.usage([trajectory()], None, ["base", "a", "b"])["rows"]}
    assert "thoughts" not in rows and rows["tool calls"] == 5


@pytest.mark.parametrize("texts, inside", [(["a", "b", "</think>", "c"], 3), (["x", "<th", "ink>", "y"], 3), (["a", "b", "c", "d"], 0)])
def test_a_thought_may_be_open_already_or_never_end(texts, inside):
    assert gate._thoughts(np.arange(4), np.ones(4, bool), texts).sum() == inside


def test_without_slots_there_is_no_use_to_show():
    plain = trajectory()
    plain.slots = None
    assert gate.usage([plain], PIECES, ["base"]) is None and gate.usage([], PIECES, ["base"]) is None
