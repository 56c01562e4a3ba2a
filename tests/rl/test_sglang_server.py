"""`SGLangEngine` with a real SGLang server on this machine's CPU."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from model import save_pretrained
from rl.chat import Chat
from rl.engines.protocol import Completion, Policy
from rl.engines.sglang import Limits, ServerSettings, SGLangEngine, reference_of, start_servers
from tests.model import tiny
from tests.rl.engine_contract import CONTEXT, EngineContract, check, draw, finish, policies, request
from tests.sglang_server.install import sglang_python
from tests.sglang_server.server import environment, one_at_a_time
from trace_jax.quickstart.tokenizer import save_tokenizer

pytestmark = pytest.mark.sglang
LIMITS = Limits(request=240.0, liveness=10.0, outage=240.0)


def start(folder, config, logs, variables=None, **settings):
    environ = environment(**(variables or {}))
    settings = ServerSettings(context=CONTEXT, lanes=8, device="cpu", dtype="float32", environment=environ, **settings)
    return start_servers(folder, config, settings, logs=logs, python=str(sglang_python()), deadline=300, progress=print)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def net(folder):
    # on a CPU SGLang pads the intermediate size to a multiple of 32, adapters excepted, and ends at the first request under one
    net = tiny.model(vocab_size=len(Chat(folder).tokenizer), num_hidden_layers=2, intermediate_size=96)
    save_pretrained(net, folder)
    return net


@pytest.fixture(scope="module")
def servers(net, folder, tmp_path_factory):
    with one_at_a_time(), start(folder, net.config, tmp_path_factory.mktemp("logs"), rank=8) as servers:
        yield servers


@pytest.fixture(scope="module")
def connected(net, servers, tmp_path_factory):
    adapters = tmp_path_factory.mktemp("adapters")
    options = {"config": net.config, "folder": adapters, "lanes": 16, "context": CONTEXT, "limits": LIMITS}
    with SGLangEngine(servers.urls, reference=reference_of(net), tolerance=1e-4, **options) as engine:
        for policy in policies(net.config).values():
            engine.load(policy)
        yield engine
    assert not list(adapters.iterdir())


class TestSGLangServer(EngineContract):
    atol = 1e-4

    @pytest.fixture
    def engine(self, connected):
        return connected


def test_adapters_swapped_under_load_lose_no_request_and_mix_no_versions(net, connected):
    versions = {v: Policy("swapped", v, tiny.bank(net.config, seed=v)) for v in range(1, 6)}
    count, asked, found = 200, {}, {}
    connected.load(versions[1])
    for v in versions:
        connected.load(versions[v])  # those of the version before are still running
        for i in range(v - 1, count, len(versions)):
            asked[f"s{i}"] = request(f"s{i}", "swapped", draw(net.config.vocab_size, i % 20, 4 + i % 9), 2 + i % 7, key=(0, i % 20, i))
            connected.submit(asked[f"s{i}"])
        found |= {c.session: c for c in connected.poll()}
    while len(found) < count:
        found |= {c.session: c for c in connected.poll()}
    for name, c in found.items():
        assert isinstance(c, Completion), c
        assert c.version == 1 + int(name[1:]) % len(versions) and len(c.tokens) == asked[name].max_tokens
        check(net, versions[c.version], asked[name], c, 1e-4)
        connected.release(name)


def test_cached_prefixes_are_of_one_version(net, connected):
    """The second turn after a swap is computed under the new adapter from its first token on."""
    context = draw(net.config.vocab_size, 3, 30)
    for v in (1, 2):
        policy = Policy("turns", v, tiny.bank(net.config, seed=20 + v))
        connected.load(policy)
        cached = connected.metrics["cached"]
        asked = request("t", "turns", context, 3)
        connected.submit(asked)
        c = finish(connected)["t"]
        check(net, policy, asked, c, 1e-4)
        assert connected.metrics["cached"] == cached
        context = np.concatenate([context, c.tokens, [1]])
    connected.submit(request("t", "turns", context, 3))
    finish(connected)
    assert connected.metrics["cached"] > cached
    connected.release("t")


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_killed_or_stopped_comes_back_with_its_adapters(net, connected, servers, sign):
    policy = Policy("survivor", 9, tiny.bank(net.config, seed=9))
    connected.load(policy)
    asked = {f"k{i}": request(f"k{i}", "survivor", draw(net.config.vocab_size, i, 5), 30, key=(0, i, 0)) for i in range(64)}
    for r in asked.values():
        connected.submit(r)
    time.sleep(0.3)
    keeper = servers._servers[0].process.pid
    group = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])
    os.killpg(group, sign)
    found = {}
    if sign == signal.SIGSTOP:
        while connected.metrics["servers"]:
            found |= {c.session: c for c in connected.poll()}
        os.killpg(group, signal.SIGCONT)
    while len(found) < len(asked):
        found |= {c.session: c for c in connected.poll()}
    for name, c in found.items():
        check(net, policy, asked[name], c, 1e-4)
        connected.release(name)
    assert connected.metrics["retries"] > 0


@pytest.mark.slow
def test_the_experts_of_each_token_are_those_that_our_model_takes(folder, tmp_path):
    save_tokenizer(tmp_path)
    config = dataclasses.replace(
        tiny.CONFIGS["qwen3_moe"], vocab_size=len(Chat(folder).tokenizer), tie_word_embeddings=False, moe_intermediate_size=32
    )
    net = tiny.model(config=config)
    save_pretrained(net, tmp_path)
    # the experts' buffer is to be pinned by CUDA, of all places on a CPU
    pinning = "types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)"
    (tmp_path / "sitecustomize.py").write_text(f"import types, torch\ntorch.cuda.cudart = lambda: {pinning}\n")
    with one_at_a_time():
        servers = start(tmp_path, config, tmp_path, variables={"PYTHONPATH": str(tmp_path)}, experts=True)
        options = {"folder": tmp_path / "adapters", "context": CONTEXT, "limits": LIMITS, "reference": reference_of(net), "tolerance": 1e-4}
        with SGLangEngine(servers, config=config, experts=True, **options) as engine:
            engine.load(Policy("base", 1))
            prompt = draw(config.vocab_size, 1, 20)
            asked = [request("a", tokens=prompt), request("b", tokens=np.concatenate([prompt[:15], [3]]))]  # its prefix is cached
            found = [engine.generate([r])[0] for r in asked]
            assert engine.metrics["cached"] > 0
    for r, c in zip(asked, found, strict=True):
        check(net, Policy("base", 1), r, c, 1e-4)
        whole = np.concatenate([r.tokens, c.tokens])
        ours = np.sort(np.asarray(tiny.forward(net, jnp.asarray(whole)[None], collect=("experts",)).experts)[0], axis=-1)
        assert c.experts.shape == ours.shape and (np.sort(c.experts, axis=-1)[:-1] == ours[:-1]).all() and (c.experts[-1] == -1).all()
