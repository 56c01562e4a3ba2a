"""`SGLangEngine` against servers that fail in every way that was seen or feared."""

import concurrent.futures
import contextlib
import dataclasses
import time

import numpy as np
import pytest

from model import constant_gate, stack_banks
from rl.engines.protocol import Completion, EngineError, EngineFault, Policy
from rl.engines.sglang import Limits, SGLangEngine, reference_of
from tests.fake_sglang import Fake, fakes
from tests.model import tiny
from tests.rl.engine_contract import check, draw, finish, request

QUICK = Limits(request=20.0, retries=2, backoff=0.02, liveness=5.0, outage=10.0, load=10.0)
CONTEXT = 48


@pytest.fixture(scope="module")
def net():
    net = tiny.model(num_hidden_layers=1)
    with fakes(net) as (server,):  # compiles what all others use
        for bank in (None, tiny.bank(net.config)):
            server._rows([1], bank)
    return net


@pytest.fixture
def fake(net):
    with fakes(net) as (server,):
        yield server


@pytest.fixture
def pair(net):
    with fakes(net, 2) as servers:
        yield servers


@contextlib.contextmanager
def connect(servers, net, folder, **options):
    servers = [servers] if isinstance(servers, Fake) else servers
    options = {"lanes": 16, "context": CONTEXT, "limits": QUICK} | options
    with SGLangEngine([s.url for s in servers], config=net.config, folder=folder, **options) as engine:
        engine.load(Policy("base", 1))
        yield engine


def adapter(net, name="p", version=1, seed=1) -> Policy:
    return Policy(name, version, tiny.bank(net.config, seed=seed))


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


# --- faults


@pytest.mark.parametrize(
    "mode, kind",
    [
        ("500", "server"),
        ("garbage", "garbage"),
        ("types", "garbage"),
        ("nan", "garbage"),
        ("positive", "garbage"),
        ("abort", "aborted"),
        ("die", "lost"),
        ("short", "lost"),
        ("hang", "timeout"),
        ("drip", "garbage"),
    ],
)
def test_a_server_that_fails_always_gives_a_fault_and_one_that_fails_once_a_completion(net, fake, tmp_path, mode, kind):
    slow = mode in ("hang", "drip")
    limits = dataclasses.replace(QUICK, request=0.4) if slow else QUICK
    with connect(fake, net, tmp_path, limits=limits) as engine:
        fake.mode = mode
        engine.submit(request("a"))
        (fault,) = finish(engine).values()
        assert isinstance(fault, EngineFault) and (fault.session, fault.kind) == ("a", kind), fault
        assert engine.metrics[f"faults_{kind}"] == 1 and engine.metrics["retries"] == (0 if slow else 2)
        fake.mode, fake.times = mode, 1
        if slow:
            fake.mode = "ok"
        engine.submit(request("a"))
        check(net, Policy("base", 1), request("a"), finish(engine)["a"], 5e-5)
        if slow:
            first = next(body["rid"] for body in fake.bodies if body["logprob_start_len"] == -1)
            until(lambda: first in fake.aborted)


def test_a_refused_request_is_a_fault_with_the_servers_words_and_no_second_attempt(net, fake, tmp_path):
    with connect(fake, net, tmp_path) as engine:
        fake.mode = "400"
        with pytest.raises(EngineFault, match=r"status 400: .*the reason"):
            engine.generate([request()])
        assert engine.metrics["retries"] == 0 and engine.metrics["servers"] == 1


def test_the_requests_of_a_server_that_is_stopped_go_elsewhere_and_it_comes_back(net, pair, tmp_path):
    with connect(pair, net, tmp_path, limits=dataclasses.replace(QUICK, liveness=0.5, retries=20)) as engine:
        until(lambda: engine.metrics["servers"] == 2)
        engine.load(adapter(net))
        for server in pair:
            server.pace = 0.05
        for i in range(8):
            engine.submit(request(f"s{i}", "p", key=(0, i, 0)))
        until(lambda: pair[0].running and pair[1].running)
        pair[0].stopped = True
        pair[0].pace = 60
        found = finish(engine, 8)
        assert all(isinstance(c, Completion) for c in found.values()) and engine.metrics["retries"] > 0
        assert engine.metrics["servers"] == 1
        pair[0].stopped, pair[0].pace = False, 0
        until(lambda: engine.metrics["servers"] == 2)


