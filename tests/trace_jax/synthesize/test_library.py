"""Which environment of the library a run takes, and what it says where there is none."""

import types

import pytest

from envs.builtin import load_builtin
from trace_jax.synthesize.brief import library_example
from trace_jax.synthesize.packages import ready_made


@pytest.mark.parametrize(
    "target, capability, there",
    [
        ("toolsandbox", "tool_calling_precision", "insufficient_information, state_dependency"),
        ("desk", "state_dependency", "multi_step_task_completion, precondition_verification, "),
        ("somebody_s_shop", "tool_calling_precision", "none at all"),
    ],
)
def test_the_library_is_that_of_the_run_s_target(target, capability, there):
    runtime = types.SimpleNamespace(
        config=types.SimpleNamespace(synthesis=None),
        workdir=types.SimpleNamespace(exists=lambda path: False),
        target_of=lambda capability: types.SimpleNamespace(target=target),
    )
    found = ready_made(runtime, capability, {})
    (reason,) = found["reasons"]
    assert not found["usable"] and reason.startswith(f"the library has no environment for it in target {target}, only for {there}")
    assert all(fix in reason for fix in (f"FOLDER/{capability}/, and set synthesis.packages", "generator=llm", "diagnosis.candidates"))


def test_the_example_of_a_brief_is_of_the_same_target_if_the_library_has_one():
    found = library_example("structured_data_reasoning", "tau2_retail", 100_000)
    assert (found["target"], found["capability"]) == ("tau2_retail", "multi_step_task_completion")
    assert found["environment"] == load_builtin("tau2_retail/multi_step_task_completion").source.strip()
    assert library_example("structured_data_reasoning", "somebody_s_shop", 8000)["target"] == "desk"
