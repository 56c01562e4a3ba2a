"""The micro-batch and the rematerialisation that fit the devices, where the config leaves them open.

What the forward pass keeps for the backward pass is counted, not guessed: `jax.vjp` is traced for the real mesh from shapes alone, which
takes seconds and no memory, and the arrays that it would keep are added up. Half of the memory that weights, adapters and optimizer leave
may be taken; the other half is for the engine's cache and the compiler. `trace-jax preflight` says it exactly.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from model import CausalLM, Routing, init_bank, init_gate, token_logprobs
from model import Config as Architecture
from model.lora import bank_shardings
from model.parameters import abstract_parameters
from model.sharding import RULES
from rl.learner import LearnerConfig
from trace_jax.base_model import read_architecture
from trace_jax.config import Config
from trace_jax.errors import InputError
from trace_jax.runtime.mesh import make_mesh

_SHARE = 0.5  # of the memory that weights, adapters and optimizer leave
_STATES = 4  # float32 copies of an adapter: itself, two moments, the gradient
_ADAPTERS = 4  # of the bank under the gate, whose step keeps most
# Tokens of a micro-batch on one device. A CPU is fastest while the activations stay in its cache (measured: 512 tokens .61-.66 CPU s a
# gradient of the quickstart, 4096 tokens 1.8); an accelerator gains nothing more, and padding grows.
_CPU_TOKENS, _TOKENS = 512, 32768


def fit(config: Config, devices: list[jax.Device], memory: float | None = None) -> Config:
    """The config with `train.micro_rows` and `train.remat` set.

    Args:
      devices: of all processes.
      memory: bytes of one device; by default as it says itself, on a CPU its share of the machine's.

    Raises:
      InputError: the model's folder or the mesh cannot be used, or the devices do not tell their memory.
    """
    train = config.train
    if train.micro_rows is not None and train.remat is not None:
        return config
    mesh = make_mesh(config.mesh, devices) or Mesh(np.asarray(devices[:1]), ("fsdp",))
    architecture, dtype = read_architecture(config), jnp.dtype(config.model.dtype)
    ways, needed = _ways(mesh), row_bytes(architecture, dtype, train.rank, train.pack_length, mesh)
    held = _held_bytes(architecture, dtype, train.rank, mesh)
    room = _SHARE * ((device_memory(devices[0]) if memory is None else memory) - held)
    asked = -(-train.micro_rows // ways) if train.micro_rows else 1
    rows, remat = asked, True
    for again in (False, True) if train.remat is None else (train.remat,):
        if (most := int(room // needed[again])) >= asked:
            rows, remat = most, again
            break
    cap = (_CPU_TOKENS if devices[0].platform == "cpu" else _TOKENS) // train.pack_length
    rows = 1 << (max(1, min(rows, cap)).bit_length() - 1)
    settings = {"micro_rows": train.micro_rows or rows * ways, "remat": remat if train.remat is None else train.remat}
    return dataclasses.replace(config, train=dataclasses.replace(train, **settings))


def row_bytes(architecture: Architecture, dtype: jnp.dtype, rank: int, length: int, mesh: Mesh) -> dict[bool, float]:
    """Bytes of a device for each of its rows of `length` tokens in a gate's step, without rematerialisation and with it."""
    plain, again = (_kept_bytes(dataclasses.replace(architecture, remat=remat), dtype, rank, length, mesh) for remat in (False, True))
    # at work at one moment: a layer's intermediates and their gradients, and the logits of a chunk, their softmax and their gradient
    layer, logits = 2 * plain / architecture.num_hidden_layers, 3 * 4 * min(length, LearnerConfig().logprob_chunk) * architecture.vocab_size
    return {False: plain + layer + logits, True: again + layer + logits}


def _kept_bytes(architecture: Architecture, dtype: jnp.dtype, rank: int, length: int, mesh: Mesh) -> float:
    """Bytes that a device keeps of a row from the forward to the backward pass."""
    model = CausalLM(architecture, mesh=mesh, parameters=abstract_parameters(architecture, dtype, mesh))
    key = jax.random.key(0)
    bank = jax.eval_shape(lambda: init_bank(architecture, _ADAPTERS, rank, rank, key))
    gate = jax.eval_shape(lambda: init_gate(architecture, _ADAPTERS + 1, 0.0, key))
    ways = _ways(mesh)

    def kept(rows: int) -> int:
        tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)

        def backward(parameters, bank, gate, tokens):
            net = CausalLM(architecture, mesh=mesh, parameters=parameters)

            def loss(gate):
                routing = Routing(gate=gate, mode="straight_through")
                hidden = net.forward(tokens, tokens, tokens, bank, routing).hidden
                return jnp.sum(token_logprobs(net, hidden, tokens)[0])

            return jax.vjp(loss, gate)[1]

        found = jax.eval_shape(backward, model.parameters(), bank, gate, tokens)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(found))

    # the difference leaves out what does not grow with the rows: weights
    return (kept(2 * ways) - kept(ways)) / mesh.size


def _ways(mesh: Mesh) -> int:
    """Devices that have rows of their own."""
    return math.prod(mesh.shape.get(axis, 1) for axis in RULES["batch"])


def _held_bytes(architecture: Architecture, dtype: jnp.dtype, rank: int, mesh: Mesh) -> float:
    """Bytes of a device for its part of the weights, an adapter and its optimizer."""
    weights = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in abstract_parameters(architecture, dtype, mesh).values())
    bank = jax.eval_shape(lambda: init_bank(architecture, 1, rank, rank, jax.random.key(0)))
    shardings = jax.tree.leaves(bank_shardings(bank, architecture, mesh))
    adapter = sum(math.prod(sharding.shard_shape(x.shape)) for x, sharding in zip(jax.tree.leaves(bank), shardings, strict=True))
    return weights * dtype.itemsize + _STATES * 4 * adapter


def device_memory(device: jax.Device) -> float:
    """Bytes that programs on a device may take; on a CPU the machine's, or the control group's, shared among its devices.

    Raises:
      InputError: an accelerator does not tell.
    """
    if device.platform != "cpu":
        if "bytes_limit" in (stats := device.memory_stats() or {}):
            return stats["bytes_limit"]
        why = "; XLA_PYTHON_CLIENT_ALLOCATOR=platform keeps no count" if device.platform == "gpu" else ""
        raise InputError(f"{device.device_kind} does not say how much memory it has{why}; set train.micro_rows and train.remat")
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    group = pathlib.Path("/sys/fs/cgroup/memory.max")
    if group.is_file() and (text := group.read_text().strip()).isdecimal():
        limits.append(int(text))
    return min(limits) / jax.local_device_count()