def test_a_killed_server_gets_the_adapters_again_before_requests(net, pair, tmp_path):
    with connect(pair, net, tmp_path) as engine:
        until(lambda: engine.metrics["servers"] == 2)
        engine.load(adapter(net))
        for server in pair:
            server.pace = 0.02
        for i in range(8):
            engine.submit(request(f"s{i}", "p", key=(0, i, 0), max_tokens=10))
        until(lambda: pair[0].running)
        pair[0].kill()
        for name, c in finish(engine, 8).items():
            check(net, adapter(net), request(name, "p"), c, 5e-5)
        pair[0].start()
        until(lambda: engine.metrics["servers"] == 2)
        assert list(pair[0].adapters) == list(pair[1].adapters) != []
        pair[1].kill()
        for c in engine.generate([request(f"t{i}", "p", key=(0, i, 0)) for i in range(4)]):
            check(net, adapter(net), request("t", "p"), c, 5e-5)
        assert not pair[0].reloaded and not pair[1].reloaded


def test_a_server_that_was_started_anew_unnoticed_gets_its_adapters(net, fake, tmp_path):
    with connect(fake, net, tmp_path) as engine:
        engine.load(adapter(net))
        fake.adapters, fake.known = {}, {}
        (c,) = engine.generate([request(policy="p")])
        check(net, adapter(net), request(policy="p"), c, 5e-5)
        assert engine.metrics["retries"] == 1


def test_without_any_server_requests_become_faults_and_loading_an_error(net, fake, tmp_path):
    with connect(fake, net, tmp_path, limits=dataclasses.replace(QUICK, outage=0.8, retries=9)) as engine:
        fake.kill()
        began = time.monotonic()
        engine.submit(request("a"))
        (fault,) = finish(engine).values()
        assert fault.kind == "lost" and "no server was up in time" in str(fault) and time.monotonic() - began < 10
        with pytest.raises(EngineError, match="no SGLang server can be used"):
            engine.load(adapter(net))
        with pytest.raises(EngineError, match="'p' is not loaded"):
            engine.submit(request("b", "p"))
        fake.start()
        until(lambda: engine.metrics["servers"] == 1)
        assert len(engine.generate([request("c")])) == 1


def test_an_engine_without_servers_names_them_and_keeps_secrets(net, tmp_path):
    for url, message in [
        ("http://127.0.0.1:9", r"http://127.0.0.1:9: /health: Client"),
        ("http://user:secret@127.0.0.1:9", "credentials are given as api_key"),
        ("127.0.0.1:9", "an address is http://host:port"),
    ]:
        with pytest.raises(EngineError, match=message) as caught:
            SGLangEngine([url], config=net.config, folder=tmp_path, limits=dataclasses.replace(QUICK, outage=0.5), api_key="secret")
        assert "secret" not in str(caught.value)


def test_nothing_is_lost_or_mixed_when_servers_fail_now_and_then_while_adapters_change(net, tmp_path):
    random, found, asked = np.random.default_rng(0), {}, {}
    versions = {v: adapter(net, version=v, seed=v) for v in range(1, 5)}
    modes = ["500", "garbage", "types", "nan", "abort", "die", "short", "503"]
    with fakes(net, 3, pace=0.002) as servers, connect(servers, net, tmp_path, limits=dataclasses.replace(QUICK, retries=50)) as engine:
        for v, policy in versions.items():
            engine.load(policy)
            for i in range(12):
                name = f"{v}.{i}"
                asked[name] = request(name, ["p", "base"][i % 2], draw(net.config.vocab_size, i, 4 + i), 1 + i % 6, key=(0, i, v))
                engine.submit(asked[name])
            if v == 2:
                servers[0].kill()
            if v == 3:
                servers[0].start()
            while len(found) < len(asked) - 8:
                found |= {c.session: c for c in engine.poll()}
                server = servers[random.integers(3)]
                server.mode, server.times = str(random.choice(modes)), 1
        while len(found) < len(asked):
            found |= {c.session: c for c in engine.poll()}
        assert engine.metrics["retries"] > 5
        for name, c in found.items():
            policy = Policy("base", 1) if asked[name].policy == "base" else versions[int(name[0])]
            check(net, policy, asked[name], c, 5e-5)
        until(lambda: all(len(server.adapters) <= 1 for server in servers))
        assert not any(server.reloaded for server in servers)


