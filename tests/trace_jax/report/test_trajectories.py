"""Token views: each token in the colour of its slot, cut to what a page may take."""

import re

import numpy as np

from rl.trajectory import encode_shard
from tests.trace_jax.example_run import add_gate, trajectory
from tests.trace_jax.report.pages import written
from trace_jax import report
from trace_jax.report import budgets


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
