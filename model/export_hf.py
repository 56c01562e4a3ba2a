"""Hugging Face folders out: the model, models merged with an adapter, and the gate's file.

Tensors are named as transformers itself writes them (one an expert and projection), which every loader of these models reads. They come to
the host one layer of a parameter at a time, and files appear under their names only when whole.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.causal_lm import CausalLM
from model.config import huggingface_config
from model.errors import CheckpointError
from model.gate import Gate
from model.huggingface_names import Source, huggingface_sources
from model.lora import AdapterBank
from model.tensor_files import LazyTensor, open_tensors, write_tensors


def save_pretrained(model: CausalLM, path: str | Path, shard_bytes: int = 5_000_000_000) -> None:
    """Writes config.json and model.safetensors, or shards of up to `shard_bytes` and their index, into a local folder.

    `load_pretrained` and transformers read them. The tokenizer is not ours to write. One process must hold all of the parameters.
    """
    parameters = model.parameters()
    write_tensors(path, _huggingface_tensors(parameters, huggingface_sources(model.config)), shard_bytes=shard_bytes)
    write_json(Path(path) / "config.json", huggingface_config(model.config, str(parameters["embed"].dtype)))


def _huggingface_tensors(parameters: dict[str, jax.Array], sources: dict[str, list[Source]]) -> dict[str, LazyTensor]:
    @functools.lru_cache(maxsize=1)  # the experts of a layer are asked for one after the other
    def fetch(name: str, layer: int) -> np.ndarray:
        x = parameters[name]
        return np.asarray(x[layer] if name.startswith("layers.") else x)

    def make(name: str, layer: int, expert: int, source: Source) -> np.ndarray:
        x = fetch(name, layer)
        x = x[expert] if source.per_expert else x
        return (x.swapaxes(-1, -2) if source.turned else x).reshape(source.shape)

    tensors = {}
    for name, layers in sources.items():
        for layer, source in enumerate(layers):
            for expert, tensor in enumerate(source.tensors):
                lazy = functools.partial(make, name, layer, expert, source)
                tensors[tensor] = LazyTensor(source.shape, parameters[name].dtype, lazy)
    return tensors


def merge(model: CausalLM, bank: AdapterBank, slot: int) -> CausalLM:
    """A model whose weights are W + scale A B of the adapter in `slot`; slot 0 is the base itself. Summed in float32."""
    if not 0 <= slot <= bank.size:
        raise IndexError(f"slot {slot} of a bank of {bank.size} adapters; slot 0 is the base, slot k + 1 is adapter k")
    parameters = model.parameters()
    for name in bank.a if slot else ():
        weight = parameters[f"layers.{name}"]
        add = jax.jit(_add_product, out_shardings=weight.sharding)
        parameters[f"layers.{name}"] = add(weight, bank.a[name][:, slot - 1], bank.b[name][:, slot - 1], bank.scale[slot - 1])
    return CausalLM(model.config, parameters=parameters, mesh=model.mesh)


def _add_product(weight: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    """weight[n, ..., in, out] + scale a[n, ..., in, R] b[n, ..., R, out], a layer at a time: that is all there is in float32."""

    def layer(arrays: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        w, a, b = (x.astype(jnp.float32) for x in arrays)
        product = jnp.einsum("...ir,...ro->...io", a, b, precision=jax.lax.Precision.HIGHEST)
        return (w + scale * product).astype(weight.dtype)

    return jax.lax.map(layer, (weight, a, b))


def save_gate(gate: Gate, path: str | Path) -> None:
    """Writes `kernel` [L, D, S] and `bias` [L, S], float32, as one safetensors file."""
    path = Path(path)
    write_tensors(path.parent, {"kernel": gate.kernel, "bias": gate.bias}, stem=path.stem)


def load_gate(path: str | Path) -> Gate:
    """The gate of a file of `save_gate`, local or `gs://`; `CheckpointError` if it is not one."""
    folder, file = os.path.split(path)
    with open_tensors(folder, file.removesuffix(".safetensors")) as files:
        shapes = {name: files.shape(name) for name in files.names()}
        if shapes.keys() != {"kernel", "bias"} or len(shapes["kernel"]) != 3 or shapes["bias"] != shapes["kernel"][::2]:
            raise CheckpointError(f"{path} is not a gate: it holds {shapes}, expected kernel [L, D, S] and bias [L, S]")
        return Gate(jnp.asarray(files.read("kernel")), jnp.asarray(files.read("bias")))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
