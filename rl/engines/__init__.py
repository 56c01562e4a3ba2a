"""What samples tokens: one protocol, several engines behind it."""

from rl.engines.protocol import Completion, Engine, EngineError, EngineFault, Policy, Request

__all__ = ["Completion", "Engine", "EngineError", "EngineFault", "Policy", "Request"]
