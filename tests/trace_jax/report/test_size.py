"""A report stays below five megabytes, whatever a run holds."""

import numpy as np
import pytest

from rl.trajectory import encode_shard
from tests.trace_jax import example_run
from tests.trace_jax.example_run import PIECES, add_all, held_out, trajectory
from tests.trace_jax.report.pages import written
from trace_jax.report import budgets

CAPABILITIES = [f"capability_number_{n}" for n in range(10)]
LAYERS, TOKENS, TASKS = 48, 32_000, 164
OUTPUT = "<row id='1'>&amp; a value that a tool returned \u202e</row>\n" * 20_000  # a megabyte, and twice that once it is escaped


def add_large_run(workdir, examples, layers, tokens, tasks, output):
    """A run of real size: long episodes of many turns, tools that return megabytes, ten capabilities."""
    add_all(workdir)
    shown = [trajectory(n, tokens=tokens, slots=len(CAPABILITIES) + 1, layers=layers) for n in range(examples)]
    for t in shown:
        t.messages = long_conversation(t.messages, output)
    workdir.write_bytes("gate/examples.jsonl.zst", encode_shard(shown))
    workdir.write_json("gate/pieces.json", [*PIECES, *(f"<piece{n}>&" for n in range(1000))])
    for policy in ("base", "composed"):
        held = [held_out(n, (n % 2 == 0) == (policy == "base")) for n in range(tasks)]
        for t in held:
            t.messages = long_conversation(t.messages, output)
        workdir.write_shard(policy, "heldout", 0, held)
        data = workdir.read_json(f"evaluation/{policy}.json")
        workdir.write_json(
            f"evaluation/{policy}.json", data | {"tasks": {t.task_id: {"trials": 1, "successes": int(t.success)} for t in held}}
        )


def long_conversation(messages, output):
    start, call, result, end = messages[:2], messages[2], messages[3], messages[4]
    outputs = [output, *(f"{n} {output[:2000]}" for n in range(40))]
    return [*start, *[m for text in outputs for m in (call, result | {"content": text})], end]


@pytest.fixture
def ten_capabilities(monkeypatch):
    monkeypatch.setattr(example_run, "CAPABILITIES", CAPABILITIES)


def test_megabytes_of_output_and_thousands_of_tokens_fit(workdir, ten_capabilities):
    add_large_run(workdir, examples=3, layers=LAYERS, tokens=2100, tasks=12, output=OUTPUT[:50_000])
    page = written(workdir)
    assert 500_000 < len(page.source.encode()) < budgets.PAGE
    assert "The first 2000 of 2100 tokens." in page.said("trajectories") and "Broken: 6 tasks" in page.said("changes")


@pytest.mark.slow
def test_a_full_run_of_real_size_fits(workdir, ten_capabilities):
    add_large_run(workdir, examples=12, layers=LAYERS, tokens=TOKENS, tasks=TASKS, output=OUTPUT)
    page = written(workdir)
    size = len(page.source.encode())
    print(f"{size:,} bytes")
    assert 2_000_000 < size < budgets.PAGE
    assert "Broken: 82 tasks" in page.said("changes") and np.prod([TOKENS, LAYERS]) > 1_000_000


def test_what_may_take_most_takes_less_than_a_page_together():
    parts = budgets.TRAJECTORIES + 2 * budgets.CHANGES + budgets.EVIDENCE
    assert parts + 1_000_000 < budgets.PAGE  # the rest is charts, tables and config
