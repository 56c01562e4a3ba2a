"""The report is written from files alone, at any stage of a run, and shows what models and tools wrote as text."""

import re

import pytest
from rich.console import Console

from tests.trace_jax import example_run
from tests.trace_jax.example_run import CAPABILITIES, add_all, add_diagnosis, add_environments, add_evaluation, add_gate
from tests.trace_jax.report.pages import HOSTILE, Page, written
from trace_jax import report
from trace_jax.errors import InputError
from trace_jax.workdir import Workdir


def test_a_whole_run_is_told_in_plain_words(whole):
    said = whole[1].said("summary")
    base, composed = (whole[0].read_json(f"evaluation/{p}.json")["overall"]["rate"] for p in ("base", "composed"))
    assert f"On 400 held-out tasks of desk the base agent succeeds in {100 * base:.1f} %" in said
    assert f"The composed agent succeeds in {100 * composed:.1f} %" in said
    assert f"{100 * (composed - base):.1f} points above the base (+" in said
    assert "best single adapter, precondition_verification" in said
    assert "GRPO on the target's own train tasks, with 8,640 rollouts," in said
    assert "The token gate was kept" in said and "84.9 % with the gate, 60.4 % with the best single adapter" in said
    assert "retained 3 of 4 candidate capabilities: structured_data_reasoning" in said
    assert "The LLM agents gave 1,640 answers for $4.10: 12,300,000 tokens in and 410,000 out." in said
    assert "not finished" not in said


def test_every_section_of_a_whole_run_is_there(whole):
    page = whole[1]
    assert "missing" not in {attributes.get("class") for _, attributes in page.tags}
    assert "0.55 0.41 to 0.67" in page.said("capabilities")
    assert "message 4, assistant I have returned it." in page.said("capabilities")
    assert "little support: 3.2 applicable passed trajectories a run" in page.said("capabilities")
    assert "90.0 % 0.81 desk:3#0" in page.said("capabilities").replace("\xa0", " ")
    assert "Written by some-model: accepted after 2 hand-ins." in page.said("environments")
    assert "Hand-in 1: environment.py:3: import of 'socket'" in page.said("environments")
    assert "3 of 4 checks passed" in page.said("environments") and "25.0 % of each group's rollouts see a hint" in page.said("environments")
    said = page.said("environments").replace("\xa0", " ")
    assert "the verdict was certain after 40 seeds." in said and "768 rollouts with all that was tried" in said
    assert '{"records": 3} taken 12.0 %' in said and "With a hint the base agent succeeds in 50.0 %" in said
    assert "outside of 0.6 to 0.8: it tells too little" in said
    assert "desk:1#0: success, 5 messages, 240 tokens" in page.said("trajectories")
    assert "train.learning_rate" in page.said("settings") and "jaxlib" in page.said("settings")
    assert "3 min 24 s" in page.said("costs")


def test_a_page_tells_baselines_difficulty_players_and_sandbox(whole):
    page = whole[1]
    said = page.said("baselines")
    assert "single:precondition_verification the best single adapter, on every token the adapter of step 3 50.0 % 45.0 to 55.0 %" in said
    assert "2,000 80,000 1,250,000" in said and "swe_rl does not apply" in said
    assert "up to 6,001 rollouts, as many as the composed agent took. Success" in said
    charts = [a["aria-label"] for tag, a in page.tags if tag == "svg"]
    assert "Success on held-out tasks against rollouts: composed from 31 % at rollouts 0 to 66 % at 6,001; grpo_target from" in " ".join(
        charts
    )
    assert "against capabilities: composed from 31 % at capabilities 0 to 66 % at 3; gepa from 40 %" in " ".join(charts)
    said = page.said("environments")
    assert "knob least most at first used harder records 3 6 4 3 at the most" in said  # the third was too hard
    assert "oracle, who knows the solution 1.000 100.0 % repeats the prompt 0.100 0.0 %" in said
    assert "oracle the oracle always earns everything passed reward 1 on 50 of 50 seeds" in said
    assert "seccomp on no system calls but the few" in page.said("settings")
    assert "landlock the kernel has none" in page.said("settings")
    assert "differ by 4.7e−7 nats on average (bound 0.02)" in page.said("training")
    assert "dual clip 0.0 %" in page.said("training")


def test_baselines_of_a_budget_of_their_own_are_said_to_be_so(workdir):
    example_run.add_comparison(workdir)
    compared = workdir.read_json("evaluation/comparison.json")
    workdir.write_json("evaluation/comparison.json", compared | {"budget": 48})
    assert "up to 48 rollouts; the composed agent took 6,001. Success" in written(workdir).said("baselines")


def test_a_capability_that_nobody_has_an_environment_for_leaves_a_run_finished(workdir):
    example_run.add_all(workdir)
    selected = workdir.read_json("diagnosis/selected_capabilities.json")
    workdir.write_json("diagnosis/selected_capabilities.json", [*selected, selected[0] | {"skill": "communicating_results"}])
    assert "This run is not finished" not in written(workdir).said("summary")


def test_without_a_comparison_the_page_says_what_makes_one(workdir):
    assert "trace-jax compare --workdir=… sets the composed agent beside" in written(workdir).said("baselines")
    add_evaluation(workdir, n=30)
    assert "This baseline trains one adapter on the target's own train tasks" in written(workdir).said("baselines")


def test_the_page_stands_alone_and_is_small(whole):
    source = whole[1].source
    assert len(source.encode()) < 5_000_000
    assert not re.search(r"""(?:src|href|action)\s*=\s*["'](?!#|data:,)""", source)
    assert "url(" not in source and "@import" not in source and "http" not in re.sub(r"http-equiv", "", source)


def test_only_the_pages_own_script_may_run(whole):
    page = whole[1]
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert [tag for tag, _ in page.tags].count("script") == 1