# --- what a server says it is


@pytest.mark.parametrize(
    "info, message",
    [
        ({"context_length": 50}, "--context-length and --max-total-tokens of 56"),
        ({"max_total_num_tokens": 40}, "--max-total-tokens of 56"),
    ],
)
def test_a_server_that_cannot_serve_the_engine_is_refused_with_the_flag(net, fake, tmp_path, info, message):
    fake.info = info
    with pytest.raises(EngineError, match=message), connect(fake, net, tmp_path):
        pass


def test_a_server_of_another_model_is_refused(net, fake, tmp_path):
    other = dataclasses.replace(net.config, model_type="qwen3_5", vocab_size=97)
    with pytest.raises(EngineError, match="serves a qwen3, the model here is a qwen3_5"):
        SGLangEngine([fake.url], config=other, folder=tmp_path, limits=QUICK)
    same_shape = reference_of(tiny.model(seed=5, num_hidden_layers=1))
    with pytest.raises(EngineError, match="log-probs of the base differ from our model's"):
        SGLangEngine([fake.url], config=net.config, folder=tmp_path, context=CONTEXT, limits=QUICK, reference=same_shape)


@pytest.mark.parametrize(
    "info, message",
    [
        ({"enable_lora": False}, "--enable-lora --max-lora-rank 4"),
        ({"max_lora_rank": 2}, "--max-lora-rank 4"),
        (
            {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
            "down_proj, gate_proj, up_proj; add them to --lora-target-modules",
        ),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 1"),
        ({"dp_size": 2}, "single servers"),
    ],
)
def test_an_adapter_that_a_server_cannot_load_is_refused_with_the_flag(net, fake, tmp_path, info, message):
    fake.info = info
    with connect(fake, net, tmp_path) as engine:
        with pytest.raises(EngineError, match=message):
            engine.load(adapter(net))
        assert len(engine.generate([request()])) == 1 and "/load_lora_adapter" not in fake.calls


@pytest.mark.parametrize(
    "field, message",
    [
        ("static", "loads no adapters while it serves"),
        ("ignores_adapters", "changes no log-prob: the server samples the base"),
        ("dies_under_adapters", "end at their first request under adapter"),
    ],
)
def test_a_server_that_accepts_an_adapter_and_does_not_run_it_is_found_out_when_it_is_loaded(net, fake, tmp_path, field, message):
    setattr(fake, field, True)
    fake.kill()
    fake.start()
    with connect(fake, net, tmp_path) as engine:
        with pytest.raises(EngineError, match=message):
            engine.load(adapter(net))
        until(lambda: engine.metrics["servers"] == 1)
        assert len(engine.generate([request()])) == 1
        idle = tiny.bank(net.config, size=0.0)
        if field == "ignores_adapters":
            engine.load(Policy("idle", 1, idle))  # it is the base


def test_another_adapter_than_ours_is_found_out(net, fake, tmp_path):
    ours = reference_of(net)

    def other(bank, tokens):
        return ours(None if bank is None else tiny.bank(net.config, seed=9), tokens)

    with connect(fake, net, tmp_path, reference=other, tolerance=1e-3) as engine:
        with pytest.raises(EngineError, match="log-probs of adapter policy-000001-.* differ from our model's"):
            engine.load(adapter(net))
        until(lambda: not fake.adapters)


def test_the_old_names_of_the_descriptions_and_repeated_logprobs_are_understood(net, fake, tmp_path):
    fake.old = fake.cumulative = True
    fake.kill()
    fake.start()
    with connect(fake, net, tmp_path) as engine:
        (c,) = engine.generate([request(max_tokens=9)])
        check(net, Policy("base", 1), request(), c, 5e-5)


# --- versions


def test_an_adapter_is_unloaded_after_its_last_request_and_its_name_never_used_again(net, fake, tmp_path):
    with connect(fake, net, tmp_path) as engine:
        engine.load(adapter(net, version=3))
        (old,) = fake.adapters
        engine.load(adapter(net, version=3))  # the same again
        assert list(fake.adapters) == [old] and old.startswith("policy-000003-")
        fake.pace = 0.05
        engine.submit(request("a", "p", max_tokens=12))
        until(lambda: fake.running)
        engine.load(adapter(net, version=4, seed=2))
        assert old in fake.adapters and len(fake.adapters) == 2 and "/unload_lora_adapter" not in fake.calls
        fake.mode, fake.times = "die", 1  # the new request is tried twice, the old one goes on
        engine.submit(request("b", "p", max_tokens=2))
        found = finish(engine, 2)
        assert (found["a"].version, found["b"].version) == (3, 4)
        until(lambda: len(fake.adapters) == 1)
        engine.load(adapter(net, version=3))
        assert old not in fake.adapters and not fake.reloaded
        until(lambda: len(list(tmp_path.iterdir())) == len(fake.adapters) == 1)
    assert not fake.adapters and not list(tmp_path.iterdir())


def test_tokens_of_several_or_other_weights_are_a_fault(net, fake, tmp_path):
    with connect(fake, net, tmp_path) as engine:
        fake.versions = ("default", "other")
        engine.submit(request("a"))
        (fault,) = finish(engine).values()
        assert fault.kind == "version" and engine.metrics["retries"] == 0
        fake.versions = ("other",)
        engine.submit(request("b"))
        assert finish(engine)["b"].kind == "version"


# --- requests


def test_the_models_own_end_token_does_not_end_a_turn_that_does_not_name_it(net, fake, tmp_path):
    with connect(fake, net, tmp_path) as engine:
        asked = request(max_tokens=12, temperature=0.0, stop=(95,))
        (free,) = engine.generate([asked])
        fake.end = int(free.tokens[3])
        (same,) = engine.generate([asked])
        assert same.tokens.tolist() == free.tokens.tolist() and len(fake.bodies) > 3 and same.finish == "length"
        np.testing.assert_allclose(same.logprobs, free.logprobs, atol=1e-5)
        before = len(fake.bodies)
        engine.generate([request(max_tokens=12, temperature=0.0)])
        assert len(fake.bodies) == before + 1 and fake.bodies[-1]["sampling_params"]["ignore_eos"]


def test_a_request_says_all_that_a_server_might_fill_in(net, fake, tmp_path):
    fake.info = {"enable_deterministic_inference": True}
    with connect(fake, net, tmp_path) as engine:
        engine.generate([request(stop=(5,), temperature=0.5, key=(1, 2, 3))])
    sampling = fake.bodies[-1]["sampling_params"]
    said = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "n": 1, "repetition_penalty": 1.0, "stop_token_ids": [5]}
    assert said.items() <= sampling.items() and sampling["no_stop_trim"] and not sampling["skip_special_tokens"]
    assert not sampling["ignore_eos"] and 0 <= sampling["sampling_seed"] < 2**31 and "lora_path" not in fake.bodies[-1]


