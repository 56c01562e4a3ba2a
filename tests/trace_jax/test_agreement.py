import dataclasses

import pytest

from tests.trace_jax import tiny
from trace_jax import train
from trace_jax.agreement import FILE, check_agreement
from trace_jax.train import initial_adapter

ONE = "precondition_verification"


@pytest.fixture
def check(runtime):
    """The check before the first update of a capability's adapter."""
    tiny.store_environment(runtime, ONE)
    train.make_learner.cache_clear()
    return lambda: check_agreement(runtime, train.make_learner(runtime), initial_adapter(runtime, ONE), runtime.environment(ONE))


def test_engine_and_learner_agree_under_an_adapter_that_matters(runtime, check, monkeypatch):
    check()
    found = runtime.workdir.read_json(FILE)
    assert found["sequences"] == 64 and found["tokens"] > 100 and found["engine"] == "jax"
    assert found["mean"] < 1e-5 and found["largest"] < 1e-3 and found["adapter_effect"] > 3 * found["bound"]
    monkeypatch.setattr(runtime, "roll_out", lambda *_: pytest.fail("tried again"))
    check()


@pytest.mark.parametrize("fault", ["no adapter", "half the scale"])
def test_an_engine_that_samples_something_else_is_refused(runtime, check, monkeypatch, fault):
    load = runtime.engine.load

    def wrong(policy):
        half = policy.adapters and dataclasses.replace(policy.adapters, scale=policy.adapters.scale / 2)
        load(dataclasses.replace(policy, adapters=None if fault == "no adapter" else half))

    monkeypatch.setattr(runtime.engine, "load", wrong)
    with pytest.raises(RuntimeError, match="engine 'jax' and learner disagree: .* See agreement.json; give both"):
        check()
    assert runtime.workdir.read_json(FILE)["mean"] > runtime.config.train.agreement
    with pytest.raises(RuntimeError, match="disagree"):
        check()  # the file that says so is no pass
    monkeypatch.setattr(runtime.engine, "load", load)
    check()  # the engine is mended, and asked again
    assert runtime.workdir.read_json(FILE)["mean"] < 1e-5 and runtime.workdir.read_json(FILE)["refused"] == 2


def test_it_can_be_left_out(runtime, check):
    runtime.config = dataclasses.replace(runtime.config, train=dataclasses.replace(runtime.config.train, agreement=0.0))
    check()
    assert not runtime.workdir.exists(FILE)
