"""Hugging Face folders in: config.json with model.safetensors or a sharded index, on a disk or in a bucket.

Every name and shape is checked before anything is read. Then each parameter is put together on the devices, layer by layer, each host
reading only what its devices hold: beside the result, memory holds one layer's share of one parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from model.causal_lm import CausalLM
from model.config import Config, read_config
from model.errors import CheckpointError
from model.huggingface_names import HEAD, Source, find_layout, huggingface_sources
from model.parameters import parameter_dtype, parameter_specs
from model.placement import place, place_stacked
from model.sharding import partition
from model.tensor_files import Index, TensorFiles, open_tensors

_LOG = logging.getLogger(__name__)
# what a checkpoint may hold beside the decoder of text, by the name that it is reported under
_LEFT_OUT = {
    "of the vision tower": re.compile(r"(model\.)?visual\..*"),
    "of multi-token prediction": re.compile(r"mtp\..*"),
    "of rotary constants": re.compile(r".*\.rotary_emb\.inv_freq"),
}
_TIED_HEAD = "of a head that is the embedding"
_TOGETHER = 16  # experts read side by side


def load_pretrained(
    path: str | Path, mesh: Mesh | None = None, dtype: jnp.dtype = jnp.float32, *, remat: bool = False, packed: bool = True
) -> CausalLM:
    """The causal language model of a Hugging Face folder, local or `gs://`, laid out over `mesh` if one is given.

    With `remat` the backward pass computes a layer's activations again instead of keeping them; rows that are not `packed` hold one segment
    each, see `model.attention.attend`.

    Parameters are cast to `dtype`, the router too (its product is summed in float32 all the same), except A_log and dt_bias of gated delta
    layers, which stay float32. Tensors of a vision tower and of multi-token prediction are left out and counted in a warning of this
    module's logger. Raises `ConfigError` for settings that are not honoured and `CheckpointError`, before reading any tensor, for those
    that are missing, surplus or of another shape than config.json says.
    """
    config = dataclasses.replace(read_config(path), remat=remat, packed=packed)
    with open_tensors(path) as files:
        sources = huggingface_sources(config, *find_layout(set(files.names())))
        left_out = check_tensors(files, config, sources)
        if left_out:
            counts = ", ".join(f"{count} {what}" for what, count in left_out.items())
            _LOG.warning("%s: left out tensors that the decoder of text does not use: %s", path, counts)

        specs = parameter_specs(config)

        def load(name: str) -> jax.Array:
            spec = specs[name]
            sharding = None if mesh is None else partition(spec.shape, spec.axes, mesh)
            reads = [functools.partial(read_source, files, source) for source in sources[name]]
            kept = parameter_dtype(name, dtype)
            return place(spec.shape, kept, sharding, *reads) if spec.part is None else place_stacked(spec.shape, kept, sharding, reads)

        return CausalLM(config, parameters={name: load(name) for name in sources}, mesh=mesh)


def check_tensors(files: TensorFiles, config: Config, sources: dict[str, list[Source]]) -> Counter[str]:
    """What is left out of `files`, counted by kind. `CheckpointError` unless the rest is what `sources` name."""
    shapes = {tensor: source.shape for layers in sources.values() for source in layers for tensor in source.tensors}
    names, left_out, surplus = set(files.names()), Counter(), []
    for name in sorted(names - shapes.keys()):
        kinds = [kind for kind, pattern in _LEFT_OUT.items() if pattern.fullmatch(name)]
        if config.tie_word_embeddings and name == HEAD:
            kinds = [_TIED_HEAD]
        left_out.update(kinds)
        surplus += [] if kinds else [f"surplus {name}"]
    problems = [f"missing {name}" for name in shapes if name not in names] + surplus
    for name in shapes.keys() & names:
        if files.shape(name) != shapes[name]:
            problems.append(f"{name} has shape {files.shape(name)}, config.json implies {shapes[name]}")
        elif not jnp.issubdtype(files.dtype(name), jnp.floating) or files.dtype(name).itemsize < 2:
            problems.append(f"{name} is {files.dtype(name)}, quantized weights are not supported")
    if any(".lora." in name for name in surplus):
        raise CheckpointError(
            f"{files.folder} is a composed model, base, adapters and gate in one; load it with transformers (trust_remote_code=True) or "
            "SGLang, and give its base, or the workdir that it was exported from, here"
        )
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{files.folder}: the weights do not fit config.json: {shown}")
    return left_out


def read_source(files: TensorFiles, source: Source, index: Index) -> np.ndarray:
    """The elements `index`, one slice an axis of ours, of one layer of a parameter."""
    if source.turned:
        index = (*index[:-2], index[-1], index[-2])
    if source.start:
        rows = index[-2]
        index = (*index[:-2], slice(rows.start + source.start, rows.stop + source.start), index[-1])
    if source.per_expert:
        tensors = source.tensors[index[0]]
        read = np.empty((len(tensors), *(part.stop - part.start for part in index[1:])), files.dtype(tensors[0]))
        for first in range(0, len(tensors), _TOGETHER):
            some = tensors[first : first + _TOGETHER]
            read[first : first + len(some)] = files.read_all([(tensor, index[1:]) for tensor in some])
    elif len(source.shape) > len(index):  # a depthwise convolution has an axis of one between channels and taps
        read = files.read(source.tensors[0], (index[0], slice(0, 1), index[1]))[:, 0]
    else:
        read = files.read(source.tensors[0], index)
    return read.swapaxes(-1, -2) if source.turned else read
