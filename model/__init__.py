"""The Qwen backbone in Flax NNX: pure functions and modules that know nothing of reinforcement learning."""

from model.cache import Cache, Pool, init_cache, init_pool
from model.causal_lm import CausalLM, Output
from model.composed import export_composed, save_gate_update
from model.config import Config, parse_config, read_config
from model.errors import CheckpointError, ConfigError
from model.export_hf import load_gate, merge, save_gate, save_pretrained
from model.gate import Gate, Routing, constant_gate, count_gate_parameters, grow, init_gate, open_slots
from model.load_hf import load_pretrained
from model.logprobs import token_logprobs
from model.lora import AdapterBank, count_adapter_parameters, init_bank, slice_bank, stack_banks
from model.parameters import count_parameters
from model.peft_files import load_peft, save_peft
from model.rotary import Rope

__all__ = [
    "AdapterBank",
    "Cache",
    "CausalLM",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Gate",
    "Output",
    "Pool",
    "Rope",
    "Routing",
    "constant_gate",
    "count_adapter_parameters",
    "count_gate_parameters",
    "count_parameters",
    "export_composed",
    "grow",
    "init_bank",
    "init_cache",
    "init_gate",
    "init_pool",
    "load_gate",
    "load_peft",
    "load_pretrained",
    "merge",
    "open_slots",
    "parse_config",
    "read_config",
    "save_gate",
    "save_gate_update",
    "save_peft",
    "save_pretrained",
    "slice_bank",
    "stack_banks",
    "token_logprobs",
]
