"""`trace-jax preflight --topology=NAME`: does a config fit accelerators that are not there, and what limits it.

The real train, gate and decode steps are lowered for a mesh of the topology's devices from the shapes that config.json gives, and compiled.
No weight is read, no accelerator is needed. A program that does not fit fails here and not an hour after the rent began.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model import AdapterBank, Cache, CausalLM, Gate, init_bank, init_cache, init_gate, init_pool
from model import Config as Architecture
from model.flops import adapter_step_flops, forward_flops
from model.lora import bank_shardings
from model.parameters import abstract_parameters
from model.sharding import AXES, distribute
from rl.engines.jax.blocks import BLOCK, pool_size
from rl.engines.jax.steps import Slots, Turn, cache_lengths, decode
from rl.learner import Learner
from trace_jax.base_model import read_architecture
from trace_jax.cli import Arguments
from trace_jax.config import Config
from trace_jax.errors import InputError
from trace_jax.preflight import accelerators, cost, report
from trace_jax.preflight.program import DoesNotFit, Program, compile_program
from trace_jax.runtime.fit import fit
from trace_jax.runtime.mesh import engine_mesh, make_mesh
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
    config = fit(config, devices, accelerator.hbm)
    architecture = dataclasses.replace(read_architecture(config), remat=config.train.remat, packed=config.train.packing)
    if devices[0].platform == "gpu" and architecture.head_dim > 128:  # JAX asks GPUs that are there whether cuDNN takes such heads
        architecture = dataclasses.replace(architecture, attention="triton")
    programs: list[Program | DoesNotFit] = []
    flops = {}
    try:
        for step in lower_all(config, architecture, mesh):
            programs.append(dataclasses.replace(_compile(step.name, step.lowered), beside=step.beside))
            flops[step.name] = step.flops
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise InputError(f"--topology={topology}: {error} train.packing=false takes its attention: pip install 'trace-jax[gpu]'") from error
    settings = report.Settings(
        micro_rows=config.train.micro_rows,
        pack_length=config.train.pack_length,
        remat=config.train.remat,
        lanes=config.rollout.lanes,
        mesh=mesh.shape,
        weights=_device_bytes(abstract_parameters(architecture, jnp.dtype(config.model.dtype), mesh)),
    )
    print(report.render(config.name, topology, accelerator, programs, settings, flops))
    if not all(report.fits(program, accelerator) for program in programs):
        raise SystemExit(1)
    seconds = (report.roofline(program, accelerator, flops[program.name]).step for program in programs)
    processes, work = len({device.process_index for device in devices}), cost.planned(config)
    times = cost.Times(*seconds, decoded_tokens=processes * config.rollout.lanes * _STEPS)  # a process has an engine
    stored = cost.bucket(work, processes, checkpoint_bytes(config, architecture))
    print("\n".join(cost.report(accelerator.name, accelerator.devices, work, times, stored)))


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


class Step(NamedTuple):
    """A program of a run: operations of one device, and the bytes that the run holds on a device beside the program's own."""

    name: str
    lowered: jax.stages.Lowered
    flops: float
    beside: int


def lower_all(config: Config, architecture: Architecture, mesh: Mesh) -> Iterator[Step]:
    """The steps that a run of this config takes."""
    dtype, train, length = jnp.dtype(config.model.dtype), config.train, config.train.pack_length
    engine = engine_mesh(config.mesh, mesh)
    model = CausalLM(architecture, mesh=mesh, parameters=abstract_parameters(architecture, dtype, mesh))
    key = jax.random.key(0)

    def bank(k: int, mesh: Mesh = mesh) -> AdapterBank:
        shapes = jax.eval_shape(lambda: init_bank(architecture, k, train.rank, train.alpha, key))
        return distribute(shapes, bank_shardings(shapes, architecture, mesh))

    def operations(rank: int) -> float:
        return adapter_step_flops(architecture, train.micro_rows * length, length, rank, remat=train.remat) / mesh.size

    weights, adapter = _device_bytes(model.parameters()), _device_bytes(bank(1))
    cache = jax.eval_shape(lambda: init_cache(architecture, config.rollout.lanes, config.rollout.context, dtype))
    cache = distribute(cache, cache.shardings(engine))
    blocks, states = pool_size(config.rollout.lanes, config.rollout.context)
    pool = jax.eval_shape(lambda: init_pool(architecture, blocks, BLOCK, states, dtype))
    pool = distribute(pool, pool.shardings(engine))
    held = _device_bytes((cache, pool))  # by the engine, which has weights of its own where the learner's are no whole copy
    if any(engine.shape[axis] != mesh.shape[axis] for axis in AXES[1:]):
        held += _device_bytes(abstract_parameters(architecture, dtype, engine))
    settings, loss = learner_config(config, train.learning_rate, 0, train.iterations), loss_config(train)
    gate = jax.eval_shape(lambda: init_gate(architecture, _ADAPTERS + 1, config.gate.base_bias, key))

    one = Learner(model, settings, loss).lower(bank(1), length)
    used = held + _device_bytes(bank(1, engine))
    # the sum of the micro-batches' gradients, and the optimizer's two moments
    yield Step(_PROGRAMS[0], one["gradient"], operations(train.rank), used + 3 * adapter)
    yield Step(_PROGRAMS[1], one["update"], 0.0, used + weights)
    routed = Learner(model, settings, loss, bank=bank(_ADAPTERS)).lower(gate, length)
    many = bank(_ADAPTERS, engine)
    yield Step(_PROGRAMS[2], routed["gradient"], operations(train.rank * _ADAPTERS), held + _device_bytes(many))
    tokens = config.rollout.lanes * _STEPS
    decoded = forward_flops(architecture, tokens, 1, rank=train.rank * _ADAPTERS, keys=config.rollout.context) / engine.size
    # the learner of the gate has the bank, that of an adapter its optimizer; a part of the context is decoded in a copy
    part = (0, *cache_lengths(config.rollout.context))[-2] / config.rollout.context
    beside = max(_ADAPTERS, 3) * adapter + _device_bytes(pool) + math.ceil(part * _device_bytes(cache))
    yield Step(_PROGRAMS[3], lower_decode(config, architecture, cache, many, gate, engine), decoded, beside)


def _device_bytes(tree: Any) -> int:
    """Bytes of one device for arrays that are shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def checkpoint_bytes(config: Config, architecture: Architecture) -> float:
    """Bytes that a run keeps of its adapters and their optimizers: of each adapter the newest checkpoints, and the best."""
    train = config.train
    bank = jax.eval_shape(lambda: init_bank(architecture, _ADAPTERS, train.rank, train.alpha, jax.random.key(0)))
    return 3 * (train.keep_checkpoints + 1) * sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(bank))  # two moments


def lower_decode(config: Config, architecture: Architecture, cache: Cache, bank: AdapterBank, gate: Gate, mesh: Mesh) -> jax.stages.Lowered:
    """The decoding step of the routed model in one process's engine, all lanes in use up to the whole context."""
    lanes, context, dtype = config.rollout.lanes, config.rollout.context, jnp.dtype(config.model.dtype)
    whole = NamedSharding(mesh, PartitionSpec())

    def repeated(tree):
        return distribute(tree, jax.tree.map(lambda _: whole, tree))

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
        top_k=integers,
        top_p=floats,
    )
    return decode.lower(
        architecture,
        mesh,
        abstract_parameters(architecture, dtype, mesh),
        cache,
        bank,
        repeated(gate),
        repeated(slots),
        repeated(turn),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        steps=_STEPS,
        length=context,
    )
