"""The LLM behind analyst=llm and generator=llm: who is asked, what is remembered, and what it may cost.

    agent = make_agent(config, workdir, "diagnose", templates)
    replies = ask_all(agent, [lambda m=m: agent.complete(m, schema) for m in questions])

Nothing of it is imported before it is needed: `openai` and `jsonschema` are of the extra `agents`.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

from trace_jax.agents.questions import ask_all
from trace_jax.agents.record import bill, usage_of
from trace_jax.errors import InputError

if TYPE_CHECKING:
    from trace_jax.agents.client import Client
    from trace_jax.agents.protocol import Backend
    from trace_jax.agents.templates import Templates
    from trace_jax.config import AgentsSection, Config
    from trace_jax.workdir import Workdir

__all__ = ["ask_all", "bill", "make_agent", "usage_of"]


def make_agent(config: Config, workdir: Workdir, stage: str, templates: Templates) -> Client:
    """The agent of the config's section `agents`, with the memory and the budget of a workdir.

    Args:
      stage: of the run, for the bill.
      templates: have the prompt of repairs.

    Raises:
      InputError: a package, key, model, command or file is missing.
    """
    settings = config.agents
    for name in ("jsonschema", *(["openai"] if settings.backend in ("openai", "served") else [])):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise InputError(f"agents.backend={settings.backend} needs the package {name!r}: pip install 'trace-jax[agents]'") from error
    from trace_jax.agents.client import Client

    _check_prices(settings)
    backend = _backend(settings, stage)
    if settings.backend == "replay":  # which spends nothing
        settings = dataclasses.replace(settings, max_tokens=None, max_cost=None)
    return Client(backend, workdir, templates, settings, stage)


def _backend(settings: AgentsSection, stage: str) -> Backend:
    if settings.backend in ("openai", "served"):
        from trace_jax.agents import openai_endpoint

        return openai_endpoint.openai_endpoint(settings) if settings.backend == "openai" else openai_endpoint.served_endpoint(settings)
    if settings.backend == "replay":
        from trace_jax.agents.replay import Replay

        return Replay(settings, stage)
    from trace_jax.agents import command

    return {"claude": command.Claude, "codex": command.Codex, "command": command.Command}[settings.backend](settings)


def _check_prices(settings: AgentsSection) -> None:
    """One price without the other would give a wrong bill."""
    missing = [name for name in ("price_input", "price_output") if getattr(settings, name) is None]
    if len(missing) == 1:
        raise InputError(f"config field 'agents.{missing[0]}': missing, the other price is given; give both, 0 where nothing is paid")
