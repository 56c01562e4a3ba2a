"""`trace-jax preflight --topology=NAME`: does a config fit accelerators that are not there, and what limits it.

The real train, gate and decode steps are lowered for a mesh of the topology's devices from the shapes that config.json gives, and compiled.
No weight is read, no accelerator is needed. A program that does not fit fails here and not an hour after the rent began.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model import AdapterBank, CausalLM, Gate, init_bank, init_cache, init_gate
from model import Config as Architecture
from model.flops import adapter_step_flops, forward_flops
from model.lora import bank_shardings
from model.parameters import abstract_parameters
from model.sharding import AXES, distribute
from rl.engines.jax.steps import Slots, Turn, decode
from rl.learner import Learner
from trace_jax.cli import Arguments
from trace_jax.config import Config
from trace_jax.errors import InputError
from trace_jax.mesh import engine_mesh, make_mesh
from trace_jax.params import read_architecture
from trace_jax.preflight import accelerators, report
from trace_jax.preflight.program import DoesNotFit, Program, compile_program
from trace_jax.train import learner_config, loss_config

_ADAPTERS = 4  # that the gate and the engine are compiled for
_STEPS = 16  # tokens of one call of the engine
_TOLD_EVERY = 30  # seconds
_PROGRAMS = ("adapter gradient", "adapter update", "gate gradient", f"decode, {_STEPS} tokens")


def main(arguments: Arguments) -> None:
    """Prints the report.

    Raises:
      InputError: the topology is unknown or cannot be compiled for here, or the config does not go with it.
      SystemExit: 1, where a program does not fit.
    """
    config = arguments.config
    topology = arguments.topology or config.mesh.topology
    if not topology:
        raise InputError("--topology is missing: name accelerators, such as v5e:4x4, v5p:2x2x4, v6e:4x4 or h100:8, or set mesh.topology")
    accelerator = accelerators.find(topology)
    devices = accelerators.topology_devices(topology)
    mesh = make_mesh(config.mesh, devices) or Mesh(np.asarray(devices).reshape(1, 1, 1, 1), AXES)
    architecture = dataclasses.replace(read_architecture(config), remat=config.train.remat)
    programs, flops = [], {}
    for name, lowered, operations in lower_all(config, architecture, mesh):
        programs.append(_compile(name, lowered))
        flops[name] = operations
    print(report.render(config.name, topology, accelerator, programs, flops))
    if not all(report.fits(program, accelerator) for program in programs):
        raise SystemExit(1)


def _compile(name: str, lowered: jax.stages.Lowered) -> Program | DoesNotFit:
    """`compile_program` in a thread, since the compiler hears no Ctrl-C; it takes minutes, which standard error counts."""
    start, found = time.monotonic(), ThreadPool(1).apply_async(compile_program, (name, lowered))
    while True:
        seconds = time.monotonic() - start
        print(f"compiling {_PROGRAMS.index(name) + 1} of {len(_PROGRAMS)}, {name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        try:
            return found.get(_TOLD_EVERY)
        except multiprocessing.TimeoutError:
            continue


def lower_all(config: Config, architecture: Architecture, mesh: Mesh) -> Iterator[tuple[str, jax.stages.Lowered, float]]:
    """The steps that a run of this config takes: name, what is compiled, and its operations on one device."""
    dtype, train, length = jnp.dtype(config.model.dtype), config.train, config.train.pack_length
    model = CausalLM(architecture, mesh=mesh, parameters=abstract_parameters(architecture, dtype, mesh))
    key = jax.random.key(0)

    def bank(k: int) -> AdapterBank:
        return jax.eval_shape(lambda: init_bank(architecture, k, train.rank, train.alpha, key))

    def operations(rank: int) -> float:
        return adapter_step_flops(architecture, train.micro_rows * length, length, rank, remat=train.remat) / mesh.size

    settings, loss = learner_config(config, train.learning_rate, 0, train.iterations), loss_config(train)
    gate = jax.eval_shape(lambda: init_gate(architecture, _ADAPTERS + 1, config.gate.base_bias, key))
    one = Learner(model, settings, loss).lower(bank(1), length)
    yield _PROGRAMS[0], one["gradient"], operations(train.rank)
    yield _PROGRAMS[1], one["update"], 0.0
    yield (
        _PROGRAMS[2],
        Learner(model, settings, loss, bank=bank(_ADAPTERS)).lower(gate, length)["gradient"],
        operations(train.rank * _ADAPTERS),
    )
    engine = engine_mesh(config.mesh, mesh)
    tokens = config.rollout.lanes * _STEPS
    decoded = forward_flops(architecture, tokens, 1, rank=train.rank * _ADAPTERS, keys=config.rollout.context) / engine.size
    yield _PROGRAMS[3], lower_decode(config, architecture, bank(_ADAPTERS), gate, engine), decoded


def lower_decode(config: Config, architecture: Architecture, bank: AdapterBank, gate: Gate, mesh: Mesh) -> jax.stages.Lowered:
    """The decoding step of the routed model in one process's engine, all lanes in use up to the whole context."""
    lanes, context, dtype = config.rollout.lanes, config.rollout.context, jnp.dtype(config.model.dtype)
    whole = NamedSharding(mesh, PartitionSpec())

    def repeated(tree):
        return distribute(tree, jax.tree.map(lambda _: whole, tree))

    cache = jax.eval_shape(lambda: init_cache(architecture, lanes, context, dtype))
    slots = Slots(jax.ShapeDtypeStruct((lanes, _ADAPTERS + 1), jnp.float32), jax.ShapeDtypeStruct((lanes,), bool))
    integers, floats = (jax.ShapeDtypeStruct((lanes,), dtype) for dtype in (jnp.int32, jnp.float32))
    turn = Turn(
        token=integers,
        position=integers,
        running=jax.ShapeDtypeStruct((lanes,), bool),
        remaining=integers,
        keys=jax.ShapeDtypeStruct((lanes, 2), jnp.uint32),
        temperature=floats,
        stop=jax.ShapeDtypeStruct((lanes, 4), jnp.int32),
    )
    return decode.lower(
        architecture,
        mesh,
        abstract_parameters(architecture, dtype, mesh),
        distribute(cache, cache.shardings(mesh)),
        distribute(bank, bank_shardings(bank, architecture, mesh)),
        repeated(gate),
        repeated(slots),
        repeated(turn),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        steps=_STEPS,
        length=context,
    )
