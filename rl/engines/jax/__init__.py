"""The embedded engine: the model of this repository, decoded in batches under jit."""

from rl.engines.jax.engine import JaxEngine

__all__ = ["JaxEngine"]
