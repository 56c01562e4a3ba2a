"""A Qwen backbone with a bank of LoRA adapters and a token gate, for transformers: `from_pretrained(folder, trust_remote_code=True)`.

In every layer each token takes one slot: `argmax(h @ kernel + bias)` in float32 of the normalised layer input h. Slot 0 is the base, slot
k + 1 adapter k, and the slot governs all adapted projections of the layer: `y += scale_k * (x @ A_k) @ B_k`. All adapters are applied as
one product, `((x @ [A_1 .. A_K]) * mask) @ [B_1; ..; B_K]`, whose mask is zero but for the ranks of the token's slot.

This file stands alone beside the weights. The base's tensors keep their names and files; the bank and the gate add

    model.layers.N.<projection>.lora.A  [K*R, in]     .B  [out, K*R]          model.layers.N.input_layernorm.gate.kernel  [D, S]
    model.layers.N.mlp.experts.{gate,up,down}_lora.A  [E, K*R, in]  .B  [E, out, K*R]                            .bias    [S]

and `trace_jax` in config.json gives the names of the slots, the rank R and the scales. Shape letters: B batch, T time, D model width,
K adapters, S = K + 1 slots, R rank, E experts, L layers, N tokens.
"""

from __future__ import annotations

import json
import os
from contextvars import ContextVar
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

FORMAT = 1  # of the tensors and of `trace_jax` in config.json

# linear layers that carry adapters, below a decoder layer
ADAPTED = {
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")),
    *(f"mlp.{part}{name}_proj" for part in ("", "shared_expert.") for name in ("gate", "up", "down")),
}

# State of a call, not of a model: two threads may run one model. The rank mask is that of the layer that is running.
_RANKS: ContextVar[torch.Tensor] = ContextVar("ranks")
_SLOTS: ContextVar[list[torch.Tensor] | None] = ContextVar("slots", default=None)


