"""The contract of engines over a fake SGL-JAX that has the faults of the real one, see `tests.fake_sgl_jax`."""

import asyncio
import dataclasses
import functools
import json
import pathlib
import signal
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import AdapterBank, Gate, Routing, stack_banks
from model.lora import bank_shapes
from model.rotary import Rope
from rl.engines.protocol import EngineError, EngineFault, Policy, Request
from rl.engines.sgl_jax import SglJaxEngine, launch
from rl.engines.sgl_jax.engine import read_answer
from tests import fake_sgl_jax
from tests.model import tiny as backbones
from tests.rl import tiny

CONTEXT = 40
SPARSE = dataclasses.replace(backbones.CONFIGS["qwen3_moe"], num_hidden_layers=2)


@functools.cache
def bank():
    return stack_banks([tiny.bank(seed=1), tiny.bank(seed=2, rank=2)])


def policies() -> dict[str, Policy]:
    return {
        "base": Policy("base", 1),
        "first": Policy("first", 2, bank(), np.array([0, 1, 0])),
        "second": Policy("second", 3, bank(), np.array([0, 0, 1])),
        "half": Policy("half", 4, bank(), np.array([0.2, 0.5, 0.3])),
    }


@pytest.fixture(scope="module")
def shared():
    """One engine for the tests that leave it as it was, and the fake that it runs on."""
    with pytest.MonkeyPatch.context() as patch:
        fake_sgl_jax.install(patch, tiny.model(), eos=tuple(range(40, 50)), replicas=2)
        fake = start(tiny.CONFIG, context=CONTEXT, rank=8, lora_scaling=0.5)
        engine = SglJaxEngine(fake, tiny.CONFIG)
        for policy in policies().values():
            engine.load(policy)
        yield engine, fake


@pytest.fixture
def engine(shared):
    return shared[0]


@pytest.fixture
def fake(shared):
    return shared[1]


def start(config, **settings):
    """`launch`, of a folder that holds no more than a configuration with the one base of rotary positions that SGL-JAX knows."""
    config = dataclasses.replace(config, rope=Rope(1e6))
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps({"model_type": config.model_type, "num_experts": config.num_experts}))
        return launch(folder, config, **settings)


def request(session="a", policy="base", tokens=(1, 2, 3), max_tokens=6, temperature=1.0, stop=(), **more):
    return Request(session, policy, np.array(tokens, np.int32), max_tokens, temperature, (0, 0, 0), stop, **more)


def draw(seed: int, length: int, vocabulary: int = 49) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


@functools.cache
def forward():
    """(tokens[T], slot weights) -> logits[T, V]: the oracle."""
    return jax.jit(lambda tokens, weights: tiny.model()(tokens[None], adapters=bank(), routing=Routing(weights=weights[None]))[0])


def nothing(config, rank):
    a, b = ({name: np.zeros(shapes[i], np.float32) for name, shapes in bank_shapes(config, 1, rank).items()} for i in (0, 1))
    return AdapterBank(a, b, np.ones(1))


def check(r, c, temperature=1.0):
    """That a completion's log-probs are those of its policy."""
    weights = policies()[r.policy].weights
    padded = np.zeros(256, np.int32)
    whole = np.concatenate([r.tokens, c.tokens])
    padded[: len(whole)] = whole
    logits = forward()(padded, jnp.asarray([1, 0, 0] if weights is None else weights, jnp.float32))
    law = np.asarray(jax.nn.log_softmax(logits / temperature, axis=-1))[len(r.tokens) - 1 : len(whole) - 1]
    np.testing.assert_allclose(c.logprobs, law[np.arange(len(c.tokens)), c.tokens], atol=1e-4)
    return law


def run(engine, count=1):
    found, end = {}, time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < end, "waited too long"
        found |= {x.session: x for x in engine.poll()}
    return found


def test_logprobs_are_those_of_each_policy_whatever_was_written_before(engine, fake):
    order = ["first", "base", "second", "first", "half", "base", "second"]
    requests = [request(str(i), name, draw(i, 4 + i), 9, (1.0, 0.7)[i % 2]) for i, name in enumerate(order)]
    flushes = fake.flushes
    for i, (r, c) in enumerate(zip(requests, engine.generate(requests), strict=True)):
        assert len(c.tokens) == 9 and c.finish == "length" and c.version == policies()[r.policy].version
        check(r, c, (1.0, 0.7)[i % 2])
    assert fake.flushes - flushes == 4  # those of one policy are served together, in the order of the first of them


