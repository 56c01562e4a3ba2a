"""The Qwen backbone in Flax NNX: pure functions and modules that know nothing of reinforcement learning."""

from model.cache import KVCache, init_cache
from model.config import PROJECTIONS, Config, ConfigError, parse_config, read_config
from model.export_hf import load_gate, load_peft, merge, save_gate, save_peft, save_pretrained
from model.gate import Gate, Routing, count_gate_parameters, init_gate
from model.load_hf import CheckpointError, load_pretrained
from model.logprobs import token_logprobs
from model.lora import AdapterBank, count_adapter_parameters, init_bank, slice_bank, stack_banks
from model.qwen3 import Output, Qwen3, count_parameters

__all__ = [
    "PROJECTIONS",
    "AdapterBank",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Gate",
    "KVCache",
    "Output",
    "Qwen3",
    "Routing",
    "count_adapter_parameters",
    "count_gate_parameters",
    "count_parameters",
    "init_bank",
    "init_cache",
    "init_gate",
    "load_gate",
    "load_peft",
    "load_pretrained",
    "merge",
    "parse_config",
    "read_config",
    "save_gate",
    "save_peft",
    "save_pretrained",
    "slice_bank",
    "stack_banks",
    "token_logprobs",
]
