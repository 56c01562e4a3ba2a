"""The share of a training step that goes into exchanging rollouts through a bucket, on pods of 4 to 256 hosts: a discrete-event simulation.

    python tests/benchmarks/exchange_simulation.py [--hosts=4,8,16,32,64,128,256] [--tokens=4096,16384] [--workers=200] [--lanes=32]
        [--seed=0] [--measure]

Each host has rolled out a trajectory in each of its environment workers. What then follows is the protocol of `Workdir.write_shard` and
`Workdir.read_shards`: every host encodes and writes its part, a gather, process 0 writes the manifest, every host reads and decodes all
parts one after the other. Beside it stand protocols that do less of this. All hosts are ready at the same moment, so that waiting for
slow episodes is no part of the exchange.

The store's limits are those of Cloud Storage's documentation; latencies, the rates of a stream and a host, and the seconds of a step are
assumptions, all in `Store` and `Load`. `--measure` measures the bytes and seconds of a token again, on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Generator, Iterator
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Store:
    """A bucket, and the way to it.

    Attributes:
      read_latency, write_latency: median seconds until the first byte; `spread` is the standard deviation of the logarithm.
      tail: share of the requests that take `tail_seconds` more.
      stream, host, egress: bytes per second of one request, of all of a host, and of the bucket to all hosts.
      reads, writes: requests per second, before the store has spread the load over more servers (minutes); `burst` seconds of them are
        taken at once. One more is refused, and tried again after up to `backoff` seconds, twice as many each time, at most `longest`.
      same_name: seconds between two writes of one name.
      compose: objects that one request combines.
    """

    read_latency: float = 0.05
    write_latency: float = 0.08
    spread: float = 0.5
    tail: float = 0.001
    tail_seconds: float = 2.0
    stream: float = 75e6
    host: float = 2e9
    egress: float = 25e9
    reads: float = 5000.0
    writes: float = 1000.0
    burst: float = 1.0
    backoff: float = 1.0
    longest: float = 60.0
    same_name: float = 1.0
    compose: int = 32


@dataclasses.dataclass(frozen=True)
class Load:
    """What is exchanged, and the step that it is a part of.

    Attributes:
      workers: trajectories of a host and step.
      token_bytes, encode, decode: of a shard, bytes and seconds of one core for a token (`--measure`).
      agree: seconds in which all hosts tell each other a few numbers.
      link: bytes per second of a host to the other hosts.
      lanes, token: episodes that a host decodes at once, and seconds of a token in all lanes; `gradient`: seconds of a host for a token
        that is learnt from. Of tau2_qwen3_30b_a3b on v5p (preflight). Half of the tokens are sampled.
    """

    hosts: int
    tokens: int
    workers: int = 200
    token_bytes: float = 5.7
    encode: float = 1.2e-6
    decode: float = 0.63e-6
    agree: float = 0.005
    link: float = 10e9
    lanes: int = 32
    token: float = 0.434 / 16
    gradient: float = 3.34 * 4 / 262_144

    @property
    def host_tokens(self) -> int:
        return self.workers * self.tokens

    @property
    def part(self) -> float:
        """Bytes of a host's part of the shard."""
        return self.host_tokens * self.token_bytes

    @property
    def step(self) -> float:
        """Seconds of a step without the exchange: the same for any number of hosts, since the batch grows with them."""
        return self.workers / self.lanes * self.tokens / 2 * self.token + self.host_tokens * self.gradient


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What a host does once the manifest is written.

    Attributes:
      reads: "all" parts, "others" than its own, the parts "combined" into one object, "none"; or all over the "network".
      streams: requests of a host at a time.
      decodes: "all" trajectories, "others", or "none".
      faster: how many times less a host takes for decoding, by its format or by more cores.
    """

    name: str
    reads: str = "all"
    streams: int = 1
    decodes: str = "all"
    faster: float = 1.0


# Arrays: as base64 of their bytes in the JSON line, instead of lists of numbers, a token takes 0.12 us. Combined: one object that
# process 0 has the store make of the parts. Own rows: a host trains on what it has sampled, and tells the others how many rows it has.
PROTOCOLS = (
    Protocol("as it is"),
    Protocol("own part kept", "others", decodes="others"),
    Protocol("16 streams", "others", 16, "others"),
    Protocol("combined object, 16 ranges", "combined", 16),
    Protocol("over the network", "network", decodes="others"),
    Protocol("arrays", "others", decodes="others", faster=5),
    Protocol("arrays, 16 streams, 8 cores", "others", 16, "others", 40),
    Protocol("own rows", "none", decodes="none"),
)


class Barrier:
    """Lets `parties` go on together, `seconds` after the last has come."""

    def __init__(self, parties: int, seconds: float = 0.0):
        self.parties, self.seconds, self.waiting = parties, seconds, []


Steps = Generator["float | Barrier", None, None]  # of one actor: seconds that pass, or a barrier that it waits at


class Clock:
    """Actors that take turns in the order of simulated time."""

    def __init__(self):
        self.now = 0.0
        self._queue: list[tuple[float, int, Steps]] = []
        self._number = itertools.count()

    def start(self, actor: Steps, after: float = 0.0) -> None:
        heapq.heappush(self._queue, (self.now + after, next(self._number), actor))

    def run(self) -> float:
        """Until nothing is left to do, or all wait; the time then."""
        while self._queue:
            self.now, _, actor = heapq.heappop(self._queue)
            wait = next(actor, None)
            if isinstance(wait, Barrier):
                wait.waiting.append(actor)
                if len(wait.waiting) == wait.parties:
                    for other in wait.waiting:
                        self.start(other, wait.seconds)
                    wait.waiting = []
            elif wait is not None:
                self.start(actor, wait)
        return self.now


class Limit:
    """So many requests per second; those of `burst` seconds are saved up."""

    def __init__(self, rate: float, burst: float):
        self.rate, self.most, self.free, self.last = rate, max(1.0, rate * burst), max(1.0, rate * burst), 0.0

    def admits(self, now: float) -> bool:
        self.free, self.last = min(self.most, self.free + (now - self.last) * self.rate), now
        if self.free < 1 - 1e-9:
            return False
        self.free -= 1
        return True


class Outcome(NamedTuple):
    """Of one exchange: seconds when the last host has written its part, has all bytes, and is done; requests."""

    written: float
    read: float
    done: float
    requests: int
    refused: int


class Exchange:
    """One exchange of one shard."""

    def __init__(self, store: Store, load: Load, protocol: Protocol, seed: int = 0):
        self.store, self.load, self.protocol = store, load, protocol
        self.clock, self._random = Clock(), random.Random(seed)
        self._limits = {"read": Limit(store.reads, store.burst), "write": Limit(store.writes, store.burst)}
        self._written: dict[str, float] = {}
        self._agreed = Barrier(load.hosts, load.agree)
        self._requests = self._refused = 0
        self._marks = {"written": 0.0, "read": 0.0}

    def run(self) -> Outcome:
        for host in range(self.load.hosts):
            self.clock.start(self._host(host))
        done = self.clock.run()
        return Outcome(self._marks["written"], self._marks["read"], done, self._requests, self._refused)

    def _host(self, host: int) -> Steps:
        load, protocol, leads = self.load, self.protocol, host == 0
        yield load.host_tokens * load.encode
        yield from self._manifest(leads)
        yield from self._request("read", 0.0)  # whether there is one, and of which generation
        yield from self._request("write", load.part, f"part {host}")
        self._mark("written")
        yield self._agreed  # the gather of sizes
        if leads:
            yield from self._combine()
            yield from self._request("write", 200.0 * load.hosts, "manifest")
        yield self._agreed
        if protocol.reads != "none":
            yield from self._manifest(leads)
            yield from self._fetch()
        self._mark("read")
        yield load.host_tokens * self._decoded() * load.decode / protocol.faster

    def _manifest(self, leads: bool) -> Steps:
        """Process 0 looks whether there is one, and reads it, for all."""
        if leads:
            yield from self._request("read", 0.0)
            yield from self._request("read", 200.0 * self.load.hosts)
        yield self._agreed

    def _combine(self) -> Steps:
        parts = self.load.hosts if self.protocol.reads == "combined" else 1
        while parts > 1:
            calls = math.ceil(parts / self.store.compose)
            for call in range(calls):
                yield from self._request("write", 0.0, f"combined {parts} {call}")
            parts = calls

    def _fetch(self) -> Steps:
        load, streams = self.load, self.protocol.streams
        if self.protocol.reads == "network":
            yield (load.hosts - 1) * load.part / load.link
            return
        if self.protocol.reads == "combined":  # the object in ranges
            sizes = [load.hosts * load.part / streams] * streams
        else:
            sizes = [load.part] * (load.hosts - (self.protocol.reads == "others"))
        left, joined = iter(sizes), Barrier(streams + 1)
        for _ in range(streams):
            self.clock.start(self._stream(left, joined))
        yield joined

    def _stream(self, sizes: Iterator[float], joined: Barrier) -> Steps:
        for size in sizes:
            yield from self._request("read", size)
        yield joined

    def _request(self, kind: str, size: float, name: str = "") -> Steps:
        store, streams = self.store, self.protocol.streams if kind == "read" else 1
        rate = min(store.stream, store.host / streams, store.egress / (self.load.hosts * streams))
        delay = store.backoff
        while True:
            self._requests += 1
            latency = self._latency(store.read_latency if kind == "read" else store.write_latency)
            now = self.clock.now
            early = bool(name) and now < self._written.get(name, -math.inf) + store.same_name
            if not early and self._limits[kind].admits(now):
                if name:
                    self._written[name] = now
                yield latency + size / rate
                return
            self._refused += 1
            yield latency + self._random.uniform(0.0, delay)
            delay = min(2 * delay, store.longest)

    def _latency(self, median: float) -> float:
        store, tail = self.store, self._random.random() < self.store.tail
        return median * math.exp(self._random.gauss(0.0, store.spread)) + tail * store.tail_seconds

    def _decoded(self) -> int:
        """Hosts whose trajectories are decoded."""
        return {"all": self.load.hosts, "others": self.load.hosts - 1, "none": 0}[self.protocol.decodes]

    def _mark(self, name: str) -> None:
        self._marks[name] = max(self._marks[name], self.clock.now)


def share(outcome: Outcome, load: Load) -> float:
    """Of a step, the exchange included."""
    return outcome.done / (outcome.done + load.step)


def measure() -> None:
    """Prints bytes and seconds of a token of a shard on one core: as it is, and with the token arrays as base64 of their bytes."""
    import base64
    import json
    import time

    import numpy as np
    import zstandard

    from rl.trajectory import Trajectory, decode_shard, encode_shard

    generator = np.random.default_rng(0)

    def made(number: int, length: int) -> Trajectory:
        """Turns of 256 tokens, every other one sampled, of words whose frequencies fall off as those of a language."""
        turns = (np.arange(length) // 256).astype(np.int32)
        mask = (turns % 2).astype(np.int8)
        tokens = np.minimum(generator.zipf(1.2, length), 150_000).astype(np.int32)
        logprobs = np.where(mask, -generator.exponential(0.5, length), 0.0).astype(np.float32)
        messages = [{"role": "user", "content": " ".join(f"w{token % 5000}" for token in tokens)}]
        arrays = dict(tokens=tokens, loss_mask=mask, logprobs=logprobs, turns=turns, versions=np.full(length, 3, np.int32))
        return Trajectory(id=f"{number}#0", environment="made", task_id=str(number), reward=1.0, messages=messages, **arrays)

    types = {"tokens": np.int32, "loss_mask": np.int8, "logprobs": np.float32, "turns": np.int32, "versions": np.int32}

    def encode_bytes(trajectories: list[Trajectory]) -> bytes:
        lines = []
        for trajectory in trajectories:
            arrays = {name: base64.b64encode(getattr(trajectory, name).tobytes()).decode() for name in types}
            lines.append(json.dumps(dataclasses.replace(trajectory, **dict.fromkeys(types)).to_json() | arrays, ensure_ascii=False))
        return zstandard.ZstdCompressor(level=3, write_checksum=True).compress("\n".join(lines).encode())

    def decode_bytes(data: bytes) -> list[Trajectory]:
        lines = map(json.loads, zstandard.ZstdDecompressor().decompress(data).split(b"\n"))
        return [
            Trajectory.from_json(line | {name: np.frombuffer(base64.b64decode(line[name]), dtype) for name, dtype in types.items()})
            for line in lines
        ]

    for length in (4096, 16384):
        trajectories, count = [made(number, length) for number in range(16)], 16 * length
        for form, encode, decode in (("lists", encode_shard, decode_shard), ("bytes", encode_bytes, decode_bytes)):
            encoding, decoding = [], []
            for _ in range(5):
                start = time.process_time()
                data = encode(trajectories)
                middle = time.process_time()
                found = list(decode(data))
                encoding.append((middle - start) / count * 1e6)
                decoding.append((time.process_time() - middle) / count * 1e6)
            assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(found, trajectories, strict=True))
            seconds = f"{min(encoding):.2f} us to encode, {min(decoding):.2f} us to decode"
            print(f"{length:,} tokens, arrays as {form}: of a token {len(data) / count:.2f} bytes, {seconds}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", default="4,8,16,32,64,128,256")
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", action="store_true")
    words = parser.parse_args()
    if words.measure:
        return measure()
    for tokens in map(int, words.tokens.split(",")):
        loads = [Load(hosts, tokens, words.workers, lanes=words.lanes) for hosts in map(int, words.hosts.split(","))]
        found = {p.name: [Exchange(Store(), load, p, words.seed).run() for load in loads] for p in PROTOCOLS}
        print(
            f"{words.workers} trajectories of {tokens:,} tokens a host; {loads[0].part / 1e6:.1f} MB a part; a step {loads[0].step:.0f} s\n"
        )
        print("   hosts  requests  refused  write, s  read, s  decode, s  together, s  of the step")
        for load, now in zip(loads, found[PROTOCOLS[0].name], strict=True):
            times = (
                f"{now.written:>10.1f}{now.read - now.written:>9.1f}{now.done - now.read:>11.1f}{now.done:>13.1f}{share(now, load):>13.1%}"
            )
            print(f"{load.hosts:>8}{now.requests:>10,}{now.refused:>9,}{times}")
        print(f"\n{'seconds, and share of the step':<32}" + "".join(f"{load.hosts:>14}" for load in loads))
        for name, outcomes in found.items():
            cells = (f"{now.done:,.1f} {share(now, load):>6.1%}" for now, load in zip(outcomes, loads, strict=True))
            print(f"{name:<32}" + "".join(f"{cell:>14}" for cell in cells))
        print()


if __name__ == "__main__":
    main()