def test_an_update_reaches_the_next_request_and_none_that_runs(engine, fake, monkeypatch):
    """Of one prompt, whose keys and values an engine that was not flushed would still hold under the old weights."""
    tokens = draw(1, 8)
    one, other = request("one", "moving", tokens, 20, 0.0), request("other", "moving", tokens, 20, 0.0)
    engine.load(Policy("moving", 7, bank(), np.array([0, 1, 0])))
    monkeypatch.setattr(fake, "delay", 0.01)
    engine.submit(one)
    assert engine.poll() == []
    engine.load(Policy("moving", 8, bank(), np.array([0, 0, 1])))
    engine.submit(other)
    found = run(engine, 2)
    assert [found[name].version for name in ("one", "other")] == [7, 8]
    check(dataclasses.replace(one, policy="first"), found["one"])
    check(dataclasses.replace(other, policy="second"), found["other"])
    for name in ("one", "other"):
        engine.release(name)


def test_a_learner_may_donate_what_was_loaded(engine):
    own = jax.tree.map(lambda x: jnp.array(x, copy=True), bank())
    engine.load(Policy("mine", 5, own, np.array([0, 1, 0])))
    jax.tree.map(lambda x: x.delete(), own)
    r = request("a", "mine", draw(2, 5))
    check(dataclasses.replace(r, policy="first"), engine.generate([r])[0])


def test_greedy_takes_the_likeliest_token(engine):
    r = request(tokens=draw(3, 7), temperature=0.0, max_tokens=8)
    (c,) = engine.generate([r])
    assert c.tokens.tolist() == check(r, c).argmax(-1).tolist()


def test_a_stop_token_is_part_of_the_completion_and_an_end_of_the_engines_own_is_not_one(engine, fake):
    stop, found = tuple(range(0, 20)), set()
    for seed in range(6):
        r = request(tokens=draw(seed, 5), max_tokens=25, stop=stop, temperature=1.5)
        (c,) = engine.generate([r])
        ends = [i for i, token in enumerate(c.tokens) if token in stop]
        assert (c.finish, ends) == ("stop", [len(c.tokens) - 1]) if c.finish == "stop" else not ends
        check(r, c, 1.5)
        found.add(c.finish)
    assert "stop" in found
    own = [request(str(i), tokens=draw(i, 5), max_tokens=30, stop=(0,), temperature=3.0) for i in range(8)]
    found = engine.generate(own)
    assert any((c.tokens[:-1] >= 40).any() for c in found)
    for r, c in zip(own, found, strict=True):
        check(r, c, 3.0)
    (c,) = engine.generate([request(tokens=draw(0, 5), max_tokens=1, stop=tuple(range(49)))])
    assert c.finish == "stop"  # which the engine calls a length


def test_a_full_context_ends_a_turn(engine):
    (c,) = engine.generate([request(tokens=draw(0, 33), max_tokens=20)])
    assert (c.finish, len(c.tokens)) == ("context", CONTEXT - 33)
    (c,) = engine.generate([request(tokens=draw(0, CONTEXT), max_tokens=20)])
    assert (c.finish, len(c.tokens)) == ("context", 0)


def test_a_session_goes_on_and_must_extend_what_it_holds(engine):
    first = request(tokens=draw(4, 12), max_tokens=5)
    engine.submit(first)
    with pytest.raises(EngineError, match="has not finished"):
        engine.submit(first)
    c = run(engine)["a"]
    longer = np.concatenate([first.tokens, c.tokens, draw(5, 4)])
    with pytest.raises(EngineError, match="do not extend the 17"):
        engine.submit(request(tokens=np.flip(longer)))
    engine.submit(second := request(tokens=longer, max_tokens=5))
    check(second, run(engine)["a"])
    engine.release("a")
    engine.release("a")
    assert engine.generate([first])


def test_a_released_session_is_aborted_and_its_answer_never_comes(engine, fake, monkeypatch):
    monkeypatch.setattr(fake, "delay", 0.01)
    engine.submit(request("gone", "first", draw(1, 3), 30))
    assert engine.poll() == []
    engine.release("gone")
    engine.submit(request("here", "second", draw(1, 3), 4))
    assert list(run(engine)) == ["here"] and not engine._running
    engine.release("here")


