"""What samples tokens: one protocol, several engines behind it."""

from rl.engines.protocol import Completion, Engine, EngineError, Policy, Request

__all__ = ["Completion", "Engine", "EngineError", "Policy", "Request"]
