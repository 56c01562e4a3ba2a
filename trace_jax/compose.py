"""Step 4: a gate per layer that sends every token to one adapter or to the base.

    success of every slot on seeds of every capability environment -> labels (soft where several slots solve a seed)
    -> warm start of the gate -> GRPO of the routed model on the mixed environments -> kept only if it beats the best single adapter

In a later round of a run (`trace_jax.rounds`) the gate of the round before grows: the warm start fits its new slots alone, and the gate is
kept only if it beats the agent of the round before too.

Everything here is measured in the capability environments; the target's tasks are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from model import Gate, grow, save_gate
from rl import task_router
from rl.engines.protocol import Policy
from rl.gate_learner import GateData, GateWarmStart, WarmStartConfig, routing_metrics
from rl.learner import Learner, LearnerState
from rl.rollout import Task
from rl.task_router import TaskRouter
from rl.trajectory import Trajectory
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.evaluate.outcomes import rate_line, success_rate
from trace_jax.export import write_composed
from trace_jax.policies import Mixture, load_mixture, read_routing, routed_tasks
from trace_jax.runtime import BASE, GATE, GATE_TRAINING, SELECTION, VALIDATION, Runtime, open_runtime, plan
from trace_jax.train import learner_config, loss_config, run_grpo

_PRIOR = 2.0  # rollouts that a capability's mean success is worth against those of one seed
_SCALES = (0.25, 0.5, 0.75, 1.0)


class NothingToCompose(InputError):
    """No adapter ever succeeded in its own environment."""


SuccessTable = dict[str, dict[str, list[Trajectory]]]  # environment's capability -> slot -> trajectories, one a seed


def measure_slots(runtime: Runtime, mixture: Mixture) -> SuccessTable:
    """Rolls every slot out on seeds of every capability environment: `gate.successes` for its own adapter, `gate.table_seeds` for the
    others."""
    gate, table = runtime.config.gate, {}
    for capability in mixture.capabilities:
        package, split = runtime.environment(capability), f"gate-{capability}"
        table[capability] = {}
        for slot in mixture.slots:
            tasks = runtime.tasks(package, split, GATE, gate.successes if slot == capability else gate.table_seeds, 1)
            policy = mixture.slot(slot)
            table[capability][slot] = runtime.roll_out(policy, policy.name, split, 0, tasks)
    return table


def soft_targets(table: SuccessTable, slots: Sequence[str], capability: str) -> np.ndarray:
    """[n, S] distribution over slots for each of the own adapter's trajectories in a capability's environment.

    A slot counts by how much more often than the base it solves the seed. Its chance on a seed is what was seen there, shrunk to its mean
    over the environment, since a seed was tried once or not at all by most slots. Where no slot beats the base the own adapter keeps
    its label.
    """
    columns = []
    own = table[capability][capability]
    for slot in slots:
        found = {t.seed: float(t.success) for t in table[capability][slot] if t.error is None}
        mean = float(np.mean(list(found.values()))) if found else 0.0
        columns.append([(found[t.seed] + _PRIOR * mean) / (1 + _PRIOR) if t.seed in found else mean for t in own])
    chance = np.array(columns, np.float32).T
    gain = np.maximum(chance - chance[:, :1], 0.0)
    hard = np.eye(len(slots), dtype=np.float32)[slots.index(capability)]
    total = gain.sum(-1, keepdims=True)
    return np.where(total > 0, gain / np.maximum(total, 1e-9), hard)


def labelled(table: SuccessTable, mixture: Mixture, success: float = 1.0) -> tuple[list[Trajectory], list[int], np.ndarray]:
    """The successful trajectories of the own adapters, their slots, and their targets; an adapter without success has no labels.

    Args:
      success: smallest reward that counts as success, for the message.

    Raises:
      NothingToCompose: no adapter ever succeeded in its environment.
    """
    trajectories, slots, targets = [], [], []
    for index, capability in enumerate(mixture.capabilities, 1):
        own = table[capability][capability]
        won = [i for i, t in enumerate(own) if t.error is None and t.success]
        trajectories += [own[i] for i in won]
        slots += [index] * len(won)
        targets.append(soft_targets(table, mixture.slots, capability)[won])
    if not trajectories:
        own = {capability: [t.reward for t in table[capability][capability] if t.error is None] for capability in mixture.capabilities}
        seen = "; ".join(f"{name} 0 of {len(rewards)} seeds, best reward {max(rewards, default=0.0):.2f}" for name, rewards in own.items())
        raise NothingToCompose(
            f"no adapter solved a seed of its own environment, so there is nothing to compose: {seen}; success is a reward of {success:g}. "
            "Where the reward rose in training, train longer (train.iterations) in a new --workdir; where nothing was learnt, take a base "
            "that solves some seeds, easier environments, or a lower diagnosis.success"
        )
    return trajectories, slots, np.concatenate(targets)


def warm_start(
    runtime: Runtime, mixture: Mixture, table: SuccessTable, previous: Gate | None = None
) -> tuple[GateWarmStart, GateData, dict[str, Gate], dict[str, Any]]:
    """Stage 1: a gate fitted to the labels under each form of the loss, and how each routes them; `previous` keeps its slots."""
    gate, train, config = runtime.config.gate, runtime.config.train, runtime.config
    warm = GateWarmStart(
        runtime.local_model,
        mixture.bank,
        lengths=train.row_lengths,
        micro_rows=train.micro_rows,
        temperature=config.rollout.temperature,
    )
    data = warm.measure(*labelled(table, mixture, config.diagnosis.success))
    gates, figures = {}, {}
    for form in ("kl_weighted", "plain"):
        settings = WarmStartConfig(
            loss=form,
            steps=gate.warm_steps,
            learning_rate=gate.learning_rate,
            kl_clip=gate.kl_clip,
            base_weight=gate.base_weight,
            load_balance=gate.load_balance,
            base_bias=gate.base_bias,
        )
        gates[form], found = warm.fit(data, settings, config.seed, previous)
        figures[form] = {name: value for name, value in found.items() if name != "loss"}
    gates = runtime.processes.same(gates)  # each process fitted them; their last bits need not agree
    return warm, data, gates, figures


def train_gate(runtime: Runtime, mixture: Mixture, gate: Gate) -> Gate:
    """Stage 2: GRPO of the routed model, straight-through, on groups from all capability environments in turn."""
    config, train = runtime.config, runtime.config.train
    if not config.gate.grpo_iterations:
        return gate
    settings = learner_config(config, config.gate.grpo_learning_rate, 0, config.gate.grpo_iterations)
    learner = Learner(runtime.model, settings, loss_config(train), bank=mixture.bank)

    def tasks(iteration: int) -> list[Task]:
        found = []
        for group in range(iteration * train.groups, (iteration + 1) * train.groups):
            package = runtime.environment(mixture.capabilities[group % len(mixture.capabilities)])
            found += runtime.tasks(package, "training", GATE_TRAINING + group, 1, train.group_size)
        return found

    def policy(state: LearnerState) -> Policy:
        return mixture.gated(learner.gathered(state.params), "gate", int(state.step))

    validation = []
    for seed in range(train.validation_seeds):
        package = runtime.environment(mixture.capabilities[seed % len(mixture.capabilities)])
        validation += runtime.tasks(package, "validation", VALIDATION + seed, 1, 1)
    start = learner.init(gate, seed=config.seed)
    iterations = config.gate.grpo_iterations
    state = run_grpo(runtime, learner, start, "gate", "gate", iterations, tasks, policy, validation=validation)
    return learner.gathered(state.params)


def select(runtime: Runtime, mixture: Mixture, policy: Policy | TaskRouter, folder: str) -> list[Trajectory]:
    """One policy on the unseen seeds of all capability environments."""
    found = []
    for capability in mixture.capabilities:
        split = f"selection-{capability}"
        tasks = runtime.tasks(runtime.environment(capability), split, SELECTION, runtime.config.train.selection_seeds, 1)
        if isinstance(policy, TaskRouter) and 0 not in runtime.workdir.shards(folder, split):
            tasks = routed_tasks(runtime, policy, mixture, tasks)
        sampler = folder if isinstance(policy, TaskRouter) else policy
        found += runtime.roll_out(sampler, folder, split, 0, tasks, runtime.config.evaluation.temperature)
    return found


def fit_router(runtime: Runtime, mixture: Mixture, table: SuccessTable) -> TaskRouter:
    """The task-level router: the capability of a seed, from the base's last hidden state of its prompt."""
    trajectories = [t for capability in mixture.capabilities for t in table[capability][capability] if t.error is None]
    slots = [mixture.slots.index(c) for c in mixture.capabilities for t in table[c][c] if t.error is None]
    features = task_router.prompt_features(runtime.local_model, [task_router.prompt_of(t) for t in trajectories])
    return task_router.fit(features, slots, len(mixture.capabilities))


