"""Step 1 as a whole: what is drawn, what is retained, what is written, what is said."""

import collections
import dataclasses
import importlib.util
import io
import json
import os
import pathlib

import pytest
from rich.console import Console

from trace_jax.benchmarks.results import read_results
from trace_jax.diagnose import diagnose, print_diagnosis
from trace_jax.diagnose.aggregate import aggregate, decode_run
from trace_jax.diagnose.diagnosis import do_nothing_tasks, draw
from trace_jax.diagnose.evidence import Candidate, Label
from trace_jax.diagnose.rules import EvidenceAnalyst
from trace_jax.diagnose.select import decode_candidates, decode_selection
from trace_jax.errors import InputError

_spec = importlib.util.spec_from_file_location("desk_agent", pathlib.Path(__file__).with_name("desk_agent.py"))
desk_agent = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(desk_agent)

ROOT = pathlib.Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "tau2"
SHARED = pathlib.Path(os.environ.get("TRACE_JAX_DATA", ROOT.parent / "shared" / "data"))
PLANTED = dict.fromkeys(desk_agent.FAULTS, 0.6)


def desk(tasks=40, trials=4, faults=PLANTED):
    """Trials differ in what the agent does, so a trial is played from another seed under its task's name."""
    for task in range(tasks):
        for trial in range(trials):
            t = desk_agent.play(task + 1000 * trial, faults)
            yield dataclasses.replace(t, id=f"{task}#{trial}", task_id=str(task), trial=trial)


@pytest.fixture(scope="module")
def airline():
    return read_results([DATA / "gpt-4o_airline_excerpt.json"])


def printed(diagnosis, **options):
    out = io.StringIO()
    print_diagnosis(diagnosis, Console(file=out, width=80), **options)
    return out.getvalue()


def test_planted_deficits_are_retained_and_what_is_not_lacked_is_rejected():
    diagnosis = diagnose(desk())
    assert set(diagnosis.retained) == set(desk_agent.FAULTS.values())
    rejected = {f.capability: f for f in diagnosis.figures}["communicating_results"]
    assert not rejected.passes_consistency and rejected.mean_delta == 0.0 and rejected.applicable_passed > 0
    assert all(f.gap_interval[0] > 0.2 for f in diagnosis.figures if f.passes_consistency)


@pytest.mark.parametrize("absent", desk_agent.FAULTS)
def test_a_deficit_that_the_agent_does_not_have_is_rejected(absent):
    diagnosis = diagnose(desk(faults={**PLANTED, absent: 0.0}))
    assert desk_agent.FAULTS[absent] not in diagnosis.retained
    assert len(diagnosis.retained) == 3


def test_the_consistency_filter_filters():
    # a deficit near the thresholds passes in some runs and not in others
    diagnosis = diagnose(desk(faults={"skip_check": 0.9, "malform": 0.12}))
    passed = {f.capability: f.n_runs_passed for f in diagnosis.figures}["tool_calling_precision"]
    assert 0 < passed < 10
    assert "tool_calling_precision" in diagnose(desk(faults={"skip_check": 0.9, "malform": 0.12}), min_runs=passed).retained


def test_the_same_seed_gives_the_same_figures_and_another_seed_other_draws():
    one, two, three = diagnose(desk(), seed=1), diagnose(desk(), seed=1), diagnose(desk(), seed=2)
    assert one == two
    assert [f.mean_cov for f in one.figures] != [f.mean_cov for f in three.figures]


def test_a_run_draws_one_trial_of_each_task():
    episodes = list(desk(tasks=10, trials=3))
    draws = [draw(episodes, attempt, 0) for attempt in range(1, 11)]
    assert all([i.split("#")[0] for i in ids] == [str(t) for t in range(10)] for ids in draws)
    assert len({tuple(ids) for ids in draws}) == 10
    assert draws[0] == draw(episodes, 1, 0)


def test_a_run_draws_four_fifths_where_each_task_has_one_trial(airline):
    draws = [draw(airline, attempt, 0) for attempt in range(1, 11)]
    assert all(len(ids) == len(set(ids)) == 10 for ids in draws)
    assert len({tuple(ids) for ids in draws}) > 5


def test_tasks_with_one_and_with_several_trials_are_drawn_each_in_their_way():
    episodes = [t for t in desk(tasks=20, trials=2) if t.trial == 0 or int(t.task_id) < 10]
    drawn = [i.split("#")[0] for i in draw(episodes, 1, 0)]
    assert drawn[:10] == [str(t) for t in range(10)] and len(drawn) == 18