def test_headings_descend_one_level_at_a_time_and_charts_can_be_heard(whole):
    page = whole[1]
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(charts) > 20 and all(a["role"] == "img" and len(a["aria-label"]) > 10 for a in charts)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    assert {a["href"][1:] for tag, a in page.tags if tag == "a"} <= set(ids)
    assert {a["for"] for tag, a in page.tags if tag == "label"} <= set(ids)


@pytest.mark.parametrize("steps", range(7))
def test_an_unfinished_run_says_what_is_not_there_yet(workdir, steps):
    for step in ("rollouts", "diagnosis", "environments", "training", "gate", "evaluation")[:steps]:
        getattr(example_run, f"add_{step}")(workdir)
    page = written(workdir)
    commands = ["diagnose", "synthesize", "train", "compose", "evaluate"]
    sections = ["capabilities", "environments", "training", "gate", "evaluation"]
    for n, (section, command) in enumerate(zip(sections, commands, strict=True), 2):
        assert ("Not there yet: " in page.said(section)) == (n > steps), section
        assert (f"trace-jax {command}" in page.said(section)) == (n > steps), section
    assert ("not finished" in page.said("summary")) == (steps < 6)
    table = Console(width=120).render_lines(report.summary_table(workdir))
    assert table


def test_a_step_that_is_half_done_is_shown(workdir):
    add_diagnosis(workdir)
    add_environments(workdir)
    name = CAPABILITIES[0]
    workdir.local(f"environments/{name}/calibration.json").unlink()
    workdir.append_jsonl(f"adapters/{CAPABILITIES[1]}/metrics.jsonl", {"step": 0, "reward": 0.4, "success": None})
    workdir.append_jsonl("gate/metrics.jsonl", {"stage": "warm", "step": 0, "loss": 1.3})
    page = written(workdir)
    assert "not calibrated yet" in page.said("environments")
    assert "still training" in page.said("training")
    assert "Warm start on labels" in page.said("gate") and "Not there yet: the gate's validation" in page.said("gate")


def test_a_workdir_without_anything_has_a_report(tmp_path):
    with Workdir.open(tmp_path) as workdir:
        page = written(workdir)
    assert "There are no results yet." in page.said("summary")


def test_a_gate_that_was_not_kept_is_named(workdir):
    add_gate(workdir, kept=False)
    add_evaluation(workdir)
    page = written(workdir)
    assert "The token gate was not kept" in page.said("summary")
    assert "the gate was not kept; this is adapter:precondition_verification" in page.said("evaluation")
    assert "no choice of a slot to show" in page.said("trajectories")


def test_what_models_and_tools_wrote_is_shown_as_text(workdir):
    # a lone surrogate cannot be stored as UTF-8, but a JSON escape brings it back
    add_all(workdir, HOSTILE.replace("\ud800", ""))
    lines = workdir.read_bytes("diagnosis/evidence.jsonl").replace(b"onerror", b"\\ud800onerror")
    workdir.write_bytes("diagnosis/evidence.jsonl", lines)
    page = written(workdir)
    assert [tag for tag, _ in page.tags].count("script") == 1 and "img" not in {tag for tag, _ in page.tags}
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<script>alert('tool')</script>␀␛[31m\\u202egnp.exe" in page.said("trajectories")
    assert "\ufffdonerror=alert(1)>" in page.said("capabilities")
    assert not set(page.source) & {"\x00", "\x1b", "\u202e"}
    assert "<script>" in page.said("trajectories")  # the token


def test_a_damaged_file_is_named(workdir):
    workdir.write_bytes("gate/routing.json", b'{"slots": [')
    with pytest.raises(InputError, match="routing.json: not JSON"):
        report.write_report(workdir)
    assert not workdir.exists("report.html")


def test_the_same_files_give_the_same_page(whole):
    workdir, page = whole
    assert report.render(report.WorkdirReader(workdir)) == page.source


def test_rounds_are_shown_where_there_are_several(workdir, whole):
    assert "rounds" not in whole[1].sections
    add_all(workdir)
    same = {"still_lacking": [], "unusable": [], "interval": [0.5, 0.7], "paired": None, "rollouts": 1200}
    agents = [CAPABILITIES[:2], CAPABILITIES, CAPABILITIES]
    entries = [
        same | {"round": n, "capabilities": agent, "new": agent[2:] if n == 2 else [], "composed": "gate", "rate": 0.5 + n / 20}
        for n, agent in enumerate(agents, 1)
    ]
    entries[1] |= {"paired": {"difference": 0.05, "interval": [-0.01, 0.11]}, "still_lacking": [HOSTILE.replace("\ud800", "")]}
    entries[2] |= {"unusable": ["policy_compliance"]}
    workdir.write_json("rounds.json", {"rounds": entries})
    report.write_report(workdir)
    page = Page(workdir.read_bytes("report.html").decode())
    said = page.said("rounds")
    assert CAPABILITIES[2] in said and "60.0" in said and "+5.0" in said and "no usable environment: policy_compliance" in said
    assert said.count("the agent stays as it was") == 1 and ("a", {"href": "#rounds"}) in page.tags
    assert "<script>alert" not in page.source


def test_the_summary_says_when_deficits_were_planted_and_names_a_benchmark_by_its_environment(workdir):
    add_all(workdir)
    assert "its deficits were planted" in written(workdir).said("summary")
    stored = workdir.read_json("config.json")
    stored["config"]["model"]["path"], stored["config"]["benchmark"]["name"] = "WEIGHTS", "own"
    workdir.write_json("config.json", stored)
    page = written(workdir)
    assert "planted" not in page.said("summary") and "tasks of desk the base" in page.said("summary")
    assert "your own benchmark" not in page.source
