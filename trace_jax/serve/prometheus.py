"""What the server counts, in Prometheus' text format."""

from __future__ import annotations

import collections
from collections.abc import Mapping

_HELP = {
    "requests_total": "answers by path and status",
    "prompt_tokens_total": "tokens of prompts by model",
    "completion_tokens_total": "tokens sampled by model, as far as a client was told of them",
    "request_seconds_sum": "from a request's arrival to the end of its answer",
    "request_seconds_count": "answers to requests that sample",
    "requests_running": "completions in the engine, queued or decoding",
    "lanes": "completions that decode at once",
}


class Counts:
    """Counters with labels; of the event loop's thread alone."""

    def __init__(self) -> None:
        self._counts: collections.Counter[tuple[str, tuple[tuple[str, str], ...]]] = collections.Counter()

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        self._counts[name, tuple(labels.items())] += value

    def render(self, gauges: Mapping[str, float], engine: Mapping[str, float]) -> str:
        """All counters, the gauges, and what the engine counts (`JaxEngine.metrics`), each under `trace_jax_`."""
        samples = [*self._counts.items(), *(((name, ()), value) for name, value in gauges.items())]
        samples += [((f"engine_{name}", ()), value) for name, value in engine.items()]
        lines, last = [], None
        for (name, labels), value in sorted(samples):
            if name != last:
                if name in _HELP:
                    lines.append(f"# HELP trace_jax_{name} {_HELP[name]}")
                lines.append(f"# TYPE trace_jax_{name} {'gauge' if name in gauges else 'counter'}")
                last = name
            shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
            lines.append(f"trace_jax_{name}{f'{{{shown}}}' if shown else ''} {value}")
        return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
