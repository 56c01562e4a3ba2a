import pytest

from trace_jax.agents import client


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF", 0.001)
