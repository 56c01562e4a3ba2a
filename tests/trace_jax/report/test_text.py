"""Numbers and foreign text as a reader sees them."""

import json

from trace_jax.report import text


def test_foreign_text_is_visible_and_encodes():
    assert text.visible("a\x00b\r\u202ec\ud800\n\t") == "a␀b␍\\u202ec\ufffd\n\t"
    assert text.clip("x" * 12, 10) == "x" * 10 + " … and 2 more characters"
    assert text.duration(3725) == "1 h 02 min" and text.duration(75) == "1 min 15 s" and text.duration(3) == "3 s"
    assert text.as_text({"a": [1]}) == json.dumps({"a": [1]})


def test_a_quote_is_marked_whatever_its_blanks_and_case():
    assert text.marked("I have\n returned it.", "HAVE returned", 100) == "I <mark>have\n returned</mark> it."
    assert text.marked("<b>a & b</b>", "A &", 100) == "&lt;b&gt;<mark>a &amp;</mark> b&lt;/b&gt;"
    assert text.marked("nothing of it", "elsewhere", 7) == "nothing … and 6 more characters"
    assert text.marked("x" * 12, "", 10) == text.clip("x" * 12, 10)


def test_of_a_long_text_the_part_around_its_quote_is_shown():
    said = text.marked("a" * 5000 + " the quote " + "b" * 5000, "the  quote", 300)
    assert said.startswith("4,901 characters before … aaa") and "<mark>the quote</mark> bbb" in said and said.endswith("more characters")
    assert len(said) < 400


def test_durations_fit_a_tile():
    assert [text.roughly(s) for s in (3, 75, 607, 7300, 7_200_000)] == ["3 s", "1 min", "10 min", "2 h", "2,000 h"]
    assert [text.number(x) for x in (0, 4.7e-7, 0.1234, 12, 12345.6)] == ["0", "4.7e−7", "0.123", "12", "12,346"]
