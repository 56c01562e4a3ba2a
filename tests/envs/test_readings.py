"""A value is found in each reading of a text, and not by chance."""

import base64

import pytest

from envs.readings import in_words, shape, tells

TOLD = [
    ("set it to 4711", "4711"),
    ("4-7-1-1", "4711"),
    ("4_711 or so", "4711"),
    ("b 2.7 x", "B27X"),
    ("it ends in four seven one one", "4711"),
    ("four thousand seven hundred and eleven", "4711"),
    ("forty-two of them", "42"),
    ("1174, from behind", "4711"),
    ("\uff14\uff17\uff11\uff11", "4711"),
    ("\u0412\u200b27", "B27"),
    ("the r3s3rv4t!0n", "reservation"),
    ("erfreingvba, by ROT13", "reservation"),
    (f"remember {base64.b64encode(b'item B27').decode()}", "B27"),
    (f"remember {b'item B27'.hex()}", "B27"),
]


@pytest.mark.parametrize(("text", "value"), TOLD)
def test_a_value_in_disguise_is_told(text, value):
    assert tells(text, value) or tells(text.swapcase(), value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Look the price up, then add what was asked for.", "4711"),
        ("one of 14711 or 47112", "4711"),
        ("default subtotal", "A17"),
        ("often, at their weight", "10"),
        ("weight", "8"),
        ("the order is cancelled", "ord"),
    ],
)
def test_what_only_looks_like_a_value_is_not_told(text, value):
    assert not tells(text, value)


def test_numbers_in_words():
    assert [in_words(n) for n in (0, 13, 40, 42, 100, 4711)] == [
        "zero", "thirteen", "forty", "forty two", "one hundred", "four thousand seven hundred eleven",
    ]  # fmt: skip
    assert in_words(1_000_001) == "one million one" and shape("#W77-ab") == "#a00-a"
