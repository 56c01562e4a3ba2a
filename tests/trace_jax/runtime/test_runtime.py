import dataclasses
import shutil
import types

import jax
import pytest

from envs import Pool
from rl.trajectory import encode_shard
from tests.trace_jax import tiny
from trace_jax.errors import InputError, Unfinished
from trace_jax.runtime import BASE, CALIBRATION, SELECTION, TRAINING, find_package, open_runtime, plan

PRECISION = "tool_calling_precision"


def train_tasks(runtime, count=3, rollouts=2):
    return runtime.tasks(runtime.target, "train", 0, count, rollouts)


def test_a_batch_is_sampled_once_and_then_read(runtime, monkeypatch):
    tasks = train_tasks(runtime)
    found = runtime.roll_out(BASE, "base", "train", 0, tasks)
    assert [(t.seed, t.trial) for t in found] == [(s, r) for s in range(3) for r in range(2)]
    with runtime.workdir.open(runtime.workdir.place(), lock=False) as workdir:
        assert workdir.shards("base", "train") == [0]
    monkeypatch.setattr("trace_jax.runtime.batches.Rollout", lambda *_, **__: pytest.fail("sampled again"))
    assert encode_shard(runtime.roll_out(BASE, "base", "train", 0, tasks)) == encode_shard(found)


def test_a_shard_of_other_tasks_is_refused_and_the_folder_named(runtime):
    runtime.roll_out(BASE, "base", "train", 0, train_tasks(runtime))
    with pytest.raises(InputError, match=r"rollouts/base/train/00000\.jsonl\.zst holds other tasks"):
        runtime.roll_out(BASE, "base", "train", 0, train_tasks(runtime, 4))


def test_success_begins_at_the_threshold_of_the_config(runtime):
    tiny.store_environment(runtime, "precondition_verification")
    tasks = runtime.tasks(runtime.environment("precondition_verification"), "calibration-x", CALIBRATION, 6, 2)
    found = runtime.roll_out(BASE, "base", "calibration-x", 0, tasks)
    assert {t.success for t in found if 0.05 <= t.reward < 1.0} == {True}  # the tiny run's threshold


def test_a_batch_that_infrastructure_failed_as_a_whole_is_not_stored(runtime, monkeypatch):
    found = runtime.roll_out(BASE, "base", "train", 0, train_tasks(runtime, 1))
    for t in found:
        t.reward, t.error = None, {"kind": "crash", "message": "the worker ended"}
    monkeypatch.setattr(
        "trace_jax.runtime.batches.Rollout", lambda *_, **__: types.SimpleNamespace(result=lambda: found, cancel=lambda: None)
    )
    with pytest.raises(Unfinished, match="desk: all 2 rollouts of base in heldout failed, the first by crash: the worker ended; mend that"):
        runtime.roll_out(BASE, "base", "heldout", 0, train_tasks(runtime, 1))
    assert runtime.workdir.shards("base", "heldout") == []


def test_no_step_sees_the_seeds_of_another(runtime):
    assert {t.seed for t in train_tasks(runtime, 4)} == {0, 1, 2, 3}
    runtime.tasks(runtime.target, "training", TRAINING + 999_999, 1, 1)
    with pytest.raises(InputError, match="more than 1,000,000 seeds"):
        runtime.tasks(runtime.target, "training", TRAINING + 999_999, 2, 1)
    with pytest.raises(InputError, match="more than 1,000,000 seeds"):
        runtime.tasks(runtime.target, "selection", SELECTION, 1_000_001, 1)


def test_a_target_does_not_reach_into_the_seeds_of_another_purpose(runtime):
    target = dataclasses.replace(runtime.config.target, train_tasks=1_000_001)
    runtime.config = dataclasses.replace(runtime.config, target=target)
    with pytest.raises(InputError, match="'train' asks for more than 1,000,000 seeds"):
        runtime.target_tasks("train", 1)
    assert [task.seed for task in runtime.target_tasks("train", 1, places=[7, 3])] == [7, 3]


