"""All engines against the same contract: the embedded one, and the one over HTTP with a server that imitates SGLang."""

import pytest

from rl.engines.jax import JaxEngine
from rl.engines.sglang import SGLangEngine, reference_of
from tests.fake_sglang import fakes
from tests.model import tiny
from tests.rl.engine_contract import CONTEXT, EngineContract, policies


@pytest.fixture(scope="module")
def net():
    return tiny.model(num_hidden_layers=1)


@pytest.fixture(scope="module")
def embedded(net):
    engine = JaxEngine(net, lanes=4, context=CONTEXT, steps=4, rows=2, chunk=8)
    for policy in policies(net.config).values():
        engine.load(policy)
    yield engine
    engine.close()
    engine.close()


@pytest.fixture(scope="module")
def remote(net, tmp_path_factory):
    with fakes(net, 2) as servers:
        folder, urls = tmp_path_factory.mktemp("adapters"), [server.url for server in servers]
        reference = reference_of(net)
        engine = SGLangEngine(urls, config=net.config, folder=folder, lanes=4, context=CONTEXT, reference=reference, tolerance=1e-4)
        for policy in policies(net.config).values():
            engine.load(policy)
        yield engine
        engine.close()
        engine.close()
        assert all(not server.adapters and not server.reloaded for server in servers) and not list(folder.iterdir())


class TestJaxEngine(EngineContract):
    @pytest.fixture
    def engine(self, embedded):
        return embedded


class TestSGLangEngine(EngineContract):
    @pytest.fixture
    def engine(self, remote):
        return remote
