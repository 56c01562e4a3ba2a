"""Settings of all tests: a CPU, no network, compiled programs kept between runs."""

import os
import pathlib
import signal
import sys

# before the first import of jax
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# most of the suite's time is compiling what runs for milliseconds; less of it changes no result beyond the last bits
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# the machine may be busy: an example that takes long is no failure; the same examples every time
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

# A shell starts background jobs with SIGINT ignored, and children inherit that; the tests of Ctrl-C need it as it is in the foreground.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The environment of a real SGLang server is built by the first test that needs it; without Python 3.11 it cannot be."""
    if item.get_closest_marker("sglang"):
        from tests.sglang_server.install import sglang_python

        try:
            sglang_python()
        except RuntimeError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_go_with_their_module():
    """Else a run of the whole suite holds thousands of them."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
