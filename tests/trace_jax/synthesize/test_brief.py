import ast
import dataclasses
import json

import pytest

from envs.builtin import library, load_builtin
from tests.trace_jax import example_run
from trace_jax.agents.budget import estimate_tokens
from trace_jax.agents.templates import Templates
from trace_jax.synthesize.brief import library_example, shorten, shorten_source, write_briefs

LIBRARY = library("desk")
ONE, TWO = "structured_data_reasoning", "multi_step_task_completion"


@pytest.fixture
def diagnosed(runtime):
    example_run.add_rollouts(runtime.workdir)
    example_run.add_diagnosis(runtime.workdir)
    selection = runtime.workdir.read_json("diagnosis/selected_capabilities.json")
    selection[0]["example_failed_cases"] = ["desk:2#0", "desk:4#0", "elsewhere:1", "desk:0#0", "desk:1#0"]
    runtime.workdir.write_json("diagnosis/selected_capabilities.json", selection)
    return runtime


def test_a_brief_tells_what_is_lacking_and_what_the_target_is_like(diagnosed):
    briefs = write_briefs(diagnosed, Templates(), [ONE, TWO])
    text = briefs[ONE]
    assert f"`{ONE}`: Does what structured data reasoning asks for" in text and f'"desk_{ONE}"' in text
    shown = [number for number in range(6) if f'<conversation id="desk:{number}#0">' in text]
    assert shown == [0, 2, 4] and "Please return order #2." in text and '> get_order({"order_id": "#4"})' in text
    assert text.count("Why this lacks the capability: message 4: returns the order without having seen its status") == 3
    assert all(json.dumps(tool) in text for tool in diagnosed.tools(diagnosed.target))
    assert "Check an order before you return it." in text and "<messages>\nuser: " in text
    assert "All of an episode, tools and prompt included, must fit into 256 tokens" in text and "at most 1.0 never" in text
    assert f"It trains `{TWO}`" in text and "class Environment:" in text and "lines are left out" not in text
    assert f"It trains `{ONE}`" not in text
    assert '<conversation id="desk:0#0">' in briefs[TWO] and '<conversation id="desk:2#0">' not in briefs[TWO]
    assert write_briefs(diagnosed, Templates(), [ONE]) == {ONE: text}  # asked again, it is the same question


def test_a_brief_keeps_to_the_tokens_of_a_prompt(diagnosed):
    whole = write_briefs(diagnosed, Templates(), [ONE])[ONE]
    config = dataclasses.replace(diagnosed.config, agents=dataclasses.replace(diagnosed.config.agents, prompt_tokens=2000))
    diagnosed.config = config
    text = write_briefs(diagnosed, Templates(), [ONE])[ONE]
    assert estimate_tokens(text) < 0.75 * estimate_tokens(whole) and "lines are left out here" in text


def test_without_rollouts_of_the_cases_the_definition_has_to_do(runtime):
    example_run.add_diagnosis(runtime.workdir)
    assert "No conversation is at hand" in write_briefs(runtime, Templates(), [ONE])[ONE]


@pytest.mark.parametrize("capability", [*LIBRARY, "patience"])
def test_the_example_is_of_another_capability(capability):
    found = library_example(capability, "desk", 8000)
    assert found["capability"] in LIBRARY and found["capability"] != capability
    assert found["environment"] == load_builtin(found["capability"]).source.strip()


@pytest.mark.parametrize("tokens", [2500, 1500, 500])
def test_code_is_shortened_by_whole_definitions_the_longest_first(tokens):
    source = load_builtin(ONE).source
    text = shorten_source(source, tokens)
    assert estimate_tokens(text) <= max(tokens, 1100) and "# Environment: " in text
    kept = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    every = {node.name: ast.unparse(node) for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    out = {name for name in every if f"# {name}: " in text}
    assert kept | out == every.keys() and not kept & out
    assert not kept or max(len(every[name]) for name in kept) <= 1.3 * max(len(every[name]) for name in out)


def test_a_long_prompt_loses_its_middle():
    text = "".join(map(str, range(5000)))
    short = shorten(text, 500)
    assert estimate_tokens(short) < 520 and short.startswith("0123") and short.endswith("4999") and "characters are left out here" in short
    assert shorten("short", 500) == "short"
