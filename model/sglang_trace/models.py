"""A Qwen backbone with a bank of LoRA adapters and a token gate, as models of SGLang (written for 0.5.23).

In every layer each token takes one slot: `argmax(h @ kernel + bias)` in float32 of the normalised layer input h. Slot 0 is the base, slot
k + 1 adapter k, and the slot governs all adapted projections of the layer: `y += scale_k * (x @ A_k) @ B_k`. All adapters are applied as
one product whose inner values are masked but for the ranks of the token's slot, so a step has the same operations whatever its tokens
choose, and CUDA graphs can record it.

This file stands alone beside the weights, whose names `modeling_trace.py` lists. SGLang's classes do everything but the adapters: the
deltas are forward hooks of the linear layers; experts are computed here, as grouped products, because SGLang's kernel keeps to itself the
values between an expert's two products, where adapters have a part.

What runs: qwen3 and qwen3_moe whose layers all have experts, one GPU or the CPU per server, unquantised. The constructor refuses the rest.

The gate can be exchanged while the server runs: `/update_weights_from_disk` with a folder that holds all layers' gates and nothing else
(`model.composed.save_gate_update` makes one). SGLang then empties its prefix cache, whose keys and values the old gate had a part in.

Shape letters: N tokens, D model width, K adapters, S = K + 1 slots, R rank, E experts, F width of an expert.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.runtime_context import get_lora, get_parallel
from torch import nn

FORMAT = 1  # of the tensors and of `trace_jax` in config.json
_ALIGNED = 16  # grouped products on a GPU want rows of whole 16 bytes

logger = logging.getLogger(__name__)


def _frozen(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


class Gate(nn.Module):
    """One layer's choice among S slots. `ranks` [N, W] is that of the running step: the scale of each token's adapter in its ranks."""

    def __init__(self, width: int, scale: list[float], rank: int):
        super().__init__()
        self.kernel = _frozen(width, len(scale) + 1, dtype=torch.float32)
        self.bias = _frozen(len(scale) + 1, dtype=torch.float32)
        used = torch.repeat_interleave(torch.diag(torch.tensor(scale, dtype=torch.float32)), rank, dim=1)  # [K, K * R]
        table = F.pad(used, (0, -used.shape[1] % _ALIGNED, 1, 0))
        self.register_buffer("table", table, persistent=False)  # [S, W], row 0 is zero
        self.ranks = table[:0]

    @property
    def width(self) -> int:
        """W, K * R rounded up."""
        return self.table.shape[1]

    def forward(self, hidden: torch.Tensor) -> None:
        """Decides for hidden[N, D], the normalised input of the layer."""
        self.ranks = self.table[torch.argmax(hidden.float() @ self.kernel + self.bias, dim=-1)]


class LoRA(nn.Module):
    """The bank's part of a linear layer, as a forward hook. The layer may fuse P projections of one input: B is then block diagonal."""

    def __init__(self, gate: Gate, width: int, outs: list[int], decides: bool = False):
        super().__init__()
        self._gate, self.decides, self.outs = [gate], decides, outs  # in a list: the gate is no part of this module
        self.A = _frozen(len(outs) * gate.width, width)
        self.B = _frozen(sum(outs), len(outs) * gate.width)

    def forward(self, module: nn.Module, inputs: tuple, output: tuple) -> tuple:
        gate, x = self._gate[0], inputs[0]
        if self.decides:
            gate(x)
        inner = F.linear(x, self.A) * gate.ranks.to(x.dtype).repeat(1, len(self.outs))
        return output[0] + F.linear(inner, self.B), *output[1:]

    def targets(self, part: int, ranks: int, shape: tuple[int, int]) -> dict[str, tuple[nn.Parameter, tuple[slice, ...]]]:
        """Where the checkpoint's A[ranks, width] and B[out, ranks] of the fused projection `part` go; shape is (width, out) there."""
        row, column = sum(self.outs[:part]), part * self._gate[0].width
        inner = slice(column, column + ranks)
        return {"A": (self.A, (inner, slice(0, shape[0]))), "B": (self.B, (slice(row, row + shape[1]), inner))}