def best_constant(runtime: Runtime, mixture: Mixture) -> float:
    """The scale at which all adapters together do best on training seeds of the capability environments."""
    rates = {}
    for scale in _SCALES:
        found = []
        for capability in mixture.capabilities:
            split = f"gate-{capability}"
            tasks = runtime.tasks(runtime.environment(capability), split, GATE, runtime.config.gate.table_seeds, 1)
            found += runtime.roll_out(mixture.constant(scale), f"constant-{scale}", split, 0, tasks)
        rates[scale] = success_rate(found)["rate"]
    return max(rates, key=lambda scale: (rates[scale], -scale))


def choose(rates: Mapping[str, Mapping[str, Any]]) -> str:
    """What `composed` is: the gate if it beats every single adapter and the agent of the round before, else the best of these; where an
    adapter is only as good, that agent stays."""
    others = [name for name in rates if name == "previous" or name.startswith("adapter:")]
    best = max(others, key=lambda name: (rates[name]["rate"], name == "previous"))
    return "gate" if rates["gate"]["rate"] > rates[best]["rate"] else best


def compose(runtime: Runtime, capabilities: Sequence[str], previous: Gate | None = None) -> dict[str, Any]:
    """Trains, validates and stores the gate; `gate/routing.json` says what was found and what `composed` is, `composed/` holds it.

    Args:
      previous: the gate of the round before, over the first of the slots.

    Raises:
      InputError: an adapter is not trained, none of them is of any use, or the gate was trained over other ones.
    """
    workdir, config = runtime.workdir, runtime.config.gate
    if workdir.exists("gate/routing.json"):
        routing = read_routing(runtime, ("base", *capabilities))
        runtime.progress.advance(plan(runtime.config, len(capabilities))["compose"], earlier=True)
        _export(runtime, load_mixture(runtime, capabilities))
        return routing
    mixture = load_mixture(runtime, capabilities)
    table = measure_slots(runtime, mixture)
    warm, data, gates, forms = warm_start(runtime, mixture, table, previous)
    workdir.produce("gate/plain_gate.safetensors", lambda path: save_gate(gates["plain"], path))
    gate = train_gate(runtime, mixture, gates[config.label_loss])
    workdir.produce("gate/gate.safetensors", lambda path: save_gate(gate, path))
    router = fit_router(runtime, mixture, table)
    workdir.write_json("gate/router.json", router.to_json())
    scale = best_constant(runtime, mixture)

    candidates = {
        "base": BASE,
        **{f"adapter:{capability}": mixture.adapter(capability) for capability in capabilities},
        "uniform": mixture.uniform(),
        "constant": mixture.constant(scale),
        "router": router,
        "plain_gate": mixture.gated(gates["plain"], "plain_gate"),
        "warm_gate": mixture.gated(gates[config.label_loss], "warm_gate"),
        "gate": mixture.gated(gate, "gate"),
    }
    if previous is not None:
        grown = grow(previous, len(mixture.slots) - previous.bias.shape[-1])
        workdir.produce("gate/previous_gate.safetensors", lambda path: save_gate(grown, path))
        candidates["previous"] = mixture.gated(grown, "previous")
    rates = {name: success_rate(select(runtime, mixture, policy, name)) for name, policy in candidates.items()}
    composed = choose(rates)
    routing = {
        "slots": list(mixture.slots),
        "success_table": {c: {s: success_rate(found)["rate"] for s, found in row.items()} for c, row in table.items()},
        "label_form": forms,
        "constant_scale": scale,
        "validation": rates,
        "kept": composed == "gate",
        "composed": composed,
        **_routing(warm, gate, data, mixture.slots),
    }
    workdir.write_json("gate/routing.json", routing)
    _export(runtime, mixture)
    return routing


def _export(runtime: Runtime, mixture: Mixture) -> None:
    """`composed/`, unless it is there; it costs no room on the disk that the base is on."""
    if not runtime.workdir.exists("composed/config.json"):
        runtime.workdir.produce("composed", lambda path: write_composed(runtime, mixture, path))


def _routing(warm: GateWarmStart, gate: Gate, data: GateData, slots: Sequence[str]) -> dict[str, Any]:
    """How the final gate routes the labelled trajectories, shares under the slots' names."""
    found = routing_metrics(data, warm.gate_logits(gate, data))
    share = {name: found.pop(f"share/{index}") for index, name in enumerate(slots)}
    return found | {"share": share}


def main(arguments: Arguments) -> None:
    """`trace-jax compose`."""
    with open_runtime(arguments, "compose") as runtime:
        routing = compose(runtime, runtime.usable())
        for name, rate in routing["validation"].items():
            print(rate_line(name, rate))
        print(f"composed is {routing['composed']}")
