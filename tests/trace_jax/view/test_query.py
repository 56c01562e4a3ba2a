"""Filters, counts and orders, against the plainest way to find them."""

import random

import pytest

from tests.trace_jax.view import made
from trace_jax.diagnose.evidence import Label
from trace_jax.rollout_index import entry
from trace_jax.view.query import COLUMNS, FACETS, PAGE, Query, Table, lacking
from trace_jax.view.rows import Listing, make_row


def rows(count=300):
    rng = random.Random(0)
    found = []
    for n in range(count):
        reward = rng.choice([None, 0.0, 0.3, 0.7, 1.0])
        error = {"error": {"kind": "deadline", "message": ""}, "stop_reason": "environment_error"} if reward is None else {}
        t = made.light(n, rng.choice(["base", "adapter:x"]), reward=reward, hint=rng.choice([None, {"text": "h"}]), **error)
        where, split = rng.choice(["", "rounds/2"]), rng.choice(["train", "heldout"])
        row = make_row(f"{where}/{n}", where, t.policy["name"].replace(":", "-"), split, entry(t))
        labels = {c: Label(t.id, c, rng.choice(["LACKING", "PRESENT", "NA"]), None, "") for c in "ab" if rng.random() < 0.4}
        found.append(type(row)(**{name: getattr(row, name) for name in row.__slots__} | {"labels": labels}))
    return found


@pytest.fixture(scope="module")
def table():
    return Table(Listing("here", rows()))


def holds(row, query):
    """Whether a query finds a row."""
    labels = [label.value for name, label in row.labels.items() if query.capability in ("", name)]
    bounds = (query.low, query.high) != (None, None)
    low, high = (-1 if query.low is None else query.low), (2 if query.high is None else query.high)
    return (
        all(getattr(query, name) in ("", of(row)) for name, of in FACETS.items())
        and (not (query.capability or query.label) or (query.label in labels if query.label else bool(labels)))
        and query.text.lower() in row.id.lower()
        and (row.task == query.task if query.task == "desk:1" else query.task in row.task)
        and (not bounds or (row.reward is not None and low <= row.reward <= high))
    )


QUERIES = [
    Query(),
    Query(policy="base", reward="zero"),
    Query(where="rounds/2", split="train", hinted="yes"),
    Query(capability="a"),
    Query(label="LACKING", policy="adapter:x"),
    Query(capability="b", label="NA", split="heldout"),
    Query(low=0.2, high=0.8),
    Query(low=0.5, reward="success"),
    Query(ended="deadline"),
    Query(task="desk:1"),
    Query(task="sk:1", text="#2"),
    Query(policy="no such"),
]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: str(query.parameters()))
def test_a_query_finds_what_holds_and_counts_what_each_choice_would_show(table, query):
    found, every = table.find(query), rows()
    expected = [n for n, row in enumerate(every) if holds(row, query)]
    assert found.order.tolist() == expected
    assert found.successes == sum(every[n].outcome == "success" for n in expected)
    assert found.graded == sum(every[n].reward is not None for n in expected)
    for choice, counts in found.counts.items():
        for value, count in counts:
            other = Query(**query.parameters() | {choice: value})
            assert count == sum(holds(row, other) for row in every), (choice, value)


@pytest.mark.parametrize("column", COLUMNS)
def test_columns_sort_up_and_down_and_what_has_no_value_comes_last(table, column):
    every = rows()
    for sort in (column, f"-{column}"):
        values = [COLUMNS[column](every[n]) for n in table.find(Query(sort=sort)).order]
        there = [value for value in values if value is not None]
        assert values[len(there) :] == [None] * (len(values) - len(there))
        if column != "id":
            assert there == sorted(there, reverse=sort != column)


def test_numbers_in_names_sort_as_numbers(table):
    every = rows()
    tasks = [int(every[n].task.partition(":")[2]) for n in table.find(Query(sort="id")).order]
    assert tasks == sorted(tasks)


def test_an_address_gives_the_query_back():
    query = Query(policy="adapter:x", low=0.25, sort="-reward", page=3, text="ü&=")
    assert Query.parse({name: str(value) for name, value in query.parameters().items()}) == query
    odd = {"page": "-3", "low": "nan", "high": "x", "sort": "__class__", "policy": " "}
    assert Query.parse(odd) == Query()
    assert Query.parse({"page": "1" * 400}) == Query() and PAGE == 100


def test_lacking_names_the_capabilities(table):
    row = next(row for row in rows() if {label.value for label in row.labels.values()} == {"LACKING"} and len(row.labels) == 2)
    assert lacking(row) == "a, b"
