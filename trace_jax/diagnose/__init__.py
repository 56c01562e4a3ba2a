"""Step 1: which capabilities does the agent lack, by contrast of failed and passed trajectories."""

from trace_jax.diagnose.diagnosis import Diagnosis, diagnose
from trace_jax.diagnose.report import print_diagnosis

__all__ = ["Diagnosis", "diagnose", "print_diagnosis"]