def test_the_files_are_those_of_the_published_tool_and_the_selection_comes_last():
    files = {}
    diagnosis = diagnose(desk(), write=files.__setitem__)
    runs = [f"diagnosis/runs/run_{i:02d}.json" for i in range(1, 11)]
    assert list(files) == [
        "diagnosis/candidates.json",
        *runs,
        "diagnosis/evidence.jsonl",
        "diagnosis/gaps.jsonl",
        "diagnosis/figures.json",
        "diagnosis/selected_capabilities.json",
    ]
    data = {name: json.loads(content) for name, content in files.items() if name.endswith(".json")}
    candidates = decode_candidates(data["diagnosis/candidates.json"], "candidates.json")
    again = aggregate([decode_run(data[name], name, list(candidates)) for name in runs])
    assert [(f.capability, f.mean_cov, f.mean_delta) for f in again] == [
        (f.capability, f.mean_cov, f.mean_delta) for f in diagnosis.figures
    ]
    assert decode_selection(data["diagnosis/selected_capabilities.json"], "s") == diagnosis.selection
    example = data["diagnosis/candidates.json"]["candidates"][0]["example_trajectories"][0]
    assert set(example) == {"task_id", "reward", "note"} and example["note"].startswith("message ")
    labels = [json.loads(line) for line in files["diagnosis/evidence.jsonl"].splitlines()]
    assert len(labels) == 160 * len(candidates)
    assert set(labels[0]) == {"trajectory", "capability", "value", "message_index", "reason", "quote", "passed"}
    assert data["diagnosis/figures.json"]["passed"] + data["diagnosis/figures.json"]["failed"] == 160


def test_figures_that_are_undefined_are_null_in_json():
    out = diagnose([desk_agent.play(1, {})]).to_json()
    assert json.loads(json.dumps(out, allow_nan=False))["capabilities"]


def test_infrastructure_errors_are_counted_and_neither_passed_nor_failed(airline):
    broken = dataclasses.replace(
        airline[0], id="x#0", reward=None, success=False, error={"kind": "user_error", "message": "gone"}, checks={}
    )
    diagnosis = diagnose([*airline, broken])
    assert diagnosis.errors == {"user_error": 1} and "x#0" not in diagnosis.outcome
    assert "besides 1 user_error, counted apart" in " ".join(printed(diagnosis).split())
    with pytest.raises(InputError, match="no graded trajectory"):
        diagnose([broken])


def test_only_the_train_split_is_read_and_mixing_is_said():
    episodes = list(desk(trials=1))
    held = [dataclasses.replace(t, id=f"h{t.id}", split="heldout") for t in episodes]
    mixed = diagnose([*episodes, *held])
    assert set(mixed.outcome) == {t.id for t in episodes}
    assert any("40 trajectories of other splits were left out" in note for note in mixed.notes)
    assert any("of the split heldout" in note for note in diagnose(held).notes)
    assert any("do not say which split" in note for note in diagnose([dataclasses.replace(t, split="") for t in episodes]).notes)


def test_a_blinded_labeller_sees_no_outcome_and_the_figures_use_it_all_the_same():
    class Analyst:
        name, deterministic, record = "spy", False, {}

        def __init__(self):
            self.seen = []

        def discover(self, trajectories):
            return [Candidate("c", "A capability.")]

        def label(self, draws, candidates):
            self.seen += [(t.reward, t.success, {c["passed"] for c in t.checks.values()}) for drawn in draws.values() for t in drawn]
            return {attempt: [Label(t.id, "c", "LACKING", 1, "because") for t in drawn] for attempt, drawn in draws.items()}

    blind, open_eyed = Analyst(), Analyst()
    diagnosis = diagnose(desk(), analyst=blind, blind=True)
    figures = diagnosis.figures
    assert all(seen == (0.0, False, {None}) for seen in blind.seen)
    assert diagnosis.to_json()["capabilities"] == diagnose(desk(), analyst=open_eyed).to_json()["capabilities"]
    assert len({seen[1] for seen in open_eyed.seen}) == 2
    assert figures[0].mean_cov == 1.0 and figures[0].mean_delta == 0.0
    assert diagnose(desk(), blind=True).figures == diagnose(desk()).figures


class Scripted:
    """A labeller whose labels are `label(attempt, trajectory)`; of two capabilities that it does not tell apart."""

    name, deterministic, record = "scripted", False, {"model": "none"}

    def __init__(self, label):
        self.one = label

    def discover(self, trajectories):
        return [Candidate("multi_step_task_completion", "Finishes."), Candidate("twin", "Its double.")]

    def label(self, draws, candidates):
        return {n: [self.one(n, t, c.name) for t in drawn for c in candidates] for n, drawn in draws.items()}


def test_pairs_without_a_label_are_kept_with_their_reasons_and_count_nowhere():
    def label(attempt, t, name):
        if attempt == 2 and int(t.task_id) % 2:
            return Label(t.id, name, "GAP", None, "the quote does not occur")
        return Label(t.id, name, "PRESENT" if t.success else "LACKING", 1, "it shows", "words of it")

    files = {}
    d = diagnose(desk(), analyst=Scripted(label), write=files.__setitem__)
    assert d.thresholds["model"] == "none" and d.overlaps == [("multi_step_task_completion", "twin", 1.0)]
    assert {n for n, _ in d.gaps} == {2} and all(x.value != "GAP" for x in d.labels)
    rows = [json.loads(line) for line in files["diagnosis/gaps.jsonl"].splitlines()]
    assert len(rows) == len(d.gaps) > 5 and rows[0]["reason"] == "the quote does not occur" and rows[0]["run"] == 2
    again = decode_run(json.loads(files["diagnosis/runs/run_02.json"]), "run_02.json", [c.name for c in d.candidates])
    assert again == d.runs[1] and len(again.failed) > len(again.codes["twin"])
    assert "gaps" not in json.loads(files["diagnosis/runs/run_01.json"])
    text = printed(d)
    assert "without a valid label" in text and "may be one" in text
    assert d.figures[0].mean_delta == 1.0