def test_later_rollouts_of_a_seed_draw_other_random_numbers(runtime):
    later = runtime.tasks(runtime.target, "training", 0, 2, 3, earlier=6)
    assert [(t.seed, t.rollout, t.trial) for t in later] == [(s, r, r) for s in range(2) for r in (6, 7, 8)]


def test_knobs_of_the_config_are_the_targets_alone(tmp_path, checkpoint):
    with tiny.open_tiny(tmp_path, checkpoint, target__knobs='{"records": 5}') as runtime:
        tiny.store_environment(runtime, PRECISION)
        assert train_tasks(runtime, 1)[0].knobs == {"records": 5}
        assert runtime.tasks(runtime.environment(PRECISION), "training", TRAINING, 1, 1)[0].knobs == {}


def test_hints_go_to_a_share_of_each_group(runtime):
    tiny.store_environment(runtime, PRECISION)
    package = runtime.environment(PRECISION)
    tasks = runtime.tasks(package, "training", TRAINING, 3, runtime.config.train.group_size)
    assert runtime.with_hints(package, 0.0, tasks) == tasks
    hinted = runtime.with_hints(package, 0.5, tasks)
    assert [t.hint is not None for t in hinted] == [True, True, False, False] * 3
    assert hinted[0].hint == runtime.pool.function(package, "hint", TRAINING)
    found = runtime.roll_out(BASE, "base", "training", 0, hinted)
    assert [t.hint is not None for t in found] == [t.hint is not None for t in hinted]


def test_an_environment_that_changed_since_it_was_certified_is_refused(runtime):
    with pytest.raises(InputError, match=r"certificate\.json: no such file"):
        runtime.environment(PRECISION)
    tiny.store_environment(runtime, PRECISION)
    source = runtime.workdir.local(f"environments/{PRECISION}/environment.py")
    source.write_text(source.read_text() + "\nextra = 1\n")
    with pytest.raises(InputError, match=f"environments/{PRECISION}: changed since it was certified"):
        runtime.environment(PRECISION)
    source.unlink()
    with pytest.raises(InputError, match=r"environment\.py: No such file"):
        runtime.environment(PRECISION)


def test_usable_are_the_retained_ones_that_are_calibrated_in_the_order_of_the_gaps(runtime):
    with pytest.raises(InputError, match=r"selected_capabilities\.json: no such file"):
        runtime.usable()
    tiny.retain(runtime, "b", "a", "communicating_results")
    with pytest.raises(InputError, match="no usable environment; run trace-jax synthesize"):
        runtime.usable()
    runtime.workdir.write_json("environments/a/calibration.json", {"usable": True})
    runtime.workdir.write_json("environments/b/calibration.json", {"usable": False})
    assert runtime.retained() == ["b", "a", "communicating_results"] and runtime.usable() == ["a"]


def test_a_stage_writes_its_cost_down_even_when_it_fails(runtime):
    with pytest.raises(ZeroDivisionError), runtime.stage("train"):
        raise ZeroDivisionError
    with runtime.stage("train"):
        pass
    assert len(runtime.workdir.read_jsonl("seconds.jsonl")) == 2
    assert runtime.workdir.read_json("spent.json")["stages"]["train"]["seconds"] >= 0


@pytest.mark.parametrize(
    "overrides, what, message",
    [
        ({"target__package": "/nowhere"}, "target", r"'target\.package': /nowhere/package\.json"),
        ({"target__knobs": '{"record": 3}'}, "target", r"'target\.knobs': environment desk: no knob 'record'"),
        ({"target__knobs": '{"records": 99}'}, "target", r"'target\.knobs': environment desk: knob records = 99"),
        ({"rollout__context": "2000", "train__pack_length": "2000"}, "model", r"'rollout\.context': 2000 is more than the 1024 positions"),
    ],
)
def test_a_config_that_does_not_fit_model_or_target_names_the_field(tmp_path, checkpoint, overrides, what, message):
    with tiny.open_tiny(tmp_path, checkpoint, **overrides) as runtime, pytest.raises(InputError, match=message):
        getattr(runtime, what)


