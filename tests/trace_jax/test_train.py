import dataclasses
import types

import jax
import numpy as np
import pytest

from rl.advantages import group_advantages
from rl.engines.protocol import Policy
from rl.learner import LearnerConfig
from rl.loss import LossConfig
from rl.trajectory import Trajectory
from tests.trace_jax import tiny
from trace_jax import agreement, train
from trace_jax.config import Config, TrainSection
from trace_jax.errors import InputError
from trace_jax.evaluate.command import heldout_tasks
from trace_jax.runtime import TRAINING, VALIDATION, Runtime, plan
from trace_jax.runtime.batches import Batch
from trace_jax.train import initial_adapter, learner_config, load_adapter, loss_config, train_adapter, update
from trace_jax.workdir import Workdir

ONE = "precondition_verification"


@pytest.fixture
def ready(runtime):
    """Steps 1 and 2 are done, for one capability, whose rollouts get hints."""
    tiny.retain(runtime, ONE)
    tiny.store_environment(runtime, ONE, hint_ratio=0.5)
    return runtime


def adapter_bytes(runtime) -> bytes:
    return runtime.workdir.read_bytes(f"adapters/{ONE}/hf/adapter_model.safetensors")


def figures(runtime) -> list[dict]:
    """Metrics without what depends on the clock or on the process."""
    rows = runtime.workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("seconds") and k != "compiles"} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, checkpoint):
    with tiny.open_tiny(tmp_path_factory.mktemp("undisturbed"), checkpoint) as runtime:
        tiny.retain(runtime, ONE)
        tiny.store_environment(runtime, ONE, hint_ratio=0.5)
        train_adapter(runtime, ONE)
        yield runtime


def test_every_field_of_the_config_reaches_the_learner_and_the_loss():
    section = TrainSection(
        adam_b1=0.1, adam_b2=0.2, weight_decay=0.3, max_grad_norm=0.4, micro_rows=5, clip_low=0.11, clip_high=0.12, dual_clip=1.3,
        importance_cap=1.4, outlier_low=0.15, outlier_high=16.0, ratio="sequence", kl=0.17, schedule="cosine", icepop=(0.5, 5.0),
    )  # fmt: skip
    config = dataclasses.replace(Config(), train=section)
    assert learner_config(config, 0.5, 6, 7) == LearnerConfig(
        learning_rate=0.5, warmup_steps=6, total_steps=7, beta1=0.1, beta2=0.2, weight_decay=0.3, max_grad_norm=0.4, temperature=1.0,
        micro_rows=5, schedule="cosine",
    )  # fmt: skip
    assert loss_config(section) == LossConfig(
        clip_low=0.11, clip_high=0.12, dual_clip=1.3, weight_cap=1.4, drop_below=0.15, drop_above=16.0, ratio="sequence", kl=0.17,
        icepop=(0.5, 5.0),
    )  # fmt: skip


def test_a_fresh_adapter_does_nothing_and_depends_on_name_and_seed_alone(runtime):
    one, other = initial_adapter(runtime, "a"), initial_adapter(runtime, "b")
    assert not any(np.any(x) for x in one.b.values())
    assert not np.array_equal(one.a["q"], other.a["q"])
    np.testing.assert_array_equal(one.a["q"], initial_adapter(runtime, "a").a["q"])
    runtime.config = dataclasses.replace(runtime.config, seed=1)
    assert not np.array_equal(one.a["q"], initial_adapter(runtime, "a").a["q"])


