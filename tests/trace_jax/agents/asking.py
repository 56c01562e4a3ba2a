"""An agent over a scripted endpoint, as the steps make it."""

import contextlib
import dataclasses
import os
from unittest import mock

from tests.scripted_llm import scripted_llm
from trace_jax.agents import ask_all, make_agent
from trace_jax.agents.templates import Templates
from trace_jax.config import AgentsSection, Config
from trace_jax.workdir import Workdir

KEY = "sk-test-4f1cKeyThatNoFileMayHold"
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["NA", "PRESENT", "LACKING"]}, "step": {"type": "integer"}},
    "required": ["label", "step"],
    "additionalProperties": False,
}
GOOD = '{"label": "NA", "step": 3}'
FAST = {"model": "gpt-x", "deadline": 5.0, "attempts": 3, "concurrency": 4, "answer_tokens": 256}


def question(text="How is it?"):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def make(workdir, stage="diagnose", **fields):
    settings = AgentsSection(**FAST | fields)
    return make_agent(dataclasses.replace(Config(), agents=settings), workdir, stage, Templates())


def ask(agent, *texts, schema=SCHEMA, **options):
    """The replies to several questions."""
    return ask_all(agent, [lambda t=t: agent.complete(question(t), schema, **options) for t in texts or ("How is it?",)])


def environment(url):
    """The environment of an agent of backend openai."""
    ours = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY, "OPENAI_ORG_ID": "org-acme1", "OPENAI_PROJECT_ID": "proj_acme1"}
    return {**{name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}, **ours}


@contextlib.contextmanager
def asking(folder, script, **fields):
    """An agent, and the server that answers it."""
    with scripted_llm(script) as server, mock.patch.dict(os.environ, environment(server.url), clear=True):
        with Workdir.open(folder, Config()) as workdir:
            yield make(workdir, **fields), server
