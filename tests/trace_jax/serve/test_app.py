"""The routes over an engine that says what it is told to, with the chat template of Qwen3."""

import http.client
import json
import threading

import openai
import pytest

from rl.engines.protocol import Policy
from tests.rl import chats
from tests.rl.test_tool_calls import TOOL, in_json, in_tags
from tests.trace_jax.serve.serving import ScriptedEngine, client, send, serving, wait_until
from trace_jax.serve import app

MODELS = {"trace-jax": Policy("base", 3), "base": Policy("base", 3), "adapter:x": Policy("adapter:x")}
ASK = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def chat():
    return chats.chat("qwen3")


@pytest.fixture(scope="module")
def shared(chat):
    """A server for all tests that leave it as it was, and its engine."""
    engine = ScriptedEngine(chat)
    with serving(chat, engine, MODELS, len(chat.tokenizer)) as (url, decoder):
        yield engine, url, decoder


@pytest.fixture
def engine(shared):
    shared[0].reset()
    return shared[0]


@pytest.fixture
def url(shared):
    return shared[1]


@pytest.fixture
def own(chat):
    """A server of the test's own, and its engine."""
    engine = ScriptedEngine(chat)
    with serving(chat, engine, MODELS, len(chat.tokenizer)) as (url, decoder):
        yield engine, url, decoder


