import dataclasses

import pytest

from rl.trajectory import StopReason, Trajectory
from tests.scripted_llm import scripted_llm, status
from tests.trace_jax import tiny
from trace_jax.baselines.prompt_evolution import evolve, feedback, make_reflection_agent, seed_instructions, token_count
from trace_jax.errors import InputError, Unfinished
from trace_jax.runtime import HELDOUT_TASKS

SETTINGS = {"target__train_tasks": "10", "baselines__gepa_minibatch": "2", "baselines__gepa_validation": "4", "agents__attempts": "1"}
GOOD = "all done."


def answer(text: str) -> str:
    return f"Here they are:\n```\n{text}\n```"


@pytest.fixture
def llm(monkeypatch):
    """An endpoint that says what the test puts into `script`."""
    with scripted_llm(lambda request: server.say(request)) as server:
        for name, value in (("BASE_URL", server.url), ("API_KEY", "k"), ("MODEL", "m")):
            monkeypatch.setenv(f"OPENAI_{name}", value)
        yield server


@pytest.fixture
def runtime(tmp_path, checkpoint, monkeypatch):
    """Its rollouts cost nothing: who is told GOOD earns 1 on all tasks, everybody else on none."""
    with tiny.open_tiny(tmp_path, checkpoint, **SETTINGS) as runtime:
        runtime.sampled = []

        def roll_out(policy, folder, split, index, tasks, temperature=None):
            if index not in runtime.workdir.shards(folder, split):
                runtime.sampled.append((folder, split, index))
                runtime.workdir.write_shard(folder, split, index, [played(task) for task in tasks])
            return list(runtime.workdir.read_shards(folder, split, [index]))

        monkeypatch.setattr(runtime, "roll_out", roll_out)
        yield runtime


def played(task) -> Trajectory:
    reward = float(GOOD in task.instructions)
    system = f"Help.\n\n{task.instructions}"
    return Trajectory(
        id=task.id,
        environment=task.package.name,
        task_id=task.task_id,
        split=task.split,
        seed=task.seed,
        group=task.group,
        trial=task.trial,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": "return order A1 please."}],
        reward=reward,
        success=bool(reward),
        checks={"db": {"passed": bool(reward), "expected": {"A1": "returned"}, "actual": {"A1": "delivered"}, "message_index": 1}},
    )


def test_the_prompt_that_does_best_on_train_tasks_is_the_one_that_counts(runtime, llm):
    llm.say = lambda request: answer(GOOD if len(llm.requests) == 3 else f"no. {len(llm.requests)}")
    found = evolve(runtime, 60)
    workdir = runtime.workdir
    assert found["instructions"] == GOOD and found["overall"]["rate"] == found["validation_score"] == 1.0
    assert found["training_rollouts"] <= 60 and workdir.read_bytes("baselines/gepa/prompt.txt").decode() == GOOD
    rows = workdir.read_jsonl("baselines/gepa/log.jsonl")
    assert [row["score"] for row in rows] == sorted(row["score"] for row in rows) and rows[0]["rollouts"] == 4
    curve = workdir.read_json("evaluation/gepa_curve.json")
    assert curve["rate"][0] == 0.0 and curve["rate"][-1] == 1.0 and curve["rollouts"][-1] == found["training_rollouts"]

    trained = list(workdir.read_shards("gepa", "training"))
    assert len(trained) == found["training_rollouts"] and {t.seed for t in trained} <= set(range(10))
    assert len({t.id for t in trained}) == len(trained), "a task that comes again is played with other random numbers"
    assert {t.seed for t in workdir.read_shards("gepa", "heldout")} == set(range(HELDOUT_TASKS, HELDOUT_TASKS + 6))
    told = llm.requests[0]["messages"][-1]["content"]
    assert (
        'db: expected {"A1": "returned"}, found {"A1": "delivered"}.' in told and "return order A1 please." in told and "64 tokens" in told
    )
    assert not any(str(HELDOUT_TASKS + n) in request["messages"][-1]["content"] for request in llm.requests for n in range(6))
    sampled = len(runtime.sampled)
    assert evolve(runtime, 60) == found and len(runtime.sampled) == sampled


