import pytest

from tests.trace_jax.example_run import add_all
from tests.trace_jax.report.pages import written
from trace_jax.config import load_config
from trace_jax.workdir import Workdir


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """(workdir, page) of a finished run."""
    with Workdir.open(tmp_path_factory.mktemp("run"), load_config("quickstart")) as workdir:
        add_all(workdir)
        yield workdir, written(workdir)


@pytest.fixture
def workdir(tmp_path):
    with Workdir.open(tmp_path / "run", load_config("quickstart")) as workdir:
        yield workdir
