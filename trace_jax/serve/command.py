"""`trace-jax serve --policy=P [--host=H] [--port=N]`: an OpenAI-compatible server over the policies of a run.

A request's `model` names the policy: `base`, `adapter:<capability>`, `composed`, whatever of these the workdir holds, and `trace-jax` for
the one of `--policy`. Without a workdir it is the base of the config. The server only reads, so it may run beside the run itself.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator

import uvicorn

from rl.engines.jax import JaxEngine
from rl.engines.protocol import Policy
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.policies import find_policy, trained_mixture
from trace_jax.progress import Progress
from trace_jax.runtime import Runtime, keep_compiled_programs
from trace_jax.serve.app import Service
from trace_jax.serve.decoding import Decoder
from trace_jax.serve.listener import bind, url
from trace_jax.workdir import Workdir

ALIAS = "trace-jax"
_STEPS = 4  # tokens of one call of the engine: a stream moves on, and a newcomer waits, by so many
_PATIENCE = 5  # seconds that connections have to end by themselves


def main(arguments: Arguments) -> None:
    """Serves until a signal ends it.

    Raises:
      InputError: no such policy, the port is taken, or the context is more than the model's.
    """
    if len(arguments.policy) != 1:
        raise InputError(f"--policy={','.join(arguments.policy)}: give one policy; requests choose among all of the workdir by their model")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(arguments.host, arguments.port))  # before anything is loaded
        keep_compiled_programs()
        workdir = arguments.workdir or stack.enter_context(_nothing_trained(arguments))
        runtime = stack.enter_context(Runtime(arguments.config, workdir, Progress({"serve": 1.0})))
        models = find_models(runtime, arguments.policy[0])
        engine = make_engine(runtime, models, arguments.context)
        decoder = Decoder(engine)
        service = Service(runtime.chat, decoder, models, runtime.local_model.config.vocab_size)
        server = Server(service, decoder, url(listener, arguments.host))
        decoder.on_failure = lambda: setattr(server, "should_exit", True)
        with decoder:
            server.run(sockets=[listener])
    if decoder.failure is not None:
        raise decoder.failure


def find_models(runtime: Runtime, asked: str) -> dict[str, Policy]:
    """The policies that requests may name; `asked` also under the alias.

    Raises:
      InputError: there is no policy `asked`.
    """
    mixture = trained_mixture(runtime)
    models = {asked: find_policy(runtime, asked, mixture)}
    names = ["base", *(f"adapter:{capability}" for capability in (mixture.capabilities if mixture else ()))]
    if runtime.workdir.exists("gate/routing.json"):
        names.append("composed")
    for name in names:
        if name not in models:
            with contextlib.suppress(InputError):  # a gate over other adapters than are there now: not asked for, not served
                models[name] = find_policy(runtime, name, mixture)
    return {ALIAS: models[asked], **models}


def make_engine(runtime: Runtime, models: dict[str, Policy], context: int | None) -> JaxEngine:
    """The engine with all policies, its programs compiled for the one that `trace-jax` stands for.

    Raises:
      InputError: the model has fewer positions than the context.
    """
    model, context = runtime.local_model, context or runtime.config.rollout.context
    if context > model.config.max_position_embeddings:
        raise InputError(f"--context={context}: more than the {model.config.max_position_embeddings} positions of the model; lower it")
    engine = JaxEngine(
        model,
        lanes=runtime.config.rollout.lanes,
        context=context,
        steps=_STEPS,
        chunk=max(16, min(256, context // 32)),  # a long prompt in few calls, a short one without much padding
        forget=False,  # the next request of a conversation is a new session that begins with the last one's tokens
    )
    for policy in models.values():
        engine.load(policy)
    engine.warm_up([models[ALIAS].name])
    return engine


class Server(uvicorn.Server):
    """Says when it listens; at a signal, running requests are failed first, so that their connections can end."""

    def __init__(self, service: Service, decoder: Decoder, url: str):
        # h11: with it a stream learns that its client is gone while it waits for a lane
        settings = {"http": "h11", "ws": "none", "lifespan": "off", "log_level": "warning", "access_log": False}
        super().__init__(uvicorn.Config(service.app(), timeout_graceful_shutdown=_PATIENCE, server_header=False, **settings))
        self._decoder, self._service, self._url = decoder, service, url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"serving at {self._url}/v1, models: {', '.join(self._service.models)}", flush=True)

    def handle_exit(self, sig: int, frame) -> None:
        self._decoder.stop()
        super().handle_exit(sig, frame)


@contextlib.contextmanager
def _nothing_trained(arguments: Arguments) -> Iterator[Workdir]:
    """The workdir of a server that was given none."""
    with tempfile.TemporaryDirectory(prefix="trace-jax-") as folder, Workdir.open(folder, arguments.config) as workdir:
        yield workdir
