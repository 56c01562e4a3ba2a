import json

import pytest

from trace_jax.agents.answers import AnswerError, find_json, format_note, read_answer, schema_faults

VALUE = {"a": [1, {"b": 'x } ] " y'}], "é": None}
TEXT = json.dumps(VALUE, indent=1)


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        f"  \n{TEXT}\n",
        f"```json\n{TEXT}\n```",
        f"```\n{TEXT}\n```",
        f"Here it is [sic], as {{you}} wished:\n\n```json\n{TEXT}\n```\nIt's done.",
        f"Sure: {TEXT} That's it, see [1].",
        f'<think>Maybe {{"a": 1}}? Or [2].</think>\n{TEXT}',
        f'Maybe {{"a": 1}}?</think>{TEXT}',
    ],
)
def test_json_is_found_bare_in_a_fence_and_in_prose(text):
    assert find_json(text, dict) == VALUE


@pytest.mark.parametrize(
    "text, fault",
    [
        ("", "empty"),
        ("<think>hm</think>", "empty"),
        ("```json\n\n```", "empty"),
        ("I would rather not.", "no JSON"),
        ("See {this}.", "no JSON"),
        (TEXT[:-9], "not valid JSON"),
        (f"Answer: {TEXT[:-9]}", "not valid JSON"),
        ('{"a": {"b": 1}, "c": {"d": 2},}', "not valid JSON"),  # nothing is taken out of the inside
        (f"{TEXT} or {TEXT}", "2 JSON values"),
        ('{"a": 1}\n{"a": 2}', "2 JSON values"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1e999}', "1e999"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"a": "\\ud83d"}', "surrogate"),
        ("{" + "".join(f'"{n}": 0, ' for n in range(100_000)) + '"99999": 1}', "'99999' occurs twice"),  # in no more than a moment
        ("[" * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_no_single_json_value_is_a_fault(text, fault):
    with pytest.raises(AnswerError, match=fault):
        find_json(text)


def test_a_value_that_quotes_the_end_of_thoughts_is_whole():
    assert find_json('{"quote": "</think>"}') == {"quote": "</think>"}


def test_faults_have_the_path_of_the_field():
    schema = {
        "type": "object",
        "properties": {
            "labels": {"type": "array", "items": {"type": "object", "properties": {"label": {"enum": ["A", "B"]}}}},
            "reason": {},
        },
        "required": ["labels", "reason"],
        "additionalProperties": False,
    }
    value = {"labels": [{"label": "A"}, {"label": "C" * 1000}, 3], "more": 1}
    faults = schema_faults(value, schema)
    assert len(faults) == 4 and all(len(fault) < 340 for fault in faults)
    assert any(fault.startswith("labels[1].label: 'CCC") for fault in faults) and "labels[2]: 3 is not of type 'object'" in faults
    assert "the answer: 'reason' is a required property" in faults
    assert read_answer(json.dumps(value), schema) == (None, faults)
    assert read_answer('{"labels": [], "reason": 0}', schema) == ({"labels": [], "reason": 0}, [])
    assert schema_faults({"labels": [3] * 20, "reason": 0}, schema)[-1] == "and 12 more"
    assert schema_faults({"labels": [3] * 1_000_000, "reason": 0}, schema)[-1] == "and 192 more at least"
    assert json.dumps(schema) in format_note(schema)


def test_a_list_is_not_taken_for_the_object_that_was_asked_for():
    schema = {"type": "object", "properties": {}}
    assert read_answer("[{}]", schema) == (None, ["the answer: [{}] is not of type 'object'"])
    assert read_answer("Items [1, 2] give {}", schema) == ({}, [])
