"""Rollouts from SGLang servers over HTTP, their adapters swapped while they serve."""

from rl.engines.sglang.engine import SGLangEngine
from rl.engines.sglang.launch import Servers, ServerSettings, start_servers

__all__ = ["SGLangEngine", "ServerSettings", "Servers", "start_servers"]
