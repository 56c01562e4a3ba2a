"""PEFT adapters in and out: adapter_config.json with adapter_model.safetensors.

PEFT keeps A as [rank, in] and B as [out, rank], one pair a module; the bank keeps them transposed and stacked. Of experts there are two
layouts. One pair an expert and projection is what is written here and what SGLang, vLLM and PEFT read. PEFT itself writes one pair for all
experts of a fused parameter: `mlp.experts.base_layer` adapts gate_up_proj, `mlp.experts` adapts down_proj, A is [E * rank, in] with the
experts outside and B is [out, rank * E] with the experts inside (peft/tuners/lora/layer.py, ParamWrapper).
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from model.config import Config
from model.errors import CheckpointError
from model.export_hf import write_json
from model.files import read_text
from model.huggingface_names import MODULES, layers_with
from model.lora import AdapterBank, bank_shapes
from model.tensor_files import LazyTensor, TensorFiles, open_tensors, write_tensors

_KEY = re.compile(r"base_model\.model\.(model|model\.language_model|language_model\.model)\.(layers\.\d+\..+)\.lora_([AB])\.weight")
_FUSED = re.compile(r"layers\.(\d+)\.mlp\.experts(\.base_layer)?")
# SGLang fuses these; an adapter with one of them and not the others is refused, or accepted and then ends the server at its first request
_TOGETHER = (
    ("q", "k", "v"),
    ("gate", "up", "down"),
    ("shared_gate", "shared_up", "shared_down"),
    ("expert_gate", "expert_up", "expert_down"),
    ("qkv", "z"),
    ("a", "b"),
)
# PEFT settings that change what an adapter computes and that the bank does not have, with the value that is honoured
_PLAIN = {
    "bias": "none", "fan_in_fan_out": False, "use_dora": False, "use_qalora": False, "lora_bias": False, "modules_to_save": None,
    "layer_replication": None, "trainable_token_indices": None, "alora_invocation_tokens": None, "kasa_config": None, "use_bdlora": None,
    "arrow_config": None, "monteclora_config": None,
}  # fmt: skip
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # initialisations that subtract the adapter from the base's weights
_TOGETHER_READ = 64  # pairs read side by side


class Target(NamedTuple):
    """What one module adapts: a projection, in the layer `layer` of its stack, of one expert if it has them."""

    name: str
    layer: int
    expert: int | None = None


def peft_targets(config: Config) -> dict[str, Target]:
    """{module inside of the decoder, such as layers.3.mlp.up_proj: what it adapts}"""
    table = {}
    for name, p in config.projections().items():
        for i, layer in enumerate(layers_with(config, p.part)):
            for expert in range(p.experts) if p.experts else [None]:
                table[f"layers.{layer}.{MODULES[name].format(expert=expert)}"] = Target(name, i, expert)
    return table


def save_peft(bank: AdapterBank, config: Config, path: str | Path, base: str | None = None, root: str = "model") -> None:
    """Writes the one adapter of `bank` as a PEFT folder; `base` is the name or folder of its base model.

    Projections that engines fuse are written together, as zeros where the bank lacks one. `root` is where the decoder is in the model that
    takes the adapter: "model" for a model of text, "model.language_model" for engines that serve the checkpoint with its vision tower
    (vLLM then applies keys of the other kind to nothing, silently). PEFT reads both. PEFT 0.21 cannot adapt dense layers beside sparse ones
    (`mlp_only_layers`).
    """
    if bank.size != 1:
        raise ValueError(f"a PEFT folder holds one adapter, the bank holds {bank.size}; take one with slice_bank(bank, k)")
    projections, rank = config.projections(), bank.rank
    together = {name for group in _TOGETHER if bank.a.keys() & set(group) for name in group}
    written = [name for name in projections if name in together or name in bank.a]
    dtype = next(iter(bank.a.values())).dtype

    @functools.lru_cache(maxsize=2)  # A and B: the experts of a layer are asked for one after the other
    def fetch(half: int, name: str, layer: int) -> np.ndarray:
        return np.asarray(bank.factors[half][name][layer, 0])

    def make(half: int, target: Target, shape: tuple[int, int]) -> np.ndarray:
        if target.name not in bank.a:
            return np.zeros(shape, dtype)
        x = fetch(half, target.name, target.layer)
        return (x if target.expert is None else x[target.expert]).T

    tensors = {}
    for module, target in peft_targets(config).items():
        if target.name in written:
            p = projections[target.name]
            for half, shape in enumerate([(rank, p.width), (p.out, rank)]):
                lazy = LazyTensor(shape, dtype, functools.partial(make, half, target, shape))
                tensors[f"base_model.model.{root}.{module}.lora_{'AB'[half]}.weight"] = lazy
    write_tensors(path, tensors, stem="adapter_model", shard_bytes=2**63)  # readers of adapters know one file only
    alpha = float(bank.scale[0]) * rank
    alpha = round(alpha) if abs(alpha - round(alpha)) < 1e-4 else alpha
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(dict.fromkeys(MODULES[name].rpartition(".")[2] for name in written)),
        "inference_mode": True,
    }
    if config.model_type == "qwen3_5_moe" and "expert_gate" in written:  # PEFT finds the experts by itself only in qwen3_moe
        settings |= {
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {r".*\.gate_up_proj": 2 * rank},
            "alpha_pattern": {r".*\.gate_up_proj": 2 * alpha},
        }
    write_json(Path(path) / "adapter_config.json", settings)


def load_peft(path: str | Path, config: Config) -> AdapterBank:
    """The bank of one adapter from a PEFT folder, local or `gs://`, float32, all projections; what the adapter leaves alone is zero.

    Modules may differ in rank and alpha: the bank has the largest rank and the scale of the adapter's `r` and `lora_alpha`; other scales go
    into B. Raises `CheckpointError` for unknown modules, missing halves, shapes that do not fit `config` and settings that are not
    honoured.
    """
    settings = _Settings.read(path)
    with open_tensors(path, "adapter_model") as files:
        pairs, problems = _pair_keys(files, config, settings)
        if problems or not pairs:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise CheckpointError(f"{path}/adapter_model.safetensors: {shown or 'no adapter weights'}")
        shapes = bank_shapes(config, 1, max(pair.rank for pair in pairs))
        a, b = ({name: np.zeros(pair[half], np.float32) for name, pair in shapes.items()} for half in (0, 1))
        for pair, half_a, half_b in _read_pairs(files, pairs):
            for name, where, part_a, part_b in _parts(pair, half_a, half_b, config):
                a[name][*where, ..., : pair.rank] = part_a
                b[name][*where, ..., : pair.rank, :] = part_b * np.float32(pair.scale / settings.scale)
    return AdapterBank(
        *({name: jnp.asarray(x) for name, x in half.items()} for half in (a, b)), jnp.full((1,), settings.scale, jnp.float32)
    )


class _Settings(NamedTuple):
    """What counts of adapter_config.json."""

    file: str
    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]  # by pattern
    alphas: Mapping[str, float]

    @staticmethod
    def read(folder: str | Path) -> _Settings:
        file = f"{folder}/adapter_config.json"

        def need(condition: Any, message: str) -> None:
            if not condition:
                raise CheckpointError(f"{file}{message}")

        raw = None
        try:
            raw = json.loads(read_text(folder, "adapter_config.json"))
        except FileNotFoundError:
            need(False, " does not exist; point to a PEFT adapter folder")
        except ValueError as error:
            need(False, f" is not JSON: {error}")
        need(isinstance(raw, dict), " is not a JSON object")
        need(raw.get("peft_type") == "LORA", f": peft_type {raw.get('peft_type')!r} is not supported, only 'LORA'")
        odd = [f"{key}={raw[key]!r}" for key, plain in _PLAIN.items() if raw.get(key) and raw[key] != plain]
        if str(start := raw.get("init_lora_weights")).startswith(_CHANGES_BASE):
            odd.append(f"init_lora_weights={start!r}")
        need(not odd, f": {', '.join(odd)} not supported; export a plain LoRA adapter")
        ranks, alphas = ({**(raw.get(key) or {})} for key in ("rank_pattern", "alpha_pattern"))
        for name, value in [("r", raw.get("r")), *((f"rank_pattern {key!r}", value) for key, value in ranks.items())]:
            need(isinstance(value, int) and value > 0, f": {name} must be a positive integer, got {value!r}")
        for name, value in [("lora_alpha", raw.get("lora_alpha")), *((f"alpha_pattern {key!r}", value) for key, value in alphas.items())]:
            need(isinstance(value, int | float) and value > 0, f": {name} must be a positive number, got {value!r}")
        return _Settings(file, raw["r"], raw["lora_alpha"], bool(raw.get("use_rslora")), ranks, alphas)

    @property
    def scale(self) -> float:
        return self._scaling(self.alpha, self.rank)

    def _scaling(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def of(self, module: str) -> tuple[int, float]:
        """(rank, scale) of a module: those of the first pattern that its name ends with, as in PEFT."""

        def pick(patterns: Mapping[str, Any], default: Any) -> Any:
            return next((value for key, value in patterns.items() if _matcher(self.file, key).match(module)), default)

        rank = pick(self.ranks, self.rank)
        return rank, self._scaling(pick(self.alphas, self.alpha), rank)


@functools.lru_cache
def _matcher(file: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise CheckpointError(f"{file}: {pattern!r} is no regular expression: {error}") from None


class _Pair(NamedTuple):
    """The tensors of one adapted module; `expert` of its target is None for all experts of a fused parameter, named `fused`."""

    key_a: str
    key_b: str
    target: Target
    rank: int
    scale: float
    fused: str | None = None


def _pair_keys(files: TensorFiles, config: Config, settings: _Settings) -> tuple[list[_Pair], list[str]]:
    """The pairs of an adapter, checked by name and shape, and what is wrong with them."""
    targets, projections = peft_targets(config), config.projections()
    sparse = {layer: i for i, layer in enumerate(layers_with(config, "sparse"))}
    halves: dict[tuple[str, str], dict[str, str]] = {}
    problems = []
    for key in files.names():
        match = _KEY.fullmatch(key)
        layer = match and _FUSED.fullmatch(match[2])
        if not match or not (match[2] in targets or (layer and int(layer[1]) in sparse)):
            problems.append(f"unknown {key}")
        else:
            halves.setdefault((match[1], match[2]), {})[match[3]] = key
    if len({root for root, _ in halves}) > 1:
        problems.append(f"modules under {' and '.join(sorted({root for root, _ in halves}))}; keep those under one of them")
    pairs = []
    for (root, module), found in halves.items():
        if len(found) < 2:
            problems.append(f"only one of lora_A and lora_B of {module}")
            continue
        shape_a, shape_b = files.shape(found["A"]), files.shape(found["B"])
        fused, experts = None, 1
        if match := _FUSED.fullmatch(module):
            # the names do not say which parameter is adapted, the widths do: no model has both 2F = D and F = D
            p, experts = projections["expert_down"], config.num_experts
            down = (shape_a[-1:], shape_b[:1]) == ((p.width,), (p.out,))
            fused, width, out = ("down_proj", p.width, p.out) if down else ("gate_up_proj", p.out, 2 * p.width)
            target = Target("expert_down" if down else "expert_gate", sparse[int(match[1])])
            named = f"{root}.layers.{match[1]}.mlp.experts.{fused}"
        else:
            target, named = targets[module], f"{root}.{module}"
            width, out = projections[target.name].width, projections[target.name].out
        rank, scale = settings.of(named)
        for key, shape, expected in (
            (found["A"], shape_a, (experts * rank, width)),
            (found["B"], shape_b, (out, experts * rank)),
        ):
            if shape != expected:
                problems.append(f"{key} has shape {shape}, the model and rank {rank} imply {expected}")
        pairs.append(_Pair(found["A"], found["B"], target, rank, scale, fused))
    whole = [(pair.target, pair.fused) for pair in pairs if pair.fused]
    if len(set(whole)) < len(whole) or (whole and any(pair.target.expert is not None for pair in pairs)):
        problems.append("the experts of a layer are adapted twice")
    return pairs, problems


def _read_pairs(files: TensorFiles, pairs: list[_Pair]) -> Iterator[tuple[_Pair, np.ndarray, np.ndarray]]:
    for first in range(0, len(pairs), _TOGETHER_READ):
        some = pairs[first : first + _TOGETHER_READ]
        tensors = files.read_all([(key, ()) for pair in some for key in pair[:2]])
        yield from zip(some, (x.astype(np.float32) for x in tensors[::2]), (x.astype(np.float32) for x in tensors[1::2]), strict=True)


def _parts(pair: _Pair, a: np.ndarray, b: np.ndarray, config: Config) -> Iterator[tuple[str, tuple[int, ...], np.ndarray, np.ndarray]]:
    """(projection, where in its stack, A[.., in, rank], B[.., rank, out]) of a pair: two of gate_up_proj, which have A in common."""
    name, layer, expert = pair.target
    if pair.fused is None:
        yield name, (layer, 0) if expert is None else (layer, 0, expert), a.T, b.T
        return
    a = a.reshape(config.num_experts, pair.rank, -1).swapaxes(1, 2)
    b = b.reshape(-1, pair.rank, config.num_experts).transpose(2, 1, 0)
    if pair.fused == "down_proj":
        yield name, (layer, 0), a, b
    else:
        gate, up = np.split(b, 2, axis=-1)
        yield "expert_gate", (layer, 0), a, gate
        yield "expert_up", (layer, 0), a, up
