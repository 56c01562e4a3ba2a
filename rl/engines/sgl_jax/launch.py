"""Starts SGL-JAX in this process so that `SglJaxEngine` can use it, and takes back what it does to the process."""

from __future__ import annotations

import atexit
import signal
from typing import Any

from transformers import AutoConfig, __version__

from model import Config
from model.huggingface_names import MODULES
from rl.engines.protocol import EngineError

MISSING = (
    "SGL-JAX is not installed, and its release on the package index can neither take adapters nor return log-probs. In an environment with "
    "Python 3.12 or 3.13: pip install 'sglang-jax[tpu] @ git+https://github.com/sgl-project/sglang-jax#subdirectory=python', then trace-jax"
    " again, since SGL-JAX pins an older flax and transformers, and works with the newer ones"
)
_RESERVED = 6  # positions that SGL-JAX keeps back from a prompt


def launch(folder: str, config: Config, *, context: int, lanes: int = 64, rank: int = 16, **settings: Any) -> Any:
    """An `sgl_jax` Engine of a Hugging Face folder, to be called from the main thread.

    Dense models get static LoRA, whose buffers take adapters of up to `rank` (of a mixture, the sum of the ranks). Sparse ones get none and
    are served with merged weights: SGL-JAX calls their `o_proj` `c_proj` and leaves its adapter out, and cannot adapt experts.

    On a CPU, where one tries things out, set JAX_CPU_ENABLE_ASYNC_DISPATCH=false: without it SGL-JAX at times mixes up the requests of a
    batch.

    Args:
      settings: further fields of SGL-JAX's ServerArgs, such as `tp_size`, `dtype`, `mem_fraction_static`; they win over those chosen here.

    Raises:
      EngineError: SGL-JAX is not installed, or would compute another model than the folder's.
    """
    _check_folder(folder, config)
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


def _check_folder(folder: str, config: Config) -> None:
    """Of a field that transformers does not know by the name that SGL-JAX asks for, SGL-JAX takes a default without a word."""
    if config.rope.kind != "default":
        raise EngineError(f"{folder}: rope_type {config.rope.kind!r}; SGL-JAX turns positions the default way alone")
    seen = AutoConfig.from_pretrained(folder)
    for name, default, wanted in (("rope_theta", 1e6, config.rope.theta), ("num_experts", 128, config.num_experts)):
        if wanted and (found := getattr(seen, name, default)) != wanted:
            raise EngineError(
                f"{folder}: {name} is {wanted:g}, but SGL-JAX would take {found:g}, since transformers {__version__} has no such field; "
                "sample this model with another engine"
            )
