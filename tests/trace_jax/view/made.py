"""A small workdir with something of everything that the pages show."""

import contextlib
import dataclasses
import html
import re

import numpy as np
from starlette.testclient import TestClient

from rl.trajectory import Trajectory
from tests.trace_jax import example_run
from trace_jax.config import Config
from trace_jax.view.app import Pages
from trace_jax.view.rollouts import Rollouts
from trace_jax.workdir import Workdir

HOSTILE = "</table><script>alert('x')</script>\x00\x1b[31m\u202egnp.exe\u2028 </details><img src=x onerror=alert(1)> 'a\"b"
LONG = "".join(f"line {n} of the listing\n" for n in range(45_000))  # a megabyte
QUOTE = "I have  returned it."


def light(number, policy="base", **fields):
    """A rollout without tokens, like those of other tools."""
    reward = fields.pop("reward", (0.0, 0.25, 1.0)[number % 3])
    fields = {"policy": {"name": policy, "version": number // 100}, "split": "training", "group": str(number // 4)} | fields
    return Trajectory(
        id=f"desk:{number // 4}#{number % 4}",
        environment="desk",
        task_id=f"desk:{number // 4}",
        seed=number // 4,
        trial=number % 4,
        reward=reward,
        success=reward == 1.0,
        messages=[{"role": "user", "content": f"order {number}"}, {"role": "assistant", "content": "done."}][: 1 + number % 2],
        **fields,
    )


def hostile():
    """A rollout in which every text is hostile."""
    call = {"id": HOSTILE, "name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}
    return Trajectory(
        id=HOSTILE,
        environment=HOSTILE,
        task_id=HOSTILE,
        group=HOSTILE,
        policy={"name": HOSTILE, "version": 0},
        messages=[
            {"role": HOSTILE, "content": HOSTILE},
            {"role": "assistant", "content": f"<think>{HOSTILE}</think>", "tool_calls": [call], HOSTILE: HOSTILE},
            {"role": "tool", "content": HOSTILE, "tool_call_id": HOSTILE},
        ],
        checks={HOSTILE: {"passed": False, "expected": HOSTILE, "actual": {HOSTILE: None}, "message_index": 1}},
        hint={"text": HOSTILE, "token_span": [0, 0]},
        metrics={HOSTILE: 1.0},
        error={"kind": HOSTILE, "message": HOSTILE},
    )


def fill(path):
    """The workdir: 6 diagnosed rollouts of the base, 230 of training, 4 composed with slots, 3 odd ones, and those of inner workdirs."""
    with Workdir.open(path, Config()) as workdir:
        base = [
            dataclasses.replace(example_run.trajectory(n, tokens=120), slots=None, policy={"name": "base", "version": 0}) for n in range(6)
        ]
        base[1].messages[-1]["content"] = f"<think>that was easy</think>Well. {QUOTE}"
        workdir.write_shard("base", "train", 0, base)
        example_run.add_diagnosis(workdir)
        label = {"trajectory": "desk:1#0", "capability": "quoting", "value": "LACKING", "message_index": 4, "passed": True}
        workdir.append_jsonl("diagnosis/evidence.jsonl", {**label, "reason": "says so", "quote": "i have returned it."})
        for shard in range(3):
            numbers = range(shard * 100, min(shard * 100 + 100, 230))
            workdir.write_shard("adapter:x", "training", shard, [light(n, "adapter:x") for n in numbers])
        example_run.add_gate(workdir)
        routed = [example_run.trajectory(n, tokens=220 + 20 * n, slots=4) for n in range(1, 5)]
        workdir.write_shard("composed", "heldout", 0, [dataclasses.replace(t, slots=None, split="heldout") for t in routed])
        long = light(0, split="odd", reward=0.5)
        long.messages.append({"role": "tool", "content": LONG})
        fault = light(1, split="odd", reward=None, stop_reason="environment_error", error={"kind": "deadline", "message": "30 s"})
        hint = dataclasses.replace(base[2], hint={"text": "look first", "token_span": [3, 5]}, stop_reason="max_turns")
        workdir.write_shard("base", "odd", 0, [long, fault, hint])
        workdir.within("rounds/2").write_shard("previous", "train", 0, [light(n, "previous", split="train") for n in range(4)])
        workdir.within("capabilities/1").write_shard("composed", "heldout", 0, [light(7, "composed", split="heldout")])
    return path


@contextlib.contextmanager
def opened(path, results=()):
    """A client of the pages, when all is listed."""
    workdir = Workdir.look(path) if path else None
    with contextlib.closing(Rollouts(workdir, results)) as rollouts:
        while not (now := rollouts.now(20)).looked and path or now.unread:
            continue
        with TestClient(Pages(rollouts).app(), base_url="http://localhost") as client:
            client.rollouts = rollouts
            yield client


def same(a, b):
    """Two records, field by field."""
    return all(
        np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


def said(page):
    """The words of a page."""
    words = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", words)).split())


def rows(page):
    """The addresses of the rollouts that a list shows."""
    return [html.unescape(address) for address in re.findall(r'<th scope="row"><a href="([^"]*)"', page)]


def get(client, address, status=200):
    answer = client.get(address)
    assert answer.status_code == status, answer.text
    return answer.text
