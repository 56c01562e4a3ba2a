"""`trace-jax view WORKDIR [--host=H] [--port=N]`, or `--results=FILE,...`: every rollout in a browser.

Takes no lock and writes nothing, so it may run beside the run whose rollouts it shows.
"""

from __future__ import annotations

import contextlib
import socket
import sys

import uvicorn
from starlette.applications import Starlette

from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.serve.listener import bind, url
from trace_jax.view.app import Pages, is_loopback
from trace_jax.view.rollouts import Rollouts
from trace_jax.workdir import Workdir

_PATIENCE = 1  # seconds that connections have to end by themselves


def main(arguments: Arguments) -> None:
    """Serves until Ctrl-C.

    Raises:
      InputError: no workdir and no results, or both, no such workdir, or the port is taken.
    """
    if (arguments.argument is None) == (not arguments.results):
        raise InputError("trace-jax view: give the folder or gs:// address of a workdir, or --results=FILE,...")
    with contextlib.ExitStack() as stack:
        workdir = stack.enter_context(Workdir.look(arguments.argument)) if arguments.argument else None
        listener = stack.enter_context(bind(arguments.host, arguments.port))
        rollouts = stack.enter_context(contextlib.closing(Rollouts(workdir, arguments.results)))
        rollouts.now(patience=0)  # begins to look
        address = url(listener, arguments.host)
        loopback = is_loopback(listener.getsockname()[0])
        if not loopback:
            print(f"trace-jax: everybody who reaches {arguments.host} can read these rollouts", file=sys.stderr)
        with contextlib.suppress(KeyboardInterrupt):
            Server(Pages(rollouts, loopback).app(), f"rollouts of {rollouts.place} at {address}, Ctrl-C ends it").run(sockets=[listener])


class Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, app: Starlette, said: str):
        settings = {"http": "h11", "ws": "none", "lifespan": "off", "log_level": "warning", "access_log": False}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=_PATIENCE, server_header=False, **settings))
        self._said = said

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._said, flush=True)