def test_training_leaves_adapter_metrics_and_summary(undisturbed):
    workdir, config = undisturbed.workdir, undisturbed.config.train
    summary = workdir.read_json(f"adapters/{ONE}/summary.json")
    assert summary["capability"] == ONE and summary["iterations"] == 2 and summary["rollouts"] == 16 + config.validation_seeds
    assert summary["before"]["n"] == summary["after"]["n"] == config.selection_seeds
    rows = workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(0 <= row["reward"] <= 1 for row in rows) and any(row["trajectories_kept"] for row in rows)
    bank = load_adapter(undisturbed, ONE)
    assert bank.rank == config.rank and any(np.any(x) for x in bank.b.values())
    assert workdir.list(f"adapters/{ONE}/checkpoints") and workdir.list(f"events/adapters/{ONE}")
    assert {t.split for t in workdir.read_shards(f"adapter:{ONE}", "training")} == {"training"}
    with pytest.raises(InputError, match="adapter 'other' is not trained .* run trace-jax train --capability=other"):
        load_adapter(undisturbed, "other")


def test_the_engine_samples_under_the_version_that_is_trained(undisturbed):
    batches = [list(undisturbed.workdir.read_shards(f"adapter:{ONE}", "training", [i])) for i in range(2)]
    kept = [row["trajectories_kept"] for row in undisturbed.workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")]
    assert {t.policy["version"] for t in batches[0]} == {0}
    assert {t.policy["version"] for t in batches[1]} == {int(kept[0] > 0)}  # a batch without contrast is no update


def test_half_of_each_group_sees_a_hint_in_training_and_nobody_elsewhere(undisturbed):
    workdir = undisturbed.workdir
    training = list(workdir.read_shards(f"adapter:{ONE}", "training"))
    assert [t.hint is not None for t in training] == [True, True, False, False] * 4
    assert not any("expert_guidance" in str(t.messages) for t in training)
    for policy, split in ((f"adapter:{ONE}", "validation"), (f"adapter:{ONE}", f"own-{ONE}"), ("base", f"own-{ONE}")):
        assert not any(t.hint for t in workdir.read_shards(policy, split)) and workdir.shards(policy, split)
    assert not any(task.hint for task in heldout_tasks(undisturbed))
    for row in workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl"):
        assert row["hinted_share"] == 0.5 and (row["hinted_success"] + row["unhinted_success"]) / 2 == pytest.approx(row["success"])


def test_hinted_tokens_are_weighted_from_the_law_with_the_hint_to_the_policy_without(undisturbed):
    """From the engine through packing to the loss, under a random adapter; the oracle is NumPy, on whole logits of single episodes."""
    model, config, package = undisturbed.local_model, undisturbed.config.train, undisturbed.environment(ONE)
    bank = agreement._random(initial_adapter(undisturbed, ONE), 0)
    tasks = undisturbed.with_hints(package, 0.5, undisturbed.tasks(package, "training", TRAINING, 2, 4))
    found = undisturbed.roll_out(Policy("hinted", 1, adapters=bank), "hinted", "training", 0, tasks)
    found = [dataclasses.replace(t, reward=n / 8) for n, t in enumerate(found)]  # so that every group has contrast
    forward = jax.jit(lambda tokens: model(tokens, adapters=bank))

    def logprobs(tokens):
        logits = np.asarray(forward(np.pad(tokens, (0, 256 - len(tokens)))[None])[0, : len(tokens)], np.float64)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.concatenate([[0.0], np.take_along_axis(logits[:-1], np.asarray(tokens)[1:, None], 1)[:, 0]])

    loss, tokens, weights, kept = 0.0, 0, [], []
    for t, advantage in zip(found, group_advantages(found).values, strict=True):
        on, span = t.loss_mask > 0, t.hint["token_span"] if t.hint else (0, 0)
        np.testing.assert_allclose(logprobs(t.tokens)[on], t.logprobs[on], atol=2e-4)  # the engine saw the hint
        plain = np.delete(t.tokens, np.arange(*span))
        mu, old = t.logprobs[on], logprobs(plain)[np.delete(t.loss_mask, np.arange(*span)) > 0]
        weight = np.exp(old - mu)
        keep = (weight >= config.outlier_low) & (weight <= config.outlier_high)
        loss -= (keep * np.minimum(weight, config.importance_cap) * advantage).sum()
        tokens += len(mu)
        if t.hint:
            weights += (keep * np.minimum(weight, config.importance_cap)).tolist()
            kept += keep.tolist()
    assert np.abs(np.array(weights) - 1).mean() > 0.05  # the hint makes a difference
    learner = train.make_learner(undisturbed)
    state = learner.init(bank, seed=0)
    _, metrics = update(learner, state, found, config)
    assert metrics["loss"] == pytest.approx(loss / tokens, rel=1e-3, abs=1e-5) and metrics["action_tokens"] == tokens
    assert metrics["hinted_weight"] == pytest.approx(np.mean(weights), rel=1e-3)
    assert metrics["hinted_masked_share"] == pytest.approx(1 - np.mean(kept))


@pytest.mark.parametrize("where", ["group_advantages", "save_peft"])
def test_an_interrupted_training_ends_with_the_same_adapter(undisturbed, ready, monkeypatch, where):
    calls, original = [], getattr(train, where)

    def interrupted(*args, **options):
        calls.append(where)
        if len(calls) == (2 if where == "group_advantages" else 1):  # the second batch is stored and not learnt from
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(train, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_adapter(ready, ONE)
    assert not ready.workdir.exists(f"adapters/{ONE}/summary.json")
    train.make_learner.cache_clear()
    train_adapter(ready, ONE)
    assert adapter_bytes(ready) == adapter_bytes(undisturbed)
    assert figures(ready) == figures(undisturbed)
    assert ready.workdir.read_json(f"adapters/{ONE}/summary.json") == undisturbed.workdir.read_json(f"adapters/{ONE}/summary.json")


@pytest.mark.parametrize("rewards, best", [([0.1, 0.5, 0.3], 2), ([0.2, 0.2, 0.1], 2), ([0.1, 0.2, 0.9], 3)])
def test_the_adapter_that_is_best_on_unseen_seeds_remains(tmp_path, checkpoint, monkeypatch, rewards, best):
    settings = dict(train__iterations="3", train__validate_every="1", train__keep_checkpoints="1", train__validation_seeds="3")
    with tiny.open_tiny(tmp_path, checkpoint, **settings) as runtime:
        tiny.store_environment(runtime, ONE)
        roll_out, begin, seen, after = runtime.roll_out, runtime.batches.begin, [], []

        def contrasted(policy, folder, split, *more):
            batch = begin(policy, folder, split, *more)
            if split == "training":  # a reward of its own for each rollout, so that every iteration is an update
                found = [dataclasses.replace(t, reward=i / 8) for i, t in enumerate(batch.result())]
                batch.result = lambda: found
            return batch

        def scored(policy, folder, split, index, tasks, *more):
            found = roll_out(policy, folder, split, index, tasks, *more)
            if split == "validation":
                seen.append({t.seed for t in tasks})
                found = [dataclasses.replace(t, reward=rewards[index]) for t in found]
            if split.startswith("own-"):
                after.append(policy)
            return found

        monkeypatch.setattr(runtime, "roll_out", scored)
        monkeypatch.setattr(runtime.batches, "begin", contrasted)
        train.make_learner.cache_clear()
        train_adapter(runtime, ONE)
        assert after[-1].version == best == runtime.workdir.read_json(f"adapters/{ONE}/summary.json")["updates"]
        np.testing.assert_array_equal(after[-1].adapters.b["q"], load_adapter(runtime, ONE).b["q"])
        assert [row["validation"] for row in runtime.workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")] == pytest.approx(rewards)
        assert seen == [{VALIDATION, VALIDATION + 1, VALIDATION + 2}] * 3


def test_the_last_iteration_is_validated_whatever_the_interval(undisturbed):
    rows = undisturbed.workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")
    assert ["validation" in row for row in rows] == [False, True]
    assert len(list(undisturbed.workdir.read_shards(f"adapter:{ONE}", "validation"))) == undisturbed.config.train.validation_seeds


def test_a_step_is_split_into_what_it_spends_its_time_on(undisturbed):
    rows = undisturbed.workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")
    for row in rows:
        names = ["rollout", "sync", *(["pack", "transfer", "step"] if row["trajectories_kept"] else [])]
        assert sorted(name for name in row if name.startswith("seconds/")) == sorted(f"seconds/{name}" for name in names)
        assert all(row[f"seconds/{name}"] >= 0 for name in names) and row["seconds/rollout"] > 0


@pytest.fixture(scope="module")
def lagging(tmp_path_factory, checkpoint):
    """Rollouts run one update behind."""
    settings = dict(train__max_lag="1", train__iterations="4", train__validate_every="0", train__agreement="0")
    with tiny.open_tiny(tmp_path_factory.mktemp("lagging"), checkpoint, **settings) as runtime:
        tiny.retain(runtime, ONE)
        tiny.store_environment(runtime, ONE)
        train.make_learner.cache_clear()
        train_adapter(runtime, ONE)
        yield runtime


def test_with_lag_a_batch_is_sampled_under_the_adapter_of_the_iteration_before(lagging):
    rows = lagging.workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")
    updates = np.cumsum([0] + [row["trajectories_kept"] > 0 for row in rows])  # before each iteration
    under = [updates[max(0, i - 1)] for i in range(4)]
    assert [{t.policy["version"] for t in lagging.workdir.read_shards(f"adapter:{ONE}", "training", [i])} for i in range(4)] == [
        {version} for version in under
    ]
    lags = [updates[i] - under[i] for i in range(4)]
    assert max(lags) == 1 and all(row.get("policy_lag", lag) == lag for row, lag in zip(rows, lags, strict=True))


def test_the_batch_behind_is_what_the_older_adapter_samples(lagging, tmp_path, checkpoint):
    with tiny.open_tiny(tmp_path, checkpoint, train__agreement="0") as runtime:
        tiny.store_environment(runtime, ONE)
        tasks = runtime.tasks(runtime.environment(ONE), "training", TRAINING + 2, 2, 4)
        found = runtime.roll_out(Policy("p", 0, adapters=initial_adapter(runtime, ONE)), "p", "training", 1, tasks)
    behind = lagging.workdir.read_shards(f"adapter:{ONE}", "training", [1])
    assert [t.tokens.tolist() for t in behind] == [t.tokens.tolist() for t in found]


@pytest.mark.parametrize("at", [2, 3])
def test_an_interrupted_training_with_lag_ends_with_the_same_adapter(lagging, tmp_path, checkpoint, monkeypatch, at):
    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return original(*args, **options)

    calls, original = [], train.group_advantages
    monkeypatch.setattr(train, "group_advantages", interrupted)
    overrides = dict(train__max_lag="1", train__iterations="4", train__validate_every="0", train__agreement="0")
    with tiny.open_tiny(tmp_path, checkpoint, **overrides) as runtime:
        tiny.retain(runtime, ONE)
        tiny.store_environment(runtime, ONE)
        train.make_learner.cache_clear()
        with pytest.raises(KeyboardInterrupt):
            train_adapter(runtime, ONE)
        runtime.workdir.close()
        again = Runtime(runtime.config, runtime.workdir, runtime.progress)
        again.plan(plan(again.config))
    with Workdir.open(again.workdir.place(), again.config) as again.workdir, again:
        train_adapter(again, ONE)
        assert adapter_bytes(again) == adapter_bytes(lagging)


def test_a_run_two_updates_behind_goes_on_under_the_adapters_that_it_would_have_had(tmp_path, checkpoint, monkeypatch):
    def interrupted(batch):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(batch)

    calls, original = [], Batch.result
    monkeypatch.setattr(Batch, "result", interrupted)
    overrides = dict(train__max_lag="2", train__iterations="5", train__validate_every="0", train__agreement="0")
    with tiny.open_tiny(tmp_path, checkpoint, **overrides) as runtime:
        tiny.store_environment(runtime, ONE)
        train.make_learner.cache_clear()
        with pytest.raises(KeyboardInterrupt):
            train_adapter(runtime, ONE)
        assert runtime.workdir.shards(f"adapter:{ONE}", "training") == [0, 1, 2]
        again = Runtime(runtime.config, runtime.workdir, runtime.progress)
    with again:
        train.make_learner.cache_clear()
        train_adapter(again, ONE)
        rows = again.workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")
        updates = np.cumsum([0] + [row["trajectories_kept"] > 0 for row in rows])
        under = [{t.policy["version"] for t in again.workdir.read_shards(f"adapter:{ONE}", "training", [i])} for i in range(5)]
        assert under == [{updates[max(0, i - 2)]} for i in range(5)] and updates[3] > updates[1]


def test_lag_beside_the_learner_on_several_devices_is_refused(runtime, monkeypatch):
    runtime.config = dataclasses.replace(runtime.config, train=dataclasses.replace(runtime.config.train, max_lag=1))
    assert runtime.max_lag(Policy("p")) == 1
    monkeypatch.setitem(runtime.__dict__, "local_model", types.SimpleNamespace(mesh=types.SimpleNamespace(size=8)))
    with pytest.raises(InputError, match="'train.max_lag': 1 needs an engine on devices of its own"):
        runtime.max_lag(Policy("p"))


def test_a_profile_of_the_iterations_asked_for_is_left(tmp_path, checkpoint):
    with tiny.open_tiny(tmp_path, checkpoint) as runtime:
        tiny.store_environment(runtime, ONE)
        runtime = Runtime(runtime.config, runtime.workdir, runtime.progress, profiled=[1])
        train.make_learner.cache_clear()
        train_adapter(runtime, ONE)
        traces = [name for name in runtime.workdir.list("profile") if name.endswith(".xplane.pb")]
        assert len(traces) == 1 and traces[0].startswith(f"profile/adapters/{ONE}/00001/")


def test_a_trained_adapter_is_left_alone(undisturbed, monkeypatch):
    monkeypatch.setattr(train, "run_grpo", lambda *_, **__: pytest.fail("trained again"))
    train_adapter(undisturbed, ONE)


def test_training_stops_when_the_mean_of_three_iterations_is_high_enough():
    assert not train._saturated([1.0, 1.0], 0.9)
    assert train._saturated([0.0, 1.0, 0.8, 0.9], 0.9) and not train._saturated([1.0, 1.0, 0.8, 0.8], 0.9)
    assert not train._saturated([1.0] * 9, None)


def test_a_stopped_training_trains_no_further_when_it_goes_on(tmp_path, checkpoint, monkeypatch):
    with tiny.open_tiny(tmp_path, checkpoint, train__stop_reward="0.01", train__iterations="5") as runtime:
        tiny.store_environment(runtime, ONE)
        monkeypatch.setattr(train, "_STOP_WINDOW", 1)
        for _ in range(2):
            train_adapter(runtime, ONE)
            iterations = len(runtime.workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl"))
            assert iterations == len(runtime.workdir.shards(f"adapter:{ONE}", "training")) < 5
            runtime.workdir.local(f"adapters/{ONE}/summary.json").unlink()
        assert runtime.progress._shares["train"] == 0  # no stage ran: units are counted inside one only


def test_groups_of_one_reward_change_nothing_and_are_counted():
    arrays = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0], "turns": [0, 0], "versions": [0, 0]}
    alike = [Trajectory(id=f"t{i}", environment="e", task_id="t", group="g", reward=0.5, **arrays) for i in range(4)]
    state, metrics = update(None, "state", alike, TrainSection())
    assert state == "state" and metrics["constant_share"] == 1.0 and metrics["reward"] == 0.5


def test_the_command_names_what_may_be_trained(ready):
    with pytest.raises(InputError, match=f"--capability=typo: no usable environment; there are: {ONE}"):
        train.main(tiny.arguments(ready, "train", capability="typo"))
