"""What a run costs at best: its planned work at the times that its compiled programs cannot beat, and the list prices of what it rents.

The estimate is of the work that the config names, all of it, at the roofline: a training that ends early does less, and a real step takes
longer. What no config says, how many tokens a rollout has, is assumed (`_FILLED`, `_SAMPLED`) and printed; times are in proportion to it.
Prices are in `prices.json`, each with the page to look it up again on. One that is not there is not guessed.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from trace_jax.config import Config
from trace_jax.runtime import plan

_CAPABILITIES = 4  # that a run is planned for until its diagnosis is done
_FILLED = 0.5  # of rollout.context, by a rollout
_SAMPLED = 0.5  # of a rollout's tokens, simulated users included; the others are read
_TOKEN_BYTES = 5.7  # of a shard: tests/benchmarks/exchange_simulation.py measures them


class Work(NamedTuple):
    """What a run does.

    Attributes:
      rollouts: of all stages.
      tokens: of one rollout, `sampled` of them by the engine.
      batches: of rollouts, each a shard.
      gradients: micro-batches of adapters; as many updates as `updates`.
      gate_gradients: micro-batches of the gate, by GRPO.
    """

    rollouts: float
    tokens: float
    sampled: float
    batches: int
    gradients: int
    updates: int
    gate_gradients: int


class Times(NamedTuple):
    """Seconds of one execution of each program, and what one call of the engine decodes, in all engines together."""

    gradient: float
    update: float
    gate_gradient: float
    decode: float
    decoded_tokens: int


class Hours(NamedTuple):
    """Of all devices, one after the other: an engine on the learner's own devices waits while they learn."""

    sampling: float
    learning: float

    @property
    def together(self) -> float:
        return self.sampling + self.learning


class Price(NamedTuple):
    """Of one chip or GPU for an hour."""

    machine: str
    region: str
    on_demand: float
    spot: float
    page: str


class Bucket(NamedTuple):
    """Requests and bytes of a run's rollouts in a bucket, and the bytes of its checkpoints."""

    writes: int
    reads: int
    bytes: float
    checkpoints: float


def planned(config: Config) -> Work:
    """The work of the four steps and the evaluation, if no step ends early and no group is dropped.

    Args:
      config: with `train.micro_rows` set.
    """
    train, stages = config.train, plan(config, _CAPABILITIES)
    rollouts = sum(count for stage, count in stages.items() if stage != "diagnose")  # which counts itself, not rollouts
    tokens, batch = _FILLED * config.rollout.context, train.groups * train.group_size
    micro_batches = math.ceil(batch * tokens / (train.micro_rows * train.pack_length))
    updates = train.iterations * _CAPABILITIES
    return Work(
        rollouts=rollouts,
        tokens=tokens,
        sampled=_SAMPLED * tokens,
        batches=math.ceil(rollouts / batch),
        gradients=updates * micro_batches,
        updates=updates,
        gate_gradients=config.gate.grpo_iterations * micro_batches,
    )


def hours(work: Work, times: Times) -> Hours:
    """Sampling with every lane busy, and learning without padding."""
    calls = work.rollouts * work.sampled / times.decoded_tokens
    learning = work.gradients * times.gradient + work.updates * times.update + work.gate_gradients * times.gate_gradient
    return Hours(sampling=calls * times.decode / 3600, learning=learning / 3600)


def bucket(work: Work, processes: int, checkpoints: float) -> Bucket:
    """Of a batch: a part of each process, looked up and written, and read by all; a manifest, which process 0 looks up and reads thrice."""
    several = processes > 1  # one process keeps what it has sampled
    return Bucket(
        writes=work.batches * (processes + 1),
        reads=work.batches * (processes + 4 + several * (processes**2 + 2)),
        bytes=work.rollouts * work.tokens * _TOKEN_BYTES,
        checkpoints=checkpoints,
    )


def prices() -> dict:
    """`prices.json`, as it is."""
    return json.loads((pathlib.Path(__file__).parent / "prices.json").read_text())


def find_price(name: str) -> Price | None:
    """Of an accelerator by the name of its topology, `v5p`; None where no price is known."""
    found = prices()["accelerators"].get(name)
    return Price(**found) if found else None


def report(accelerator: str, devices: int, work: Work, times: Times, stored: Bucket) -> Iterator[str]:
    """The lines of the estimate.

    Args:
      accelerator: its name, `v5p`.
      devices: of the topology.
    """
    needed, price, listed = hours(work, times), find_price(accelerator), prices()
    rented, rates = needed.together * devices, listed["bucket"]
    page = price.page if price else rates["page"]
    assumed = f"assumed: {_FILLED:.0%} of rollout.context, {_SAMPLED:.0%} of that"
    yield "What a run costs at best, if it takes all the rollouts that it plans for:"
    yield f"  work       {work.rollouts:,.0f} rollouts of {work.tokens:,.0f} tokens, {work.sampled:,.0f} of them sampled ({assumed})"
    yield f"  sampling   {_number(needed.sampling)} h for {_number(work.rollouts * work.sampled / 1e6)} M tokens, every lane busy"
    yield (
        f"  learning   {_number(needed.learning)} h for {work.updates:,} updates of {_CAPABILITIES} adapters in {work.gradients:,} "
        f"micro-batches, and {work.gate_gradients:,} of the gate"
    )
    yield f"  together   {_number(needed.together)} h x {devices} devices = {_number(rented)} device-hours"
    if price:
        hourly = f"{price.machine} in {price.region}, ${price.on_demand:.2f} and ${price.spot:.2f} an hour"
        yield f"  price      ${_number(rented * price.on_demand)} on demand, ${_number(rented * price.spot)} spot: {hourly}"
    else:
        yield f"  price      no price known of {accelerator}"
    requests = (stored.writes * rates["thousand_writes"] + stored.reads * rates["thousand_reads"]) / 1000
    month = (stored.bytes + stored.checkpoints) / 1e9 * rates["gigabyte_month"]
    yield f"  gs://      ${requests:.2f} for {stored.writes:,} writes and {stored.reads:,} reads of rollouts; ${month:.2f} a month for"
    yield f"             {stored.bytes / 1e9:,.1f} GB of rollouts and {stored.checkpoints / 1e9:,.1f} GB of checkpoints"
    yield "In proportion to these tokens. Times are the roofline's, which no step beats; each decoded token reads the cache of a whole"
    yield "context. A run takes longer: it reads prompts, waits for environments, compiles, and fails now and then. List prices in US"
    yield f"dollars, of {listed['date']} or little later; those of spot may change daily. See {page} before renting."


def _number(number: float) -> str:
    """Three digits of it, more of a large one."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
