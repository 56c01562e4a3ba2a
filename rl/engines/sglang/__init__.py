"""Rollouts from SGLang servers over HTTP, their adapters swapped while they serve."""

from rl.engines.sglang.engine import SGLangEngine, reference_of
from rl.engines.sglang.fleet import Limits
from rl.engines.sglang.launch import Servers, ServerSettings, start_servers

__all__ = ["Limits", "SGLangEngine", "ServerSettings", "Servers", "reference_of", "start_servers"]
