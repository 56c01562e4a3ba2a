"""What the environment must say, what a run writes, and our own server as the endpoint."""

import logging
import os
import sys

import pytest

from rl.engines.protocol import Policy
from tests.rl import chats
from tests.scripted_llm import ORGANISATION, html, in_turn, refusal, scripted_llm, status
from tests.trace_jax.agents.asking import GOOD, KEY, SCHEMA, ask, asking, make, question
from tests.trace_jax.serve.serving import ScriptedEngine, serving
from trace_jax.agents import ask_all
from trace_jax.config import Config
from trace_jax.errors import InputError
from trace_jax.workdir import Workdir


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("OPENAI_")]:
        monkeypatch.delenv(name)
    with Workdir.open(tmp_path / "run", Config()) as workdir:
        yield workdir


@pytest.mark.parametrize(
    "environment, fields, said",
    [
        ({}, {}, "environment variable OPENAI_API_KEY: missing"),
        ({"OPENAI_BASE_URL": "https://llm.example/v1"}, {}, "environment variable OPENAI_API_KEY: missing"),
        ({"OPENAI_BASE_URL": "llm.example"}, {}, "environment variable OPENAI_BASE_URL: not an address"),
        ({"OPENAI_API_KEY": KEY}, {"model": ""}, "'agents.model': missing, and so is the environment variable OPENAI_MODEL"),
        ({"OPENAI_API_KEY": KEY}, {"parameters": {"max_tokens": 5}}, "'agents.parameters': 'max_tokens' .* agents.answer_tokens"),
        ({"OPENAI_API_KEY": KEY}, {"parameters": {"stream": True}}, "'agents.parameters': 'stream'"),
    ],
)
def test_what_is_missing_is_said_at_once(workdir, monkeypatch, environment, fields, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said):
        make(workdir, **fields)


def test_a_local_server_needs_no_key_and_the_model_may_come_from_the_environment(workdir, monkeypatch):
    with scripted_llm(lambda request: GOOD) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_MODEL", "from-the-environment")
        assert ask(make(workdir, model=""))[0].faults == () and server.requests[0]["model"] == "from-the-environment"


@pytest.mark.parametrize("package, backend", [("openai", "openai"), ("jsonschema", "claude")])
def test_a_missing_package_is_named_with_the_extra(workdir, monkeypatch, package, backend):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"needs the package '{package}': pip install 'trace-jax\[agents\]'"):
        make(workdir, backend=backend)


def test_no_endpoint_at_all_is_no_answer(workdir, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    (found,) = ask(make(workdir, attempts=2))
    assert "no connection" in str(found) and "127.0.0.1" not in str(found)


def test_no_key_address_header_or_account_is_in_any_file_or_log(tmp_path, caplog, monkeypatch):
    """The files of a run in which everything goes wrong once, the errors it ends with, and the logs at their most talkative."""
    monkeypatch.setenv("OPENAI_LOG", "debug")
    caplog.set_level(logging.DEBUG)
    said = f"key {KEY}, organization {ORGANISATION}, org-acme1, proj_acme1, user-acme1X, Bearer {KEY}, me@acme.example"
    replies = (status(429, said), status(503, said), html(said), refusal(), f'the key is {KEY} {{"label": "NA"}}', GOOD, status(401, said))
    with asking(tmp_path / "run", in_turn(*replies), concurrency=1, attempts=4) as (agent, server):
        assert ask(agent)[0].faults == ()
        with pytest.raises(InputError) as fatal:
            ask(agent, "other")
        server.script = lambda request: status(503, said)
        (failed,) = ask(agent, "third")
        server.script = lambda request: html(said)
        (page,) = ask(agent, "fourth")
        address = server.url.removesuffix("/v1").removeprefix("http://")
        assert server.headers[0]["openai-organization"] == "org-acme1" and KEY in server.headers[0]["authorization"]
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()).decode()
    assert "there is no JSON" not in written and "How is it?" not in written and "Be brief" not in written, "no prompt"
    for text in (written, str(fatal.value), str(failed), str(page), caplog.text):
        for secret in (KEY, address, ORGANISATION, "org-acme1", "proj_acme1", "user-acme1X", "acme.example", "uthorization", "req_1"):
            assert secret not in text, secret
    assert "[redacted]" in written and "[redacted]" in str(fatal.value) and "[redacted]" in str(failed) and "[redacted]" in str(page)


def test_our_own_server_answers(workdir):
    chat = chats.chat("qwen3")
    engine = ScriptedEngine(chat)
    models = {name: Policy("base", 0) for name in ("trace-jax", "base")}
    with serving(chat, engine, models, len(chat.tokenizer)) as (url, _):
        engine.say(GOOD)
        fields = {"backend": "served", "url": f"{url}/", "deadline": 30.0, "parameters": {"temperature": 0.5, "top_k": 3}}
        agent = make(workdir, model="", **fields)
        (found,) = ask(agent)
        assert found.parsed == {"label": "NA", "step": 3} and agent.usage.output_tokens > 0
        request = engine.requests[0]
        assert request.max_tokens == 256 and request.temperature == 0.5 and request.top_k == 3
        assert '"LACKING"' in chat.tokenizer.decode(request.tokens), "the schema is in the prompt"
        engine.say('{"label": ', cut=True)
        assert "cut off" in ask(make(workdir, **fields | {"model": "base"}))[0].faults[0]
        with pytest.raises(InputError, match="status 404"):
            ask(make(workdir, **fields | {"model": "gpt-x"}))
        with pytest.raises(InputError, match="min_p"):
            ask(make(workdir, model="", **fields | {"parameters": {"min_p": 0.1}}))


def test_a_client_works_in_one_event_loop_after_the_other(tmp_path):
    with asking(tmp_path, lambda request: GOOD) as (agent, server):
        for text in "abc":
            assert ask(agent, text)[0].faults == ()
        assert ask_all(agent, [lambda: agent.complete(question("d"), SCHEMA)])[0].faults == () and len(server.requests) == 4
