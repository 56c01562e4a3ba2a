"""SGL-JAX as the engine, in this process, on TPU: its scheduler and kernels, our adapters in its arrays."""

from rl.engines.sgl_jax.engine import SglJaxEngine
from rl.engines.sgl_jax.launch import launch

__all__ = ["SglJaxEngine", "launch"]
