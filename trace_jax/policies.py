"""The policies of a run by the names that users write: base, adapter:<capability>, uniform, constant, router, composed, and what they are
made of.

All policies over the trained adapters share one bank, so that the engine serves them with one compiled function. The base is always served
without a bank, so that it takes the same tokens before and after the adapters are trained.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from envs import EnvironmentFault
from model import AdapterBank, CausalLM, Gate, Routing, load_gate, stack_banks
from rl import task_router
from rl.engines.protocol import Policy
from rl.packing import pack
from rl.rollout import Task
from rl.task_router import TaskRouter
from rl.trajectory import Trajectory
from trace_jax.errors import InputError
from trace_jax.runtime import BASE, Runtime
from trace_jax.train import load_adapter


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The adapters of a run as one bank; slot 0 is the base, slot k + 1 the adapter of `capabilities[k]`."""

    capabilities: tuple[str, ...]
    bank: AdapterBank

    @property
    def slots(self) -> tuple[str, ...]:
        """Slot names as in `routing.json`."""
        return ("base", *self.capabilities)

    def adapter(self, capability: str) -> Policy:
        """One adapter on every token."""
        weights = np.eye(len(self.slots), dtype=np.float32)[self.slots.index(capability)]
        return Policy(name=f"adapter:{capability}", adapters=self.bank, weights=weights)

    def slot(self, name: str) -> Policy:
        """The adapter of a slot, or the base."""
        return BASE if name == "base" else self.adapter(name)

    def constant(self, scale: float, name: str = "constant") -> Policy:
        """All adapters at once, each scaled by `scale`."""
        weights = np.full(len(self.slots), scale, np.float32)
        weights[0] = 0.0
        return Policy(name=name, adapters=self.bank, weights=weights)

    def uniform(self) -> Policy:
        """All adapters at 1/K each."""
        return self.constant(1.0 / len(self.capabilities), "uniform")

    def gated(self, gate: Gate, name: str = "composed", version: int = 0) -> Policy:
        """Top-1 of the gate for every token and layer."""
        return Policy(name=name, version=version, adapters=self.bank, gate=gate)


def load_mixture(runtime: Runtime, capabilities: Sequence[str]) -> Mixture:
    """The trained adapters of a run.

    Raises:
      InputError: one of them is not trained.
    """
    return Mixture(tuple(capabilities), stack_banks([load_adapter(runtime, capability) for capability in capabilities]))


def routed_tasks(runtime: Runtime, router: TaskRouter, mixture: Mixture, tasks: Sequence[Task]) -> list[Task]:
    """The tasks, each with the adapter that the task-level router chooses from its prompt; the adapters are loaded into the engine."""
    for capability in mixture.capabilities:
        runtime.engine.load(mixture.adapter(capability))
    prompts = [
        # an environment that fails here will fail again when the task is rolled out, and is counted there
        np.array([runtime.chat.end])
        if isinstance(start, EnvironmentFault)
        else runtime.chat.start(start.system, start.messages, runtime.tools(task.package))
        for task, start in zip(tasks, runtime.starts(tasks), strict=True)
    ]
    chosen = router.predict(task_router.prompt_features(runtime.local_model, prompts))
    return [dataclasses.replace(task, policy=f"adapter:{mixture.slots[slot]}") for task, slot in zip(tasks, chosen, strict=True)]


def trained_mixture(runtime: Runtime) -> Mixture | None:
    """The trained adapters of a run, or None before there are any."""
    if not runtime.workdir.exists("diagnosis/selected_capabilities.json"):
        return None
    trained = [c for c in runtime.retained() if runtime.workdir.exists(f"adapters/{c}/summary.json")]
    return load_mixture(runtime, trained) if trained else None


@functools.lru_cache(maxsize=1)
def _slot_function(model: CausalLM):
    graph, _ = nnx.split(model)

    @jax.jit
    def slots(frozen, bank, gate, batch):
        routing = Routing(gate=gate, mode="top1")
        return nnx.merge(graph, frozen).forward(batch.tokens, batch.positions, batch.segment_ids, bank, routing).slots

    return slots


def with_slots(runtime: Runtime, mixture: Mixture, gate: Gate, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories with the slot that each layer chose for each token, by scoring them once more.

    The tokens behind the last sampled one are not scored; they are given the base slot.
    """
    _, frozen = nnx.split(runtime.local_model)
    train = runtime.config.train
    batch = pack(trajectories, np.zeros(len(trajectories)), lengths=train.row_lengths, packed=train.packing)
    found = np.asarray(_slot_function(runtime.local_model)(frozen, mixture.bank, gate, batch))
    out = []
    for index, trajectory in enumerate(trajectories):
        slots = np.zeros((len(trajectory.tokens), found.shape[-1]), np.int8)
        here = batch.trajectory == index
        slots[batch.positions[here]] = found[here]
        out.append(dataclasses.replace(trajectory, slots=slots))
    return out


def read_routing(runtime: Runtime, slots: Sequence[str]) -> dict[str, Any]:
    """What step 4 found.

    Raises:
      InputError: it has not run, or the gate was trained over other slots.
    """
    routing = runtime.workdir.read_json("gate/routing.json")
    if routing["slots"] != list(slots):
        raise InputError(
            f"{runtime.workdir.place('gate')}: its slots are {', '.join(routing['slots'])}, the trained adapters would make "
            f"{', '.join(slots)}; compose these in another --workdir"
        )
    return routing


def composed_gate(runtime: Runtime, routing: Mapping[str, Any]) -> Gate | None:
    """The gate of the policy `composed`, None where that is a single adapter; `routing` is of `read_routing`."""
    file = {"gate": "gate.safetensors", "previous": "previous_gate.safetensors"}.get(routing["composed"])
    return file and load_gate(runtime.workdir.local(f"gate/{file}"))


def find_policy(runtime: Runtime, name: str, mixture: Mixture | None) -> Policy:
    """The policy of a name; the router is none, it chooses among the adapters (`routed_tasks`).

    Raises:
      InputError: no such policy in this workdir; what there is, is listed.
    """
    if name == "base":
        return BASE
    if mixture is not None:
        if name.removeprefix("adapter:") in mixture.capabilities:
            return mixture.adapter(name.removeprefix("adapter:"))
        if name == "uniform":
            return mixture.uniform()
        if name in ("constant", "composed", "plain_gate"):
            routing = read_routing(runtime, mixture.slots)
            if name == "constant":
                return mixture.constant(routing["constant_scale"])
            if name == "plain_gate":
                return mixture.gated(load_gate(runtime.workdir.local("gate/plain_gate.safetensors")), name)
            gate = composed_gate(runtime, routing)
            if gate is None:
                return dataclasses.replace(mixture.adapter(routing["composed"].removeprefix("adapter:")), name=name)
            return mixture.gated(gate, name)
    adapters = [f"adapter:{c}" for c in mixture.capabilities] if mixture else []
    known = ["base", *adapters, *(["uniform", "constant", "router", "plain_gate", "composed"] if mixture else [])]
    raise InputError(f"--policy={name}: no such policy in {runtime.workdir.place()}; there are: {', '.join(known)}")