class ExpertsLoRA(nn.Module):
    """The experts of a layer with the bank's part of each, in place of `FusedMoE.forward`."""

    def __init__(self, gate: Gate, experts: nn.Module):
        super().__init__()
        self._gate, self._experts = [gate], [experts]
        count, width, inner = experts.w2_weight.shape  # [E, D, F]
        self.gate_A, self.gate_B = _frozen(count, gate.width, width), _frozen(count, inner, gate.width)
        self.up_A, self.up_B = _frozen(count, gate.width, width), _frozen(count, inner, gate.width)
        self.down_A, self.down_B = _frozen(count, gate.width, inner), _frozen(count, width, gate.width)

    def forward(self, hidden: torch.Tensor, topk, *_, **__) -> torch.Tensor:
        """hidden[N, D] -> [N, D]; `topk` has the router's experts[N, k] and weights[N, k]."""
        if not TopKOutputChecker.format_is_standard(topk):
            raise NotImplementedError("the routed experts need the router's choice as ids and weights; use --moe-runner-backend triton")
        experts, count, k = self._experts[0], self.gate_A.shape[0], topk.topk_ids.shape[1]
        chosen, order = torch.sort(topk.topk_ids.flatten().clamp(0, count - 1), stable=True)  # rows of one expert together
        ends = torch.searchsorted(chosen, torch.arange(count, device=chosen.device, dtype=chosen.dtype), right=True).int()
        tokens = order // k
        x, ranks = hidden[tokens], self._gate[0].ranks[tokens].to(hidden.dtype)

        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)

        def bank(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return product(product(x, a) * ranks, b)

        both = product(x, experts.w13_weight)
        if getattr(experts.quant_method, "w13_swiglu_interleaved", False):  # SGLang may have reordered the rows for its own kernel
            gate, up = both[:, 0::2], both[:, 1::2]
        else:
            gate, up = both.chunk(2, dim=-1)
        inner = F.silu(gate + bank(x, self.gate_A, self.gate_B)) * (up + bank(x, self.up_A, self.up_B))
        y = product(inner, experts.w2_weight) + bank(inner, self.down_A, self.down_B)
        y = y[torch.argsort(order)].view(*topk.topk_ids.shape, -1)
        return (y.float() * topk.topk_weights[..., None]).sum(1).to(hidden.dtype)


class Composed:
    """What the models below have in common."""

    def __init__(self, config, quant_config=None, prefix: str = ""):
        trace = _check(config, quant_config)
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        self._targets: dict[str, tuple[nn.Parameter, tuple[slice, ...]]] = {}
        self._loaded = self._refused = False
        for i, layer in enumerate(self.model.layers):
            self._adapt(layer, f"model.layers.{i}", config, trace)

    def _adapt(self, layer: nn.Module, prefix: str, config, trace: dict) -> None:
        """Gives one decoder layer its gate and its part of the bank."""
        width, ranks = config.hidden_size, len(trace["scale"]) * trace["rank"]
        gate = layer.trace_gate = Gate(width, trace["scale"], trace["rank"])
        for name in ("kernel", "bias"):
            self._targets[f"{prefix}.input_layernorm.gate.{name}"] = getattr(gate, name), ()

        def hook(part: str, fused: str, names: list[str], shapes: list[tuple[int, int]], decides: bool = False) -> None:
            linear = getattr(getattr(layer, part), fused)
            # widths are the layer's own: SGLang fills up an MLP to a multiple of 32 on a CPU
            outs = linear.output_partition_sizes if len(names) > 1 else [linear.output_size]
            linear.trace_lora = lora = LoRA(gate, linear.input_size, list(outs), decides)
            linear.register_forward_hook(lora)
            for j, (name, shape) in enumerate(zip(names, shapes, strict=True)):
                for key, target in lora.targets(j, ranks, shape).items():
                    self._targets[f"{prefix}.{part}.{name}.lora.{key}"] = target

        attention = layer.self_attn
        query, value = attention.total_num_heads * attention.head_dim, attention.total_num_kv_heads * attention.head_dim
        hook("self_attn", "qkv_proj", ["q_proj", "k_proj", "v_proj"], [(width, query), (width, value), (width, value)], decides=True)
        hook("self_attn", "o_proj", ["o_proj"], [(query, width)])
        if hasattr(layer.mlp, "experts"):
            experts, inner = layer.mlp.experts, _unpadded(config, "moe_intermediate_size")
            layer.mlp.trace_lora = lora = ExpertsLoRA(gate, experts)
            experts.forward = lora.forward
            for name, (wide, out) in {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}.items():
                module, every = f"{prefix}.mlp.experts.{name}_lora", slice(None)
                self._targets[f"{module}.A"] = getattr(lora, f"{name}_A"), (every, slice(0, ranks), slice(0, wide))
                self._targets[f"{module}.B"] = getattr(lora, f"{name}_B"), (every, slice(0, out), slice(0, ranks))
        else:
            inner = _unpadded(config, "intermediate_size")
            hook("mlp", "gate_up_proj", ["gate_proj", "up_proj"], [(width, inner), (width, inner)])
            hook("mlp", "down_proj", ["down_proj"], [(inner, width)])
            if hasattr(layer.mlp, "dual_gemm"):
                layer.mlp.dual_gemm.mode = None  # a kernel for small batches that reads the weight and passes by the hook

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args, **kwargs):
        """All of the checkpoint at first; later whole gates, whole banks, or weights of the base.

        Raises `ValueError` for a bank or gate that is not whole or of other shapes; nothing of a later one is then applied.
        """
        ours: dict[str, torch.Tensor] = {}

        def base() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if not _is_ours(name):
                    yield name, tensor
                elif self._loaded or _is_gate(name) or name not in self._targets:
                    ours[name] = tensor
                else:  # the first bank is put in its place at once: that of a large model has gigabytes
                    self._put(name, tensor)
                    ours[name] = tensor.new_empty(0)

        result = super().load_weights(base(), *args, **kwargs)
        problems = self._problems(ours)
        if problems and self._refused:  # SGLang undoes a failed update by loading the same folder again; a second error would end it
            self._refused = False
            logger.error("the update was refused and changed neither bank nor gate")
            return result
        if problems:
            self._refused = self._loaded
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ValueError(f"bank and gate are not those of config.json: {shown}; export them again")
        for name, tensor in ours.items():
            if tensor.numel():
                self._put(name, tensor)
        self._loaded, self._refused = True, False
        return result

    def _problems(self, ours: dict[str, torch.Tensor]) -> list[str]:
        problems = [f"surplus {name}" for name in ours if name not in self._targets]
        for group in (True, False):
            expected = {name for name in self._targets if _is_gate(name) == group}
            if not self._loaded or ours.keys() & expected:
                problems += [f"missing {name}" for name in sorted(expected - ours.keys())]
        for name, tensor in ours.items():
            if name in self._targets and tensor.numel() and tensor.shape != (shape := self._view(name).shape):
                problems.append(f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
        return problems

    def _view(self, name: str) -> torch.Tensor:
        parameter, index = self._targets[name]
        return parameter.data[index]

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        view = self._view(name)
        if tensor.shape != view.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)} instead of {list(view.shape)}; export the model again")
        view.copy_(tensor)


