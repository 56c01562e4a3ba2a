"""`trace-jax diagnose` with an LLM as analyst, against an endpoint that misbehaves in every way, killed and started again."""

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.scripted_llm import EMPTY_BODY, cut, dropped, html, refusal, scripted_llm, slow, status, truncated
from tests.trace_jax.agents.asking import KEY, environment
from tests.trace_jax.diagnose import scripted_analyst
from trace_jax import cli
from trace_jax.config.sections import ROOT
from trace_jax.diagnose.aggregate import decode_run

RESULTS = ROOT / "tests" / "data" / "tau2" / "gpt-4o_airline_excerpt.json"
SECRETS = (KEY, "127.0.0.1", "acme-corp", "acme1", "authorization", "Bearer")


def command(workdir, *more, results=RESULTS, runs=3):
    return [
        "diagnose", f"--results={results}", f"--workdir={workdir}", "--config=quickstart", "--config.analyst=llm",
        f"--config.diagnosis.runs={runs}", f"--config.diagnosis.min_runs={runs - 1}", "--config.agents.model=gpt-x",
        "--config.agents.deadline=2", "--config.agents.concurrency=4", '--config.agents.parameters={"seed": 1}', *more,
    ]  # fmt: skip


@pytest.fixture
def endpoint(monkeypatch):
    """Starts a scripted server and points the environment at it."""
    monkeypatch.setattr("trace_jax.agents.client.BACKOFF", 0.001)

    def start(script):
        context = scripted_llm(script)
        server = context.__enter__()
        for name, value in environment(server.url).items():
            monkeypatch.setenv(name, value)
        contexts.append(context)
        return server

    contexts = []
    yield start
    for context in contexts:
        context.__exit__(None, None, None)


def read(workdir, name):
    return json.loads((pathlib.Path(workdir) / "diagnosis" / name).read_text())


def files(workdir):
    return [path for path in pathlib.Path(workdir).rglob("*") if path.is_file()]


def assert_no_secret(workdir):
    for path in files(workdir):
        text = path.read_bytes().decode(errors="replace")
        assert not [secret for secret in SECRETS if secret.lower() in text.lower()], path


def test_a_whole_diagnosis_has_evidence_in_every_label_and_is_not_paid_for_again(tmp_path, endpoint, capsys):
    server = endpoint(scripted_analyst.answer)
    prices = ("--config.agents.price_input=2", "--config.agents.price_output=8")
    assert cli.main(command(tmp_path, *prices)) == 0
    out = capsys.readouterr().out
    labels = [json.loads(line) for line in (tmp_path / "diagnosis" / "evidence.jsonl").read_text().splitlines()]
    assert {label["capability"] for label in labels} == {"error_recovery", "request_tracking"}
    assert all(label["quote"] and label["message_index"] for label in labels if label["value"] != "NA")
    names = [c["name"] for c in read(tmp_path, "candidates.json")["candidates"]]
    runs = [decode_run(read(tmp_path, f"runs/run_0{n}.json"), f"run {n}", names) for n in (1, 2, 3)]
    assert len({json.dumps(run.codes["request_tracking"], sort_keys=True) for run in runs}) == 3
    thresholds = read(tmp_path, "figures.json")["thresholds"]
    assert thresholds["model"] == "gpt-x" and set(thresholds["prompts"]) >= {"capability_discovery", "capability_labelling"}
    assert f"LLM: {server.answered:,} answers for $" in out and '"' in out
    bill = json.loads((tmp_path / "spent.json").read_text())["agents"]
    assert bill["requests"] == server.answered == len(server.requests) and bill["cost"] > 0
    assert_no_secret(tmp_path)

    before, asked = {path: path.read_bytes() for path in files(tmp_path)}, len(server.requests)
    assert cli.main(command(tmp_path, *prices)) == 0
    assert len(server.requests) == asked
    assert {path.name for path in files(tmp_path) if before.get(path) != path.read_bytes()} <= {".lock"}


FAULTS = {
    "too many": lambda _: status(429, "slow down", retry_after="0"),
    "outage": lambda _: status(503),
    "slow": lambda _: slow(2.5),
    "truncated": lambda _: truncated(),
    "dropped": lambda _: dropped(),
    "page": lambda _: html(),
    "no body": lambda _: EMPTY_BODY,
    "empty": lambda _: "",
    "refusal": lambda _: refusal(),
    "cut": lambda request: cut(scripted_analyst.answer(request)[:40]),
    "label outside": lambda request: scripted_analyst.answer(request).replace("PRESENT", "MAYBE").replace("LACKING", "MISSING"),
    "quote not there": lambda request: scripted_analyst.answer(request).replace('"quote": "', '"quote": "nobody ever said '),
}


