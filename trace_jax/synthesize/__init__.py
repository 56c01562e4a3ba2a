"""Step 2: one certified and calibrated environment per retained capability."""

from trace_jax.synthesize.command import main, refusal, require_finished, synthesize_all
from trace_jax.synthesize.generation import NEEDS_ATTENTION, OPEN
from trace_jax.synthesize.packages import own_packages

__all__ = ["NEEDS_ATTENTION", "OPEN", "main", "own_packages", "refusal", "require_finished", "synthesize_all"]
