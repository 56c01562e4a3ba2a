import dataclasses
import hashlib

import pytest

from envs import Pool, write_package
from envs.builtin import load_builtin
from rl.replay import steps
from rl.trajectory import StopReason, Trajectory
from tests.trace_jax import tiny
from trace_jax import cli
from trace_jax.errors import InputError
from trace_jax.runtime import BASE, CALIBRATION, SELECTION
from trace_jax.verify_again import Verifier, find_verifiers, verify

ONE = "precondition_verification"
PACKAGE = load_builtin(ONE)
GRADE = "return 1.0 if share == 1.0 else 0.3 * share"


@pytest.fixture(scope="module")
def rolled(tmp_path_factory, checkpoint):
    """A workdir with rollouts of the target and of one environment, the latter at two settings of its knobs."""
    with tiny.open_tiny(tmp_path_factory.mktemp("rolled"), checkpoint, rollout__max_turns="4") as runtime:
        runtime.roll_out(BASE, "base", "train", 0, runtime.tasks(runtime.target, "train", 0, 6, 2))
        other = PACKAGE.with_defaults({"records": 6})
        search = [{"split": f"calibration-{ONE}", "knobs": PACKAGE.resolve_knobs()}]
        tiny.store_environment(runtime, ONE, split=f"calibration-{ONE}-new", search=search)
        runtime.workdir.produce(f"environments/{ONE}", lambda path: write_package(path, other.meta, other.source))
        for package, split in ((PACKAGE, f"calibration-{ONE}"), (other, f"calibration-{ONE}-new"), (PACKAGE, f"calibration-{ONE}-end")):
            runtime.roll_out(BASE, "base", split, 0, runtime.tasks(package, split, CALIBRATION, 3, 2))
        runtime.roll_out(BASE, "base", f"own-{ONE}", 0, runtime.tasks(other, f"own-{ONE}", SELECTION, 6, 1))
        yield runtime


def run(runtime, capsys, **options):
    """What the command writes, says, and leaves alone."""
    rollouts = runtime.workdir.local("rollouts")

    def stored():
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in rollouts.rglob("*") if path.is_file()}

    before = stored()
    words = [f"--{name}={value}" for name, value in options.items()]
    assert cli.main(["verify-again", f"--workdir={runtime.workdir.place()}", *words]) == 0
    assert stored() == before
    return runtime.workdir.read_json("verify-again.json"), capsys.readouterr().out


def changed(folder, *replacements):
    source = PACKAGE.source
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    write_package(folder, PACKAGE.meta, source)
    return folder


def test_an_unchanged_verifier_gives_the_same_verdicts(rolled, capsys):
    found, said = run(rolled, capsys)
    counts = {place: (count["same"], count["skipped"]) for place, count in found["totals"].items()}
    assert counts == {
        "base/train": (12, 0), f"base/calibration-{ONE}": (6, 0), f"base/calibration-{ONE}-new": (6, 0),
        f"base/calibration-{ONE}-end": (0, 6), f"base/own-{ONE}": (6, 0),
    }  # fmt: skip
    assert not found["changed"] and not found["drifted"] and not found["fault"] and "12 same" in said


def test_a_changed_verifier_is_told_with_the_checks_that_flipped(rolled, capsys, tmp_path):
    strict = ('"passed": match is not None,', '"passed": False,')
    found, said = run(rolled, capsys, package=changed(tmp_path, strict, (GRADE, "return 0.5 * share")))
    assert set(found["packages"]) == {PACKAGE.name} and not any("train" in place for place in found["totals"])
    stored = {t.id: t for t in rolled.workdir.read_shards("base", f"own-{ONE}")}
    listed = [one for one in found["changed"] if one["split"] == f"own-{ONE}"]
    assert listed and not found["drifted"] and f"{listed[0]['id']}: reward " in said
    for one in listed:
        passed = [name for name, check in stored[one["id"]].checks.items() if check["passed"] and name.startswith("action")]
        assert one["old"] == stored[one["id"]].reward and one["checks"] == {name: {"old": True, "new": False} for name in passed}
    assert found["totals"][f"base/own-{ONE}"]["changed"] == len(listed)


