import json

import pytest

from envs.builtin import load_builtin
from trace_jax.synthesize.handin import read_hand_in, tool_faults

CAPABILITY = "multi_step_task_completion"
PACKAGE, DESK = load_builtin(CAPABILITY), load_builtin("desk")
TARGET = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}}
    for name in ("a", "b", "c", "d", "e", "f")
]


def answer(source: str = PACKAGE.source, **meta) -> str:
    content = {key: value for key, value in (PACKAGE.meta | meta).items() if value is not None}
    return f"I thought.\n\n```json\n{json.dumps(content)}\n```\n\nAnd:\n\n```python\n{source}\n```\nThat is all."


def faults(text: str) -> list[str]:
    found = read_hand_in(text, CAPABILITY, DESK)
    assert (found.package is None) == bool(found.faults)
    return found.faults


def test_two_blocks_are_a_package():
    found = read_hand_in(answer(), CAPABILITY, DESK)
    assert found.faults == [] and found.package.meta == PACKAGE.meta
    assert found.texts["environment.py"].strip() == PACKAGE.source.strip() and json.loads(found.texts["package.json"]) == PACKAGE.meta


@pytest.mark.parametrize(
    "text",
    [
        answer().replace("```python", "````python").replace("\n```\nThat", "\n````\nThat"),
        answer().replace("\n", "\r\n"),
        "<think>perhaps\n```json\n{}\n```\n</think>" + answer(),
        answer(PACKAGE.source + "\nNOTE = '''see\n    ```json\n    {}\n    ```\n'''\n")
        .replace("```python", "````python")
        .replace("\n```\nThat", "\n````\nThat"),
    ],
)
def test_fences_of_any_length_and_thoughts_before_the_answer_are_understood(text):
    assert faults(text) == []


@pytest.mark.parametrize(
    "text, reasons",
    [
        ("", ["no ```json block", "no ```python block"]),
        ("I cannot help with that.", ["no ```json block", "no ```python block"]),
        (answer().rpartition("\n```\nThat")[0], ["no ```python block"]),
        (answer() + "\n```json\n{}\n```\n", ["2 ```json blocks in the answer"]),
        (answer().replace('"name"', '"nam"'), ["package.json: unknown field 'nam'"]),
        (answer().replace('{"name": "desk', '{"name: "desk'), ["package.json: not JSON"]),
        (answer(name="desk"), ["name = 'desk' must be 'desk_multi_step_task_completion'"]),
        (answer(capability="patience"), ["capability = 'patience' must be 'multi_step_task_completion'"]),
        (answer(target="airline"), ["target = 'airline' must be 'desk'"]),
        (answer(knobs={}), ["knobs is empty"]),
        (answer(knobs={"k": {"default": 1, "min": 1, "max": 1}}), ["or all have one value"]),
        (answer(knobs={f"k{n}": {"default": 1, "min": 0, "max": 2} for n in range(9)}), ["9 knobs, there may be 8"]),
        (answer(knobs={"k": {"default": 1, "min": 0, "max": 10**400}}), ["knobs.k.max = 1000"]),
        (answer(knobs="KNOBS").replace('"KNOBS"', "[" * 100_000), ["package.json: not JSON"]),
        (answer(knobs={"../k": {"default": 1, "min": 0, "max": 2}}), ["knobs: '../k' must be snake_case"]),
        (answer(version="1" * 10_000), ["version has 10,000 characters; write 1"]),
        (answer(knobs={"k": {"default": 1, "min": 0, "max": 2}}, rationale="\ud83d"), ["half of a surrogate pair"]),
        (answer(max_turns=0), ["max_turns = 0"]),
        (answer(max_turns=10**9), ["max_turns = 1000000000 is more than the target's 10"]),
        (answer(rationale="It helps."), ["rationale has 1 sentence, it must have 3 to 5"]),
        (answer(rationale="It helps, e.g. here. " * 6), ["rationale has 6 sentences"]),
        (answer("def f(:\n    pass"), ["environment.py: not Python"]),
        (answer("import socket\n" + PACKAGE.source), ["environment.py:1: import of 'socket'; allowed are"]),
        (answer("TOOLS = []"), ["Environment is missing"]),
        (answer("import os\n", rationale=""), ["rationale has 0 sentences", "import of 'os'"]),
    ],
)
def test_every_fault_is_named_at_once(text, reasons):
    found = faults(text)
    assert len(found) == len(reasons)
    assert all(reason in fault for reason, fault in zip(reasons, found, strict=True)), found


def test_an_abbreviation_ends_no_sentence():
    assert faults(answer(rationale="It reads, e.g. a list. It acts! Does it help? It does.")) == []


def test_tools_are_three_to_five_of_the_target_and_equal_to_it():
    assert tool_faults(TARGET[:3], TARGET) == tool_faults(TARGET[:5], TARGET) == []
    assert "2 tools, there must be 3 to 5" in tool_faults(TARGET[:2], TARGET)[0]
    assert "6 tools" in tool_faults(TARGET, TARGET)[0]
    assert tool_faults(TARGET[:2], TARGET[:2]) == []  # a target that has no more
    other = {"type": "function", "function": {**TARGET[2]["function"], "description": "new"}}
    (fault,) = tool_faults([*TARGET[:2], other], TARGET)
    assert fault.startswith("TOOLS: 'c' is not equal to the target's, which is {") and '"description": ""' in fault
    odd = {"type": "function", "function": {**TARGET[2]["function"], "name": "z"}}
    assert tool_faults([*TARGET[:2], odd], TARGET) == ["TOOLS: the target has no tool 'z'; it has a, b, c, d, e, f"]