def test_the_turns_of_a_session_and_the_rollouts_of_a_task_share_a_server_until_it_has_too_much(net, pair, tmp_path):
    with connect(pair, net, tmp_path) as engine:
        until(lambda: engine.metrics["servers"] == 2)
        prompts = [draw(net.config.vocab_size, i, 8) for i in range(8)]
        contexts = {(i, j): prompts[i] for i in range(8) for j in range(2)}
        for turn in range(2):
            for (i, j), context in contexts.items():
                engine.submit(request(f"{i}.{j}", "base", context, 3, key=(0, i, j)))
            found = finish(engine, 16)
            for i, j in contexts:
                contexts[i, j] = np.concatenate([contexts[i, j], found[f"{i}.{j}"].tokens, [turn]])
        served = [{tuple(b["input_ids"]) for b in server.bodies if b["logprob_start_len"] == -1} for server in pair]
        assert all(served) and 6 <= len(served[0]) <= 24
        firsts, seconds = ([{t for t in s if len(t) == n} for s in served] for n in (8, 12))
        assert sum(len(s) for s in seconds) == 16  # each once
        for i in range(2):  # the second turn is where the first was
            assert {t[:8] for t in seconds[i]} <= firsts[i]
        assert engine.metrics["cached"] >= 16 * 10 and engine.metrics["prompt"] == 16 * 8 + 16 * 12
        assert engine.metrics["sampled"] == 16 * 6