def test_a_damaged_model_folder_names_the_field(tmp_path, checkpoint):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    with tiny.open_tiny(tmp_path, folder) as runtime:
        (folder / "chat_template.jinja").unlink()
        with pytest.raises(InputError, match=r"'model\.path': no tokenizer with a chat template: .*chat_template\.jinja"):
            _ = runtime.chat
        (folder / "tokenizer.json").unlink()
        with pytest.raises(InputError, match=r"'model\.path': no tokenizer"):
            _ = runtime.chat
        (folder / "model.safetensors").write_bytes(b"12345678")
        with pytest.raises(InputError, match=r"'model\.path': .*model\.safetensors"):
            _ = runtime.model


def test_packages_are_found_by_name_or_folder(runtime):
    tiny.store_environment(runtime, PRECISION)
    assert find_package("desk", "target.package").name == "desk"
    by_name, by_folder = (find_package(name, "x") for name in (PRECISION, runtime.workdir.local("environments") / PRECISION))
    assert by_name.digest == by_folder.digest


def test_the_plan_counts_rollouts_by_stage(runtime):
    stages = plan(runtime.config, 3)
    assert stages["rollouts"] == 24 and stages["synthesize"] == 3 * 8 and stages["evaluate"] == 6 * (3 + 3)
    assert stages["train"] == 3 * (2 * 2 * 4 + 2 + 2 * 2) + 64  # two iterations, one validation, before and after; agreement
    # slot table of own and other slots, mixtures, the gate's own batches, and the selection of all candidates
    assert stages["compose"] == 3 * (12 + 2 * 3) + 3 * 4 * 2 + 8 + 2 + 3 * 2 * (3 + 7)


def test_a_command_of_one_stage_is_timed_as_that_stage(runtime):
    with open_runtime(tiny.arguments(runtime, "train"), "train"):
        pass
    assert [row["stage"] for row in runtime.workdir.read_jsonl("seconds.jsonl")] == ["train"]


def test_compiled_programs_are_kept_for_the_next_run(runtime, monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        with open_runtime(tiny.arguments(runtime, "export")):
            assert jax.config.jax_compilation_cache_dir == str(tmp_path / "trace-jax")
        jax.config.update("jax_compilation_cache_dir", "/the/users/own")
        with open_runtime(tiny.arguments(runtime, "export")):
            assert jax.config.jax_compilation_cache_dir == "/the/users/own"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_what_holds_the_workers_is_kept_and_printed(runtime, monkeypatch):
    runtime.__dict__.pop("pool", None)
    config = dataclasses.replace(runtime.config, generator="llm")
    monkeypatch.setattr(runtime, "config", config)
    printed = []
    monkeypatch.setattr(runtime.progress, "print", printed.append)
    monkeypatch.setattr("trace_jax.runtime.runtime.Pool", lambda *args, **options: Pool(*args, **options, _without=("landlock",)))
    with runtime.pool as pool:
        assert pool.sandbox == "require"
    record = runtime.workdir.read_json("sandbox.json")
    assert record["mode"] == "require" and "seccomp" in record["layers"] and record["missing"]["landlock"] == "left out"
    assert len(printed) == 1 and "without landlock" in printed[0]
    del runtime.pool
    monkeypatch.setattr("trace_jax.runtime.runtime.Pool", lambda *args, **options: Pool(*args, **options, _without=("seccomp",)))
    with pytest.raises(InputError, match="config field 'rollout.sandbox': sandbox 'require': the layer seccomp is missing"):
        runtime.pool  # noqa: B018
    monkeypatch.setattr(runtime, "config", dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, sandbox="off")))
    with runtime.pool as pool:
        assert pool.sandbox == "off" and pool.layers == () and "off" in printed[-1]
    del runtime.pool
