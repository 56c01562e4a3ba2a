"""Hugging Face folders in: config.json with model.safetensors or a sharded index.

Tensors are read one at a time into the stacked layout, so the peak is the result plus one tensor. Whatever is missing, surplus or wrongly
shaped is named before anything is placed on a device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from model.config import Config, read_config
from model.qwen3 import Qwen3, parameter_specs
from model.sharding import partition


class CheckpointError(ValueError):
    """Files that are not the checkpoint that they should be; the message names the file and the tensors."""


TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER = {
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
    **{name: f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
}
_TRANSPOSED = {"q", "k", "v", "o", "gate", "up", "down", "head"}  # Hugging Face keeps linear weights [out, in], we [in, out]


def huggingface_tensors(config: Config) -> dict[str, tuple[str, int | None, bool, tuple[int, ...]]]:
    """{Hugging Face name: (our name, layer or None, whether transposed, the shape in the file)} of every tensor of a checkpoint."""
    table = {}
    for name, spec in parameter_specs(config).items():
        short = name.removeprefix("layers.")
        turned = short in _TRANSPOSED
        if name == short:
            table[TOP[name]] = (name, None, turned, spec.shape[::-1] if turned else spec.shape)
            continue
        shape = spec.shape[:0:-1] if turned else spec.shape[1:]
        for i in range(spec.shape[0]):
            table[f"model.layers.{i}.{LAYER[short]}"] = (name, i, turned, shape)
    return table


def load_pretrained(path: str | Path, mesh: Mesh | None = None, dtype: jnp.dtype = jnp.float32) -> Qwen3:
    """The causal language model of a Hugging Face folder, laid out over `mesh` if one is given.

    Raises `ConfigError` for settings that are not honoured and `CheckpointError` for files that do not fit the configuration.
    """
    folder = Path(path)
    config = read_config(folder)
    specs, table = parameter_specs(config), huggingface_tensors(config)
    with ExitStack() as stack:
        files = _open(folder, stack)
        # a tied checkpoint may still carry the head; rotary buffers are constants that old checkpoints stored
        surplus = {n for n in files.keys() - table.keys() if not re.search(r"rotary_emb\.inv_freq$", n)}
        surplus -= {TOP["head"]} if config.tie_word_embeddings else set()
        problems = [f"missing {name}" for name in table if name not in files] + [f"surplus {name}" for name in sorted(surplus)]
        for name, (_, _, _, shape) in table.items():
            if name in files and (got := tuple(files[name].get_slice(name).get_shape())) != shape:
                problems.append(f"{name} has shape {got}, config.json implies {shape}")
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise CheckpointError(f"{folder}: the weights do not fit config.json: {shown}")

        sources: dict[str, list[str]] = {}
        for name, (ours, _, _, _) in table.items():
            sources.setdefault(ours, []).append(name)

        def read(ours: str) -> jax.Array:
            result = np.empty(specs[ours].shape, dtype)
            for name in sources[ours]:
                _, layer, turned, _ = table[name]
                tensor = files[name].get_tensor(name)
                result[... if layer is None else layer] = tensor.T if turned else tensor
            return jax.device_put(result, None if mesh is None else partition(specs[ours].shape, specs[ours].axes, mesh))

        return Qwen3(config, parameters={ours: read(ours) for ours in specs})


def _open(folder: Path, stack: ExitStack) -> dict[str, safe_open]:
    """{tensor name: the open file that holds it}."""
    found = {}
    for path in _shards(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="np"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist") from None
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a whole safetensors file ({error}); download it again") from None
        found |= {name: file for name in file.keys()}  # noqa: SIM118  (safe_open is no mapping)
    return found


def _shards(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        yield folder / "model.safetensors"
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, KeyError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from None
    yield from (folder / name for name in names)