def test_a_released_request_is_cancelled_at_the_server(net, fake, tmp_path):
    with connect(fake, net, tmp_path, lanes=1) as engine:
        fake.pace = 0.05
        engine.submit(request("a", max_tokens=40))
        engine.submit(request("b", max_tokens=2))  # waits for the lane
        until(lambda: fake.running)
        (rid,) = fake.running
        engine.release("a")
        assert set(finish(engine)) == {"b"}
        until(lambda: rid in fake.aborted and not fake.running)
        assert len({b["rid"] for b in fake.bodies}) == len(fake.bodies) and {len(b["rid"]) for b in fake.bodies} == {32}
        engine.submit(request("c", max_tokens=40))  # close() ends it
        until(lambda: fake.running)
    assert not fake.running


def test_closing_ends_the_wait_for_a_server_that_does_not_load_an_adapter(net, fake, tmp_path, monkeypatch):
    monkeypatch.setattr("rl.engines.sglang.engine._CLOSING", 0.2)
    with connect(fake, net, tmp_path) as engine, concurrent.futures.ThreadPoolExecutor(1) as thread:
        put = fake._put

        def stop(*names):
            fake.stopped = True
            return put(*names)

        fake._put = stop
        loading = thread.submit(engine.load, adapter(net))
        until(lambda: fake.stopped)
        began = time.monotonic()
        engine.close()
        with pytest.raises(concurrent.futures.CancelledError):
            loading.result(timeout=10)
        assert time.monotonic() - began < 5 < QUICK.load and not engine._thread.is_alive()
        with pytest.raises(concurrent.futures.CancelledError):
            engine.load(adapter(net, version=2))
    fake.stopped = False


def test_no_more_requests_than_lanes_are_at_the_servers(net, fake, tmp_path):
    fake.pace = 0.01
    with connect(fake, net, tmp_path, lanes=3) as engine:
        engine.generate([request(f"s{i}", max_tokens=3) for i in range(9)])
    assert fake.most == 3


def test_what_servers_cannot_sample_is_refused(net, fake, tmp_path):
    two = stack_banks([tiny.bank(net.config, seed=1), tiny.bank(net.config, seed=2)])
    with connect(fake, net, tmp_path) as engine:
        for bad in (request(top_k=5), request(top_p=0.9)):
            with pytest.raises(EngineError, match="top_k and top_p"):
                engine.submit(bad)
        for policy, message in [
            (Policy("p", 1, two, np.array([0, 0.5, 0.5])), "mixture .* engine 'jax', or serve its composed export"),
            (Policy("p", 1, two, gate=constant_gate(net.config, 3, 1)), "token gate .* engine 'jax'"),
        ]:
            with pytest.raises(EngineError, match=message):
                engine.load(policy)
        engine.load(Policy("none", 5, two, np.array([1, 0, 0])))
        (c,) = engine.generate([request(policy="none")])
        assert c.version == 5 and "lora_path" not in fake.bodies[-1]
        with pytest.raises(EngineError, match="closed"):
            engine.close()
            engine.submit(request())
