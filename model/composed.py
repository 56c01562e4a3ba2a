"""The composed model as a Hugging Face folder that transformers runs alone: base, adapters and gate, routed as ours.

The folder holds the base's weight files under their own names (hard links, since a base has tens of gigabytes), one more file with the bank
and the gate, and `composed_hf/modeling_trace.py`, which says how they go together. That file imports nothing of ours; the tensors' names
and layouts are described there. `sglang_trace` comes along too: the same model for SGLang, which reads the same tensors.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from model.config import Config, read_config
from model.errors import CheckpointError
from model.export_hf import write_json
from model.files import exists, read_text
from model.gate import Gate
from model.huggingface_names import MODULES, layers_with
from model.lora import AdapterBank, bank_shapes
from model.tensor_files import LazyTensor, TensorFiles, open_tensors, write_tensors

FORMAT = 1  # see `composed_hf/modeling_trace.py`
_MODELLING_FILE = Path(__file__).parent / "composed_hf" / "modeling_trace.py"
_SGLANG_PACKAGE = Path(__file__).parent / "sglang_trace"
_CLASSES = {
    "qwen3": "TraceQwen3ForCausalLM",
    "qwen3_moe": "TraceQwen3MoeForCausalLM",
    "qwen3_5": "TraceQwen3_5ForCausalLM",
    "qwen3_5_moe": "TraceQwen3_5MoeForCausalLM",
}
_INDEX = "model.safetensors.index.json"
# what a model's folder has beside config and weights, as far as it is there
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "generation_config.json", "LICENSE",
)  # fmt: skip


def export_composed(base: str | Path, bank: AdapterBank, gate: Gate, out: str | Path, slots: Sequence[str]) -> None:
    """Writes the folder `out`, which `transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)` loads.

    The folder appears when it is whole; what it holds of the base shares the disk with `base` where a hard link can be made.

    Args:
      base: the folder of the base, local or `gs://`.
      bank, gate: of K adapters on all projections, and of S = K + 1 slots. They are written in their own dtype, the gate in float32.
      slots: S names, that of the base first.

    Raises `ConfigError` or `CheckpointError` for a base that is not whole or not supported, `ValueError` if bank, gate and slots do not fit
    it or `out` cannot be written, and `FileExistsError` if `out` is there already.
    """
    config = read_config(base)
    _check(config, bank, gate, slots)
    if str(out).startswith("gs:"):
        raise ValueError(f"{out}: the composed model is written to local folders only; write there and copy the folder to the bucket")
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists; name another folder or remove it")
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was interrupted
    part.mkdir(parents=True)
    try:
        with open_tensors(base) as tensors:
            size, files = _total_size(tensors), _bring_base(base, tensors, part)
        added = trace_tensors(config, bank, gate)
        if both := sorted(files.keys() & added.keys()):
            raise CheckpointError(f"{base} is a composed model already, it holds {both[0]}; export from its base")
        write_tensors(part, added, stem="adapters")
        files |= _take_index(part, "adapters")
        size += sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in added.values())
        write_json(part / _INDEX, {"metadata": {"total_size": size}, "weight_map": files})
        for name in COMPANIONS:
            if exists(base, name):
                (part / name).write_bytes(read_text(base, name).encode())
        shutil.copyfile(_MODELLING_FILE, part / _MODELLING_FILE.name)
        shutil.copytree(_SGLANG_PACKAGE, part / _SGLANG_PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        trace = {"format": FORMAT, "slots": list(slots), "rank": bank.rank, "scale": [float(x) for x in np.asarray(bank.scale)]}
        name = _CLASSES[config.model_type]
        auto_map = {"AutoModelForCausalLM": f"{_MODELLING_FILE.stem}.{name}"}
        raw = json.loads(read_text(base, "config.json"))
        write_json(part / "config.json", raw | {"architectures": [name], "auto_map": auto_map, "trace_jax": trace})
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def save_gate_update(folder: str | Path, gate: Gate, out: str | Path) -> None:
    """Writes the folder `out` with a gate alone, for an SGLang server that runs an exported model:

        POST /update_weights_from_disk {"model_path": "OUT", "weight_version": "2"}

    The server first finishes the requests that run under the old gate, and refuses one that is not for its number of slots.

    Args:
      folder: of the exported model, or of its base.

    Raises `ValueError` for a gate that does not fit `folder`, and `FileExistsError` if `out` is there already.
    """
    raw, config = json.loads(read_text(folder, "config.json")), read_config(folder)
    _check_gate(config, gate, len(raw["trace_jax"]["slots"]) if "trace_jax" in raw else gate.kernel.shape[-1])
    Path(out).mkdir(parents=True)
    write_tensors(Path(out), gate_tensors(gate))
    write_json(Path(out) / "config.json", raw)


def trace_tensors(config: Config, bank: AdapterBank, gate: Gate) -> dict[str, LazyTensor]:
    """What the export adds to the base's tensors, by name; one layer's tensor is made at a time."""
    tensors = {}
    for name, projection in config.projections().items():
        a, b = bank.a[name], bank.b[name]
        ranks, experts = bank.size * bank.rank, [projection.experts] if projection.experts else []
        module = f"mlp.experts.{name.removeprefix('expert_')}_lora" if experts else f"{MODULES[name]}.lora"
        for row, layer in enumerate(layers_with(config, projection.part)):
            prefix = f"model.layers.{layer}.{module}"
            tensors[f"{prefix}.A"] = LazyTensor((*experts, ranks, projection.width), a.dtype, lambda a=a, row=row: _turn_a(a[row]))
            tensors[f"{prefix}.B"] = LazyTensor((*experts, projection.out, ranks), b.dtype, lambda b=b, row=row: _turn_b(b[row]))
    return tensors | gate_tensors(gate)


def gate_tensors(gate: Gate) -> dict[str, LazyTensor]:
    """The gate's part of them."""
    tensors = {}
    for layer in range(len(gate.kernel)):
        for name, stack in (("kernel", gate.kernel), ("bias", gate.bias)):
            tensors[f"model.layers.{layer}.input_layernorm.gate.{name}"] = LazyTensor(
                stack.shape[1:], np.float32, lambda stack=stack, layer=layer: np.asarray(stack[layer], np.float32)
            )
    return tensors