def choose_slots(hidden: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """hidden[..., D] -> the slot [...] of each token, decided in float32 whatever the model runs in."""
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.argmax(hidden.float() @ kernel.float() + bias.float(), dim=-1)


def rank_mask(slots: torch.Tensor, scale: tuple[float, ...], rank: int) -> torch.Tensor:
    """slots[...] -> float32 [..., K * R]: the scale of the token's adapter in that adapter's ranks, zero elsewhere."""
    weights = torch.stack([(slots == k + 1).float() * s for k, s in enumerate(scale)], dim=-1)
    return weights.repeat_interleave(rank, dim=-1)


def delta(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """What the bank adds to one projection: x[..., in], a[K * R, in], b[out, K * R], ranks with x's tokens -> [..., out]."""
    inner = F.linear(x, a)
    return F.linear(inner * ranks.reshape(inner.shape).to(inner.dtype), b)


class Gate(nn.Module):
    """One layer's choice among S slots; as a forward hook of the layer's input norm it sets the rank mask of the layer."""

    def __init__(self, width: int, scale: tuple[float, ...], rank: int):
        super().__init__()
        self.scale, self.rank = scale, rank
        self.kernel = nn.Parameter(torch.zeros(width, len(scale) + 1, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(len(scale) + 1, dtype=torch.float32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return choose_slots(hidden, self.kernel, self.bias)


def route(norm: nn.Module, inputs: tuple, hidden: torch.Tensor) -> None:
    """Forward hook of an input norm: all projections up to the next input norm follow this decision."""
    slots = norm.gate(hidden)
    _RANKS.set(rank_mask(slots, norm.gate.scale, norm.gate.rank))
    if (taken := _SLOTS.get()) is not None:
        taken.append(slots)


class LoRA(nn.Module):
    """The factors of one projection of all adapters; `lead` is (E,) for those of experts."""

    def __init__(self, width: int, out: int, ranks: int, *lead: int):
        super().__init__()
        self.A = nn.Parameter(torch.zeros(*lead, ranks, width))
        self.B = nn.Parameter(torch.zeros(*lead, out, ranks))


class RoutedLinear(nn.Module):
    """A linear layer, whose parameters it takes over, with the delta of each token's slot."""

    def __init__(self, linear: nn.Linear, ranks: int):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora = LoRA(linear.in_features, linear.out_features, ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + delta(x, self.lora.A, self.lora.B, _RANKS.get())


class RoutedExperts(nn.Module):
    """The experts of a layer, whose parameters it takes over, each with its part of the bank."""

    def __init__(self, experts: nn.Module, ranks: int):
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = experts.gate_up_proj, experts.down_proj, experts.act_fn  # [E, 2F, D], [E, D, F]
        count, width, inner = self.down_proj.shape
        self.gate_lora, self.up_lora = LoRA(width, inner, ranks, count), LoRA(width, inner, ranks, count)
        self.down_lora = LoRA(inner, width, ranks, count)

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden[N, D], the router's experts[N, k] and weights[N, k] -> [N, D], summed in float32."""
        ranks = _RANKS.get().reshape(len(hidden), -1)
        result = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in torch.unique(experts).tolist():
            rows, choice = torch.where(experts == expert)
            y = self.run_expert(expert, hidden[rows], ranks[rows]) * weights[rows, choice, None]
            result = result.index_add(0, rows, y.float())
        return result.to(hidden.dtype)

    def run_expert(self, expert: int, x: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        def bank(lora: LoRA, x: torch.Tensor) -> torch.Tensor:
            return delta(x, lora.A[expert], lora.B[expert], ranks)

        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        inner = self.act_fn(gate + bank(self.gate_lora, x)) * (up + bank(self.up_lora, x))
        return F.linear(inner, self.down_proj[expert]) + bank(self.down_lora, inner)


def adapt(layer: nn.Module, width: int, scale: tuple[float, ...], rank: int) -> None:
    """Gives one decoder layer its gate and its part of the bank."""
    for name, module in list(layer.named_modules()):
        parent, _, child = name.rpartition(".")
        if name in ADAPTED:
            setattr(layer.get_submodule(parent), child, RoutedLinear(module, len(scale) * rank))
        elif name == "mlp.experts":
            layer.mlp.experts = RoutedExperts(module, len(scale) * rank)
    layer.input_layernorm.gate = Gate(width, scale, rank)
    layer.input_layernorm.register_forward_hook(route)


class Composed:
    """What the four models below have in common."""

    _keep_in_fp32_modules_strict = ["input_layernorm.gate"]
    _can_compile_fullgraph = False  # experts are picked on the host

    def __init__(self, config):
        text = config.get_text_config()  # of a checkpoint with a vision tower; for others the config itself
        text.trace_jax = trace = config.trace_jax
        text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
        if trace["format"] != FORMAT:
            raise ValueError(f"trace_jax in config.json has format {trace['format']}, this modelling file reads {FORMAT}; export again")
        super().__init__(text)
        for layer in self.model.layers:
            adapt(layer, text.hidden_size, tuple(trace["scale"]), trace["rank"])

    @property
    def slot_names(self) -> list[str]:
        """The names of the S slots, the base first."""
        return list(self.config.trace_jax["slots"])

    # __call__ and not forward, whose signature tells `generate` what the backbone accepts
    def __call__(self, *args, output_slots: bool = False, **kwargs):
        """As the backbone; with `output_slots` the output also has `slots`, int8 [B, T, L]."""
        if not output_slots:
            return super().__call__(*args, **kwargs)
        token = _SLOTS.set([])
        try:
            output = super().__call__(*args, **kwargs | {"return_dict": True})
            taken = _SLOTS.get()
        finally:
            _SLOTS.reset(token)
        output["slots"] = torch.stack([slots.to(taken[0].device, torch.int8) for slots in taken], dim=-1)
        return output

    @classmethod
    def from_pretrained(cls, folder, *args, output_loading_info: bool = False, **kwargs):
        """As the backbone, but what the checkpoint lacks is an error, not drawn at random, and so is what the bank has too much."""
        if folder is not None and os.path.isdir(folder):
            check_files(Path(folder))
        # transformers renames these for its own classes only
        kwargs["key_mapping"] = {r"^model\.language_model\.": "model."} | (kwargs.get("key_mapping") or {})
        model, info = super().from_pretrained(folder, *args, output_loading_info=True, **kwargs)
        problems = [f"missing {name}" for name in sorted(info["missing_keys"])]
        problems += [f"of another shape {name}" for name in sorted(str(key) for key in info["mismatched_keys"])]
        problems += [
            f"surplus {name}" for name in sorted(info["unexpected_keys"]) if ".lora." in name or "_lora." in name or "norm.gate." in name
        ]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ValueError(f"{folder}: the tensors are not those of config.json: {shown}; export the model again")
        return (model, info) if output_loading_info else model


def check_files(folder: Path) -> None:
    """`OSError` naming the file of a local folder that is missing or cut short."""
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if not (folder / names[0]).exists() and index.exists():  # a model that was loaded and saved has the one, an export the other
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} does not exist; copy the whole folder or export again")
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except SafetensorError as error:
            raise OSError(f"{folder / name} is not a whole safetensors file ({error}); copy it again") from None


class TraceQwen3ForCausalLM(Composed, Qwen3ForCausalLM):
    pass


class TraceQwen3MoeForCausalLM(Composed, Qwen3MoeForCausalLM):
    pass


class TraceQwen3_5ForCausalLM(Composed, Qwen3_5ForCausalLM):
    pass


class TraceQwen3_5MoeForCausalLM(Composed, Qwen3_5MoeForCausalLM):
    pass