def _is_gate(name: str) -> bool:
    return ".input_layernorm.gate." in name


def _is_ours(name: str) -> bool:
    return ".lora." in name or "_lora." in name or _is_gate(name)


def _unpadded(config, name: str) -> int:
    """A width as the checkpoint has it; SGLang may have rounded it up in `config`."""
    return getattr(config, f"original_{name}", None) or getattr(config, name)


def _check(config, quant_config) -> dict:
    """`trace_jax` of config.json. `ValueError` for what this file does not serve, with the option to change."""
    trace = getattr(config, "trace_jax", None)
    if trace is None:
        raise ValueError("config.json has no trace_jax; serve a folder that `trace-jax export --what=composed` wrote")
    if trace["format"] != FORMAT:
        raise ValueError(f"trace_jax in config.json has format {trace['format']}, this file reads {FORMAT}; export again")
    parallel = get_parallel()
    sizes = {name: getattr(parallel, name) for name in ("tp_size", "pp_size", "moe_ep_size", "attn_dp_size")}
    if any(size > 1 for size in sizes.values()):
        raise ValueError(f"the composed model is not divided over GPUs ({sizes}); start one server a GPU with --tp-size 1")
    if quant_config is not None:
        raise ValueError("the composed model is served unquantised; leave --quantization out")
    if get_lora().enable_lora:
        raise ValueError("the composed model has its adapters built in, and --enable-lora would pass them by; leave it out")
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        raise ValueError("SGLang's qwen3_moe has experts in every layer, this base has dense ones among them; use trace-jax serve")
    return trace


class TraceQwen3ForCausalLM(Composed, Qwen3ForCausalLM):
    pass


class TraceQwen3MoeForCausalLM(Composed, Qwen3MoeForCausalLM):
    pass


class TraceQwen3_5ForCausalLM(nn.Module):
    """Not served: SGLang fuses the projections of gated delta layers, and no hook is left between them."""

    def __init__(self, *_, **__):
        super().__init__()
        raise NotImplementedError("SGLang does not serve composed models of the hybrid bases (qwen3_5, qwen3_5_moe); use trace-jax serve")


class TraceQwen3_5MoeForCausalLM(TraceQwen3_5ForCausalLM):
    pass


EntryClass = [TraceQwen3ForCausalLM, TraceQwen3MoeForCausalLM, TraceQwen3_5ForCausalLM, TraceQwen3_5MoeForCausalLM]
