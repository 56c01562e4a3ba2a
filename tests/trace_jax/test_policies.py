import dataclasses

import jax
import numpy as np
import pytest

from envs import EnvironmentFault
from model import Gate, init_gate, save_gate
from rl import task_router
from tests.trace_jax import tiny
from trace_jax.errors import InputError
from trace_jax.policies import find_policy, load_mixture, read_routing, routed_tasks, trained_mixture, with_slots
from trace_jax.runtime import BASE, HELDOUT_TASKS

ONE, TWO = "tool_calling_precision", "precondition_verification"


@pytest.fixture
def mixture(runtime):
    tiny.store_adapters(runtime, ONE, TWO)
    return load_mixture(runtime, [ONE, TWO])


def store_gate(runtime, mixture, favourite: int, **routing) -> None:
    """A gate that always takes one slot."""
    gate = init_gate(runtime.model.config, len(mixture.slots), 0.0, jax.random.key(0))
    gate = Gate(gate.kernel, gate.bias.at[:, favourite].set(1e4))
    save_gate(gate, runtime.workdir.local("gate/gate.safetensors"))
    found = {"slots": list(mixture.slots), "kept": True, "composed": "gate", "constant_scale": 0.5} | routing
    runtime.workdir.write_json("gate/routing.json", found)


def heldout(runtime, count=6):
    return runtime.tasks(runtime.target, "heldout", HELDOUT_TASKS, count, 1)


def logprobs(runtime, policy, folder):
    return np.concatenate([t.logprobs for t in runtime.roll_out(policy, folder, "heldout", 0, heldout(runtime))])


def test_before_training_there_is_the_base_alone(runtime):
    assert trained_mixture(runtime) is None
    assert find_policy(runtime, "base", None) is BASE
    with pytest.raises(InputError, match="--policy=composed: no such policy in .*; there are: base$"):
        find_policy(runtime, "composed", None)


def test_the_mixture_holds_what_is_trained(runtime, mixture):
    assert trained_mixture(runtime).slots == ("base", ONE, TWO)
    tiny.retain(runtime, ONE, "structured_data_reasoning", TWO)
    assert trained_mixture(runtime).slots == ("base", ONE, TWO)
    with pytest.raises(InputError, match="adapter 'structured_data_reasoning' is not trained .* run trace-jax train --capability"):
        load_mixture(runtime, [ONE, "structured_data_reasoning"])


def test_names_stand_for_weights_over_the_slots(runtime, mixture):
    store_gate(runtime, mixture, 0)
    for name, weights in (
        (f"adapter:{ONE}", [0, 1, 0]),
        (f"adapter:{TWO}", [0, 0, 1]),
        ("uniform", [0, 0.5, 0.5]),
        ("constant", [0, 0.5, 0.5]),
    ):
        policy = find_policy(runtime, name, mixture)
        assert policy.name == name and policy.weights.tolist() == weights and policy.adapters is mixture.bank
    assert find_policy(runtime, "composed", mixture).gate is not None
    with pytest.raises(InputError, match=f"there are: base, adapter:{ONE}, adapter:{TWO}, uniform, constant, router"):
        find_policy(runtime, "adapter:typo", mixture)


def test_a_gate_that_was_not_kept_gives_way_to_the_best_adapter(runtime, mixture):
    store_gate(runtime, mixture, 0, kept=False, composed=f"adapter:{TWO}")
    policy = find_policy(runtime, "composed", mixture)
    assert policy.name == "composed" and policy.gate is None and policy.weights.tolist() == [0, 0, 1]


def test_a_gate_over_other_adapters_is_refused(runtime, mixture):
    with pytest.raises(InputError, match=r"routing\.json: no such file"):
        find_policy(runtime, "composed", mixture)
    store_gate(runtime, mixture, 0, slots=["base", ONE])
    for name in ("composed", "constant"):
        with pytest.raises(InputError, match=f"its slots are base, {ONE}, the trained adapters would make base, {ONE}, {TWO}"):
            find_policy(runtime, name, mixture)
    assert read_routing(runtime, ["base", ONE])["kept"]


def test_a_gate_that_takes_one_slot_is_that_adapter(runtime, mixture):
    store_gate(runtime, mixture, 2)
    composed = find_policy(runtime, "composed", mixture)
    adapter = logprobs(runtime, mixture.adapter(TWO), f"adapter:{TWO}")
    np.testing.assert_allclose(logprobs(runtime, composed, "composed"), adapter, atol=1e-5)
    assert not np.array_equal(logprobs(runtime, BASE, "base"), adapter)
    routed = list(runtime.workdir.read_shards("composed", "heldout"))
    for before, after in zip(routed, with_slots(runtime, mixture, composed.gate, routed), strict=True):
        last = int(np.flatnonzero(before.loss_mask)[-1])
        assert after.slots.shape == (len(before.tokens), runtime.model.config.num_hidden_layers)
        assert (after.slots[:last] == 2).all() and (after.slots[last:] == 0).all()  # nothing is routed behind the last sampled token
        assert dataclasses.replace(after, slots=None).to_json() == before.to_json()


def test_the_router_sends_each_task_to_one_adapter_and_loads_it(runtime, mixture):
    tasks = heldout(runtime)
    width = runtime.model.config.hidden_size
    sides = np.random.default_rng(0).normal(size=(width, 2)).astype(np.float32)
    router = task_router.TaskRouter(sides, np.zeros(2, np.float32), np.zeros(width, np.float32), np.ones(width, np.float32))
    routed = routed_tasks(runtime, router, mixture, tasks)
    starts = [runtime.pool.open(t.package, t.seed, t.knobs).reset() for t in tasks]
    prompts = [runtime.chat.start(s.system, s.messages, runtime.tools(runtime.target)) for s in starts]
    chosen = router.predict(task_router.prompt_features(runtime.model, prompts))
    assert [t.policy for t in routed] == [f"adapter:{mixture.slots[slot]}" for slot in chosen]
    found = runtime.roll_out("router", "router", "heldout", 0, routed)
    assert [t.policy["name"] for t in found] == [t.policy for t in routed]


def test_a_task_whose_environment_fails_is_routed_all_the_same(runtime, mixture, monkeypatch):
    batch = runtime.pool.batch
    monkeypatch.setattr(runtime.pool, "batch", lambda requests: [EnvironmentFault("crash", "gone"), *batch(requests)[1:]])
    width = runtime.model.config.hidden_size
    router = task_router.TaskRouter(
        np.zeros((width, 2), np.float32), np.zeros(2, np.float32), np.zeros(width, np.float32), np.ones(width, np.float32)
    )
    assert {t.policy for t in routed_tasks(runtime, router, mixture, heldout(runtime, 3))} == {f"adapter:{ONE}"}