def test_a_second_labeller_is_set_beside_the_first_where_both_know_a_capability():
    d = diagnose(desk(), analyst=Scripted(lambda n, t, name: Label(t.id, name, "NA", None, "")), second=EvidenceAnalyst())
    (row,) = d.agreement
    assert row.capability == "multi_step_task_completion" and row.pairs == len({i for run in d.runs for i in run.failed})
    assert 0 < row.same < 1 and sum(row.counts[0]) == row.pairs
    assert json.loads(json.dumps(d.to_json(), allow_nan=False))["agreement"][0]["pairs"] == row.pairs
    assert f"of {row.pairs}, alpha" in printed(d)


def test_tasks_that_reward_doing_nothing_are_told(airline):
    assert do_nothing_tasks(airline) == ["0", "4", "1", "48"]
    diagnosis = diagnose(airline)
    assert "Doing nothing is rewarded in 4 of 12 tasks; 2 of the 4 passed trajectories are" in printed(diagnosis)
    assert do_nothing_tasks(desk(tasks=20)) == []


def test_double_ids_bad_thresholds_and_several_agents_are_named(airline):
    with pytest.raises(InputError, match="trajectory id '0#0' occurs twice"):
        diagnose([*airline, airline[0]])
    with pytest.raises(InputError, match="diagnosis.min_runs is 11"):
        diagnose(airline, min_runs=11)
    other = dataclasses.replace(airline[0], id="y#0", policy={"name": "another", "version": 0})
    assert any("several agents" in note for note in diagnose([*airline, other]).notes)


def test_what_cannot_be_contrasted_is_said():
    notes = " ".join(diagnose(desk(faults={})).notes)
    assert "All trajectories passed: there is nothing to contrast." in notes
    thin = " ".join(diagnose(desk(tasks=8)).notes)
    assert "little support" in thin and "ER+ is 0 by construction" in thin


def test_where_no_call_is_expected_a_note_says_that_nothing_can_be_seen():
    bare = [dataclasses.replace(t, checks={}) for t in desk(tasks=8)]
    diagnosis = diagnose(bare)
    assert not diagnosis.figures and not diagnosis.retained and not diagnosis.labels
    note = "32 of 32 trajectories have no expected calls (action:0, ...)"
    assert any(note in said and "--config.analyst=llm" in said for said in diagnosis.notes) and note in " ".join(printed(diagnosis).split())
    assert not any("no expected calls" in said for said in diagnose(desk(tasks=8)).notes)


def test_the_report_fits_eighty_columns_and_explains_by_message(airline):
    text = printed(diagnose(airline))
    table = text[text.index("capability ") : text.index("A run passes")].splitlines()
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in table)
    assert "LACKING 1#0 (failed), message 19: cancel_reservation(Q69X3R) is a change that should not be made" in text
    assert "PRESENT 0#0 (" in text and "All labels" not in text
    assert text.index("A run passes") < text.index("Note: ") < text.index("\nprecondition_verification\n")
    short = printed(diagnose(desk()), where="there")
    for part in short.split("\n\n")[1:-1]:
        lines = part.splitlines()[1:]
        lacking = [line.split("(")[1][:6] for line in lines if line.startswith("  LACKING")]
        assert len(lacking) <= 3 and lacking == sorted(lacking) and sum(line.startswith("  PRESENT") for line in lines) <= 1, part
    assert "more LACKING, " in short and short.endswith("\nAll labels: there\n")
    assert " more " not in printed(diagnose(airline), explain=None).partition("Note")[2]


needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real result files are not here; set TRACE_JAX_DATA to their folder")


@needs_shared
def test_the_published_capabilities_come_out_of_a_real_run():
    diagnosis = diagnose(read_results([SHARED / "tau2/results/gpt-4o_airline_base50_1trial.json"]))
    assert set(diagnosis.retained) == set(desk_agent.FAULTS.values())
    assert len(diagnosis.do_nothing) == 19 and diagnosis.passed_do_nothing == 15


@needs_shared
def test_domains_are_pooled_under_their_names():
    names = ["gpt-4o_airline_base50_1trial", "gpt-4o_telecom_small20_1trial"]
    diagnosis = diagnose(read_results([SHARED / f"tau2/results/{n}.json" for n in names]))
    domains = collections.Counter(i.partition(":")[0] for i in diagnosis.outcome)
    assert domains == {"airline": 50, "telecom": 20}
