import io
import random

import pytest
import rich.console

from tests.scripted_llm import scripted_llm
from trace_jax import cli
from trace_jax.compare import comparison_table
from trace_jax.report.comparison import write_charts
from trace_jax.stores import open_store
from trace_jax.workdir import Workdir

TO_BASE = {"difference": 0.367, "interval": [0.321, 0.42], "p": 1e-20, "fixed": ["a"], "broken": []}
ROW = {"rollouts": 9214, "sampled_tokens": 81_000, "agent_tokens": 1000, "note": ""}
RESULT = {
    "target": "desk",
    "budget": 9214,
    "policies": [
        {"policy": "base", "rate": 0.4, "interval": [0.35, 0.45], "n": 400, "to_base": None, **ROW, "rollouts": 0},
        {"policy": "single:multi_step_task_completion", "rate": 0.5, "interval": [0.45, 0.55], "n": 400, "to_base": TO_BASE, **ROW},
        {"policy": "composed", "rate": 0.767, "interval": [0.72, 0.81], "n": 400, "to_base": TO_BASE, **ROW},
    ],
    "left_out": {"swe_rl": "does not apply: desk and its capability environments have no patches to compare"},
    "against_rollouts": {"composed": {"rollouts": [0, 9214], "rate": [0.4, 0.767]}, "gepa": {"rollouts": [0, 100], "rate": [0.4, 0.41]}},
    "against_capabilities": {
        "composed": [{"capabilities": [], "rate": 0.4, "rollouts": 0}, {"capabilities": ["a"], "rate": 0.767, "rollouts": 9214}]
    },
}
# everything of the quickstart, and as little as there can be of each
SHRUNKEN = {
    "target.train_tasks": 16,
    "target.heldout_tasks": 12,
    "diagnosis.trials": 3,
    "diagnosis.coverage": 0.0,
    "diagnosis.gap": 0.0,
    "diagnosis.min_runs": 1,
    "synthesis.calibration_seeds": 4,
    "synthesis.calibration_rollouts": 2,
    "synthesis.certify_seeds": 20,
    "synthesis.mean_low": 0.0,
    "synthesis.mean_high": 1.0,
    "synthesis.min_std": 0.0,
    "synthesis.max_all_success": 1.0,
    "synthesis.max_all_zero": 1.0,
    "synthesis.max_constant": 1.0,
    "train.iterations": 2,
    "train.warmup_steps": 0,
    "train.groups": 2,
    "train.group_size": 4,
    "train.selection_seeds": 4,
    "gate.successes": 8,
    "gate.table_seeds": 2,
    "gate.grpo_iterations": 1,
    "gate.warm_steps": 4,
    "evaluation.tasks": 12,
    "baselines.rollouts": 48,
    "baselines.gepa_rollouts": 48,
    "baselines.single_budget": "true",
    "baselines.gepa_minibatch": 3,
    "baselines.gepa_validation": 4,
}
SAID = ("Check an order before you return it.", "Only delivered orders may be returned.", "Cancel the order, then tell the status.")


def test_the_table_has_every_policy_in_eighty_columns():
    console = rich.console.Console(width=80, file=io.StringIO())
    console.print(comparison_table(RESULT))
    text = console.file.getvalue()
    words = " ".join(text.split())
    assert "composed 76.7 [72, 81] +36.7 [+32, +42] 1e-20 9,214 82 k" in words and "…" not in text
    assert "swe_rl does not apply: desk" in words and "composed with 0, 1, ... capabilities: 40.0, 76.7." in words


def test_the_curves_are_drawn_the_same_every_time(tmp_path):
    found = []
    for name in "ab":
        with Workdir.open(tmp_path / name) as workdir:
            write_charts(workdir, RESULT)
            assert workdir.list("evaluation") == ["evaluation/score_against_capabilities.svg", "evaluation/score_against_rollouts.svg"]
            found.append([workdir.read_bytes(file) for file in workdir.list("evaluation")])
    assert found[0] == found[1] and b"<svg" in found[0][0] and b">gepa</text>" in found[0][1]


@pytest.mark.slow
def test_the_whole_comparison_and_once_more_without_work(tmp_path, monkeypatch, capsys):
    def script(request):
        return f"So:\n```\n{random.Random(request['messages'][-1]['content']).choice(SAID)}\n```"

    words = ["compare", "--config=quickstart", f"--workdir={tmp_path}", *(f"--config.{name}={value}" for name, value in SHRUNKEN.items())]
    with scripted_llm(script) as server:
        for name, value in (("BASE_URL", server.url), ("API_KEY", "k"), ("MODEL", "m")):
            monkeypatch.setenv(f"OPENAI_{name}", value)
        assert cli.main(words) == 0, capsys.readouterr().err
        asked = len(server.requests)
        with Workdir(open_store(tmp_path)) as workdir:
            files = {name: workdir.read_bytes(name) for name in workdir.list("evaluation")}
            result = workdir.read_json("evaluation/comparison.json")
            capabilities = workdir.read_json("gate/routing.json")["slots"][1:]
        assert cli.main(words) == 0 and len(server.requests) == asked > 0
        with Workdir(open_store(tmp_path)) as workdir:
            assert {name: workdir.read_bytes(name) for name in workdir.list("evaluation")} == files
    rows = {row["policy"].partition(":")[0]: row for row in result["policies"]}
    assert list(rows) == ["base", "grpo_target", "single", "gepa", "router", "uniform", "composed"] and set(result["left_out"]) == {
        "swe_rl"
    }
    assert all(row["n"] == 12 and row["to_base"]["tasks"] == 12 for name, row in rows.items() if name != "base")
    assert rows["base"]["rollouts"] == 0 < rows["uniform"]["rollouts"] < rows["router"]["rollouts"] < rows["composed"]["rollouts"]
    assert rows["grpo_target"]["rollouts"] == 48 >= rows["gepa"]["rollouts"] > 0 and rows["gepa"]["agent_tokens"] > 0
    assert result["budget"] == 48 and "trained on" in rows["single"]["note"]
    assert set(result["against_rollouts"]) == {"grpo_target", rows["single"]["policy"], "gepa", "composed"}
    for points in result["against_capabilities"].values():
        assert [point["capabilities"] for point in points] == [capabilities[:k] for k in range(len(capabilities) + 1)]
    assert result["against_capabilities"]["composed"][-1]["rollouts"] == rows["composed"]["rollouts"]
    spent = [point["rollouts"] for point in result["against_capabilities"]["composed"]]
    assert spent == sorted(spent)
    out = capsys.readouterr().out
    assert "swe_rl does not apply" in out and "score_against_*.svg" in out
