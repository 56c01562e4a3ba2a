"""The model in tests/benchmarks/exchange_simulation.py against what can be computed by hand."""

import dataclasses
import importlib.util
import pathlib
import sys

import pytest

PATH = pathlib.Path(__file__).parents[1] / "benchmarks/exchange_simulation.py"


@pytest.fixture(scope="module")
def simulation():
    spec = importlib.util.spec_from_file_location("exchange_simulation", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look their annotations up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def store(simulation):
    """No jitter, and no limit that is met."""
    return simulation.Store(spread=0.0, tail=0.0, reads=1e9, writes=1e9, host=1e12, egress=1e15)


def protocol(simulation, name: str):
    return next(p for p in simulation.PROTOCOLS if p.name.startswith(name))


def exchange(simulation, store, load, name="as it is", seed=0):
    return simulation.Exchange(store, load, protocol(simulation, name), seed).run()


def by_hand(store, load, reads: int, decoded: int) -> float:
    """Encode, look up, write and gather; the manifest looked up, written and looked up; so many parts one after the other."""
    lookup = 2 * store.read_latency + 400.0 * load.hosts / store.stream / 2 + load.agree
    part = load.part / store.stream
    written = load.host_tokens * load.encode + lookup + store.read_latency + store.write_latency + part + load.agree
    listed = written + store.write_latency + 200.0 * load.hosts / store.stream + load.agree + lookup
    return listed + reads * (store.read_latency + part) + decoded * load.host_tokens * load.decode


@pytest.mark.parametrize("hosts", [1, 7])
def test_without_jitter_the_seconds_add_up(simulation, store, hosts):
    load = simulation.Load(hosts, 4096)
    found = exchange(simulation, store, load)
    assert found.done == pytest.approx(by_hand(store, load, hosts, hosts))
    assert found.requests == 2 * hosts + 1 + 4 + hosts**2 and found.refused == 0  # a part is looked up and written; all are read by all
    kept = exchange(simulation, store, load, "own part kept")
    assert kept.done == pytest.approx(by_hand(store, load, hosts - 1, hosts - 1))


def test_more_requests_than_the_store_takes_need_their_number_over_the_rate(simulation, store):
    limited = dataclasses.replace(
        store, read_latency=0.0, write_latency=0.0, stream=1e15, host=1e15, reads=50.0, burst=0.01, backoff=0.02, longest=0.02
    )
    load = simulation.Load(12, 1, workers=1, agree=0.0)
    found = exchange(simulation, limited, load, "16 streams")
    assert found.done == pytest.approx((12 * 11 + 12 + 4) / 50, rel=0.05) and found.refused > 0


def test_refused_requests_are_tried_again_later_and_later(simulation, store):
    limited = dataclasses.replace(store, reads=100.0)
    load = simulation.Load(32, 512)
    patient, hasty = (exchange(simulation, dataclasses.replace(limited, backoff=backoff), load, "16 streams") for backoff in (1.0, 0.01))
    assert patient.done > 32 * 31 / 100 - 1 and 0 < patient.refused < hasty.refused


def test_a_name_is_written_once_a_second(simulation, store):
    made = simulation.Exchange(store, simulation.Load(1, 1), simulation.PROTOCOLS[0])
    for _ in range(2):
        made.clock.start(made._request("write", 0.0, "manifest"))
    assert made.clock.run() >= store.same_name and made._refused >= 1


def test_streams_share_what_a_host_and_the_bucket_can_send(simulation, store):
    load = simulation.Load(5, 4096)
    alone = exchange(simulation, store, load)
    for narrow in (dataclasses.replace(store, host=store.stream / 3), dataclasses.replace(store, egress=5 * store.stream / 3)):
        slowed = exchange(simulation, narrow, load)
        sent = 6 * load.part + 3 * 200.0 * 5  # its part and all parts, and the manifest thrice
        more = sent / store.stream * 2  # three times as long
        assert slowed.done - alone.done == pytest.approx(more, rel=0.01)


def test_parts_are_combined_by_as_many_at_a_time_as_a_request_takes(simulation, store):
    load = simulation.Load(64, 512)
    found = exchange(simulation, store, load, "combined")
    assert found.requests == 2 * 64 + 3 + 1 + 4 + 64 * 16  # 64 parts in two requests, these two in one; then 16 ranges for each host


def test_who_trains_on_its_own_rows_waits_for_nobody_to_read(simulation, store):
    few, many = (exchange(simulation, store, simulation.Load(hosts, 4096), "own rows") for hosts in (2, 200))
    assert many.done == pytest.approx(few.done, rel=0.01) and many.requests == 2 * 200 + 1 + 2


def test_the_step_does_not_depend_on_the_hosts_and_the_share_does(simulation, store):
    few, many = simulation.Load(4, 4096), simulation.Load(64, 4096)
    assert few.step == many.step == pytest.approx(200 / 32 * 2048 * 0.434 / 16 + 200 * 4096 * 3.34 * 4 / 262_144)
    shares = [simulation.share(exchange(simulation, simulation.Store(), load), load) for load in (few, many)]
    assert 0 < shares[0] < shares[1] < 1


def test_the_same_seed_gives_the_same_exchange(simulation):
    load = simulation.Load(8, 4096)
    first, second, other = (exchange(simulation, simulation.Store(), load, seed=seed) for seed in (0, 0, 1))
    assert first == second != other
