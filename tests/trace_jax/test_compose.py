import numpy as np
import pytest

from model import load_gate
from rl.trajectory import Trajectory
from tests.trace_jax import tiny
from trace_jax import compose as composition
from trace_jax.compose import compose, labelled, soft_targets
from trace_jax.errors import InputError
from trace_jax.policies import Mixture, trained_mixture
from trace_jax.runtime import GATE, GATE_TRAINING, SELECTION, VALIDATION

ONE, TWO = "precondition_verification", "tool_calling_precision"
SLOTS = ("base", "a", "b")


def column(outcomes: dict[int, bool | None]) -> list[Trajectory]:
    """One rollout a seed; None failed by infrastructure."""
    return [
        Trajectory(
            id=str(seed),
            environment="a",
            task_id=str(seed),
            seed=seed,
            reward=None if won is None else float(won),
            success=bool(won),
            error={"kind": "crash", "message": ""} if won is None else None,
        )
        for seed, won in outcomes.items()
    ]


def test_a_slot_counts_by_how_much_more_often_than_the_base_it_solves_a_seed():
    base, own, other = {0: True, 1: False, 2: False, 3: False}, {0: True, 1: True, 2: True, 3: False}, {0: False, 1: True, 2: None}
    targets = soft_targets({"a": {"base": column(base), "a": column(own), "b": column(other)}}, SLOTS, "a")

    def chance(outcomes, seed):
        known = {s: won for s, won in outcomes.items() if won is not None}
        mean = sum(known.values()) / len(known)
        return (known[seed] + 2 * mean) / 3 if seed in known else mean

    for seed in range(4):
        gain = np.array([max(chance(slot, seed) - chance(base, seed), 0) for slot in (base, own, other)])
        np.testing.assert_allclose(targets[seed], gain / gain.sum(), atol=1e-6)
    assert targets[0][1] == 1.0 and 0 < targets[1][2] < targets[1][1] and targets[2][2] > 0


def test_where_nothing_beats_the_base_the_own_adapter_keeps_its_label():
    table = {"a": {"base": column({0: True}), "a": column({0: True}), "b": column({0: True})}}
    assert soft_targets(table, SLOTS, "a").tolist() == [[0.0, 1.0, 0.0]]


def test_labels_are_the_successes_of_the_own_adapters():
    table = {
        "a": {"base": column({0: False, 1: False}), "a": column({0: True, 1: None}), "b": column({0: True, 1: True})},
        "b": {"base": column({2: False}), "a": column({2: False}), "b": column({2: False})},
    }
    trajectories, slots, targets = labelled(table, Mixture(("a", "b"), None))
    assert [t.seed for t in trajectories] == [0] and slots == [1] and targets.shape == (1, 3)
    table["a"]["a"] = column({0: False})
    with pytest.raises(InputError, match="no adapter solved a seed of its own environment") as said:
        labelled(table, Mixture(("a", "b"), None), 0.05)
    assert "a 0 of 1 seeds, best reward 0.00; b 0 of 1 seeds, best reward 0.00; success is a reward of 0.05." in str(said.value)


@pytest.fixture(scope="module")
def composed(tmp_path_factory, checkpoint):
    """A composition that was interrupted twice: before the gate's own rollouts, and before the router's."""
    with pytest.MonkeyPatch.context() as patch, tiny.open_tiny(tmp_path_factory.mktemp("composed"), checkpoint) as runtime:
        tiny.store_adapters(runtime, ONE, TWO)
        for name in ("train_gate", "routed_tasks"):
            with patch.context() as once, pytest.raises(KeyboardInterrupt):
                once.setattr(composition, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                compose(runtime, [ONE, TWO])
            del runtime.engine  # as a new process begins
        compose(runtime, [ONE, TWO])
        yield runtime


def test_an_interrupted_composition_ends_as_an_undisturbed_one(composed, tmp_path, checkpoint):
    with tiny.open_tiny(tmp_path, checkpoint) as runtime:
        tiny.store_adapters(runtime, ONE, TWO)
        assert compose(runtime, [ONE, TWO]) == composed.workdir.read_json("gate/routing.json")
        for name in ("gate/gate.safetensors", "gate/plain_gate.safetensors", "gate/router.json"):
            assert runtime.workdir.read_bytes(name) == composed.workdir.read_bytes(name)
        shards = [name for name in runtime.workdir.list("rollouts") if name.endswith(".zst")]
        assert shards and all(runtime.workdir.read_bytes(name) == composed.workdir.read_bytes(name) for name in shards)


def test_what_was_found_is_written_down(composed):
    routing = composed.workdir.read_json("gate/routing.json")
    assert routing["slots"] == ["base", ONE, TWO]
    assert set(routing["success_table"]) == {ONE, TWO} and set(routing["success_table"][ONE]) == {"base", ONE, TWO}
    policies = {"base", f"adapter:{ONE}", f"adapter:{TWO}", "uniform", "constant", "router", "plain_gate", "warm_gate", "gate"}
    assert set(routing["validation"]) == policies
    assert {row["n"] for row in routing["validation"].values()} == {2 * composed.config.train.selection_seeds}
    assert set(routing["label_form"]) == {"kl_weighted", "plain"}
    assert set(routing["share"]) == {"base", ONE, TWO} and sum(routing["share"].values()) == pytest.approx(1.0)
    gate = load_gate(composed.workdir.local("gate/gate.safetensors"))
    assert gate.bias.shape == (composed.model.config.num_hidden_layers, 3)
    (row,) = composed.workdir.read_jsonl("gate/metrics.jsonl")
    assert row["step"] == 0 and row["trajectories_kept"] > 0 and row["grad_norm"] > 0


def test_the_gate_is_kept_only_if_it_beats_every_adapter(composed):
    routing = composed.workdir.read_json("gate/routing.json")
    rates = {name: row["rate"] for name, row in routing["validation"].items()}
    best = max(rates[f"adapter:{ONE}"], rates[f"adapter:{TWO}"])
    assert routing["kept"] == (rates["gate"] > best)
    assert routing["composed"] == "gate" if routing["kept"] else rates[routing["composed"]] == best


def test_no_task_of_the_target_is_touched(composed):
    purposes = {"gate": GATE, "training": GATE_TRAINING, "validation": VALIDATION, "selection": SELECTION}
    for name in composed.workdir.list("rollouts"):
        if name.endswith(".zst"):
            _, folder, split, _ = name.split("/")
            first = purposes[split.split("-")[0]]
            for t in composed.workdir.read_shards(folder, split):
                assert t.environment.startswith("desk_") and first <= t.seed < first + 1_000_000


def test_a_composition_that_is_done_is_read(composed, monkeypatch):
    monkeypatch.setattr(composed, "roll_out", lambda *_: pytest.fail("sampled again"))
    assert compose(composed, [ONE, TWO])["slots"] == ["base", ONE, TWO]
    with pytest.raises(InputError, match="compose these in another --workdir"):
        compose(composed, [ONE])


def test_the_command_prints_every_candidate(composed, capsys):
    composition.main(tiny.arguments(composed, "compose"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("base ") and lines[-1].startswith("composed is ") and len(lines) == 10
    assert trained_mixture(composed).slots == ("base", ONE, TWO)
