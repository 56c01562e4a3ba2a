import pytest

from rl.chat import parse_turn
from rl.tool_calls import Unreadable, json_types, parse_calls, read_value

TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "zip": {"type": "string"},
                "count": {"type": "integer"},
                "price": {"type": "number"},
                "express": {"type": "boolean"},
                "items": {"type": "array", "items": {"type": "string"}},
                "address": {"$ref": "#/$defs/Address"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                "class": {"enum": ["economy", "null"]},
                "free": {},
            },
            "$defs": {"Address": {"type": "object", "properties": {"street": {"type": "string"}}}},
        },
    },
}


def in_json(name="book", arguments="{}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def in_tags(name="book", **parameters):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (in_json(), {}),
        (in_json(arguments='{"a": {"b": [{"c": "}"}, "{"]}}'), {"a": {"b": [{"c": "}"}, "{"]}}),
        (in_json(arguments='{"zip": "02139", "count": 2}'), {"zip": "02139", "count": 2}),
        (in_json(arguments='{"note": "ein Grüß 你好 \\u00e9 \\ud83d\\ude00"}'), {"note": "ein Grüß 你好 é 😀"}),
        (in_json(arguments='{"note": "</tool_call><tool_call>"}'), {"note": "</tool_call><tool_call>"}),
        ('<tool_call>{"name":"book","arguments":{"x":null}}</tool_call>', {"x": None}),
        (in_tags(), {}),
        (in_tags(zip="02139", count="2", price="2", express="true"), {"zip": "02139", "count": 2, "price": 2, "express": True}),
        (in_tags(express="False", note="None", limit="null"), {"express": False, "note": None, "limit": None}),
        (in_tags(zip="null", **{"class": "null"}), {"zip": "null", "class": "null"}),
        (in_tags(limit="7", note="7"), {"limit": 7, "note": "7"}),
        (in_tags(count="2.0", price="1e3"), {"count": 2, "price": 1000.0}),
        (in_tags(count="two", items="not a list"), {"count": "two", "items": "not a list"}),
        (in_tags(items='["a", "b"]', address='{"street": "Rue {1}"}'), {"items": ["a", "b"], "address": {"street": "Rue {1}"}}),
        (in_tags(note="line one\n\n  line two "), {"note": "line one\n\n  line two "}),
        (in_tags(note="a </parameter> within"), {"note": "a </parameter> within"}),
        (in_tags(note="<b>你好</b> 😀"), {"note": "<b>你好</b> 😀"}),
        (in_tags(free='{"a": 1}', other="5", third="true"), {"free": {"a": 1}, "other": "5", "third": "true"}),
        ("<tool_call><function=book><parameter=count>3</parameter></function></tool_call>", {"count": 3}),
    ],
)
def test_a_call_is_read_in_both_forms(text, arguments):
    found = parse_calls(text, [TOOL])
    assert [(call.name, call.arguments) for call in found.calls] == [("book", arguments)]
    assert found.before == found.after == ""
    reply = parse_turn(text, [TOOL])
    assert reply.tool_calls == found.calls and reply.error is None and reply.content == ""


@pytest.mark.parametrize(
    "text",
    [
        in_json()[: -len("\n</tool_call>")],  # cut by the length
        '<tool_call>\n{"name": "book", "argum',
        "<tool_call>\n<function=book>\n<parameter=zip>\n021",
        "<tool_call>\n<function=book>\n<parameter=zip>\n02139\n</parameter>\n",
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>book(zip=1)</tool_call>",
        in_json(arguments="[]"),
        in_json(arguments='"{}"'),
        in_json(arguments='{"a": NaN}'),
        in_json(arguments='{"a": 1e999}'),
        in_json(arguments='{"a": "\\ud800"}'),
        in_json(arguments='{"a": 1,}'),
        in_json(arguments="{'a': 1}"),
        in_json(arguments='{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        in_json(arguments='{"a": ' + "9" * 5000 + "}"),
        in_json(name=""),
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["book", {}]</tool_call>',
        in_json() + "</tool_call>",
        in_json() + "\n<tool_call>\nrubbish\n</tool_call>",
        "<tool_call>\n<function=book>\n<parameter=zip>\n02139\n</function>\n</tool_call>",
        "<tool_call>\n<function=book>\nzip: 02139\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
    ],
)
def test_what_cannot_be_read_is_no_call(text):
    with pytest.raises(Unreadable):
        parse_calls(text, [TOOL])
    reply = parse_turn(f"So: {text}", [TOOL])
    assert reply.error and reply.tool_calls == () and reply.content == f"So: {text}"


def test_parallel_calls_keep_their_order_and_the_text_around_them():
    first, second, third = in_json(arguments='{"zip": "1"}'), in_tags("cancel", zip="2"), in_json(arguments='{"zip": "3"}')
    text = f"{first}\n{second}\n and\n{third}\nDone. "
    found = parse_calls(f"First {text}", [TOOL])
    assert [(call.name, call.arguments) for call in found.calls] == [
        ("book", {"zip": "1"}),
        ("cancel", {"zip": "2"}),
        ("book", {"zip": "3"}),
    ]
    assert (found.before, found.after) == ("First ", "and\nDone.")


@pytest.mark.parametrize(("call", "template"), [(in_json(), "\n"), (in_tags(), "\n\n")])
def test_the_line_ends_before_a_call_are_the_templates(call, template):
    assert parse_turn(f"I look.{template}{call}", [TOOL]).content == "I look."
    assert parse_turn(f"<think>\nhm\n</think>\n\n{in_tags()}", [TOOL]).content == "<think>\nhm\n</think>"


def test_types_are_found_through_references_and_alternatives():
    root = {
        "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/B"}, {"type": ["null", "integer"]}]}, "B": {"$ref": "#/$defs/A"}, "a/b": {"const": 1.5}}
    }
    assert json_types({"$ref": "#/$defs/A"}, root) == {"null", "integer"}
    assert json_types({"$ref": "#/$defs/a~1b"}, root) == {"number"}
    assert json_types({"allOf": [{"$ref": "#/$defs/missing"}, {"enum": ["x", None]}]}, root) == {"string", "null"}
    assert json_types({"$ref": "other.json#/A"}, root) == json_types(None, root) == json_types(True, root) == set()
    assert json_types({"properties": {}}, root) == {"object"} and json_types({"items": {}}, root) == {"array"}


def test_a_string_that_may_be_something_else_is_read_as_that():
    assert read_value("12", {"string", "integer"}) == 12
    assert read_value("twelve", {"string", "integer"}) == "twelve"
    assert read_value("true", {"integer"}) == "true"
