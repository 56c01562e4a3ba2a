import pytest

from trace_jax.serve.schema import ApiError, read_chat, read_completion, read_json

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}, "name": "f"}
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(**fields):
    return read_chat({"model": "base", "messages": [USER]} | fields)


def refused(read, **fields) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(fields)
    return error.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 0.5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"logprobs": 1}, "logprobs"),
        ({"functions": []}, "functions"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields, param):
    error = refused(read_chat, **({"model": "base", "messages": [USER]} | fields))
    assert error.status == 400 and error.body["error"]["param"] == param and error.body["error"]["type"] == "invalid_request_error"
    assert param in error.body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "logprobs": 2}, "logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "messages": [USER]}, "messages"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields, param):
    assert refused(read_completion, model="base", **fields).body["error"]["param"] == param


def test_neutral_settings_and_remarks_change_nothing():
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    neutral["response_format"] = {"type": "text"}
    remarks = {"user": "u", "metadata": {"a": "b"}, "store": False, "tool_choice": "auto", "parallel_tool_calls": True, "seed": None}
    assert chat(**neutral, **remarks) == chat()


def test_what_is_left_out_has_a_default():
    assert (chat().n, chat().max_tokens, chat().temperature, chat().seed, chat().stream) == (1, None, 1.0, None, False)
    assert read_completion({"model": "base", "prompt": "x"}).max_tokens == 16
    assert chat(max_tokens=7, max_completion_tokens=5).max_tokens == 5
    assert chat(stop="x").stop == ("x",)
    limited = read_completion({"model": "base", "prompt": "x", "top_p": 0.9, "top_k": 20})
    assert (limited.top_p, limited.top_k) == (0.9, 20) and (chat().top_p, chat().top_k) == (1.0, 0)


def test_messages_become_what_templates_read():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "function_call": None, "annotations": []},
        {"role": "tool", "content": "", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "done", "reasoning_content": "hm", "tool_calls": None},
    ]
    assert list(chat(messages=messages).messages) == [
        {"role": "system", "content": "be brief"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": None}}}],
        },
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ndone"},
    ]


def test_tools_are_kept_as_they_are():
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "default": None}},
        "$defs": {"A": {}},
    }
    tool = {"type": "function", "function": {"name": "f", "strict": False, "parameters": schema}, "extra": 1}
    assert chat(tools=[tool]).tools == (tool,)
    assert chat(tools=[TOOL]).tools[0]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert chat(tools=[tool], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"a": NaN}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b"[" * 100_000, b'"\xed\xa0\x80"'],
)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(ApiError, match="the body is not"):
        read_json(body)


def test_whole_surrogate_pairs_are_text():
    assert read_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