def test_an_outage_ends_the_command_and_the_next_goes_on_without_paying_twice(runtime, llm):
    llm.say = lambda request: answer(f"no. {len(llm.requests)}") if len(llm.requests) < 4 else status(503)
    with pytest.raises(Unfinished, match="the same command goes on from there"):
        evolve(runtime, 40)
    sampled, asked = list(runtime.sampled), len(llm.requests)
    assert not runtime.workdir.exists("evaluation/gepa.json") and asked == 4
    llm.say = lambda request: answer(GOOD)
    assert evolve(runtime, 40)["instructions"] == GOOD
    assert len(set(runtime.sampled)) == len(runtime.sampled) > len(sampled)
    questions = [request["messages"][-1]["content"] for request in llm.requests]
    assert questions[asked] == questions[asked - 1] and len(set(questions[asked:])) == len(questions) - asked


def test_an_llm_that_refuses_for_good_is_an_input_error(runtime, llm):
    llm.say = lambda request: status(401)
    with pytest.raises(InputError, match="OPENAI_API_KEY"):
        evolve(runtime, 40)


def test_without_an_llm_it_says_how_to_do_without(runtime, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", "https://llm.example/v1")
    with pytest.raises(InputError, match="OPENAI_API_KEY.*--config.baselines.policies=grpo_target,single,swe_rl,router,uniform"):
        make_reflection_agent(runtime)


def test_instructions_that_are_too_long_are_shown_to_their_author(runtime, llm):
    llm.say = lambda request: answer(GOOD if "shorten them" in request["messages"][-1]["content"] else "word " * 200)
    assert evolve(runtime, 40)["instructions"] == GOOD


def test_rollouts_under_other_instructions_are_not_taken_for_ours(runtime, llm):
    llm.say = lambda request: answer(f"no. {len(llm.requests)}")
    evolve(runtime, 40)
    runtime.workdir.local("evaluation/gepa.json").unlink()
    runtime.workdir.local("agents/exchanges.jsonl").unlink()
    with pytest.raises(InputError, match="rollouts/gepa: holds rollouts of other instructions"):
        evolve(runtime, 40)


def test_capabilities_are_told_to_the_llm_and_as_far_as_they_fit_to_the_agent(runtime, llm):
    capabilities = ["tool_calling_precision", "precondition_verification"]
    for capability in capabilities:
        tiny.store_environment(runtime, capability)
    entries = [{"skill": c, "description": f"Does {c} well.", "passes_consistency": True} for c in capabilities]
    runtime.workdir.write_json("diagnosis/selected_capabilities.json", entries)
    llm.say = lambda request: answer(GOOD)
    found = evolve(runtime, 40, 1)
    assert found["policy"] == "gepa-1" and runtime.workdir.exists("capabilities/1/gepa.json")
    told = llm.requests[0]["messages"][-1]["content"]
    assert "- tool calling precision: Does tool_calling_precision well." in told and "precondition" not in told

    both = [{"name": c.replace("_", " "), "description": "x" * 5} for c in capabilities]
    whole = seed_instructions(runtime, both, 1000)
    assert whole == "- tool calling precision: xxxxx\n- precondition verification: xxxxx"
    names = seed_instructions(runtime, both, token_count(runtime, whole) - 1)
    assert names == "tool calling precision; precondition verification"
    assert seed_instructions(runtime, both, token_count(runtime, names) - 1) == "tool calling precision"
    assert seed_instructions(runtime, both, 1) == seed_instructions(runtime, [], 0) == ""


def test_feedback_says_what_the_grader_expected():
    check = {"passed": False, "expected": "x" * 700, "actual": None, "message_index": None}
    t = Trajectory(id="a", environment="e", task_id="a", reward=0.25, stop_reason=StopReason.MAX_TURNS, checks={"db": check})
    said = feedback(t).splitlines()
    assert said[:2] == ["The score is 0.25 of 1.", "The episode did not come to its end: max_turns."]
    assert said[2].startswith('db: expected "xxx') and said[2].endswith("x ..., found null.") and len(said[2]) < 700
    good = dataclasses.replace(t, reward=1.0, stop_reason=StopReason.DONE, checks={"db": check | {"passed": True}})
    assert feedback(good) == "The score is 1.00 of 1.\nEverything was as it should be."
