"""The capabilities of a run, of a published selection, and of other tools' result files."""

import pathlib

from tests.trace_jax.example_run import add_diagnosis, add_rollouts
from tests.trace_jax.report.pages import written
from trace_jax.benchmarks.results import read_results
from trace_jax.diagnose.diagnosis import diagnose
from trace_jax.evaluate.hygiene import write_mined

EXCERPT = pathlib.Path(__file__).parents[2] / "data/tau2/gpt-4o_airline_excerpt.json"


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


def test_a_quote_is_marked_within_the_message_that_it_is_from(workdir):
    add_rollouts(workdir)
    add_diagnosis(workdir)
    page = written(workdir)
    assert "I <mark>have returned</mark> it." in page.source


def test_without_the_conversation_the_quote_itself_is_shown(workdir):
    add_diagnosis(workdir)
    assert "returns the order without having seen its status HAVE returned (message 4)" in written(workdir).said("capabilities")


def test_a_diagnosis_of_result_files_says_that_their_conversations_are_elsewhere(workdir):
    write_mined(workdir, [], ["results/gpt-4o.json"])
    add_diagnosis(workdir)
    assert "Diagnosed from results/gpt-4o.json. These conversations are not in this workdir" in written(workdir).said("capabilities")