def test_against_an_endpoint_that_fails_in_every_way_once_the_diagnosis_is_that_of_a_good_one(tmp_path, endpoint, capsys):
    left, seen = [name for name in FAULTS for _ in range(2)], set()
    random.Random(0).shuffle(left)

    def script(request):
        """Every question's first request fails, as long as there are failures left."""
        question = json.dumps([request["messages"][:2], request.get("seed")])
        first = question not in seen
        seen.add(question)
        return FAULTS[left.pop()](request) if left and first else scripted_analyst.answer(request)

    server = endpoint(script)
    assert cli.main(command(tmp_path / "bad")) == 0
    assert not left and len(server.requests) > server.answered
    assert_no_secret(tmp_path / "bad")
    endpoint(scripted_analyst.answer)
    assert cli.main(command(tmp_path / "good")) == 0
    assert read(tmp_path / "bad", "figures.json") == read(tmp_path / "good", "figures.json")
    assert not (tmp_path / "bad" / "diagnosis" / "gaps.jsonl").read_bytes()


@pytest.mark.parametrize("fault", ["empty", "refusal", "label outside", "quote not there"])
def test_an_endpoint_that_labels_badly_for_ever_leaves_gaps_with_reasons(tmp_path, endpoint, capsys, fault):
    def script(request):
        labels = "===== conversation =====" in "".join(m["content"] for m in request["messages"])
        return FAULTS[fault](request) if labels else scripted_analyst.answer(request)

    endpoint(script)
    assert cli.main(command(tmp_path, runs=2)) == 0
    gaps = [json.loads(line) for line in (tmp_path / "diagnosis" / "gaps.jsonl").read_text().splitlines()]
    labels = [json.loads(line) for line in (tmp_path / "diagnosis" / "evidence.jsonl").read_text().splitlines()]
    assert gaps and all(gap["reason"] for gap in gaps) and {label["value"] for label in labels} <= {"NA"}
    figures = read(tmp_path, "figures.json")["capabilities"]
    assert all(row["gap_share"] > 0.5 and row["mean_cov"] == 0 and not row["passes_consistency"] for row in figures)
    assert "without a valid label" in " ".join(capsys.readouterr().out.split())


def test_pairs_without_an_answer_are_named_and_only_they_are_asked_for_again(tmp_path, endpoint, capsys):
    broken = True

    def script(request):
        prompt = "".join(m["content"] for m in request["messages"])
        return (
            status(503)
            if broken and "sophia_silva" in prompt and "===== conversation =====" in prompt
            else scripted_analyst.answer(request)
        )

    server = endpoint(script)
    assert cli.main(command(tmp_path, "--config.agents.attempts=2")) == 1
    error = capsys.readouterr().err
    missing = read(tmp_path, "missing.json")["missing"]
    assert missing and {m["trajectory"] for m in missing} < {f"{n}#0" for n in range(50)}
    assert f"run {missing[0]['run']}: {missing[0]['trajectory']} x 2 capabilities" in error and "missing.json" in error
    assert not (tmp_path / "diagnosis" / "selected_capabilities.json").exists() and not list(tmp_path.glob("error.log"))
    broken, before = False, len(server.requests)
    assert cli.main(command(tmp_path, "--config.agents.attempts=2")) == 0
    assert len(server.requests) - before == len(missing) and not read(tmp_path, "missing.json")["missing"]


def test_a_budget_ends_the_run_and_a_larger_one_goes_on(tmp_path, endpoint, capsys):
    server = endpoint(scripted_analyst.answer)
    limit = ("--config.agents.max_tokens=60000", "--config.agents.answer_tokens=2000")
    assert cli.main(command(tmp_path, *limit)) == 1
    error = capsys.readouterr().err
    assert "config field 'agents.max_tokens'" in error and "raise it and run again" in error and "without an answer are" in error
    spent = [json.loads(line) for line in (tmp_path / "agents" / "exchanges.jsonl").read_text().splitlines()]
    assert 0 < sum(x["input_tokens"] + x["output_tokens"] for x in spent) <= 60000
    before = len(server.requests)
    assert cli.main(command(tmp_path)) == 0
    assert len(server.requests) == server.answered and before == len(spent)
    assert [n for n, count in collections.Counter(json.dumps(r, sort_keys=True) for r in server.requests).items() if count > 3] == []


