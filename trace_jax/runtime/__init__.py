"""What the steps of one run share: model, workers, engines, batches of rollouts, and which seeds and tasks each step may use."""

from trace_jax.runtime.batches import BASE
from trace_jax.runtime.opening import keep_compiled_programs, open_runtime
from trace_jax.runtime.runtime import Runtime, find_package
from trace_jax.runtime.seeds import (
    AGREEMENT,
    AGREEMENT_SEEDS,
    CALIBRATION,
    GATE,
    GATE_TRAINING,
    HELDOUT_TASKS,
    SELECTION,
    TRAIN_TASKS,
    TRAINING,
    USED,
    VALIDATION,
)
from trace_jax.runtime.stages import plan

__all__ = [
    "AGREEMENT",
    "AGREEMENT_SEEDS",
    "BASE",
    "CALIBRATION",
    "GATE",
    "GATE_TRAINING",
    "HELDOUT_TASKS",
    "SELECTION",
    "TRAINING",
    "TRAIN_TASKS",
    "USED",
    "VALIDATION",
    "Runtime",
    "find_package",
    "keep_compiled_programs",
    "open_runtime",
    "plan",
]
