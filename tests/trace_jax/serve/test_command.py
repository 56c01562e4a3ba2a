"""The command over the real engine and a tiny agent: policies, determinism, concurrency, how it ends."""

import concurrent.futures
import os
import re
import signal
import socket
import threading
import time

import jax
import numpy as np
import openai
import pytest

from model import Gate, init_gate, save_gate
from rl.engines.jax import JaxEngine
from rl.engines.protocol import Request
from tests.trace_jax import tiny
from tests.trace_jax.serve.serving import client, serving, wait_until
from trace_jax import cli
from trace_jax.errors import InputError
from trace_jax.serve.command import find_models, make_engine

ONE, TWO = "tool_calling_precision", "precondition_verification"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("check_order", "return_order", "cancel_order")]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory, checkpoint):
    """A run with two adapters and a gate that always takes the second."""
    with tiny.open_tiny(tmp_path_factory.mktemp("serve"), checkpoint) as runtime:
        tiny.store_adapters(runtime, ONE, TWO)
        gate = init_gate(runtime.model.config, 3, 0.0, jax.random.key(0))
        save_gate(Gate(gate.kernel, gate.bias.at[:, 2].set(1e4)), runtime.workdir.local("gate/gate.safetensors"))
        runtime.workdir.write_json("gate/routing.json", {"slots": ["base", ONE, TWO], "kept": True, "composed": "gate"})
        yield runtime


@pytest.fixture(scope="module")
def models(runtime):
    return find_models(runtime, "composed")


@pytest.fixture(scope="module")
def engine(runtime, models):
    return make_engine(runtime, models, None)


@pytest.fixture(scope="module")
def url(runtime, models, engine):
    with serving(runtime.chat, engine, models, runtime.model.config.vocab_size) as (url, _):
        yield url


def ask(url, text, **fields):
    return client(url).chat.completions.create(
        **{"model": "base", "messages": [{"role": "user", "content": text}], "temperature": 0} | fields
    )


def test_the_models_are_the_policies_of_the_workdir(url, models):
    assert list(models) == ["trace-jax", "composed", "base", f"adapter:{ONE}", f"adapter:{TWO}"]
    assert [m.id for m in client(url).models.list()] == list(models)


def test_an_answer_is_what_the_engine_samples(url, runtime, models):
    prompt = runtime.chat.start("", [{"role": "user", "content": "return order A1."}])
    engine = make_engine(runtime, models, None)
    for name in ("base", f"adapter:{TWO}", "composed"):
        request = Request("x", models[name].name, prompt, 60, 0.8, (7, 0, 1), (runtime.chat.end,))
        expected = engine.generate([request])[0]
        found = ask(url, "return order A1.", model=name, temperature=0.8, seed=7, n=2, max_tokens=60, logprobs=True).choices[1]
        assert [x.token for x in found.logprobs.content] == [runtime.chat.decode([t]) for t in expected.tokens]
        np.testing.assert_allclose([x.logprob for x in found.logprobs.content], expected.logprobs, atol=1e-4)


def test_sixteen_requests_at_once_are_answered_as_one_by_one(url, models):
    def answer(i):
        found = ask(url, f"order A{i} and B{i % 3}.", model=list(models)[i % len(models)], tools=TOOLS, max_tokens=40)
        message = found.choices[0].message
        return message.content, [(c.function.name, c.function.arguments) for c in message.tool_calls or ()], found.usage.completion_tokens

    alone = [answer(i) for i in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert list(threads.map(answer, range(16))) == alone
    assert any(calls for _, calls, _ in alone)


def test_a_seed_repeats_a_text_and_another_gives_another(url):
    def sample(seed, **fields):
        found = client(url).completions.create(
            model="base", prompt="<|im_start|>assistant\n", n=4, temperature=1.5, seed=seed, max_tokens=24, **fields
        )
        return [choice.text for choice in found.choices]

    first = sample(1)
    assert sample(1) == first != sample(2) and len(set(first)) > 1


def test_a_stream_is_the_answer_in_pieces(url):
    whole = ask(url, "return order A1.", n=3, temperature=1.0, seed=5, max_tokens=30)
    texts = ["", "", ""]
    for chunk in ask(url, "return order A1.", n=3, temperature=1.0, seed=5, max_tokens=30, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_the_length_ends_an_answer(url):
    found = ask(url, "return order A1.", max_tokens=2)
    assert found.choices[0].finish_reason == "length" and found.usage.completion_tokens == 2


def test_a_policy_that_is_not_there_is_refused(runtime):
    with pytest.raises(InputError, match="--policy=adapter:other: no such policy .*adapter:tool_calling_precision"):
        find_models(runtime, "adapter:other")
    with pytest.raises(InputError, match="--context=100000: more than the 1024 positions"):
        make_engine(runtime, {}, 100_000)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_server_and_the_requests_it_holds(tmp_path, checkpoint, monkeypatch, capfd, number, code):
    config = tiny.write_config(tmp_path / "config.py", checkpoint)
    found, printed = {}, ""

    def meanwhile():
        nonlocal printed
        try:

            def listening():
                nonlocal printed
                printed += capfd.readouterr().out
                return "serving at" in printed

            wait_until(listening, 60)
            url = re.search(r"serving at (http://127\.0\.0\.1:\d+)/v1, models: trace-jax, base\n", printed)[1]
            monkeypatch.setattr(JaxEngine, "poll", lambda engine: time.sleep(0.01) or [])
            stream = iter(ask(url, "hi", stream=True))
            next(stream)
            found["began"] = time.monotonic()
            os.kill(os.getpid(), number)
            next(stream)
        except openai.APIError as error:
            found["error"] = str(error)
        finally:
            if "began" not in found:
                os.kill(os.getpid(), number)

    thread = threading.Thread(target=meanwhile)
    thread.start()
    assert cli.main(["serve", f"--config={config}", "--policy=base", "--port=0"]) == code
    thread.join()
    assert "shutting down" in found["error"] and time.monotonic() - found["began"] < 10
    error = capfd.readouterr().err
    assert error.startswith("trace-jax: ") and error.count("\n") == 1


def test_a_port_in_use_is_said_in_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--config=quickstart", "--policy=base", f"--port={port}"]) == 2
    assert capsys.readouterr().err == (
        f"trace-jax: --port={port}: Address already in use on 127.0.0.1; give another --port, or 0 for any that is free\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config=quickstart"], "--policy is missing"),
        (["--config=quickstart", "--policy=base,composed"], "--policy=base,composed: give one policy"),
        (["--config=quickstart", "--policy=base", "--port=70000"], "port"),
        (["--config=quickstart", "--policy=base", "--host=no.such.host.invalid"], "--host=no.such.host.invalid: "),
        (["--policy=base"], "--config is missing"),
        (["--config=quickstart", "--policy=composed", "--port=0"], "--policy=composed: no such policy"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(capsys, words, message):
    assert cli.main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
