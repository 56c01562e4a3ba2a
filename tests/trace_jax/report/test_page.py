"""The report is written from files alone, at any stage of a run, and shows what models and tools wrote as text."""

import dataclasses
import html
import json
import pathlib
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from rl.trajectory import encode_shard
from tests.trace_jax import example_run
from tests.trace_jax.example_run import CAPABILITIES, add_all, add_diagnosis, add_environments, add_evaluation, add_gate, trajectory
from trace_jax import report
from trace_jax.benchmarks.results import read_results
from trace_jax.config import load_config
from trace_jax.diagnose.diagnosis import diagnose
from trace_jax.errors import InputError
from trace_jax.report import budgets, charts, results, text
from trace_jax.workdir import Workdir

EXCERPT = pathlib.Path(__file__).parents[2] / "data/tau2/gpt-4o_airline_excerpt.json"
RESULT = results.Result(**{field.name: None for field in dataclasses.fields(results.Result)})
HOSTILE = "<script>alert('tool')</script>\x00\x1b[31m\u202egnp.exe\ud800 </details><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tags with their attributes, the visible text of each section, and the order of headings."""

    VOID = {"meta", "link", "br", "img", "input", "line", "rect", "circle", "polyline", "wbr"}

    def __init__(self, source):
        super().__init__()
        self.source, self.open, self.tags, self.headings, self.sections, self.section = source, [], [], [], {}, ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "section":
            self.section = dict(attributes)["id"]

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing, line {self.getpos()[0]}"
        if tag in ("td", "th", "dt", "dd"):
            self.handle_data(" ")

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.sections[self.section] = self.sections.get(self.section, "") + data

    def said(self, section):
        return " ".join(self.sections[section].split())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with Workdir.open(tmp_path_factory.mktemp("run"), load_config("quickstart")) as workdir:
        add_all(workdir)
        path = pathlib.Path(report.write_report(workdir))
        yield workdir, Page(path.read_text("utf-8"))


@pytest.fixture
def workdir(tmp_path):
    with Workdir.open(tmp_path / "run", load_config("quickstart")) as workdir:
        yield workdir


def written(workdir):
    return Page(pathlib.Path(report.write_report(workdir)).read_text("utf-8"))


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


def test_long_texts_and_many_tokens_are_cut(workdir, monkeypatch):
    monkeypatch.setattr(budgets, "TRAJECTORIES", 200_000)
    add_gate(workdir)
    long = trajectory(2, tokens=20_000, slots=4)
    long.messages[3]["content"] = "x" * 1_000_000
    long.checks["db"]["expected"] = ["y" * 1_000_000]
    workdir.write_bytes("gate/examples.jsonl.zst", encode_shard([trajectory(k, tokens=3000, slots=4) for k in range(8)]))
    page = written(workdir)
    assert len(page.source.encode()) < 500_000
    assert f"The first {budgets.TOKENS} of 3000 tokens." in page.said("trajectories")
    assert re.search(r"\d more are in gate/examples.jsonl.zst", page.said("trajectories"))
    workdir.write_bytes("gate/examples.jsonl.zst", encode_shard([long]))
    page = written(workdir)
    assert "996,000 more characters" in page.said("trajectories") and len(page.source.encode()) < 1_000_000


def test_tokens_carry_the_majority_and_every_layer(whole):
    workdir, page = whole
    shown = next(iter(report.WorkdirReader(workdir).shard("gate/examples.jsonl.zst")))
    first = next(a for tag, a in page.tags if a.get("class") == "tokens")
    majority, *layers = first["data-layers"].split(" ")
    assert [[int(digit) for digit in layer] for layer in layers] == shown.slots.T.tolist()
    expected = [int(np.bincount(slots).argmax()) for slots in shown.slots]
    assert [int(digit) for digit in majority] == expected
    tokens = [attributes["class"].split() for tag, attributes in page.tags if tag == "i"][: len(expected)]
    assert [int(style[0][1:]) for style in tokens] == expected
    assert ["o" in style for style in tokens] == shown.loss_mask.astype(bool).tolist()


