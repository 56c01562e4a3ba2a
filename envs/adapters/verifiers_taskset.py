"""A package as a verifiers taskset, through the OpenEnv taskset that verifiers brings: it plays what `make_app` serves.

    vf_config = taskset("http://localhost:8000", seeds=range(100))

The agent of verifiers sees each observation as JSON and answers with a call in JSON, or with a text for the user; its reward is that of the
last step. Nothing of verifiers is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def taskset(base_url: str, seeds: Iterable[int], knobs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields of `verifiers.v1.tasksets.openenv.OpenEnvConfig`, one task a seed."""
    more = {"knobs": knobs} if knobs else {}
    return {"id": "openenv", "base_url": base_url, "resets": [{"seed": seed, **more} for seed in seeds]}
