import random

import pytest

from tests.rl import chats
from tests.rl.test_tool_calls import TOOL, in_json, in_tags
from trace_jax.serve.reply import EMPTY, Splitter, Text, Turn


def turn(stop=(), tools=(), thinking=True, **options):
    chat = chats.chat("qwen3")
    return Turn(Text(chat.decode, frozenset(chat.control.values()), stop), Splitter(tools, thinking=thinking, **options))


def say(text, size=None, *, finish="stop", ended=True, **options):
    """The whole delta of a turn whose tokens come `size` at a time (None: all at once), and the number of tokens that count."""
    chat = chats.chat("qwen3")
    tokens = chat.tokenizer.encode(text, add_special_tokens=False) + [chat.end] * ended
    machine, whole, size = turn(**options), None, size or len(tokens)
    for start in range(0, len(tokens), size):
        some = tokens[start : start + size]
        delta = machine.feed(some, [-1.0] * len(some), finish if start + size >= len(tokens) else None)
        whole = delta if whole is None else whole.add(delta) or whole
        if machine.finished:
            break
    return whole, machine.count


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("Hello.", "", "Hello.", 0),
        ("<think>\nfirst\n\nsecond\n</think>\n\nHello.", "first\n\nsecond", "Hello.", 0),
        ("<think>\n\n</think>\n\nHello.", "", "Hello.", 0),
        ("<think>\nfor ever", "for ever", EMPTY, 0),
        ("<think>all</think>", "all", EMPTY, 0),
        ("\n\n<think>\nx\n</think>\n" + in_json(), "x", "", 1),
        ("<think>\n" + in_json() + "\n</think>\n\nnone", in_json(), "none", 0),
        ("", "", EMPTY, 0),
        (" \n", "", " \n" + EMPTY, 0),
        ("<thin air> & <tool_cal", "", "<thin air> & <tool_cal", 0),
        ("I look.\n" + in_tags(count="1") + "\n" + in_json(), "", "I look.", 2),
        (in_json() + "\nDone.", "", "Done.", 1),
        ("First.\n" + in_json() + "\nDone.", "", "First.\nDone.", 1),
        ("x\n\n<tool_call>\n{no", "", "x\n\n<tool_call>\n{no", 0),
        ("\n<tool_call>\n{no", "", "\n<tool_call>\n{no", 0),
        ("Gr\u00fc\u00dfe \U0001f600 \u4f60\u597d", "", "Gr\u00fc\u00dfe \U0001f600 \u4f60\u597d", 0),
    ],
)
@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_turn_is_told_apart_however_its_tokens_come(text, reasoning, content, calls, size):
    found, count = say(text, size, tools=[TOOL])
    assert (found.reasoning, found.content, len(found.calls)) == (reasoning, content, calls)
    assert found.finish == ("tool_calls" if calls else "stop")
    assert count == len(found.tokens) == len(found.logprobs)


def test_a_thought_that_the_prompt_has_opened_goes_on():
    found, _ = say("hm\n</think>\n\nHello.", 1, inside=True)
    assert (found.reasoning, found.content) == ("hm", "Hello.")


def test_without_tools_or_thoughts_in_the_template_their_tags_are_text():
    text = "<think>x</think>" + in_json()
    assert say(text, 1, thinking=False)[0].content == text


def test_a_call_cut_by_the_length_is_text():
    found, _ = say("ok\n" + in_json()[:-6], 1, finish="length", ended=False, tools=[TOOL])
    assert (found.content, found.calls, found.finish) == ("ok\n" + in_json()[:-6], [], "length")


def test_one_call_at_a_time_keeps_the_first():
    found, _ = say(in_json() + in_json("cancel"), tools=[TOOL], parallel=False)
    assert [call.name for call in found.calls] == ["book"]


@pytest.mark.parametrize("size", [None, 1, 2, 7])
def test_a_stop_string_ends_the_turn_before_it_and_counts_no_token_after_it(size):
    found, count = say("one two\n\nthree ### four", size, stop=["###", "\n\nth", "never"])
    assert (found.content, found.finish) == ("one two", "stop")
    chat = chats.chat("qwen3")
    assert "\n\nth" in chat.decode(found.tokens) and "\n\nth" not in chat.decode(found.tokens[:-1]) and count == len(found.tokens)


def test_what_may_become_a_stop_string_waits():
    machine, chat = turn(stop=["ab!"]), chats.chat("qwen3")
    for text, expected in (("a", ""), ("a", "a"), ("b", ""), ("c", "abc")):
        tokens = chat.tokenizer.encode(text, add_special_tokens=False)
        assert machine.feed(tokens, [0.0], None).content == expected


def test_a_character_is_never_sent_in_halves():
    chat = chats.chat("qwen3")
    tokens = chat.tokenizer.encode("a\U0001f600b", add_special_tokens=False)
    assert len(tokens) > 4  # the emoji is several tokens
    machine = turn()
    pieces = [machine.feed([token], [0.0], None).content for token in tokens]
    assert "".join(pieces) == "a\U0001f600b" and not any("\ufffd" in piece for piece in pieces)
    assert say("x", 1)[0].content == "x"
    half = Text(chat.decode, frozenset(), ())
    assert half.feed(tokens[1:3], False) == ("", 2, False)
    assert half.feed([], True)[0] == chat.decode(tokens[1:3])


def test_random_bytes_come_out_alike_in_any_pieces():
    chat, random_numbers = chats.chat("qwen3"), random.Random(0)
    for _ in range(50):
        tokens = [random_numbers.randrange(len(chat.tokenizer)) for _ in range(60)]
        outs = []
        for size in (60, 1, 7):
            text, out = Text(chat.decode, frozenset(chat.control.values()), ["a", "\ufffd\ufffd"]), ""
            for start in range(0, 60, size):
                piece, _, stopped = text.feed(tokens[start : start + size], start + size >= 60)
                out += piece
                if stopped:
                    break
            outs.append(out)
        assert outs[0] == outs[1] == outs[2]
