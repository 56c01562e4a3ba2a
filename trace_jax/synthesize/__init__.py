"""Step 2: one certified and calibrated environment per retained capability."""

from trace_jax.synthesize.command import main, synthesize_all

__all__ = ["main", "synthesize_all"]
