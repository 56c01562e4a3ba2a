"""Runs whose rollouts are sampled by a SGLang server, here one that imitates it."""

import contextlib
import types

import numpy as np
import pytest

from model import load_pretrained
from rl.chat import Chat
from rl.engines.protocol import Policy
from tests.fake_sglang import Fake
from tests.trace_jax import tiny
from trace_jax import train
from trace_jax.agreement import FILE
from trace_jax.errors import InputError
from trace_jax.policies import load_mixture
from trace_jax.processes import Processes
from trace_jax.runtime.engines import sglang_engine
from trace_jax.stores import open_store
from trace_jax.train import initial_adapter, load_adapter, train_adapter
from trace_jax.workdir import Workdir

ONE = "precondition_verification"


@pytest.fixture(scope="module")
def server(checkpoint):
    with contextlib.closing(Fake(load_pretrained(checkpoint), context=512, end=Chat(checkpoint).end)) as fake:
        yield fake


def test_an_adapter_is_trained_on_rollouts_of_servers_one_update_behind(tmp_path, checkpoint, server):
    settings = dict(rollout__engine="sglang", servers__urls=server.url, train__iterations="3", train__validate_every="0", train__groups="1")
    with tiny.open_tiny(tmp_path, checkpoint, train__agreement="0", train__selection_seeds="1", **settings) as runtime:
        tiny.store_environment(runtime, ONE)
        train.make_learner.cache_clear()
        train_adapter(runtime, ONE)
        rows = runtime.workdir.read_jsonl(f"adapters/{ONE}/metrics.jsonl")
        updates = np.cumsum([0] + [row["trajectories_kept"] > 0 for row in rows])
        versions = [{t.policy["version"] for t in runtime.workdir.read_shards(f"adapter:{ONE}", "training", [i])} for i in range(3)]
        assert versions == [{updates[0]}, {updates[0]}, {updates[1]}] and updates[-1] > 0
        assert not any(name.startswith("errors/") for row in rows for name in row)
        assert any(np.any(b) for b in load_adapter(runtime, ONE).b.values())
        assert runtime.max_lag(Policy("p", adapters=initial_adapter(runtime, ONE))) == 1
    assert len([name for name in server.known if name.startswith("policy-")]) >= 2 and not server.running


def test_a_server_that_runs_the_base_for_an_adapter_is_refused_before_the_first_update(tmp_path, checkpoint, server):
    server.ignores_adapters = True
    try:
        with tiny.open_tiny(tmp_path, checkpoint, rollout__engine="sglang", servers__urls=server.url) as runtime:
            tiny.store_environment(runtime, ONE)
            train.make_learner.cache_clear()
            with pytest.raises(ValueError, match="changes no log-prob: the server samples the base"):
                train_adapter(runtime, ONE)
            assert not runtime.workdir.exists(FILE) and not runtime.workdir.exists(f"adapters/{ONE}/metrics.jsonl")
    finally:
        server.ignores_adapters = False


def test_processes_share_servers_and_none_is_without(tmp_path, checkpoint, server):
    with tiny.open_tiny(tmp_path, checkpoint, rollout__engine="sglang", servers__urls=server.url) as runtime:
        with pytest.raises(InputError, match="'servers.urls': 1 servers for 2 processes"):
            sglang_engine(runtime.config, runtime.model, Workdir(open_store(tmp_path), processes=Processes(1, 2)), print)
        with pytest.raises(InputError, match="'servers.folder': servers load no adapters from gs://bucket/run; give a folder"):
            sglang_engine(runtime.config, runtime.model, Workdir(open_store("gs://bucket/run")), print)


def test_servers_read_adapters_in_the_folder_that_they_share(tmp_path, checkpoint, server):
    shared = tmp_path / "shared"
    with tiny.open_tiny(tmp_path, checkpoint, rollout__engine="sglang", servers__urls=server.url, servers__folder=str(shared)) as runtime:
        tiny.store_adapters(runtime, ONE)
        runtime.engine.load(load_mixture(runtime, [ONE]).adapter(ONE))
        assert list(shared.glob("servers/0/*/adapter_model.safetensors")) and not runtime.workdir.exists("servers/0/adapters")


def test_a_server_that_is_not_there_is_named(tmp_path, checkpoint):
    settings = dict(rollout__engine="sglang", servers__urls="http://127.0.0.1:9", servers__outage="1")
    with tiny.open_tiny(tmp_path, checkpoint, **settings) as runtime:
        with pytest.raises(InputError, match="'rollout.engine': .*127.0.0.1:9"):
            runtime.engine  # noqa: B018


def test_experts_are_replayed_where_there_are_some(tmp_path, checkpoint, monkeypatch):
    with tiny.open_tiny(tmp_path, checkpoint, train__router_replay="true") as runtime:
        with pytest.raises(InputError, match="'train.router_replay': experts = True"):
            runtime.engine  # noqa: B018
    with pytest.raises(InputError, match="'train.router_replay': .*needs an engine that tells the experts"):
        tiny.open_tiny(tmp_path, checkpoint, train__router_replay="true", rollout__engine="sgl_jax")
    seen = {}
    engine = types.SimpleNamespace(close=lambda: None)
    monkeypatch.setattr("trace_jax.runtime.engines.JaxEngine", lambda _, **settings: seen.update(settings) or engine)
    (tmp_path / "other").mkdir()
    with tiny.open_tiny(tmp_path / "other", checkpoint, train__router_replay="true") as runtime:
        runtime.engine  # noqa: B018
    assert seen["experts"]
