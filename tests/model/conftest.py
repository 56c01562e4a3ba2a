"""A bucket for the tests of files that may lie in one."""

import pytest

from tests import gcs


@pytest.fixture(scope="session")
def gcs_server():
    with gcs.server() as url:
        yield url


@pytest.fixture
def bucket(gcs_server, monkeypatch) -> gcs.Bucket:
    """An empty bucket of an emulator, and the environment that leads there."""
    for name, value in gcs.SETTINGS.items():
        monkeypatch.setenv(name, value.format(gcs_server))
    return gcs.Bucket()