def test_killed_at_any_moment_nothing_that_was_answered_is_asked_again(tmp_path, endpoint):
    rng = random.Random(1)

    def script(request):
        return slow(rng.uniform(0, 0.05), scripted_analyst.answer(request))

    server = endpoint(script)
    words = [sys.executable, "-m", "trace_jax", *command(tmp_path / "killed", runs=6)]
    kills = 0
    for goal in (2, 12, 30):
        process = subprocess.Popen(words, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
        while process.poll() is None and server.answered < goal:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills == 3
    assert cli.main(command(tmp_path / "killed", runs=6)) == 0
    lines = (tmp_path / "killed" / "agents" / "exchanges.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert len(keys) == len(set(keys))
    assert len(server.requests) - len(keys) <= 4 * kills  # what was in flight when it was killed
    asked = len(server.requests)
    assert cli.main(command(tmp_path / "whole", runs=6)) == 0
    assert len(server.requests) - asked == len(keys)
    assert read(tmp_path / "killed", "figures.json") == read(tmp_path / "whole", "figures.json")


def test_both_analysts_are_compared_and_a_blinded_run_with_one_that_was_not(tmp_path, endpoint, capsys):
    server = endpoint(scripted_analyst.answer)
    assert cli.main(command(tmp_path / "both", "--config.analyst=both")) == 0
    figures = read(tmp_path / "both", "figures.json")
    known = {"structured_data_reasoning", "multi_step_task_completion", "precondition_verification", "tool_calling_precision"}
    assert known < {row["capability"] for row in figures["capabilities"]}
    assert known <= {row["capability"] for row in figures["agreement"]} and all(row["pairs"] for row in figures["agreement"])
    assert "Agreement with the second labeller" in capsys.readouterr().out

    same = f"--config.diagnosis.candidates={tmp_path / 'both' / 'diagnosis' / 'candidates.json'}"
    before = len(server.requests)
    blind = command(tmp_path / "blind", same, "--config.diagnosis.blind=true", f"--against={tmp_path / 'both'}")
    assert cli.main(blind) == 0
    prompts = ["".join(m["content"] for m in request["messages"]) for request in server.requests[before:]]
    assert prompts and not any("[end] reward" in p or "[check]" in p.partition("===== conversation")[2] for p in prompts)
    out = " ".join(capsys.readouterr().out.split())
    assert "Agreement with" in out and "error_recovery: " in out and "alpha" in out
    assert read(tmp_path / "blind", "figures.json")["thresholds"]["blind"] is True


def test_a_recorded_run_is_replayed_without_an_endpoint(tmp_path, endpoint, monkeypatch, capsys):
    endpoint(scripted_analyst.answer)
    assert cli.main(command(tmp_path / "first")) == 0
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name)
    recorded = tmp_path / "first" / "agents" / "exchanges.jsonl"
    replay = command(tmp_path / "again", "--config.agents.backend=replay", f"--config.agents.recorded={recorded}")
    assert cli.main(replay) == 0
    rows = [read(tmp_path / name, "figures.json")["capabilities"] for name in ("first", "again")]
    assert rows[0] == rows[1]
    assert cli.main([*command(tmp_path / "other", runs=4), *replay[-2:]]) == 2
    assert "recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--workdir="], "config field 'analyst': an LLM's labels need --workdir=DIR"),
        (["--config.agents.model="], "OPENAI_MODEL"),
        (["--config.agents.max_cost=1"], "agents.max_cost"),
        (["--config.agents.prompts=nowhere"], "config field 'agents.prompts': no folder 'nowhere'"),
        (["--config.agents.prompt_tokens=2000"], "raise agents.prompt_tokens"),
        (["--config.agents.backend=replay"], "agents.recorded"),
        (
            ["--config.agents.backend=command", "--config.agents.command=no-such-command", "--config.agents.parameters={}"],
            "no-such-command",
        ),
        (["--config.diagnosis.candidates=nothing.json"], "config field 'diagnosis.candidates': nothing.json: No such file"),
        (["--against=nowhere"], "--against=nowhere: no diagnosis/runs in it"),
    ],
)
def test_what_is_missing_is_said_in_one_line_before_anything_is_asked(tmp_path, endpoint, monkeypatch, capsys, words, expected):
    server = endpoint(scripted_analyst.answer)
    monkeypatch.delenv("OPENAI_MODEL", raising=False)
    assert cli.main([*command(tmp_path), *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert expected in error and not server.requests