def _turn_a(a: jax.Array) -> np.ndarray:
    """[K, ..., in, R] -> [..., K * R, in]"""
    a = np.moveaxis(np.swapaxes(np.asarray(a), -1, -2), 0, -3)
    return a.reshape(*a.shape[:-3], -1, a.shape[-1])


def _turn_b(b: jax.Array) -> np.ndarray:
    """[K, ..., R, out] -> [..., out, K * R]"""
    b = np.moveaxis(np.asarray(b), 0, -3)
    return np.swapaxes(b.reshape(*b.shape[:-3], -1, b.shape[-1]), -1, -2)


def _check(config: Config, bank: AdapterBank, gate: Gate, slots: Sequence[str]) -> None:
    k, shapes = bank.size, bank_shapes(config, bank.size, bank.rank)
    if bank.a.keys() != shapes.keys():
        raise ValueError(f"the bank adapts {', '.join(sorted(bank.a))}, the base has {', '.join(sorted(shapes))}")
    for name, want in shapes.items():
        if (got := (bank.a[name].shape, bank.b[name].shape)) != want:
            raise ValueError(f"the bank's {name} has shapes {got}, the base implies {want}; it was made for another base")
    _check_gate(config, gate, k + 1)
    if len(slots) != k + 1 or len(set(slots)) != len(slots):
        raise ValueError(f"slots must be {k + 1} different names, that of the base first, got {list(slots)}")


def _check_gate(config: Config, gate: Gate, slots: int) -> None:
    layers = config.num_hidden_layers
    if gate.kernel.shape != (want := (layers, config.hidden_size, slots)) or gate.bias.shape != (layers, slots):
        raise ValueError(f"the gate's kernel {gate.kernel.shape} and bias {gate.bias.shape} do not fit base and bank, kernel {want}")


def _bring_base(base: str | Path, tensors: TensorFiles, folder: Path) -> dict[str, str]:
    """Puts the base's weight files into `folder`. Returns {tensor: file}."""
    if str(base).startswith("gs:"):
        write_tensors(folder, {name: _lazy(tensors, name) for name in tensors.names()}, stem="base")
        return _take_index(folder, "base")
    if exists(base, "model.safetensors"):  # under another name, since transformers prefers this one to an index
        _link(Path(base) / "model.safetensors", folder / "base.safetensors")
        return dict.fromkeys(tensors.names(), "base.safetensors")
    files = json.loads(read_text(base, _INDEX))["weight_map"]
    for name in sorted(set(files.values())):
        _link(Path(base) / name, folder / name)
    return files


def _lazy(tensors: TensorFiles, name: str) -> LazyTensor:
    return LazyTensor(tensors.shape(name), tensors.dtype(name), lambda: tensors.read(name))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)  # resolved: the files of a Hugging Face cache are symbolic links
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(source, target)


def _take_index(folder: Path, stem: str) -> dict[str, str]:
    """{tensor: file} of the files that `write_tensors` wrote; their index goes, for the folder has one for all."""
    index = folder / f"{stem}.safetensors.index.json"
    if index.exists():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        index.unlink()
        return files
    with open_tensors(folder, stem) as tensors:
        return dict.fromkeys(tensors.names(), f"{stem}.safetensors")


def _total_size(tensors: TensorFiles) -> int:
    return sum(math.prod(tensors.shape(name)) * tensors.dtype(name).itemsize for name in tensors.names())
