"""The processes of one run: they meet (`job`, `membership`, `roll_call`), go on in step (`in_step`) and end together (`job`)."""

from trace_jax.processes.in_step import ALONE, Processes

__all__ = ["ALONE", "Processes"]
