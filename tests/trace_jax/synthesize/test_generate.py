"""An LLM writes environments: a scripted author, and all that its package has to pass."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

import trace_jax.run
from tests.rl.test_learner_mesh import free_port
from tests.scripted_llm import Reply, scripted_llm, slow, status
from tests.trace_jax import example_run, tiny
from tests.trace_jax.synthesize import authors
from tests.trace_jax.synthesize.authors import answer
from trace_jax import cli
from trace_jax.config.sections import ROOT
from trace_jax.diagnose.select import decode_selection
from trace_jax.errors import Unfinished
from trace_jax.spent import write_spent
from trace_jax.synthesize import NEEDS_ATTENTION, OPEN, require_finished, synthesize_all
from trace_jax.workdir import Workdir

ONE, TWO = "multi_step_task_completion", "precondition_verification"
KEY = "sk-secret-1234567890"
LLM = {"generator": "llm", "agents__model": "author-1", "agents__attempts": "1"}


class Author:
    """Answers by capability and round; `asked` are the messages, by the same. What was answered may not be asked again."""

    def __init__(self, **script):
        self.script, self.asked = script, {}

    def __call__(self, request):
        key = authors.about("\n".join(message["content"] for message in request["messages"]))
        if key in self.asked:
            return status(400, f"{key} was asked twice")  # which ends the command
        said = self.script[key[0]][key[1] - 1]
        if not isinstance(said, Reply) or said.status == 200:
            self.asked[key] = request["messages"]
        return said


@pytest.fixture
def hire(monkeypatch):
    """Puts authors behind an endpoint of their own, one after the other."""
    with contextlib.ExitStack() as stack:

        def hire(**script):
            author = Author(**script)
            author.server = stack.enter_context(scripted_llm(author))
            monkeypatch.setenv("OPENAI_BASE_URL", author.server.url)
            monkeypatch.setenv("OPENAI_API_KEY", KEY)
            return author

        yield hire


@pytest.fixture
def begin(tmp_path, checkpoint):
    """Runtimes of one workdir, whose step 1 retained the capabilities of `example_run`."""
    made = []

    def begin(*capabilities, **overrides):
        runtime = tiny.open_tiny(tmp_path, checkpoint, **LLM, **overrides)
        made.append(runtime)
        if not runtime.workdir.exists("diagnosis/selected_capabilities.json"):
            example_run.add_rollouts(runtime.workdir)
            example_run.add_diagnosis(runtime.workdir)
            entries = runtime.workdir.read_json("diagnosis/selected_capabilities.json")
            kept = [entry for entry in entries if entry["skill"] in capabilities]
            runtime.workdir.write_json("diagnosis/selected_capabilities.json", kept)
        return runtime

    yield begin
    for runtime in made:
        runtime.close()
        runtime.workdir.close()


def rounds(runtime, capability):
    return runtime.workdir.read_json(f"environments/{capability}/generation.json")["rounds"]


def entry(runtime, capability):
    return next(e for e in runtime.workdir.read_json("diagnosis/selected_capabilities.json") if e["skill"] == capability)


REFUSED = {  # what is handed in, and what its author is told
    authors.SYNTAX: "environment.py: not Python: ",
    authors.SOCKET: "import of 'socket'; allowed are",
    authors.HASHED: "another start when played with another hash seed",
    authors.SPAMMED: "spam: mean reward 1.000",
}


def test_each_refusal_is_told_and_the_fifth_is_accepted(begin, hire):
    author = hire(**{ONE: [*(answer(ONE, wrong) for wrong in REFUSED), answer(ONE)]})
    runtime = begin(ONE)
    results = synthesize_all(runtime)
    require_finished(runtime.workdir, results, OPEN, NEEDS_ATTENTION)
    assert results[ONE]["usable"] and results[ONE]["status"] == "usable" and list(author.asked) == [(ONE, n) for n in range(1, 6)]

    (brief,) = author.asked[ONE, 1]
    for number, (wrong, reason) in enumerate(REFUSED.items(), 1):
        same, handed_in, refusal = author.asked[ONE, number + 1]
        assert same == brief and handed_in["content"].strip() == answer(ONE, wrong).strip()
        assert f"hand-in {number} of at most 5" in refusal["content"] and reason in refusal["content"]
        assert all(f"hand-in {n}: " in refusal["content"] for n in range(1, number))  # what was wrong before stays in sight

    workdir, folder = runtime.workdir, f"environments/{ONE}"
    generation = workdir.read_json(f"{folder}/generation.json")
    assert generation["status"] == "usable" and generation["model"] == "author-1" and generation["usage"]["requests"] == 5
    assert [one["kind"] for one in generation["rounds"]] == ["generation"] + 4 * ["repair"]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in generation["prompts"].values()) and len(generation["prompts"]) == 3
    for one, reason in zip(generation["rounds"], REFUSED.values(), strict=False):
        assert any(reason in said for said in one["reasons"])
    came = {n: [name.rpartition("/")[2] for name in workdir.list(f"{folder}/rounds/{n}")] for n in range(1, 6)}
    texts = ["answer.md", "environment.py", "package.json"]
    assert came[1] == came[2] == texts and came[3] == came[4] == sorted([*texts, "certificate.json"])
    assert came[5] == sorted([*texts, "certificate.json", "calibration.json"])
    assert workdir.read_bytes(f"{folder}/rounds/4/answer.md").decode() == answer(ONE, authors.SPAMMED)

    package = runtime.environment(ONE)  # as training finds it
    assert generation["rounds"][4]["package"] == package.digest and runtime.usable() == [ONE]
    assert entry(runtime, ONE)["status"] == "DONE" and entry(runtime, ONE)["reward_distribution"]["n_rollouts"] == 8
    spent = write_spent(workdir)["stages"]
    assert spent["synthesize"]["rollouts"] == 8

    assert synthesize_all(runtime) == results and len(author.asked) == 5
    assert not [name for name in workdir.list() if KEY.encode() in workdir.read_bytes(name)]


@pytest.mark.parametrize(
    "first, second, bounds, words",
    [
        (
            answer(ONE, authors.EASY),
            answer(ONE),
            {"synthesis__mean_high": "0.4"},
            ["`too_easy`", "success_rate 0.750 is above 0.4", "mean reward 0.338", "| 1.00 | 3 |", "max_turns 2"],
        ),
        (
            answer(ONE),
            answer(ONE, authors.EASY),
            {"synthesis__mean_low": "0.2"},
            ["`too_hard`", "mean reward 0.000", "mean_reward 0.000 is below 0.2", "| 0.00 | 4 |", "No reward in 100 %"],
        ),
    ],
    ids=["easy", "hard"],
)
def test_a_sound_package_of_the_wrong_difficulty_is_mutated_by_the_figures(begin, hire, first, second, bounds, words):
    author = hire(**{ONE: [first, second]})
    runtime = begin(ONE, **bounds)
    assert synthesize_all(runtime)[ONE]["usable"]
    refusal = author.asked[ONE, 2][-1]["content"]
    assert all(word in refusal for word in words), refusal
    assert [(one["kind"], bool(one["calibration"])) for one in rounds(runtime, ONE)] == [("generation", True), ("mutation", True)]
    calibrated = {name.split("/")[2] for name in runtime.workdir.list("rollouts/base") if "calibration" in name}
    calibrated = {re.sub("-[0-9a-f]{8}", "", name) for name in calibrated}  # the package's digest
    assert calibrated == {f"calibration-{ONE}-r1", f"calibration-{ONE}-r1-end", f"calibration-{ONE}-r2"}


def test_what_only_the_sandbox_can_tell_is_told_too(begin, hire):
    wrong = [authors.RAISES, authors.FEW_TOOLS, authors.OTHER_TOOL]
    script = [*(answer(ONE, one) for one in wrong), answer(ONE, authors.OTHER_TOOL, version="2"), answer(ONE, authors.RAISES)]
    hire(**{ONE: script})
    runtime = begin(ONE)
    assert synthesize_all(runtime)[ONE]["status"] == "needs_attention"
    told = [one["reasons"] for one in rounds(runtime, ONE)]
    assert (
        '{"name": "no_such_tool", "arguments": {}} ends in a fault' in told[0][0]
        and "KeyError: 'no_such_tool' (environment.py, line " in told[0][0]
    )
    assert told[1] == ["TOOLS: 2 tools, there must be 3 to 5 of the target's"]
    assert len(told[2]) == 1 and "'cancel_order' is not equal to the target's" in told[2][0] and told[3] == told[2]
    assert told[4][0] == "this is hand-in 1 again, unchanged, which was refused" and told[4][1:] == told[0]


def test_after_the_last_round_a_capability_needs_attention(begin, hire, capsys):
    wrong = [answer(ONE, authors.SYNTAX, version=str(n)) for n in range(4)] + ["I would rather not."]
    author = hire(**{ONE: [*wrong, answer(ONE)]})
    runtime = begin(ONE)
    root, config = pathlib.Path(runtime.workdir.place()), runtime.config
    runtime.close()
    runtime.workdir.close()
    for _ in range(2):  # the second time nothing is left to ask
        assert cli.main(["synthesize", f"--workdir={root}"]) == 1
        told = capsys.readouterr()
        assert told.out.startswith(f"{ONE}: not usable; no ```json block in the answer")
        line = told.err.splitlines()[-1]  # all reasons
        assert line.startswith(f"trace-jax: no usable environment in 5 rounds for {ONE}: no ```json block")
        assert "; no ```python block" in line
        assert f"{root}/environments/{ONE}/generation.json" in told.err and len(author.asked) == 5
    with Workdir.open(root, config) as workdir:
        (kept,) = decode_selection(workdir.read_json("diagnosis/selected_capabilities.json"), "")
        assert kept["status"] == "PENDING" and kept["needs_attention"][0].startswith("no ```json block")
        assert workdir.read_json(f"environments/{ONE}/generation.json")["status"] == "needs_attention"
        assert not workdir.exists(f"environments/{ONE}/package.json")
    assert cli.main(["synthesize", f"--workdir={root}", "--config.synthesis.rounds=6"]) == 0  # goes on with the sixth
    assert list(author.asked)[5:] == [(ONE, 6)] and capsys.readouterr().out.startswith(f"{ONE}: usable")
    with Workdir.open(root) as workdir:
        (kept,) = workdir.read_json("diagnosis/selected_capabilities.json")
        assert kept["status"] == "DONE" and "needs_attention" not in kept


def test_capabilities_are_asked_about_together_and_one_without_an_answer_stays_open(begin, hire):
    late = slow(0.3, answer(ONE, authors.SYNTAX))
    author = hire(**{ONE: [late, answer(ONE)], TWO: [answer(TWO, authors.SYNTAX), status(503, "come later")]})
    runtime = begin(ONE, TWO)
    results = synthesize_all(runtime)
    assert results[ONE]["usable"] and results[TWO]["status"] == "open" and "503" in results[TWO]["reasons"][0] and author.server.most == 2
    with pytest.raises(Unfinished, match=rf"^{TWO}: no environment yet: .*503.*; the same command goes on"):
        require_finished(runtime.workdir, results, OPEN, NEEDS_ATTENTION)
    assert runtime.workdir.read_json(f"environments/{TWO}/generation.json")["status"] == "open"
    assert (entry(runtime, ONE)["status"], entry(runtime, TWO)["status"]) == ("DONE", "PENDING")
    again = hire(**{TWO: [None, answer(TWO)]})
    assert all(result["usable"] for result in synthesize_all(runtime).values())
    assert list(again.asked) == [(TWO, 2)] and set(author.asked) == {(ONE, 1), (ONE, 2), (TWO, 1)}


def test_a_budget_that_is_used_up_leaves_all_open(begin, hire):
    hire(**{ONE: [answer(ONE)]})
    results = synthesize_all(begin(ONE, agents__max_tokens="1000"))
    assert results[ONE]["status"] == "open" and "'agents.max_tokens'" in results[ONE]["reasons"][0]


def test_a_run_goes_on_with_the_usable_and_says_at_its_end_what_needs_attention(begin, monkeypatch):
    """Of `run` only the order is tried here; its steps are stand-ins."""
    done, usable = [], {"usable": True, "status": "usable", "reasons": []}
    for name in ("roll_out_train_split", "diagnose_workdir", "train_adapter", "compose", "evaluate_all"):
        monkeypatch.setattr(trace_jax.run, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(trace_jax.run.report, "write_report", lambda *_: done.append("report"))
    monkeypatch.setattr(trace_jax.run.report, "summary_table", lambda *_: "")
    runtime = begin(ONE, TWO)
    monkeypatch.setattr(trace_jax.run, "open_runtime", lambda _: contextlib.nullcontext(runtime))
    for left, found, steps in (
        ("needs_attention", usable, ["train_adapter", "compose", "evaluate_all", "report"]),
        ("needs_attention", {"usable": False, "status": "needs_attention", "reasons": ["bad"]}, ["report"]),
        ("open", usable, []),
    ):
        results = {ONE: found, TWO: {"usable": False, "status": left, "reasons": ["too easy"]}}
        monkeypatch.setattr(trace_jax.run, "synthesize_all", lambda _, results=results: results)
        monkeypatch.setattr(runtime, "usable", lambda: [ONE])
        done.clear()
        with pytest.raises(Unfinished, match=f"{TWO}: (too easy|no environment yet)"):
            trace_jax.run.main(tiny.arguments(runtime, "run"))
        assert done[2:] == steps


def start(workdir, *more):
    words = [sys.executable, "-m", "trace_jax", "synthesize", f"--workdir={workdir}", *more]
    return subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_killed_run_asks_nothing_twice_and_ends_as_an_undisturbed_one(begin, hire, tmp_path):
    script = {ONE: [answer(ONE, authors.SYNTAX), answer(ONE, authors.HASHED), answer(ONE)], TWO: [answer(TWO)]}
    author, runtime = hire(**script), begin(ONE, TWO)
    root = pathlib.Path(runtime.workdir.place())
    runtime.close()
    runtime.workdir.close()
    shutil.copytree(root, tmp_path / "undisturbed")

    process = start(root)
    while not (root / f"environments/{ONE}/rounds/2/answer.md").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert len(author.asked) == 3 and cli.main(["synthesize", f"--workdir={root}"]) == 0
    assert len(author.asked) == 4 == author.server.answered

    hire(**script)
    assert cli.main(["synthesize", f"--workdir={tmp_path / 'undisturbed'}"]) == 0
    for folder in ("environments", "diagnosis"):
        assert contents(root / folder) == contents(tmp_path / "undisturbed" / folder)


@pytest.mark.slow
def test_of_two_processes_one_asks_and_both_roll_out(begin, hire, tmp_path):
    script = {ONE: [answer(ONE, authors.SYNTAX), answer(ONE)], TWO: [answer(TWO)]}
    author, runtime = hire(**script), begin(ONE, TWO)
    root = pathlib.Path(runtime.workdir.place())
    runtime.close()
    runtime.workdir.close()
    shutil.copytree(root, tmp_path / "alone")
    port = free_port()
    pair = [start(root, f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}") for index in range(2)]
    for process in pair:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error
    assert len(author.asked) == 3 and list(root.glob("rollouts/base/calibration-*/00000-1of2.jsonl.zst"))

    hire(**script)
    assert cli.main(["synthesize", f"--workdir={tmp_path / 'alone'}"]) == 0
    assert contents(root / "environments") == contents(tmp_path / "alone" / "environments")


def contents(folder):
    """All files; a certificate without its hour."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: json.loads(data) | {"when": ""} if name.endswith("certificate.json") else data for name, data in files.items()}
