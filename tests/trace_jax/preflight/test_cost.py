"""The estimate of a run's cost, by hand."""

import dataclasses

import pytest

from trace_jax.config import load_config
from trace_jax.preflight import accelerators
from trace_jax.preflight.cost import Bucket, Times, Work, bucket, find_price, hours, planned, prices, report

# 7200 rollouts of 1000 tokens, 500 of them sampled; 3 micro-batches in each of 40 updates
WORK = Work(rollouts=7200, tokens=1000, sampled=500, batches=30, gradients=120, updates=40, gate_gradients=6)
TIMES = Times(gradient=60.0, update=9.0, gate_gradient=40.0, decode=2.0, decoded_tokens=1000)


def test_hours_are_calls_times_seconds():
    found = hours(WORK, TIMES)
    assert found.sampling == pytest.approx(7200 * 500 / 1000 * 2.0 / 3600)  # 2 h
    assert found.learning == pytest.approx((120 * 60 + 40 * 9 + 6 * 40) / 3600)  # 7800 s
    assert found.together == pytest.approx(2 + 7800 / 3600)


def test_the_work_is_that_of_the_config():
    config = load_config("tau2_qwen3_30b_a3b")
    work = planned(config)
    train = (40 * 256 + 8 * 32) * 4 + 2 * 64 * 4 + 64
    compose = 4 * (120 + 32 * 8) + 12 * 256 + 3 * 32 + 64 * 4 * 11
    evaluate = 60 * 4 * (6 + 4)
    assert work.rollouts == 104 * 8 + 100 * 16 * 4 + train + compose + evaluate
    assert (work.tokens, work.sampled) == (8192, 4096)  # half of the context, half of that
    assert work.updates == 160 and work.gradients == 160 * 8  # 256 x 8192 tokens in micro-batches of 16 x 16384
    assert work.gate_gradients == 12 * 8
    assert work.batches == -(-work.rollouts // 256)


def test_a_batch_that_does_not_fill_a_micro_batch_takes_one():
    config = load_config("quickstart")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_rows=64, pack_length=4096))
    assert planned(config).gradients == planned(config).updates == 24 * 4


def test_requests_to_a_bucket_grow_with_the_square_of_the_processes():
    one, four = (bucket(WORK, n, 1e9) for n in (1, 4))
    assert (one.writes, one.reads) == (30 * 2, 30 * 5)
    assert (four.writes, four.reads) == (30 * 5, 30 * (4 + 16 + 6))
    assert four.bytes == one.bytes == 7200 * 1000 * 5.7 and four.checkpoints == 1e9


def test_the_lines_multiply_out():
    listed, price = prices(), find_price("v5p")
    work, times = WORK._replace(rollouts=36000), TIMES._replace(gradient=120.0)  # 10 h, and 15000 s
    stored = Bucket(writes=200_000, reads=5_000_000, bytes=2e9, checkpoints=98e9)
    text = "\n".join(report("v5p", 16, work, times, stored))
    rented = (10 + 15000 / 3600) * 16  # 226.67
    assert "  sampling   10 h" in text and "  learning   4.17 h" in text and "x 16 devices = 227 device-hours" in text
    assert f"${rented * price.on_demand:,.0f} on demand, ${rented * price.spot:,.0f} spot" in text
    assert "$3.00 for 200,000 writes and 5,000,000 reads" in text  # 200 x 0.005 + 5000 x 0.0004
    assert "2.0 GB of rollouts and 98.0 GB" in text and "$2.00 a month" in text  # 100 GB x 0.02
    assert listed["date"] in text and price.page in text and price.region in text
    assert max(map(len, text.splitlines())) <= 140


def test_what_has_no_price_is_said():
    assert find_price("tpu7x") is None
    text = "\n".join(report("tpu7x", 16, WORK, TIMES, bucket(WORK, 4, 0.0)))
    assert "no price known of tpu7x" in text and "device-hours" in text and "on demand" not in text


def test_every_price_is_of_an_accelerator_and_says_where_it_is_from():
    listed = prices()
    assert listed["currency"] == "USD" and listed["date"] and listed["source"]
    for name in listed["accelerators"]:
        size = next(example for example in accelerators._EXAMPLES.split(", ") if example.startswith(f"{name}:"))
        price = find_price(accelerators.find(size).name)
        assert 0 < price.spot < price.on_demand < 20 and price.region and price.page.startswith("cloud.google.com/")
