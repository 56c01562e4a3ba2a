"""Starts SGL-JAX in this process so that `SglJaxEngine` can use it, and takes back what it does to the process."""

from __future__ import annotations

import atexit
import json
import pathlib
import signal
from typing import Any

from model import Config
from model.huggingface_names import MODULES
from rl.engines.protocol import EngineError

MISSING = (
    "SGL-JAX is not installed, and its release on the package index can neither take adapters nor return log-probs. In an environment with "
    "Python 3.12 or 3.13: pip install 'sglang-jax[tpu] @ git+https://github.com/sgl-project/sglang-jax#subdirectory=python'"
)
_RESERVED = 6  # positions that SGL-JAX keeps back from a prompt


def launch(folder: str, config: Config, *, context: int, lanes: int = 64, rank: int = 16, **settings: Any) -> Any:
    """An `sgl_jax` Engine of a Hugging Face folder, to be called from the main thread.

    Dense models get static LoRA, whose buffers take adapters of up to `rank` (of a mixture, the sum of the ranks). Sparse ones get none and
    are served with merged weights: SGL-JAX calls their `o_proj` `c_proj` and leaves its adapter out, and cannot adapt experts.

    On a CPU, where one tries things out, set JAX_CPU_ENABLE_ASYNC_DISPATCH=false: without it SGL-JAX at times mixes up the requests of a
    batch of a sparse model.

    Args:
      settings: further fields of SGL-JAX's ServerArgs, such as `tp_size`, `dtype`, `mem_fraction_static`; they win over those chosen here.

    Raises:
      EngineError: SGL-JAX is not installed, or would read the folder's config.json otherwise than we do.
    """
    _check_folder(pathlib.Path(folder) / "config.json", config)
    try:
        from sgl_jax.srt.entrypoints.engine import Engine
    except ImportError as error:
        raise EngineError(f"{MISSING} ({error})") from error
    chosen = {
        "model_path": str(folder),
        "context_length": context + _RESERVED,
        "max_running_requests": lanes,
        "enable_single_process": True,
        "enable_engine_loop_run_forever_daemon": True,  # requests come from our thread, its event loop runs in another
    }
    if not config.num_experts:
        chosen |= {
            "enable_static_lora": True,
            "lora_target_modules": [MODULES[name].rpartition(".")[2] for name in config.projections()],
            "max_lora_rank": rank,
            "max_loras_per_batch": 1,
            "lora_scaling": 1.0,  # each adapter's own is part of what is written
        }
    before = signal.getsignal(signal.SIGCHLD)
    engine = Engine(**chosen | settings)
    # It reaps every child of the process as it ends, and ends them all at exit. They are the workers of the environments, not its own.
    signal.signal(signal.SIGCHLD, before)
    atexit.unregister(engine.shutdown)
    return engine


def _check_folder(path: pathlib.Path, config: Config) -> None:
    """SGL-JAX reads two fields where transformers 4 wrote them, and else takes a default without a word."""
    found = {"rope_theta": 1e6, "num_experts": 128} | json.loads(path.read_text())
    for name, wanted in {"rope_theta": config.rope.theta, "num_experts": config.num_experts or found["num_experts"]}.items():
        if found[name] != wanted:
            raise EngineError(f'{path}: SGL-JAX would take {name} = {found[name]:g}, the model has {wanted:g}; add "{name}": {wanted:g}')