def test_without_token_texts_the_conversation_is_shown(workdir):
    add_gate(workdir)
    workdir.local("gate/pieces.json").unlink()
    page = written(workdir)
    assert not [a for _, a in page.tags if a.get("class") == "tokens"]
    assert "I have returned it." in page.said("trajectories")


def test_a_published_selection_is_shown_without_the_figures_that_it_lacks(workdir):
    add_diagnosis(workdir)
    for name in ("figures.json", "evidence.jsonl", "candidates.json"):
        workdir.local(f"diagnosis/{name}").unlink()
    said = written(workdir).said("capabilities")
    assert "structured_data_reasoning 0.42 – – 0.55 10/10 – yes" in said


def test_the_diagnosis_of_real_result_files_is_shown(workdir):
    found = diagnose(read_results([str(EXCERPT)]), write=workdir.write_bytes)
    said = written(workdir).said("capabilities")
    assert f"passed {sum(found.outcome.values())} of {len(found.outcome)} trajectories" in said
    shown = next(label for label in found.labels if label.value == "LACKING" and not found.outcome[label.trajectory])
    assert f"{shown.trajectory} , which failed: {shown.reason}" in said.replace(", which", " , which")
    assert f"(message {shown.message_index})" in said  # the conversation is not in this workdir
    assert all(" ".join(note.split()) in said for note in found.notes)


def test_a_damaged_file_is_named(workdir):
    workdir.write_bytes("gate/routing.json", b'{"slots": [')
    with pytest.raises(InputError, match="routing.json: not JSON"):
        report.write_report(workdir)
    assert not workdir.exists("report.html")


def test_the_same_files_give_the_same_page(whole):
    workdir, page = whole
    assert report.render(report.WorkdirReader(workdir)) == page.source


def printed(workdir, width):
    console = Console(width=width, record=True, force_terminal=False)
    console.print(report.summary_table(workdir))
    return console.export_text()


def test_the_terminal_table_lists_all_policies_with_their_difference_to_the_base(whole):
    said = printed(whole[0], 120)
    lines = said.splitlines()
    names = [line.split()[0] for line in lines[2 : next(n for n, line in enumerate(lines) if line.startswith("Doing nothing"))]]
    adapters = [f"adapter:{name}" for name in CAPABILITIES]
    assert names == ["base", *adapters, "uniform", "constant", "router", "plain_gate", "composed", "grpo_target", "do_nothing"]
    assert re.search(r"\ncomposed +\d\d\.\d +\d\d\.\d to \d\d\.\d +\+\d\d\.\d \[\+\d\d\.\d, \+\d\d\.\d\] +6,001", said)
    assert "7,441 rollouts, 297,660 sampled tokens, 8 min 16 s" in " ".join(said.split())


def test_no_figure_of_the_terminal_table_is_cut_in_eighty_columns(whole):
    narrow, wide = printed(whole[0], 80), printed(whole[0], 200)
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80
    assert set(re.findall(r"\d+\.\d", wide)) == set(re.findall(r"\d+\.\d", narrow))


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


def test_a_difference_is_paired_over_shared_tasks():
    def result(solved, *more):
        tasks = {str(n): {"trials": 1, "successes": int(n < solved)} for n in range(100)} | {
            name: {"trials": 1, "successes": 1} for name in more
        }
        return dataclasses.replace(RESULT, tasks=tasks)

    found = results.difference(result(60), result(40, "other"))
    low, high = found.interval
    assert found.difference == pytest.approx(0.2) and 0.1 < low < 0.2 < high < 0.3 and found.clear and len(found.fixed) == 20
    assert results.difference(result(60), dataclasses.replace(RESULT, tasks={})) is None


def change_evaluation(workdir, policy, change):
    data = workdir.read_json(f"evaluation/{policy}.json")
    workdir.write_json(f"evaluation/{policy}.json", change(data) or data)


def test_a_leak_is_a_red_banner_above_everything(workdir):
    add_evaluation(workdir, n=30)
    leak = {"purpose": "training", "where": "rollouts/gepa/training", "tasks": ["9000001", "<b>"]}
    change_evaluation(workdir, "composed", lambda data: data | {"leak": [leak]})
    page = written(workdir)
    assert ("p", {"class": "banner", "role": "alert"}) in page.tags
    assert "training saw 2 of the evaluated tasks (rollouts/gepa/training): 9000001, &lt;b&gt;" in page.source
    assert "These tasks are used for nothing else" not in page.source
    assert "LEAK: training saw 2 of the evaluated tasks" in " ".join(printed(workdir, 200).split())


