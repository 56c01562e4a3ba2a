"""Which adapter a policy is, and its folder for the servers.

A server knows adapters by name and never forgets one: a request for a name that was unloaded quietly loads the old files again, and a name
cannot be loaded twice. So a name is used once. It has the policy's version, what the files hold, and a few random letters, which keep
engines apart that share a server.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import uuid
from pathlib import Path

import jax
import numpy as np

from model import AdapterBank, Config, save_peft, slice_bank
from rl.engines.checks import check_policy
from rl.engines.protocol import EngineError, Policy

_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter in its folder; `idle` if it adds nothing, so that it need not differ from the base."""

    name: str
    folder: Path
    digest: str
    rank: int
    modules: tuple[str, ...]
    idle: bool

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def pick_adapter(policy: Policy) -> AdapterBank | None:
    """The bank of the one adapter that a policy is; None for the base.

    Raises:
      EngineError: a gate or a mixture, which these servers do not run, or fields that do not fit together.
    """

    def fail(why: str):
        raise EngineError(f"policy {policy.name!r}: {why}")

    weights = check_policy(policy)
    other = "sample it with the engine 'jax', or serve its composed export"
    if policy.gate is not None:
        fail(f"a token gate cannot be sampled over HTTP, where a request has one adapter; {other}")
    # the base is always there: its weight says nothing, as in `model.lora.rank_mask`
    if weights is None or not weights[1:].any():
        return None
    if np.count_nonzero(weights[1:]) > 1 or weights[1:].max() != 1:
        fail(f"a mixture (weights {weights.tolist()}) cannot be sampled over HTTP, where a request has one whole adapter; {other}")
    if policy.adapters.size == 1:
        return policy.adapters
    return slice_bank(policy.adapters, int(weights[1:].argmax()))


def write_adapter(bank: AdapterBank, config: Config, version: int, root: Path) -> Adapter:
    """Writes the adapter of a bank of one as a PEFT folder under `root`."""
    part = root / f"part-{uuid.uuid4().hex}"
    try:
        save_peft(bank, config, part)
        digest = hashlib.sha256((part / _WEIGHTS).read_bytes() + (part / _SETTINGS).read_bytes()).hexdigest()
        name = f"policy-{version:06d}-{digest[:10]}-{uuid.uuid4().hex[:6]}"
        part.rename(root / name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    modules = tuple(json.loads((root / name / _SETTINGS).read_text())["target_modules"])
    idle = not any(bool(jax.numpy.any(x)) for x in bank.b.values()) or not bank.scale.any()
    return Adapter(name, root / name, digest, bank.rank, modules, idle)
