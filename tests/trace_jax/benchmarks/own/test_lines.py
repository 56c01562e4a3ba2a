"""Trajectory lines of anybody: what is enough, and what is said of what is not."""

import json
import pathlib

import pytest
import zstandard

from rl.trajectory import Trajectory, encode_shard
from trace_jax.benchmarks.own import lines
from trace_jax.benchmarks.results import read_results
from trace_jax.errors import InputError

CALL = {"name": "water", "arguments": {"bed": "B7"}}
LINE = {
    "id": "a#0",
    "task_id": "a",
    "environment": "greenhouse",
    "messages": [
        {"role": "user", "content": "Water B7."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", **CALL}]},
        {"role": "tool", "content": "watered", "tool_call_id": "1"},
    ],
    "reward": 1,
    "checks": {"action:0": {"passed": True, "expected": {**CALL, "kind": "write"}}, "db": {"passed": True}},
}


def write(path: pathlib.Path, *said: object) -> pathlib.Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in said))
    return path


def test_a_few_fields_are_enough(tmp_path):
    t, other = read_results([write(tmp_path / "runs.jsonl", LINE, "", LINE | {"id": "a again", "reward": 0.5})])
    assert (t.id, t.reward, t.success, t.trial, t.messages[1]["content"]) == ("a#0", 1, True, 0, "")
    assert t.checks["db"] == {"passed": True, "expected": None, "actual": None, "message_index": None}
    assert (other.id, other.success, other.trial) == ("a again", False, 1)  # the next trial of its task


def test_shards_are_read_as_they_were_written(tmp_path):
    trajectories = [Trajectory.from_json(LINE | {"id": f"a#{trial}", "trial": trial, "checks": {}}) for trial in range(3)]
    (tmp_path / "00000-1of1.index.json").write_text("{}")
    (tmp_path / "00000-1of1.jsonl.zst").write_bytes(encode_shard(trajectories[:2]))
    (tmp_path / "00001-1of1.jsonl.zst").write_bytes(encode_shard(trajectories[2:]))
    assert [t.id for t in read_results([tmp_path])] == ["a#0", "a#1", "a#2"]
    assert len(read_results([tmp_path / "00000-1of1.jsonl.zst"])) == 2


def test_several_files_are_pooled(tmp_path):
    said = LINE | {"messages": [*LINE["messages"], {"role": "assistant", "content": "Done."}]}
    found = read_results([write(tmp_path / "1.jsonl", LINE), write(tmp_path / "2.jsonl", said)])
    assert [t.id for t in found] == ["greenhouse:a#0", "greenhouse:a#1"]


def without(name: str) -> dict:
    return {key: value for key, value in LINE.items() if key != name}


def check(**changes: object) -> dict:
    return LINE | {"checks": {"action:0": LINE["checks"]["action:0"] | changes}}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON .*; write one object a line"),
        ("[]", "line 2: list instead of an object"),
        ('{"reward": NaN}', "line 2: NaN is no JSON"),
        (without("environment"), "line 2, field 'environment': missing; a line needs id, task_id, environment, messages and reward"),
        (LINE | {"task_id": 3}, "field 'task_id': 3 must be a text"),
        (LINE | {"reward": 2}, "field 'reward': 2 must be a number from 0 to 1, or null with an error"),
        (without("reward"), "field 'reward': None must be"),
        (LINE | {"rewards": 1}, "line 2: .*unknown field 'rewards'; see 'trajectory lines' in docs"),
        (LINE | {"id": "x#0"}, "line 2, field 'id': 'x#0' is also that of .*line 1"),
        (LINE | {"policy": {"name": []}}, "field 'policy': must be an object whose name is a text"),
        (LINE | {"stop_reason": "bored"}, "field 'stop_reason': 'bored' is not one of"),
        (LINE | {"messages": {}}, "field 'messages': dict must be a list"),
        (LINE | {"messages": [{"role": "agent"}]}, r"field 'messages\[0\]': must be .*the role one of system, user"),
        (LINE | {"messages": [{"role": "user", "content": [{}]}]}, r"'messages\[0\]': content is of type list, .*; join its parts"),
        (LINE | {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "arguments an object; of an OpenAI message take"),
        (
            LINE | {"messages": [{"role": "tool", "content": "", "tool_call_id": 1}]},
            r"'messages\[0\]': tool_call_id is of type int, it must be",
        ),
        (
            LINE | {"messages": [{"role": "assistant", "tool_calls": [{"id": [1], "name": "water", "arguments": {}}]}]},
            r"'messages\[0\]': tool_calls: id is of type list, it must be a text",
        ),
        (LINE | {"checks": []}, "field 'checks': list must be an object"),
        (check(passed=1), r"field 'checks\['action:0'\]': must be"),
        (check(expcted=1), "unknown field 'expcted'; the fields are passed, expected"),
        (check(message_index="3"), "message_index is '3'"),
        (check(expected={"name": "water"}), "expected must be the call"),
        (LINE | {"checks": {"communicate:0": {"passed": True, "expected": 3}}}, "expected must be the text that has to be said"),
    ],
)
def test_what_is_wrong_is_said_with_the_line_the_field_and_the_fix(tmp_path, line, said):
    with pytest.raises(InputError, match=rf"runs\.jsonl, .*{said}"):
        read_results([write(tmp_path / "runs.jsonl", LINE | {"id": "x#0"}, line)])


def test_half_a_sign_where_a_text_was_cut_is_replaced(tmp_path):
    cut = LINE | {"messages": [{"role": "user", "content": "\U0001f600 and \ud83d"}]}
    (t,) = read_results([write(tmp_path / "runs.jsonl", cut)])
    assert t.messages[0]["content"] == "\U0001f600 and \ufffd"


def test_files_that_are_none(tmp_path):
    cut = tmp_path / "cut.jsonl.zst"
    cut.write_bytes(zstandard.compress(json.dumps(LINE).encode() * 9)[:40])
    with pytest.raises(InputError, match="cut.jsonl.zst: no trajectory in it, or it is cut short"):
        read_results([cut])
    cut.write_text(json.dumps(LINE))
    with pytest.raises(InputError, match="cut.jsonl.zst: damaged, or not compressed with zstd"):
        read_results([cut])
    (tmp_path / "latin.jsonl").write_bytes('{"id": "\xe9"}'.encode("latin-1"))
    with pytest.raises(InputError, match="latin.jsonl: not UTF-8 text"):
        read_results([tmp_path / "latin.jsonl"])


def test_predictions_of_swe_bench_are_not_taken_for_lines(tmp_path):
    assert not lines.recognises(write(tmp_path / "all_preds.jsonl", {"instance_id": "x", "model_patch": ""}))
    assert not lines.recognises(tmp_path) and lines.recognises(write(tmp_path / "runs.jsonl", LINE)) and lines.recognises(tmp_path)