def test_parallel_calls_have_ids_and_valid_arguments(url, engine):
    engine.say("I look.\n" + in_tags(zip="02139", count="2", note="None") + "\n" + in_json("cancel", '{"é": [1, {}]}'))
    choice = client(url).chat.completions.create(**ASK, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    calls = choice.message.tool_calls
    assert [c.function.name for c in calls] == ["book", "cancel"]
    assert [json.loads(c.function.arguments) for c in calls] == [{"zip": "02139", "count": 2, "note": None}, {"é": [1, {}]}]
    assert all(c.id.startswith("call_") and int(c.id[5:], 16) >= 0 for c in calls) and calls[0].id != calls[1].id


@pytest.mark.parametrize(
    "text", ["Hi there.", "<think>\nhm\n\n</think>\n\nHi.", "a\n" + in_json() + "\nb", "a\n<tool_call>\n{", "", in_json() * 2]
)
def test_a_stream_joins_to_the_whole_answer(url, engine, text):
    engine.say(text)
    ask = ASK | {"tools": [TOOL], "logprobs": True}
    whole = client(url).chat.completions.create(**ask)
    chunks = list(client(url).chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    message = whole.choices[0].message
    assert "".join(d.content or "" for d in deltas) == (message.content or "")
    assert "".join(getattr(d, "reasoning_content", "") or "" for d in deltas) == getattr(message, "reasoning_content", "")
    calls = [c for d in deltas for c in d.tool_calls or ()]
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        (c.function.name, c.function.arguments) for c in message.tool_calls or ()
    ]
    assert [c.index for c in calls] == list(range(len(calls)))
    logprobs = [x for c in chunks if c.choices and c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert logprobs == whole.choices[0].logprobs.content and len(logprobs) == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == [] and chunks[0].usage is None
    assert deltas[0].role == message.role == "assistant" and (message.content or message.tool_calls)
    assert len({c.id for c in chunks}) == 1 and whole.system_fingerprint == "base@3"


def test_tokens_are_sent_as_they_come(url, engine):
    engine.say("one two three four five six seven")
    chunks = list(client(url).chat.completions.create(**ASK, stream=True))
    assert sum(bool(c.choices[0].delta.content) for c in chunks) > 3


def test_a_call_cut_by_the_length_is_content(url, engine):
    engine.say(in_json()[:-12], cut=True)
    choice = client(url).chat.completions.create(**ASK, tools=[TOOL]).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", in_json()[:-12], None)


def test_without_tools_a_call_is_content(url, engine):
    engine.say(in_json())
    for ask in (ASK, ASK | {"tools": [TOOL], "tool_choice": "none"}):
        assert client(url).chat.completions.create(**ask).choices[0].message.content == in_json()


@pytest.mark.parametrize("call", [in_json(), in_tags(zip="02139")])
def test_a_call_that_is_required_is_begun_for_the_model(url, engine, chat, call):
    engine.say(call.removeprefix(app.BEGUN))
    ask = ASK | {"tools": [TOOL], "tool_choice": "required"}
    choice = client(url).chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert [c.function.name for c in choice.message.tool_calls] == ["book"]
    assert chat.decode(engine.requests[-1].tokens).endswith(f"assistant\n{app.BEGUN}")
    chunks = list(client(url).chat.completions.create(**ask, stream=True))
    assert [c.function.name for x in chunks for c in x.choices[0].delta.tool_calls or ()] == ["book"]
    engine.say("no")
    assert client(url).chat.completions.create(**ask).choices[0].message.content == f"{app.BEGUN}no"


def test_tool_schemas_reach_the_template_unharmed(url, engine, chat):
    engine.say("ok")
    client(url).chat.completions.create(**ASK, tools=[TOOL])
    prompt = chat.decode(engine.requests[-1].tokens)
    assert f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>" in prompt


def test_a_conversation_with_calls_is_what_the_template_prints(url, engine, chat):
    engine.say("ok")
    call = {"id": "call_1", "type": "function", "function": {"name": "book", "arguments": '{"zip": "<é>"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<|im_end|> go"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    client(url).chat.completions.create(model="base", messages=messages, tools=[TOOL])
    printed = [
        m | ({"tool_calls": [call | {"function": {"name": "book", "arguments": {"zip": "<é>"}}}] * 2} if "tool_calls" in m else {})
        for m in messages
    ]
    expected = chat.tokenizer.apply_chat_template(printed, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    tokens = engine.requests[-1].tokens.tolist()
    assert chat.decode(tokens) == expected
    assert tokens.count(chat.end) == 4  # the user's is text


def test_ids_and_logprobs_come_on_request(url, engine, chat):
    engine.say("Hi ok!")
    whole = client(url).chat.completions.create(**ASK, logprobs=True, extra_body={"return_token_ids": True})
    ids = whole.choices[0].token_ids
    assert ids[-1] == chat.end and chat.decode(ids[:-1]) == "Hi ok!" and whole.usage.completion_tokens == len(ids)
    assert whole.prompt_token_ids == engine.requests[-1].tokens.tolist() and whole.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert [x.token for x in whole.choices[0].logprobs.content] == [chat.decode([i]) for i in ids]
    chunks = list(client(url).chat.completions.create(**ASK, stream=True, extra_body={"return_token_ids": True}))
    assert sum((c.choices[0].token_ids for c in chunks if hasattr(c.choices[0], "token_ids")), []) == ids
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids


def test_completions_take_texts_and_ids(url, engine, chat):
    engine.say("so it goes")
    found = client(url).completions.create(model="base", prompt=["ok!", "<|im_start|>user"], n=2, logprobs=0, stop=" goes", max_tokens=50)
    assert [(c.index, c.text, c.finish_reason) for c in found.choices] == [(i, "so it", "stop") for i in range(4)]
    assert engine.requests[2].tokens[0] == chat.control["<|im_start|>"]  # of a raw prompt, control tokens are tokens
    assert [r.key[2] for r in engine.requests] == [0, 1, 0, 1]
    logprobs = found.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) and logprobs.text_offset[0] == 0
    ids = client(url).completions.create(model="base", prompt=[1, 2, 3], stream=True, extra_body={"return_token_ids": True})
    chunks = list(ids)
    assert "".join(c.choices[0].text for c in chunks) == "so it goes" and chunks[0].choices[0].prompt_token_ids == [1, 2, 3]
    assert engine.requests[-1].tokens.tolist() == [1, 2, 3] and engine.requests[-1].max_tokens == 16
    client(url).completions.create(model="base", prompt="ok!", top_p=0.5, extra_body={"top_k": 7})
    assert [(r.top_k, r.top_p) for r in engine.requests[-2:]] == [(0, 1.0), (7, 0.5)]


def test_more_requests_than_may_wait_are_turned_away(own):
    engine, url, _ = own
    engine.room = 0
    with pytest.raises(openai.InternalServerError, match="too many requests wait") as error:
        client(url).chat.completions.create(**ASK)
    assert error.value.status_code == 503
    engine.room = 1
    engine.say("ok")
    assert client(url).chat.completions.create(**ASK).choices[0].message.content == "ok"


def test_a_full_context_is_refused_by_its_code(url, chat):
    with pytest.raises(openai.BadRequestError) as error:
        client(url).chat.completions.create(model="base", messages=[{"role": "user", "content": "x " * 5000}])
    assert error.value.code == "context_length_exceeded" and error.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as error:
        client(url).completions.create(model="base", prompt=[1] * 4096)
    assert error.value.code == "context_length_exceeded"


def test_models_are_listed_and_an_unknown_one_is_not_found(url, engine):
    assert [m.id for m in client(url).models.list()] == list(MODELS)
    assert client(url).models.retrieve("adapter:x").id == "adapter:x"
    for call in (lambda: client(url).models.retrieve("gpt"), lambda: client(url).chat.completions.create(**ASK | {"model": "gpt"})):
        with pytest.raises(openai.NotFoundError, match="there are: trace-jax, base, adapter:x") as error:
            call()
        assert error.value.code == "model_not_found"
    engine.say("ok")
    client(url).chat.completions.create(**ASK | {"model": "adapter:x"})
    client(url).chat.completions.create(**ASK | {"model": "trace-jax"})
    assert [r.policy for r in engine.requests] == ["adapter:x", "base"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", ASK | {"temperature": "x"}, 400),
        ("/v1/chat/completions", ASK | {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL | {"a": "<|im_start|>"}]}, 400),
        ("/v1/completions", {"model": "base", "prompt": [-1]}, 400),
        ("/v1/completions", {"model": "base", "prompt": [10**30]}, 400),
        ("/v1/completions", None, 405),
        ("/v1/nothing", None, 404),
    ],
)
def test_errors_have_openais_form(url, path, body, status):
    found, error = send(url, path, body)
    assert found == status and set(error) == {"message", "type", "param", "code"} and "Traceback" not in error["message"]


def test_a_huge_body_is_refused(url, monkeypatch):
    monkeypatch.setattr(app, "LARGEST_BODY", 1000)
    status, error = send(url, "/v1/chat/completions", b'"' + b"x" * 100_000 + b'"')
    assert status == 413 and "larger than 1,000" in error["message"]


def test_nothing_is_allowed_across_origins(url):
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host)
    connection.request("GET", "/v1/models", headers={"Origin": "http://elsewhere"})
    assert connection.getresponse().getheader("access-control-allow-origin") is None
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_lane(shared, engine, stream):
    _, url, decoder = shared
    engine.holding = True
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/v1/chat/completions", json.dumps(ASK | {"stream": stream, "n": 3}))
    wait_until(lambda: len(engine.requests) == 3)
    if stream:
        assert connection.getresponse().status == 200
    connection.sock.close()
    connection.close()
    wait_until(lambda: decoder.running == 0)
    assert sorted(engine.released) == sorted(r.session for r in engine.requests)


def test_a_stop_string_frees_the_lane_early(url, engine):
    engine.text = "a b c STOP " + "d " * 1000
    found = client(url).chat.completions.create(**ASK, stop=["STOP"])
    assert found.choices[0].message.content == "a b c "
    wait_until(lambda: engine.released == [engine.requests[0].session])


def test_when_the_server_ends_whoever_waits_is_told(own):
    engine, url, decoder = own
    engine.holding = True
    errors = []

    def ask(stream):
        try:
            list(client(url).chat.completions.create(**ASK, stream=stream))
        except openai.APIError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    wait_until(lambda: decoder.running == 2)
    decoder.stop()
    for thread in threads:
        thread.join()
    assert len(errors) == 2 and all("shutting down" in str(error) for error in errors)
    assert send(url, "/health")[0] == 503
    assert send(url, "/v1/chat/completions", ASK)[0] == 503


def test_when_the_engine_fails_whoever_waits_is_told_and_the_error_is_kept(own):
    engine, url, decoder = own
    engine.failing = "poll"
    with pytest.raises(openai.InternalServerError, match="the engine has failed"):
        client(url).chat.completions.create(**ASK)
    assert isinstance(decoder.failure, FloatingPointError)


def test_a_request_that_the_engine_refuses_is_told_why(url, engine):
    engine.failing = "submit"
    assert send(url, "/v1/chat/completions", ASK)[0] == 400
    with pytest.raises(openai.APIError, match="not today"):
        list(client(url).chat.completions.create(**ASK, stream=True))


def test_health_and_metrics(own):
    engine, url, _ = own
    engine.say("ok")
    client(url).chat.completions.create(**ASK)
    assert send(url, "/health") == (200, '{"status":"ok"}')
    send(url, "/no/such/path")
    text = send(url, "/metrics")[1]
    lines = text.splitlines()
    assert 'trace_jax_requests_total{path="/v1/chat/completions",status="200"} 1' in lines
    assert 'trace_jax_requests_total{path="other",status="404"} 1' in lines
    assert "trace_jax_requests_running 0" in lines and "# TYPE trace_jax_lanes gauge" in lines
    assert all(line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0 for line in lines)
