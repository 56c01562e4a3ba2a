import json
import pathlib

import pytest

from trace_jax import cli
from trace_jax.benchmarks.results import read_results
from trace_jax.config import ROOT, Config
from trace_jax.workdir import Workdir

RESULTS = sorted(str(path) for path in (ROOT / "tests" / "data" / "tau2").glob("*.json"))
FILES = [
    "candidates.json",
    "evidence.jsonl",
    "figures.json",
    "gaps.jsonl",
    "mined.json",
    *(f"runs/run_{i:02d}.json" for i in range(1, 11)),
    "selected_capabilities.json",
]


def names(workdir: Workdir) -> list[str]:
    return [name.removeprefix("diagnosis/") for name in workdir.list("diagnosis")]


def test_result_files_without_a_workdir_are_only_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["diagnose", f"--results={RESULTS[0]}"]) == 0
    assert "coverage" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_workdir_gets_the_files_of_the_diagnosis(tmp_path, capsys):
    assert cli.main(["diagnose", f"--results={RESULTS[0]}", f"--workdir={tmp_path}", "--config=quickstart"]) == 0
    with Workdir.open(tmp_path) as workdir:
        assert names(workdir) == FILES


def test_rollouts_of_the_base_are_diagnosed_with_the_threshold_of_the_config(tmp_path, capsys):
    trajectories = read_results(RESULTS[:1])
    for trajectory in trajectories:
        trajectory.split, trajectory.success = "train", False
    with Workdir.open(tmp_path, Config()) as workdir:
        workdir.write_shard("base", "train", 0, trajectories)
    assert cli.main(["diagnose", f"--workdir={tmp_path}"]) == 0
    with Workdir.open(tmp_path) as workdir:
        figures = workdir.read_json("diagnosis/figures.json")
    assert figures["passed"] == sum(t.reward == 1.0 for t in trajectories if t.error is None) > 0


def test_a_second_diagnosis_keeps_the_environments_that_were_made(tmp_path, capsys):
    command = ["diagnose", f"--results={RESULTS[0]}", f"--workdir={tmp_path}", "--config=quickstart", "--config.diagnosis.min_runs=1"]
    command += ["--config.diagnosis.coverage=0", "--config.diagnosis.gap=0"]
    assert cli.main(command) == 0
    path = tmp_path / "diagnosis" / "selected_capabilities.json"
    selection = json.loads(path.read_text())
    made = {"status": "DONE", "environment_path": "environments/x", "environment_module": "environment", "reward_distribution": {}}
    path.write_text(json.dumps([{**entry, **made} for entry in selection]))
    assert cli.main(command) == 0
    assert [entry["status"] for entry in json.loads(path.read_text())] == ["DONE"] * len(selection)


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], "give --results=FILE"),
        (["--results=missing.json"], "missing.json: no such file"),
        (["--results={cut}"], "cut.json: not valid JSON"),
        (["--config=quickstart", "--workdir={workdir}"], "no rollouts to diagnose"),
        (["--workdir={workdir}"], "--config is missing"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.json").write_bytes(pathlib.Path(RESULTS[0]).read_bytes()[:400])
    assert cli.main(["diagnose", *(word.format(cut=tmp_path / "cut.json", workdir=tmp_path / "run") for word in words)]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