def test_another_reply_is_a_drift_and_not_compared(rolled, capsys, tmp_path):
    found, _ = run(
        rolled,
        capsys,
        package=changed(tmp_path, ('return "Error: no such order"', 'return "Error: unknown"'), (GRADE, "return 0.0")),
        capability=ONE,
    )
    assert found["drifted"] and all(
        (one["stored"], one["replayed"]) == ("Error: no such order", "Error: unknown") for one in found["drifted"]
    )
    ids = {(one["split"], one["id"]) for one in found["drifted"]}
    assert not ids & {(one["split"], one["id"]) for one in found["changed"]}


def test_another_world_is_a_drift_from_the_start_and_a_fault_is_told(rolled, capsys, tmp_path):
    found, _ = run(rolled, capsys, package=changed(tmp_path / "a", ("rng = random.Random(seed)", "rng = random.Random(seed + 1)")))
    assert {one["message_index"] for one in found["drifted"]} == {1} and len(found["drifted"]) > 12
    found, said = run(rolled, capsys, package=changed(tmp_path / "b", (GRADE, "return share / 0")))
    assert len(found["fault"]) == 18 and "ZeroDivisionError" in found["fault"][0]["why"] and "ZeroDivisionError" in said


def test_what_cannot_be_verified_is_named(rolled, tmp_path):
    with pytest.raises(InputError, match=f"--capability=typo: the workdir has no such environment; there are: {ONE}"):
        find_verifiers(tiny.arguments(rolled, "verify-again", capability="typo"))
    write_package(tmp_path / "a", PACKAGE.meta | {"name": "other"}, PACKAGE.source)
    with pytest.raises(InputError, match="nothing was rolled out in 'other'; there are: desk, desk_precondition"):
        find_verifiers(tiny.arguments(rolled, "verify-again", package=str(tmp_path / "a")))
    write_package(tmp_path / "b", PACKAGE.meta | {"knobs": {}}, PACKAGE.source)
    with pytest.raises(InputError, match="no knob 'records'"):
        find_verifiers(tiny.arguments(rolled, "verify-again", package=str(tmp_path / "b")))


def test_what_never_reached_the_environment_is_not_played_again(rolled):
    found = list(rolled.workdir.read_shards("base", "train"))
    assert {t.stop_reason for t in found} >= {StopReason.DONE, StopReason.MAX_TURNS}
    t = next(t for t in found if t.stop_reason == StopReason.DONE and t.metrics["tool_calls"])
    said = {"role": "assistant", "content": "<tool_call>{"}
    cut = dataclasses.replace(t, messages=[*t.messages[:-1], said], stop_reason="invalid_action", reward=0.0)
    assert [step.act for step in steps(cut)] == [step.act for step in steps(t)][:-1] and not steps(cut)[-1].done
    assert steps(t)[-1].done and steps(t)[-1].act.op == "respond"


def test_several_calls_of_a_turn_are_played_until_the_episode_was_over():
    calls = [{"id": str(n), "name": "check_order", "arguments": {"order_id": f"A{n}"}} for n in range(3)]
    messages = [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "<think>a</think>Which?"},
        {"role": "user", "content": "both"},
        {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "x", "tool_call_id": "0"},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]  # fmt: skip
    found = steps(Trajectory(id="a", environment="e", task_id="a", reward=1.0, messages=messages))
    assert [(s.act.op, s.act.arguments, s.text, s.done, s.message_index) for s in found] == [
        ("respond", ("Which?",), "both", False, 2),
        ("call", ("check_order", {"order_id": "A0"}), "x", False, 4),
        ("call", ("check_order", {"order_id": "A1"}), "y", True, 5),
    ]


def test_an_episode_that_now_ends_elsewhere_is_a_drift(rolled):
    ends = PACKAGE.source.replace("    def done(self):\n        return self.ended", "    def done(self):\n        return bool(self.log)")
    assert ends != PACKAGE.source
    found = [t for t in rolled.workdir.read_shards("base", f"calibration-{ONE}") if len(steps(t)) > 1]
    with Pool() as pool:
        verifier = Verifier(dataclasses.replace(PACKAGE, source=ends), PACKAGE.resolve_knobs(), {f"calibration-{ONE}": {}})
        results = list(verify(pool, verifier, found))
    assert found and all(one["replayed"] == "the episode is over" for one in results)
