"""The selection file: ours, the published one, and what other tools add to it."""

import json

import pytest

from trace_jax.diagnose.aggregate import Figures
from trace_jax.diagnose.select import decode_candidates, decode_selection, finished, select
from trace_jax.errors import InputError

PUBLISHED = {
    "skill": "structured_data_reasoning",
    "description": "Reads tables.",
    "mean_cov": 0.31,
    "std_cov": 0.04,
    "mean_delta": 0.35,
    "std_delta": 0.05,
    "n_runs_passed": 10,
    "n_runs_total": 10,
    "passes_consistency": True,
    "example_failed_cases": ["airline:2", "retail:11"],
    "status": "PENDING",
}


def figures(name, kept=True, lacking=()):
    return Figures(
        name, 0.3, 0.01, 0.4, 0.02, 0.5, 0.1, (0.2, 0.4), (0.3, 0.5), 1.0, 9.0, 9.0, 0.0, 9 if kept else 2, 10, kept, tuple(lacking)
    )


def test_the_retained_are_written_in_the_published_form():
    entries = select([figures("a", lacking=[f"{i}#0" for i in range(12)]), figures("b", kept=False)], {"a": "What it is."})
    assert [e["skill"] for e in entries] == ["a"]
    assert list(entries[0]) == list(PUBLISHED)
    assert entries[0]["status"] == "PENDING" and entries[0]["description"] == "What it is."
    assert entries[0]["example_failed_cases"] == [f"{i}#0" for i in range(8)]
    assert decode_selection(json.loads(json.dumps(entries)), "ours.json") == entries


def test_a_published_selection_loads_and_keeps_keys_that_we_do_not_know():
    entry = {**PUBLISHED, "owner": {"team": 7}}
    assert decode_selection([entry], "published.json") == [entry]


def test_a_finished_entry_survives_a_new_selection():
    done = finished({**PUBLISHED, "owner": "x"}, "environments/s", "environment", {"mean_reward": 0.4})
    assert done["status"] == "DONE" and decode_selection([done], "f") == [done]
    again = select([figures("structured_data_reasoning"), figures("b")], {"structured_data_reasoning": "New words."}, previous=[done])
    assert again[0]["status"] == "DONE" and again[0]["environment_path"] == "environments/s" and again[0]["owner"] == "x"
    assert again[0]["mean_cov"] == 0.3 and again[0]["description"] == "New words."
    assert again[1]["status"] == "PENDING"


def test_what_has_an_adapter_comes_first_and_only_so_many_others_are_retained():
    done = finished({**PUBLISHED, "skill": "b"}, "environments/b", "environment", {"mean_reward": 0.4})
    found = [figures("a"), figures("b"), figures("c", kept=False), figures("d"), figures("e")]
    entries = select(found, {}, known=[done], most=2)
    assert [e["skill"] for e in entries] == ["b", "a", "d"] and entries[0] == done
    assert [e["skill"] for e in select(found, {}, most=1)] == ["a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skill": ""}, "field 'skill' must be a name"),
        ({"mean_cov": "high"}, "field 'mean_cov' is 'high', not a number"),
        ({"status": "RUNNING"}, "field 'status' is 'RUNNING', not PENDING or DONE"),
        ({"status": "DONE"}, "field 'environment_path' is missing from an entry that is DONE"),
    ],
)
def test_a_damaged_entry_is_named(change, message):
    with pytest.raises(InputError, match=rf"s\.json: entry 0 .*{message}"):
        decode_selection([{**PUBLISHED, **change}], "s.json")


def test_missing_fields_doubles_and_other_files_are_named():
    with pytest.raises(InputError, match="entry 0 .*field 'status' is missing"):
        decode_selection([{k: v for k, v in PUBLISHED.items() if k != "status"}], "s.json")
    with pytest.raises(InputError, match="entry 1 .*occurs once"):
        decode_selection([PUBLISHED, PUBLISHED], "s.json")
    with pytest.raises(InputError, match="a selection is a list"):
        decode_selection({}, "s.json")
    with pytest.raises(InputError, match="entry 0 is not an object"):
        decode_selection(["a"], "s.json")


def test_candidates_load_by_name():
    data = {"candidates": [{"name": "a", "description": "x", "example_trajectories": []}, {"name": "b", "description": "y"}]}
    assert decode_candidates(data, "c.json") == {"a": "x", "b": "y"}
    with pytest.raises(InputError, match=r"c\.json: candidates\[1\]: .*'a'"):
        decode_candidates({"candidates": [{"name": "a"}, {"name": "a"}]}, "c.json")
    for name in ("../evil", "a/b", "Two words", "base", "a" * 65, "nul\0", 3):
        with pytest.raises(InputError, match=r"candidates\[0\]: field 'name' must be a name in snake_case") as error:
            decode_candidates({"candidates": [{"name": name}]}, "c.json")
        assert len(str(error.value)) < 200
    assert decode_candidates({"candidates": [{"name": "a", "description": "x\ud800"}]}, "c.json") == {"a": "x?"}
    with pytest.raises(InputError, match="field 'candidates' must be a list"):
        decode_candidates([], "c.json")
