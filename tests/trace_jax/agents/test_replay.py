import json
import os
import pathlib
import shutil

import pytest

from tests.trace_jax.agents.asking import GOOD, ask, asking, make
from trace_jax.agents import usage_of
from trace_jax.agents.protocol import Usage
from trace_jax.agents.record import EXCHANGES, parse_exchanges
from trace_jax.config import Config
from trace_jax.errors import InputError
from trace_jax.workdir import Workdir


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The record of three questions, and the replies."""
    folder = tmp_path_factory.mktemp("recorded")

    def script(request):
        """To "a" a good answer, to "b" one that is mended, to "c" none."""
        text, turns = request["messages"][1]["content"], len(request["messages"])
        return GOOD if text == "a" or (text == "b" and turns > 2) else "no"

    with asking(folder, script, parameters={"temperature": 0.5}) as (agent, _):
        replies = ask(agent, *"abc", sample=4)
    return folder / EXCHANGES, replies


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("OPENAI_")]:
        monkeypatch.delenv(name)
    with Workdir.open(tmp_path / "run", Config()) as workdir:
        yield workdir


def replaying(workdir, path, **fields):
    fields = {"model": "", "parameters": {"temperature": 0.5}} | fields
    return make(workdir, backend="replay", recorded=str(path), max_tokens=1, **fields)


def test_a_recording_gives_the_same_replies_without_an_endpoint_and_for_nothing(recorded, workdir):
    path, replies = recorded
    again = ask(replaying(workdir, path), *"abc", sample=4)
    assert [(r.text, r.parsed, r.faults) for r in again] == [(r.text, r.parsed, r.faults) for r in replies]
    assert [r.usage.requests for r in again] == [1, 2, 3] and replies[2].faults == ("there is no JSON in it",)
    assert usage_of(workdir)["total"] == Usage(6, 0, 0, 0.0)
    assert {line["model"] for line in workdir.read_jsonl(EXCHANGES)} == {"gpt-x"}


@pytest.mark.parametrize("other", [{"text": "d"}, {"sample": 5}, {"parameters": {}}])
def test_a_question_that_was_not_recorded_names_the_stage(recorded, workdir, other):
    agent = replaying(workdir, recorded[0], stage="synthesize", **({"parameters": {}} if "parameters" in other else {}))
    with pytest.raises(InputError, match=r"exchanges.jsonl: no answer to a question of stage 'synthesize', sample \d; .*other prompts"):
        ask(agent, other.get("text", "a"), sample=other.get("sample", 4))


def test_files_that_are_no_recording_are_named(recorded, workdir, tmp_path):
    for text, said in [("{}\n", "line 1: no exchange"), ("x\n", "line 1: not JSON"), ("[]\n", "line 1: not an object")]:
        (tmp_path / "other.jsonl").write_text(text)
        with pytest.raises(InputError, match=f"other.jsonl, {said}"):
            replaying(workdir, tmp_path / "other.jsonl")
    (tmp_path / "other.jsonl").write_text("{}")
    with pytest.raises(InputError, match="'agents.recorded': .*other.jsonl holds no answers; give"):
        replaying(workdir, tmp_path / "other.jsonl")
    with pytest.raises(InputError, match="'agents.recorded': .*missing.jsonl cannot be read"):
        replaying(workdir, tmp_path / "missing.jsonl")
    torn = tmp_path / "torn.jsonl"
    shutil.copy(recorded[0], torn)
    torn.write_text(torn.read_text() + '{"key": ')
    assert ask(replaying(workdir, torn), "a", sample=4)[0].faults == ()


def test_of_several_models_one_must_be_named(recorded, workdir, tmp_path):
    both = tmp_path / "both.jsonl"
    both.write_text(recorded[0].read_text() + recorded[0].read_text().replace("gpt-x", "gpt-y").replace("step", "stop"))
    with pytest.raises(InputError, match="'agents.model': .*both.jsonl has answers of gpt-x, gpt-y"):
        replaying(workdir, both)
    with pytest.raises(InputError, match="no answers of 'gpt-z'"):
        replaying(workdir, both, model="gpt-z")
    assert ask(replaying(workdir, both, model="gpt-x"), "b", sample=4)[0].faults == ()


@pytest.mark.parametrize(
    "field, value",
    [("input_tokens", "9"), ("input_tokens", -1), ("cut", 0), ("cost", "free"), ("cost", float("nan")), ("stage", ["x"]), ("text", None)],
)
def test_a_line_with_a_value_of_another_kind_is_named(recorded, field, value):
    lines = [json.loads(line) for line in recorded[0].read_text().splitlines()]
    with pytest.raises(InputError, match=f"x.jsonl, line 1: '{field}' cannot be .*; remove the line"):
        parse_exchanges([lines[0] | {field: value}], pathlib.Path("x.jsonl"))
