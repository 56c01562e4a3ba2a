"""The engines of a run, as the config says: the embedded one, which samples every policy, and SGLang or SGL-JAX for base and adapters.

A server is asked for the log-probs of a few tokens before the first rollout, under the base and under every adapter that it gets; one that
answers otherwise than the model of this process is refused.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from model import CausalLM
from rl.engines.jax import JaxEngine
from rl.engines.protocol import Engine, EngineError
from rl.engines.sgl_jax import SglJaxEngine, launch
from rl.engines.sglang import Limits, ServerSettings, SGLangEngine, reference_of, start_servers
from trace_jax.base_model import local_weights
from trace_jax.config import Config
from trace_jax.errors import InputError
from trace_jax.stores import is_remote
from trace_jax.workdir import Workdir

API_KEY = "SGLANG_API_KEY"  # the variable that holds it


def embedded_engine(config: Config, model: CausalLM) -> JaxEngine:
    """The engine in this process.

    Raises:
      InputError: the model has no experts to replay.
    """
    try:
        return JaxEngine(model, lanes=config.rollout.lanes, context=config.rollout.context, experts=config.train.router_replay)
    except EngineError as error:
        raise InputError(f"config field 'train.router_replay': {error}") from error


def sglang_engine(config: Config, model: CausalLM, workdir: Workdir, progress: Callable[[str], object]) -> Engine:
    """An engine on SGLang servers: those of `servers.urls`, of several processes each its share, else servers of its own.

    Args:
      workdir: gets their logs, and the adapters unless `servers.folder` does.
      progress: told how many servers have started.

    Raises:
      InputError: a server cannot be used or does not start, or there are fewer than processes.
    """
    settings, rollout, processes = config.servers, config.rollout, workdir.processes
    name = f"servers/{processes.index}"
    share = settings.urls[processes.index :: processes.count]
    if settings.urls and not share:
        raise InputError(
            f"config field 'servers.urls': {len(settings.urls)} servers for {processes.count} processes; each loads its adapters into "
            "servers of its own: give at least as many"
        )
    if share and not settings.folder and is_remote(workdir.place()):
        raise InputError(
            f"config field 'servers.folder': servers load no adapters from {workdir.place()}; give a folder that they and all processes "
            "of the run see under one name"
        )
    if share:
        progress(f"asking {', '.join(share)}")
    folder = Path(settings.folder, name).absolute() if settings.folder else workdir.local(f"{name}/adapters")
    shutil.rmtree(folder, ignore_errors=True)  # those of a run that was killed; no name is used again
    try:
        servers = share or start_servers(
            local_weights(config.model, "SGLang servers read a local folder"),
            model.config,
            ServerSettings(
                context=rollout.context,
                lanes=-(-rollout.lanes // settings.count),
                rank=config.train.rank,
                adapters=settings.adapters,
                dtype=config.model.dtype,
                device=settings.device,
                tensor=settings.tensor,
                deterministic=settings.deterministic,
                experts=config.train.router_replay,
                memory=settings.memory,
                options=shlex.split(settings.options),
            ),
            logs=workdir.log(name),
            count=settings.count,
            python=shlex.split(settings.python) or sys.executable,
            deadline=settings.start,
            progress=progress,
        )
        return SGLangEngine(
            servers,
            config=model.config,
            folder=folder,
            lanes=rollout.lanes,
            context=rollout.context,
            experts=config.train.router_replay,
            limits=Limits(request=settings.request, outage=settings.outage),
            reference=reference_of(model),
            api_key=os.environ.get(API_KEY),
        )
    except EngineError as error:
        raise InputError(f"config field 'rollout.engine': {error}") from error


def sgl_jax_engine(config: Config, model: CausalLM) -> Engine:
    """SGL-JAX in this process, with a copy of the weights; on TPU.

    Raises:
      InputError: it is not installed, or cannot serve the model.
    """
    rollout = config.rollout
    try:
        engine = launch(
            str(local_weights(config.model, "SGL-JAX reads a local folder")),
            model.config,
            context=rollout.context,
            lanes=rollout.lanes,
            rank=config.train.rank,
            dtype=config.model.dtype,
            tp_size=1 if model.mesh is None else model.mesh.size,
        )
        return SglJaxEngine(engine, model.config, timeout=config.servers.request)
    except EngineError as error:
        raise InputError(f"config field 'rollout.engine': {error}") from error