def test_what_cannot_be_served_is_refused(engine):
    gate = Gate(np.zeros((2, 32, 3)), np.zeros((2, 3)))
    for wrong, message in (
        (request(policy="other"), "'other' is not loaded; loaded are"),
        (request(tokens=[50]), r"in \[0, 50\)"),
        (request(max_tokens=0), "max_tokens"),
        (request(top_p=0.9), "top_k and top_p are not served"),
        (request(top_k=3), "top_k and top_p are not served"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.submit(wrong)
    for wrong, message in (
        (Policy("x", 1, bank(), gate=gate), "token gate.* JAX engine"),
        (Policy("x", 1, bank()), "needs weights"),
        (Policy("x", 1, bank(), np.ones(2)), "3 finite numbers"),
        (Policy("x", 1, nothing(tiny.CONFIG, 9)), "rank 9 together do not fit the engine's 8; launch it with rank=9"),
        (Policy("x", 1, nothing(backbones.CONFIG, 2)), "does not fit the model"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.load(wrong)


def test_only_the_last_logprobs_are_read(monkeypatch):
    """Of 120 tokens SGL-JAX returns 270 log-probs and 170 ids."""
    fake_sgl_jax.install(monkeypatch, tiny.model())
    fake = start(tiny.CONFIG, context=160, rank=8)
    engine = SglJaxEngine(fake, tiny.CONFIG)
    engine.load(policies()["first"])
    seen = []
    generate = fake._generate

    async def spy(*arguments):
        async for answer in generate(*arguments):
            seen.append(answer)
            yield answer

    fake.tokenizer_manager.generate_request = spy
    r = request(policy="first", tokens=draw(3, 20), max_tokens=120)
    (c,) = engine.generate([r])
    assert len(seen[0]["output_ids"]) == 170 and len(seen[0]["meta_info"]["output_token_logprobs"]) == 270
    assert len(c.tokens) == 120 and c.finish == "length"
    check(r, c)
    assert engine.metrics["sampled"] == 120 and engine.metrics["changes"] == 1


def test_merged_weights_serve_what_static_adapters_cannot(monkeypatch):
    """Of a sparse model, its `o_proj` and experts included; every version from the base's own weights."""
    model, bank = backbones.model(config=SPARSE), backbones.bank(SPARSE, adapters=2)
    fake_sgl_jax.install(monkeypatch, model, replicas=2)
    fake = start(SPARSE, context=30)
    assert not fake.server_args.enable_static_lora
    engine = SglJaxEngine(fake, SPARSE)
    before = [np.array(x) for x in fake.runner.model_state_leaves]
    for name, weights in {"one": [0, 1, 0], "two": [0, 0.4, 0.5]}.items():
        engine.load(Policy(name, 1, bank, np.array(weights)))
    engine.load(Policy("base"))
    forward = jax.jit(lambda tokens, weights: model(tokens[None], adapters=bank, routing=Routing(weights=weights[None]))[0])
    for name, weights in {"two": [0, 0.4, 0.5], "one": [0, 1, 0], "base": [1, 0, 0]}.items():
        (c,) = engine.generate([request(policy=name, tokens=draw(1, 10), max_tokens=8)])
        law = jax.nn.log_softmax(forward(np.concatenate([draw(1, 10), c.tokens]), jnp.asarray(weights, jnp.float32)))[9:-1]
        np.testing.assert_allclose(c.logprobs, law[np.arange(8), c.tokens], atol=1e-4)
    for x, y in zip(before, fake.runner.model_state_leaves, strict=True):
        np.testing.assert_array_equal(x, y)
    static = start(SPARSE, context=30, enable_static_lora=True, lora_target_modules=["q_proj", "o_proj"], max_lora_rank=4)
    static.server_args.lora_scaling = 1.0
    with pytest.raises(EngineError, match="puts no adapter on model.layers.0.self_attn.k_proj; launch it without static LoRA"):
        SglJaxEngine(static, SPARSE)


def test_a_failure_is_the_requests_own(engine, fake, monkeypatch):
    generate = fake._generate

    async def broken(obj, _):
        if obj.input_ids[0] == 7:
            raise ValueError("no such thing")
        async for answer in generate(obj):
            if obj.input_ids[0] == 8:
                answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "evicted"}
            yield answer

    monkeypatch.setattr(fake.tokenizer_manager, "generate_request", broken)
    for i in (7, 8, 9):
        engine.submit(request(str(i), tokens=[i, 1]))
    found = run(engine, 3)
    assert [(type(found[x]).__name__, getattr(found[x], "kind", None)) for x in "789"] == [
        ("EngineFault", "server"),
        ("EngineFault", "aborted"),
        ("Completion", None),
    ]
    with pytest.raises(EngineFault, match="no such thing"):
        engine.generate([request("b", tokens=[7])])
    for i in "789":
        engine.release(i)


def test_a_request_that_takes_too_long_is_given_up(engine, fake, monkeypatch):
    monkeypatch.setattr(engine, "_timeout", 0.2)

    async def asleep(obj, _):
        await asyncio.sleep(1.0)
        yield {}

    with monkeypatch.context() as patch:
        patch.setattr(fake.tokenizer_manager, "generate_request", asleep)
        engine.submit(request("slow"))
        found = run(engine)["slow"]
    assert isinstance(found, EngineFault) and found.kind == "timeout"
    engine.release("slow")
    while engine._running:
        engine.poll()


def test_answers_that_make_no_sense_are_faults():
    def answer(reason, logprobs, count):
        return {"meta_info": {"finish_reason": reason, "completion_tokens": count, "output_token_logprobs": logprobs}}

    stop = {"type": "stop", "matched": 3}
    assert read_answer("a", answer(stop, [(-9.0, 1, None), (-1.0, 2, None), (-2.0, 3, None)], 2)) == ([2, 3], [-1.0, -2.0])
    for reason, logprobs, count in (
        (stop, [(-1.0, 2, None)], 2),
        (stop, [], 0),
        (stop, [(float("nan"), 2, None)], 1),
        ({"type": "stop", "matched": "NaN happened"}, [(-1.0, 2, None)], 1),
    ):
        with pytest.raises(EngineFault, match="log-probs") as caught:
            read_answer("a", answer(reason, logprobs, count))
        assert caught.value.kind == "garbage"


def test_an_engine_that_cannot_serve_is_refused(monkeypatch):
    fake_sgl_jax.install(monkeypatch, tiny.model())
    for name, value in (
        ("enable_single_process", False),
        ("enable_engine_loop_run_forever_daemon", False),
        ("enable_deterministic_sampling", True),
    ):
        with pytest.raises(EngineError, match=f"{name}={value}; launch it with {not value}"):
            SglJaxEngine(start(tiny.CONFIG, context=CONTEXT, **{name: value}), tiny.CONFIG)
    with pytest.raises(EngineError, match="model_type 'qwen3_5'"):
        SglJaxEngine(start(tiny.CONFIG, context=CONTEXT), backbones.CONFIGS["qwen3_5"])
    wider = dataclasses.replace(tiny.CONFIG, intermediate_size=50)
    with pytest.raises(EngineError, match=r"mlp.gate_proj is \(32, 48\), the configuration says \(32, 50\)"):
        SglJaxEngine(start(tiny.CONFIG, context=CONTEXT), wider)


def test_launching_leaves_the_signals_of_the_process_alone(monkeypatch):
    fake_sgl_jax.install(monkeypatch, tiny.model())
    made = sys.modules["sgl_jax.srt.entrypoints.engine"].Engine

    def rude(**settings):
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return made(**settings)

    monkeypatch.setattr(sys.modules["sgl_jax.srt.entrypoints.engine"], "Engine", rude)
    before = signal.getsignal(signal.SIGCHLD)
    fake = start(tiny.CONFIG, context=CONTEXT, tp_size=2)
    assert signal.getsignal(signal.SIGCHLD) == before and fake.server_args.tp_size == 2
    assert len(fake.server_args.lora_target_modules) == 7


def test_a_model_that_sgl_jax_would_compute_otherwise_is_refused(monkeypatch, tmp_path):
    fake_sgl_jax.install(monkeypatch, tiny.model())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    for rope, message in (
        (Rope(1e6), "num_experts is 6, but SGL-JAX would take 128"),
        (Rope(5e6), r"rope_theta is 5e\+06, but SGL-JAX would take 1e\+06"),
        (Rope(1e6, "linear", factor=2.0), "rope_type 'linear'"),
    ):
        with pytest.raises(EngineError, match=message):
            launch(tmp_path, dataclasses.replace(SPARSE, rope=rope), context=CONTEXT)


def test_without_sgl_jax_the_error_says_how_to_get_it(monkeypatch):
    for name in ("entrypoints.engine", "managers.io_struct"):
        monkeypatch.setitem(sys.modules, f"sgl_jax.srt.{name}", None)
    for call in (lambda: start(tiny.CONFIG, context=CONTEXT), lambda: SglJaxEngine(None, tiny.CONFIG)):
        with pytest.raises(EngineError, match=r"pip install 'sglang-jax\[tpu\] @ git"):
            call()
