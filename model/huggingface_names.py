"""Where each parameter lies in a Hugging Face checkpoint: names, stacking, transposition. Nothing is read or written here.

Hugging Face keeps a linear weight [out, in] under a name of its layer (and expert); ours is [in, out], stacked over the layers that have it
(and over experts). Two layouts of experts are in use: one tensor for each expert and projection, which transformers writes and engines
read, and two tensors a layer, `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F], as Qwen3.5 is published.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from model.config import Config, Part
from model.parameters import parameter_specs

# the modules of the projections inside of a layer
MODULES = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "a", "b")},
    "out": "linear_attn.out_proj",
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    **{f"shared_{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    **{f"expert_{name}": f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")},
}
_TENSORS = {
    **{name: f"{module}.weight" for name, module in MODULES.items()},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
    **{name: f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")},
    "conv": "linear_attn.conv1d.weight",
    "dt_bias": "linear_attn.dt_bias",
    "A_log": "linear_attn.A_log",
    "delta_norm": "linear_attn.norm.weight",
    "router": "mlp.gate.weight",
    "shared_router": "mlp.shared_expert_gate.weight",
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
}
_FUSED = {
    "expert_gate": "mlp.experts.gate_up_proj",
    "expert_up": "mlp.experts.gate_up_proj",
    "expert_down": "mlp.experts.down_proj",
}
HEAD = "lm_head.weight"
_TURNED = {*MODULES, "router", "shared_router", "head"}  # [out, in] there, [in, out] here
_ROOTS = ("model", "model.language_model")  # the second where a checkpoint has a vision tower


class Source(NamedTuple):
    """Where one layer of a parameter lies, or all of one that belongs to no layer.

    Attributes:
      tensors: the one tensor, or that of each expert.
      shape: of each of them.
      turned: whether their last two axes are ours in the other order.
      start: our first row, the axis before the last, of a tensor that holds gate and up.
      per_expert: whether `tensors` are our first axis.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    turned: bool = False
    start: int = 0
    per_expert: bool = False


def layers_with(config: Config, part: Part) -> list[int]:
    """The layers that have a part, in the order in which its parameters are stacked."""
    return [i for i, kind in enumerate(config.kinds()) if kind.has(part)]


def huggingface_sources(config: Config, root: str = "model", fused: bool = False) -> dict[str, list[Source]]:
    """{our parameter: where each of its layers lies}, in a checkpoint whose decoder is the module `root`; `fused`: two expert tensors a
    layer."""
    top = {"embed": f"{root}.embed_tokens.weight", "norm": f"{root}.norm.weight", "head": HEAD}

    def source(name: str, shape: tuple[int, ...], prefix: str) -> Source:
        turned = name in _TURNED
        shape = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        if name == "conv":
            return Source((prefix + _TENSORS[name],), (shape[0], 1, shape[1]))
        if fused and name in _FUSED:
            experts, rows, width = shape
            whole = shape if name == "expert_down" else (experts, 2 * rows, width)
            return Source((prefix + _FUSED[name],), whole, turned, rows if name == "expert_up" else 0)
        if name in _FUSED:
            return Source(tuple(prefix + _TENSORS[name].format(expert=e) for e in range(shape[0])), shape[1:], turned, per_expert=True)
        return Source((prefix + _TENSORS[name],), shape, turned)

    table = {}
    for name, spec in parameter_specs(config).items():
        if spec.part is None:
            table[name] = [Source((top[name],), spec.shape[::-1] if name in _TURNED else spec.shape, name in _TURNED)]
        else:
            layers = layers_with(config, spec.part)
            table[name] = [source(name.removeprefix("layers."), spec.shape[1:], f"{root}.layers.{i}.") for i in layers]
    return table


def find_layout(names: Collection[str]) -> tuple[str, bool]:
    """The `root` and `fused` of `huggingface_sources` that the tensors of a checkpoint are named by."""
    root = next((root for root in _ROOTS if f"{root}.embed_tokens.weight" in names), _ROOTS[0])
    return root, any(name.endswith(_FUSED["expert_gate"]) for name in names)