def test_success_above_the_floor_is_shown_where_doing_nothing_solves_tasks(workdir):
    add_evaluation(workdir, n=30)
    free = [f"desk:{9_000_000 + n}" for n in range(10)]
    solved = lambda task: {"trials": 1, "successes": int(task in free)}  # noqa: E731
    change_evaluation(workdir, "do_nothing", lambda data: data | {"tasks": {task: solved(task) for task in data["tasks"]}})
    base = workdir.read_json("evaluation/base.json")["tasks"]
    rate = sum(counts["successes"] for task, counts in base.items() if task not in free) / 20
    found = results.load_results(report.WorkdirReader(workdir))
    assert found["base"].above_floor["rate"] == rate and found["base"].above_floor["n"] == 20
    page = written(workdir)
    assert "Doing nothing solves 10 tasks: desk:9000000, desk:9000001" in page.said("evaluation")
    assert f"on the other 20 tasks: base {100 * rate:.1f}" in page.said("summary").replace("\u00a0", " ")
    assert f"Doing nothing solves 10 tasks; on the others: base {100 * rate:.1f}" in " ".join(printed(workdir, 200).split())


def test_policies_that_were_graded_otherwise_are_not_set_beside_the_base(workdir):
    add_evaluation(workdir, n=30)
    change_evaluation(workdir, "base", lambda data: data | {"provenance": {"grader": "desk 1", "tasks": {}}})
    change_evaluation(workdir, "composed", lambda data: data | {"provenance": {"grader": "desk 2", "tasks": {}}})
    found = results.load_results(report.WorkdirReader(workdir))
    assert found["composed"].to_base is None and found["router"].to_base is not None
    assert "composed by grader 'desk 2'; evaluate both again" in written(workdir).said("evaluation")


def test_rollouts_that_infrastructure_failed_are_shown_as_failures_too(workdir):
    add_evaluation(workdir, n=30)
    failures = {"rate": 0.123, "interval": [0.1, 0.2], "n": 33}
    change_evaluation(workdir, "composed", lambda data: data["overall"].update(errors=3, errors_as_failures=failures))
    assert "3 failed by infrastructure, 12.3 % with these as failures" in written(workdir).said("evaluation").replace("\u00a0", " ")


def test_axis_ticks_are_round_and_cover_the_data():
    assert charts.ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert charts.ticks(0.13, 0.52) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert charts.ticks(3.0, 3.0)[0] <= 3.0 <= charts.ticks(3.0, 3.0)[-1]
    assert all(tick == int(tick) for tick in charts.ticks(0, 2, whole=True))


def test_a_curve_with_gaps_and_a_single_point_is_drawn():
    drawn = charts.lines([charts.Series(name="a", x=[0, 1, 2, 3, 4], y=[1.0, None, 2.0, 3.0, None])], "a", "step")
    assert drawn.count("<circle") == 1 and drawn.count("<polyline") == 1
    assert charts.lines([charts.Series(name="a", x=[0], y=[None])], "a", "step") == ""


def test_labels_of_a_chart_are_escaped():
    drawn = charts.bars([charts.Bar(label='<b x="1">', value=0.5)], 'a "title" <i>')
    assert "<b" not in drawn and "<i>" not in drawn and html.escape('a "title" <i>', quote=False)[:2] in drawn


def test_foreign_text_is_visible_and_encodes():
    assert text.visible("a\x00b\r\u202ec\ud800\n\t") == "a␀b␍\\u202ec\ufffd\n\t"
    assert text.clip("x" * 12, 10) == "x" * 10 + " … and 2 more characters"
    assert text.duration(3725) == "1 h 02 min" and text.duration(75) == "1 min 15 s" and text.duration(3) == "3 s"
    assert text.as_text({"a": [1]}) == json.dumps({"a": [1]})
