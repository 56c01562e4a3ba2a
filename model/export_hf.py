"""Hugging Face folders out, and adapters in: the model, merged models, PEFT adapters and the gate.

PEFT keeps A as [rank, in] and B as [out, rank], one pair a layer and projection; the bank keeps them transposed and stacked. Files appear
under their names only when whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from model.config import Config, huggingface_config
from model.gate import Gate
from model.load_hf import LAYER, CheckpointError, huggingface_tensors
from model.lora import AdapterBank
from model.qwen3 import Qwen3

_PEFT_KEY = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+)_proj\.lora_([AB])\.weight")
# PEFT settings that change what an adapter computes and that the bank does not have, with the value that is honoured
_PEFT_PLAIN = {
    "bias": "none", "fan_in_fan_out": False, "use_dora": False, "use_qalora": False, "lora_bias": False, "rank_pattern": {},
    "alpha_pattern": {}, "modules_to_save": None, "layer_replication": None, "target_parameters": None, "trainable_token_indices": None,
    "alora_invocation_tokens": None, "kasa_config": None, "use_bdlora": None, "arrow_config": None,
}  # fmt: skip


def _write(path: Path, save: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        save(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write(path, lambda part: part.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8"))


def _write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    # safetensors writes the memory of an array as it lies
    contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    _write(path, lambda part: save_file(contiguous, part, metadata={"format": "pt"}))


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); write or download it again") from None


def save_pretrained(model: Qwen3, path: str | Path) -> None:
    """Writes config.json and model.safetensors, which `load_pretrained` and transformers read. The tokenizer is not ours to write."""
    values = {name: np.asarray(x) for name, x in model.parameters().items()}
    tensors = {}
    for name, (ours, layer, turned, _) in huggingface_tensors(model.config).items():
        value = values[ours] if layer is None else values[ours][layer]
        tensors[name] = value.T if turned else value
    _write_tensors(Path(path) / "model.safetensors", tensors)
    _write_json(Path(path) / "config.json", huggingface_config(model.config, str(values["embed"].dtype)))


def merge(model: Qwen3, bank: AdapterBank, slot: int) -> Qwen3:
    """A model whose weights are W + scale A B of the adapter in `slot`; slot 0 is the base itself. Summed in float32."""
    if not 0 <= slot <= bank.size:
        raise IndexError(f"slot {slot} of a bank of {bank.size} adapters; slot 0 is the base, slot k + 1 is adapter k")
    parameters = model.parameters()
    for name in bank.a if slot else ():
        weight = parameters[f"layers.{name}"]
        a, b = (jnp.asarray(factor[name][:, slot - 1], jnp.float32) for factor in bank.factors)
        product = jnp.einsum("lir,lro->lio", a, b, precision=jax.lax.Precision.HIGHEST)
        parameters[f"layers.{name}"] = (weight.astype(jnp.float32) + bank.scale[slot - 1] * product).astype(weight.dtype)
    return Qwen3(model.config, parameters=parameters)


def save_peft(bank: AdapterBank, config: Config, path: str | Path, base: str | None = None) -> None:
    """Writes the one adapter of `bank` as a PEFT folder; `base` is the name or folder of its base model."""
    if bank.size != 1:
        raise ValueError(f"a PEFT folder holds one adapter, the bank holds {bank.size}; take one with slice_bank(bank, k)")
    tensors = {}
    for name in bank.a:
        module = LAYER[name].removesuffix(".weight")
        a, b = (np.asarray(factor[name][:, 0]) for factor in bank.factors)
        for i in range(config.num_hidden_layers):
            prefix = f"base_model.model.model.layers.{i}.{module}"
            tensors |= {f"{prefix}.lora_A.weight": a[i].T, f"{prefix}.lora_B.weight": b[i].T}
    alpha = float(bank.scale[0]) * bank.rank
    _write_tensors(Path(path) / "adapter_model.safetensors", tensors)
    _write_json(
        Path(path) / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": bank.rank,
            "lora_alpha": round(alpha) if abs(alpha - round(alpha)) < 1e-4 else alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [f"{name}_proj" for name in bank.a],
            "inference_mode": True,
        },
    )


def load_peft(path: str | Path, config: Config) -> AdapterBank:
    """The bank of one adapter from a PEFT folder, all seven projections; what the adapter leaves alone is zero.

    Raises `CheckpointError` for unknown modules, missing halves, shapes that do not fit `config`, and settings that are not honoured.
    """
    folder = Path(path)
    settings_path = folder / "adapter_config.json"
    try:
        settings = json.loads(settings_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{settings_path} does not exist; point to a PEFT adapter folder") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{settings_path} is not JSON: {error}") from None
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(f"{settings_path}: peft_type {settings.get('peft_type')!r} is not supported, only 'LORA'")
    odd = [f"{key}={settings[key]!r}" for key, plain in _PEFT_PLAIN.items() if settings.get(key) and settings[key] != plain]
    if odd:
        raise CheckpointError(f"{settings_path}: {', '.join(odd)} not supported; export a plain LoRA adapter")
    rank, alpha = settings["r"], settings["lora_alpha"]
    layers, widths = config.num_hidden_layers, config.widths()
    factors = {
        "A": {name: np.zeros((layers, 1, width, rank), np.float32) for name, (width, _) in widths.items()},
        "B": {name: np.zeros((layers, 1, rank, out), np.float32) for name, (_, out) in widths.items()},
    }
    tensors_path = folder / "adapter_model.safetensors"
    problems, seen = [], set()
    for key, tensor in _read_tensors(tensors_path).items():
        match = _PEFT_KEY.fullmatch(key)
        name = match and match[3]
        if not match or name not in widths or LAYER[name] != f"{match[2]}.{name}_proj.weight" or int(match[1]) >= layers:
            problems.append(f"unknown {key}")
            continue
        target = factors[match[4]][name][int(match[1]), 0]
        if tensor.T.shape != target.shape:
            problems.append(f"{key} has shape {tensor.shape}, the model and rank {rank} imply {target.shape[::-1]}")
            continue
        target[...] = tensor.T
        seen.add((int(match[1]), name, match[4]))
    halves = {(layer, name) for layer, name, half in seen if (layer, name, "AB".replace(half, "")) not in seen}
    problems += [f"only one of lora_A and lora_B of layer {layer}, {name}_proj" for layer, name in sorted(halves)]
    if problems or not seen:
        raise CheckpointError(f"{tensors_path}: {'; '.join(problems[:8]) or 'no adapter weights'}")
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return AdapterBank(*({name: jnp.asarray(x) for name, x in factors[half].items()} for half in "AB"), jnp.full((1,), scale, jnp.float32))


def save_gate(gate: Gate, path: str | Path) -> None:
    """Writes `kernel` [L, D, S] and `bias` [L, S], float32, as one safetensors file."""
    _write_tensors(Path(path), {"kernel": np.asarray(gate.kernel), "bias": np.asarray(gate.bias)})


def load_gate(path: str | Path) -> Gate:
    """The gate of a file of `save_gate`; `CheckpointError` if it is not one."""
    tensors = _read_tensors(Path(path))
    shapes = {name: x.shape for name, x in tensors.items()}
    if shapes.keys() != {"kernel", "bias"} or len(shapes["kernel"]) != 3 or shapes["bias"] != shapes["kernel"][::2]:
        raise CheckpointError(f"{path} is not a gate: it holds {shapes}, expected kernel [L, D, S] and bias [L, S]")
    return Gate(jnp.asarray(tensors["kernel"]), jnp.asarray(tensors["bias"]))
