"""What a run has cost: time, rollouts and tokens by stage, device-hours with their list price, and what LLM agents were paid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_jax.report import results as found
from trace_jax.report.reader import Reader

_KEYS = ("seconds", "rollouts", "sampled_tokens")


def costs(read: Reader, engine: str) -> dict[str, Any] | None:
    """The stages in the order of a run, their share of the time, the totals of the four steps and of everything, and what was rented.

    Args:
      engine: `rollout.engine` of the config: servers have devices of their own, which nobody counts.
    """
    spent = read.json("spent.json")
    if spent is None:
        return None
    order = [*found.STEPS, "evaluate", "baseline"]
    names = sorted(spent["stages"], key=lambda name: order.index(name) if name in order else len(order))
    steps = [spent["stages"][name] for name in names if name in found.STEPS]
    seconds = max(spent["total"]["seconds"], 1e-9)
    devices = [_device(used) for used in spent.get("devices", [])]
    return {
        "stages": {name: spent["stages"][name] | {"share": spent["stages"][name]["seconds"] / seconds} for name in names},
        "steps": {key: sum(stage[key] for stage in steps) for key in _KEYS},
        "total": spent["total"],
        "agents": spent.get("agents"),
        "devices": devices,
        "prices": _source() if any(device["price"] for device in devices) else None,
        "servers": engine == "sglang",
    }


def _device(used: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of spent.json's `devices`, with what as many hours cost at list prices; None where no price is known."""
    hours = used["count"] * used["seconds"] / 3600
    price = None
    if used["platform"] != "cpu":
        from trace_jax.preflight.accelerators import name_of_kind
        from trace_jax.preflight.cost import find_price

        name = name_of_kind(used["kind"])
        price = find_price(name) if name else None
    dollars = {"on_demand": hours * price.on_demand, "spot": hours * price.spot} if price else None
    return {**used, "hours": hours, "price": price, "dollars": dollars}


def _source() -> dict[str, Any]:
    """Where prices are from, and of when."""
    from trace_jax.preflight.cost import prices

    return {key: prices()[key] for key in ("source", "date")}
