import pathlib

import pytest

from tests.trace_jax import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    """The folder of the tiny agent."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture
def runtime(tmp_path, checkpoint):
    """A runtime of the smallest run, its workdir empty."""
    with tiny.open_tiny(tmp_path, checkpoint) as runtime:
        yield runtime
