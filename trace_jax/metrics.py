"""Figures of a run over its steps: one JSON line and TensorBoard scalars for each.

`metrics.jsonl` is what the report reads; `events/` is the same for TensorBoard. A run that goes on from a checkpoint drops the lines of
the steps that it does again, so that each step is there once.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping

from trace_jax.workdir import Workdir


class Metrics:
    """Writes `<folder>/metrics.jsonl` and `events/<folder>/`; use it in a `with` block.

    Args:
      folder: of the workdir, `adapters/<capability>` or `gate`.
      step: the step that comes next; what an earlier run wrote for it and for later ones is dropped.
    """

    def __init__(self, workdir: Workdir, folder: str, step: int = 0):
        # protobuf: only where figures are written; not SummaryWriter, whose thread dies of a full disk long after this block
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._writer: EventsWriter | None = None
        self._workdir, self._name = workdir, f"{folder}/metrics.jsonl"
        records = read_metrics(workdir, folder)
        kept = [record for record in records if record["step"] < step]
        if len(kept) < len(records):
            workdir.write_bytes(self._name, "".join(json.dumps(record) + "\n" for record in kept).encode())
        if not workdir.processes.leads:
            return
        # the names of event files are unique to the second only
        self._writer = EventsWriter(str(workdir.log(f"events/{folder}/events")), f".{os.getpid()}.{step}")
        self._event = Event
        if step:  # TensorBoard drops what it has of this step and later ones
            self._writer.write_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the figures of one step; one that is not finite is null in the JSON line."""
        numbers = {name: float(value) for name, value in values.items()}
        line = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._workdir.append_jsonl(self._name, {"step": step, **line})
        if self._writer is None:
            return
        event = self._event(wall_time=time.time(), step=step)
        for name, value in line.items():
            if value is not None:
                event.summary.value.add(tag=name, simple_value=value)
        self._writer.write_event(event)
        self._writer.flush()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def read_metrics(workdir: Workdir, folder: str) -> list[dict[str, float | None]]:
    """The figures of all steps, `[{"step": 0, ...}, ...]`; empty where nothing was written."""
    return workdir.read_jsonl(f"{folder}/metrics.jsonl")
